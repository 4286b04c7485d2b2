"""The training loop: pre-training, fine-tuning and every baseline go through `train_and_evaluate`.

Order inside a step: update, log, evaluate, checkpoint. The checkpoint comes last, so that its
existence means that all of the step is done. Everything random and the order of the data are
functions of (seed, step), so a checkpoint needs nothing but the state to continue bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from clu import parameter_overview, profiler
from ml_collections import ConfigDict

from vit_jax.checkpoint import CheckpointManager
from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.device import device_batches, local_rows
from vit_jax.data.pipeline import HostBatches, train_batches
from vit_jax.durations import to_steps
from vit_jax.errors import UserError
from vit_jax.evaluators.create import create_evaluator
from vit_jax.models.create import create_model
from vit_jax.models.vit import token_grid
from vit_jax.objectives.create import create_objective
from vit_jax.optimizer import Schedule, create_optimizer, create_schedule
from vit_jax.pretrained.load import MODEL_FILE, PARAMS_FILE, load_pretrained
from vit_jax.pretrained.npz import write_npz
from vit_jax.progress import Progress, format_seconds
from vit_jax.provenance import write_provenance
from vit_jax.sharding import (
    batch_sharding,
    check_batch_size,
    create_mesh,
    state_shardings,
    to_host,
)
from vit_jax.train_state import TrainState, create_train_state
from vit_jax.train_step import jit_train_step
from vit_jax.tree import count_parameters
from vit_jax.workdir import claim_workdir, release_workdir, write_json
from vit_jax.writers import MetricWriter, read_metrics

RESULTS_FILE = "results.json"
PARAMETERS_FILE = "parameters.txt"

# A run may be resumed with other values of these: they say how it runs, not what it computes.
RUNTIME_KEYS = (
    "mesh.",
    "loader.",
    "log.",
    "checkpoint.",
    "model.remat",
    "dataset.data_dir",
)


class TrainingDivergedError(RuntimeError):
    """The loss or the gradient is NaN or infinite; the message names the step."""


def train_and_evaluate(
    config: ConfigDict, workdir: str, *, resume: str = "auto"
) -> dict[str, float]:
    """Trains the model that `config` describes, from where `workdir` stands, and evaluates it.

    A work directory holds `config.json`, `model.json`, `parameters.txt`, `provenance.jsonl`,
    `metrics.jsonl`, `tensorboard/`, `checkpoints/`, and, once the run has ended, `params.npz` and
    `results.json`.

    Args:
      config: with the keys of `configs/default.py`.
      workdir: folder of this run; made if it is not there, continued if it is.
      resume: `auto` refuses a work directory of another config; `force` continues it.

    Returns:
      What `results.json` holds: `step`, `seconds`, `images_per_second`, and the last evaluations as
      `NAME/METRIC` for each evaluator.

    Raises:
      UserError: anything that the user can put right, before anything is compiled.
      TrainingDivergedError: NaN or Inf; the last good checkpoint is kept.
    """
    mesh = create_mesh(**config.mesh)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        run = Run(config, mesh)
        claim_workdir(
            workdir,
            config.to_dict(),
            run.fingerprints,
            resume=resume,
            runtime_keys=RUNTIME_KEYS,
        )
        stack.callback(release_workdir, workdir)
        finished = _finished_results(workdir, run.total_steps)
        if finished is not None:
            logging.info("%s: this run has ended at step %d.", workdir, run.total_steps)
            return finished
        describe(run, workdir)
        checkpoints = CheckpointManager(workdir, **config.checkpoint)
        stack.callback(checkpoints.close)
        state = initial_state(run, checkpoints)
        start_step = int(state.step)
        write_provenance(workdir, start_step=start_step)
        writer = MetricWriter(workdir, start_step=start_step, tensorboard=config.log.tensorboard)
        stack.callback(writer.close)
        return train(run, state, workdir, checkpoints, writer)


class Run:
    """The parts that the loop is made of, built from a config and checked against each other."""

    def __init__(self, config: ConfigDict, mesh: jax.sharding.Mesh):
        self.config = config
        self.mesh = mesh
        data = config.dataset
        self.batch_size = data.batch_size
        accumulation_steps = config.train_step.accumulation_steps
        check_batch_size("dataset.batch_size", self.batch_size, mesh, accumulation_steps)
        self.dataset = self._dataset(data.split, data.preprocess)
        self.eval_datasets = {
            key: self._dataset(evaluator.split, evaluator.preprocess or data.eval_preprocess)
            for key, evaluator in config.evaluators.items()
        }
        self.total_steps = to_steps(
            **config.duration, num_examples=self.dataset.num_examples, batch_size=self.batch_size
        )
        height, width, channels = self.dataset.element_spec["image"].shape
        self.image_shape = (height, width, channels)
        model_config = config.model
        self.grid = token_grid((height, width), model_config.patch_size, model_config.resnet_layers)
        self.model = create_model(**model_config, num_classes=self.dataset.num_classes)
        self.objective = create_objective(**config.objective, model=self.model)
        optimizer = dict(config.optimizer)
        self.schedule: Schedule = create_schedule(
            **config.schedule,
            learning_rate=optimizer.pop("learning_rate"),
            total_steps=self.total_steps,
        )
        self.tx = create_optimizer(**optimizer, schedule=self.schedule)
        self.evaluators = {key: self._evaluator(key) for key in self.eval_datasets}

    def _dataset(self, split: str, preprocess: str) -> Dataset:
        """Opens a split; unreadable files are found here, before any training."""
        data = self.config.dataset
        keys = ("name", "data_dir", "on_bad_image", "label_key")
        source = {key: data[key] for key in keys}
        return create_dataset(split=split, preprocess=preprocess, **source).check()

    def _evaluator(self, key: str) -> Any:
        evaluator, dataset = self.config.evaluators[key], self.eval_datasets[key]
        if dataset.class_names != self.dataset.class_names:
            raise UserError(
                f"evaluators.{key}.split={evaluator.split!r} has other classes than "
                f"dataset.split={self.config.dataset.split!r}."
            )
        if dataset.element_spec["image"].shape != self.image_shape:
            raise UserError(
                f"evaluators.{key} reads images of {dataset.element_spec['image'].shape}, training "
                f"reads {self.image_shape}; make dataset.eval_preprocess="
                f"{self.config.dataset.eval_preprocess!r} give the same size."
            )
        batch_size = evaluator.batch_size or self.batch_size
        check_batch_size(f"evaluators.{key}.batch_size", batch_size, self.mesh)
        return create_evaluator(
            evaluator.name,
            objective=self.objective,
            dataset=dataset,
            mesh=self.mesh,
            batch_size=batch_size,
            loader=dict(self.config.loader),
        )

    @property
    def fingerprints(self) -> dict[str, str]:
        """Identity of the data, so that a resumed run notices when they have changed."""
        datasets = {"train": self.dataset, **self.eval_datasets}
        return {key: dataset.fingerprint for key, dataset in datasets.items()}

    @property
    def description(self) -> dict[str, Any]:
        """What a user of the parameters has to know: sizes, grid of tokens, classes, inputs."""
        return {
            "model": {**self.config.model, "num_classes": self.dataset.num_classes},
            "image_shape": self.image_shape,
            "grid": self.grid,
            "class_names": self.dataset.class_names,
            "eval_preprocess": self.config.dataset.eval_preprocess,
        }

    def init_state(self, rng: jax.Array) -> TrainState:
        """A random state; pure, so that its shapes can be had without computing it."""
        image = jnp.zeros((1, *self.image_shape), self.dataset.element_spec["image"].dtype)
        return self.start_state(self.objective.init(rng, {"image": image}))

    def start_state(self, params: Any) -> TrainState:
        """The state before the first update of these parameters."""
        return create_train_state(params, self.tx, polyak_decay=self.config.train_step.polyak_decay)


def describe(run: Run, workdir: str) -> None:
    """Writes `model.json` and the table of parameters, and logs what is about to be trained."""
    params = jax.eval_shape(run.init_state, jax.random.key(0)).params
    if jax.process_index() == 0:
        write_json(Path(workdir) / MODEL_FILE, run.description)
        table = parameter_overview.get_parameter_overview(params, include_stats=False)
        (Path(workdir) / PARAMETERS_FILE).write_text(table + "\n")
    logging.info(
        "%s: %s parameters, %d classes, %d training images of %s, %d steps of %d, %d devices.",
        *(workdir, f"{count_parameters(params):,}", run.dataset.num_classes),
        *(run.dataset.num_examples, "x".join(map(str, run.image_shape)), run.total_steps),
        *(run.batch_size, jax.device_count()),
    )


def initial_state(run: Run, checkpoints: CheckpointManager) -> TrainState:
    """Shapes first, then shardings, then arrays: workdir checkpoint, pre-trained, or random."""
    rng = jax.random.key(run.config.seed)
    abstract_state = jax.eval_shape(run.init_state, rng)
    shardings = state_shardings(abstract_state, run.mesh)
    abstract_state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        *(abstract_state, shardings),
    )
    restored = checkpoints.restore(abstract_state)
    if restored is not None:
        step, state = restored
        logging.info("Continuing from the checkpoint of step %d.", step)
        return state

    pretrained = dict(run.config.pretrained)
    path = pretrained.pop("path")
    if not path:
        return jax.jit(run.init_state, out_shardings=shardings)(rng)
    loaded = load_pretrained(path, abstract_state.params, target_grid=run.grid, **pretrained)
    random = jax.jit(lambda rng: run.init_state(rng).params, out_shardings=shardings.params)(rng)
    # Leaves that the checkpoint does not give (a new head) are still shapes here.
    params = jax.tree.map(
        lambda new, old, sharding: (
            old
            if isinstance(new, jax.ShapeDtypeStruct)
            else jax.make_array_from_callback(new.shape, sharding, lambda index: new[index])
        ),
        *(loaded, random, shardings.params),
    )
    return jax.jit(run.start_state, out_shardings=shardings)(params)


def train(
    run: Run,
    state: TrainState,
    workdir: str,
    checkpoints: CheckpointManager,
    writer: MetricWriter,
) -> dict[str, float]:
    """Updates `state` up to the last step; returns the results (see `train_and_evaluate`)."""
    config, total_steps, start_step = run.config, run.total_steps, int(state.step)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step_fn = jit_train_step(
        run.objective, run.tx, shardings, run.mesh, seed=config.seed, **config.train_step
    )
    progress = Progress(
        start_step=start_step,
        total_steps=total_steps,
        batch_size=run.batch_size,
        elapsed=_elapsed_seconds(workdir),
    )
    results = evaluate(run, state, start_step, writer, progress)
    pending: list[tuple[int, dict[str, jax.Array]]] = []
    with train_iterator(run, start_step) as host_batches:
        sharding = batch_sharding(run.mesh)
        batches = device_batches(host_batches, sharding, batch_size=run.batch_size)
        for step, batch in zip(range(start_step + 1, total_steps + 1), batches, strict=False):
            profile(config.log.profile_steps, step, workdir)
            first = step == start_step + 1
            with progress.pause(once=True) if first else contextlib.nullcontext():
                before = time.monotonic()
                state, metrics = step_fn(state, batch)
                if first:
                    jax.block_until_ready(state.step)
                    seconds = time.monotonic() - before
                    logging.info("First step, with compilation, took %.1fs.", seconds)
            pending.append((step, metrics))

            # From here on the host waits for the devices, so only now and then.
            last = step == total_steps
            evaluates = any(
                _is_due(evaluator, step, total_steps) for evaluator in config.evaluators.values()
            )
            saves = checkpoints.should_save(step, total_steps)
            if step % config.log.every_steps == 0 or evaluates or saves or last:
                log(run, pending, checkpoints, writer, progress)
            if evaluates:
                results = evaluate(run, state, step, writer, progress)
            if saves:
                with progress.pause():
                    checkpoints.save(step, state, results if evaluates else None)
    with progress.pause():
        checkpoints.wait()
        return finish(run, state, workdir, results, progress)


def train_iterator(run: Run, start_step: int) -> HostBatches:
    """This process's rows of the batches for updates start_step + 1 to the last."""
    return train_batches(
        run.dataset,
        batch_size=run.batch_size,
        seed=run.config.seed,
        start_step=start_step,
        total_steps=run.total_steps,
        rows=local_rows(batch_sharding(run.mesh), run.batch_size),
        **run.config.loader,
    )


def log(
    run: Run,
    pending: list[tuple[int, dict[str, jax.Array]]],
    checkpoints: CheckpointManager,
    writer: MetricWriter,
    progress: Progress,
) -> None:
    """Fetches the metrics of all steps since the last call, checks them, and writes the last.

    Raises:
      TrainingDivergedError: naming the first step whose loss or gradient is not finite.
    """
    fetched = [
        (step, {name: float(value) for name, value in metrics.items()})
        for step, metrics in jax.device_get(pending)
    ]
    pending.clear()
    for step, metrics in fetched:
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        if bad:
            good = checkpoints.latest_step()
            kept = (
                "there is no checkpoint yet"
                if good is None
                else f"the checkpoint of step {good} is kept"
            )
            raise TrainingDivergedError(
                f"step {step}: {', '.join(f'{name}={value}' for name, value in bad.items())}; "
                f"{kept}. Try a lower optimizer.learning_rate, a longer schedule.warmup_steps, "
                "or optimizer.clip_norm=1.0."
            )
    step, metrics = fetched[-1]
    speed = progress.report(step)
    eta = speed.pop("eta_seconds")
    learning_rate = float(run.schedule(step - 1))  # the one that update `step` used
    writer.write(step, {**metrics, "learning_rate": learning_rate, **speed})
    others = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name != "loss")
    logging.info(
        "step %d/%d  loss %.4f  %s  lr %.3g  %.0f images/s  ETA %s",
        *(step, run.total_steps, metrics["loss"], others, learning_rate),
        *(speed["images_per_second"], format_seconds(eta)),
    )


def evaluate(
    run: Run, state: TrainState, step: int, writer: MetricWriter, progress: Progress
) -> dict[str, float]:
    """Runs the evaluators that are due at `step`; returns `{NAME/METRIC: value}`."""
    results: dict[str, float] = {}
    with progress.pause():
        for key, evaluator in run.evaluators.items():
            if not _is_due(run.config.evaluators[key], step, run.total_steps):
                continue
            values = {
                f"{key}/{name}": value for name, value in evaluator(state.eval_params).items()
            }
            results |= values
            text = "  ".join(
                f"{name} {value:.4f}"
                for name, value in values.items()
                if "num_examples" not in name
            )
            logging.info("step %d/%d  %s", step, run.total_steps, text)
        if results:
            writer.write(step, {**results, "elapsed_seconds": progress.elapsed_seconds})
    return results


def finish(
    run: Run, state: TrainState, workdir: str, results: dict[str, float], progress: Progress
) -> dict[str, float]:
    """Writes `params.npz`, then `results.json`, whose existence means that the run has ended."""
    params = to_host(state.eval_params)
    results = {
        "step": run.total_steps,
        "seconds": progress.elapsed_seconds,
        "images_per_second": progress.mean_images_per_second(run.total_steps),
        **results,
    }
    if jax.process_index() == 0:
        write_npz(Path(workdir) / PARAMS_FILE, params)
        write_json(Path(workdir) / RESULTS_FILE, results)
        logging.info("Wrote %s.", Path(workdir) / PARAMS_FILE)
    return results


def profile(profile_steps: tuple[int, int], step: int, workdir: str) -> None:
    """Traces updates first <= step < last into WORKDIR/profile, for TensorBoard or xprof."""
    first, last = profile_steps
    if first < last and step == first:
        profiler.start(str(Path(workdir) / "profile"))
    elif first < last and step == last:
        profiler.stop()


def _is_due(evaluator: ConfigDict, step: int, total_steps: int) -> bool:
    if step == 0:
        return evaluator.at_start
    every_steps = evaluator.every_steps
    return step == total_steps or bool(every_steps and step % every_steps == 0)


def _elapsed_seconds(workdir: str) -> float:
    rows = [row for row in read_metrics(workdir) if "elapsed_seconds" in row]
    return rows[-1]["elapsed_seconds"] if rows else 0.0


def _finished_results(workdir: str, total_steps: int) -> dict[str, float] | None:
    path = Path(workdir) / RESULTS_FILE
    if not path.exists() or not (Path(workdir) / PARAMS_FILE).exists():
        return None
    results = json.loads(path.read_text())
    return results if results["step"] == total_steps else None
