"""The training loop: pre-training, fine-tuning and every baseline go through `train_and_evaluate`.

Order inside a step: update, log, evaluate, checkpoint. The checkpoint comes last, so that its
existence means that all of the step is done. Everything random and the order of the data are
functions of (seed, step), so a checkpoint needs nothing but the state to continue bit for bit.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from pathlib import Path

import jax
from clu import profiler
from ml_collections import ConfigDict

from vit_jax.checkpoint import CheckpointManager
from vit_jax.data.device import device_batches, local_rows
from vit_jax.data.pipeline import HostBatches, train_batches
from vit_jax.errors import UserError
from vit_jax.pretrained.load import PARAMS_FILE
from vit_jax.pretrained.npz import write_npz
from vit_jax.progress import Progress, format_seconds
from vit_jax.provenance import write_provenance
from vit_jax.run import Run, describe, initial_state
from vit_jax.sharding import (
    batch_sharding,
    create_mesh,
    to_host,
)
from vit_jax.train_state import TrainState
from vit_jax.train_step import jit_train_step
from vit_jax.workdir import (
    claim_workdir,
    read_json,
    release_workdir,
    run_on_first_process,
    write_json,
)
from vit_jax.writers import MetricWriter, read_metrics

RESULTS_FILE = "results.json"

# A run may be resumed with other values of these: they say how it runs, not what it computes.
RUNTIME_KEYS = (
    "mesh.",
    "loader.",
    "log.",
    "checkpoint.",
    "model.remat",
    "dataset.data_dir",
    "sweep.",
)


class TrainingDivergedError(RuntimeError):
    """Loss, gradient or parameters are NaN or infinite; the message names the step."""


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
        finished = run_on_first_process(lambda: _finished_results(workdir, run.total_steps))
        if finished is not None:
            logging.info("%s: this run has ended at step %d.", workdir, run.total_steps)
            return finished
        describe(run, workdir)
        checkpoints = CheckpointManager(workdir, **config.checkpoint)
        stack.callback(checkpoints.close)
        state = initial_state(run, checkpoints)
        start_step = int(state.step)
        if start_step > run.total_steps:
            raise UserError(
                f"{workdir} stands at step {start_step}, past the {run.total_steps} steps "
                "that duration asks for; ask for more, or choose another --workdir."
            )
        write_provenance(workdir, start_step=start_step)
        writer = MetricWriter(workdir, start_step=start_step, tensorboard=config.log.tensorboard)
        stack.callback(writer.close)
        return train(run, state, workdir, checkpoints, writer)


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
        *(run.objective, run.tx, shardings, run.mesh),
        seed=config.seed,
        freeze=config.optimizer.freeze,
        **config.train_step,
    )
    progress = Progress(
        start_step=start_step,
        total_steps=total_steps,
        batch_size=run.batch_size,
        elapsed=_elapsed_seconds(workdir),
    )
    results: dict[str, float] = {}
    if start_step in (0, total_steps):  # elsewhere it was done before the checkpoint
        results = run_on_first_process(lambda: _evaluated(workdir, start_step))
        results = results or evaluate(run, state, start_step, writer, progress)
    pending: list[tuple[int, dict[str, jax.Array]]] = []
    with (
        train_iterator(run, start_step) as host_batches,
        Trace(config.log.profile_steps, workdir) as trace,
    ):
        sharding = batch_sharding(run.mesh)
        batches = device_batches(host_batches, sharding, batch_size=run.batch_size)
        for step, batch in zip(range(start_step + 1, total_steps + 1), batches, strict=False):
            trace.before(step)
            state, metrics = step_fn(state, batch)
            if step == start_step + 1:
                jax.block_until_ready(state.step)
                seconds = progress.first_step_done(step)
                logging.info("The first step, compilation included, took %.1fs.", seconds)
            pending.append((step, metrics))

            # From here on the host waits for the devices, so only now and then.
            last = step == total_steps
            evaluates = any(
                _is_due(evaluator, step, total_steps) for evaluator in config.evaluators.values()
            )
            saves = checkpoints.should_save(step, total_steps)
            saves |= evaluates and bool(config.checkpoint.best_metric)
            if step % config.log.every_steps == 0 or evaluates or saves or last:
                log(run, pending, checkpoints, writer, progress)
            if evaluates:
                results = evaluate(run, state, step, writer, progress)
                check_finite(step, results, checkpoints)
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
      TrainingDivergedError: naming the first step whose loss, gradient or parameters are not
        finite.
    """
    fetched = [
        (step, {name: float(value) for name, value in metrics.items()})
        for step, metrics in jax.device_get(pending)
    ]
    pending.clear()
    for step, metrics in fetched:
        check_finite(step, metrics, checkpoints)
    step, metrics = fetched[-1]
    speed = progress.report(step)
    eta = speed.pop("eta_seconds")
    # After nothing but the first step there is no speed to tell.
    pace = f"{speed['images_per_second']:.0f} images/s  " if "images_per_second" in speed else ""
    learning_rate = float(run.schedule(step - 1))  # the one that update `step` used
    writer.write(step, {**metrics, "learning_rate": learning_rate, **speed})
    others = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name != "loss")
    logging.info(
        "step %d/%d  loss %.4f  %s  lr %.3g  %sETA %s",
        *(step, run.total_steps, metrics["loss"], others, learning_rate, pace),
        format_seconds(eta),
    )


def check_finite(step: int, metrics: dict[str, float], checkpoints: CheckpointManager) -> None:
    """Raises TrainingDivergedError if any value is NaN or infinite."""
    bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if not bad:
        return
    checkpoints.wait()
    good = checkpoints.latest_step()
    kept = "there is no checkpoint" if good is None else f"the checkpoint of step {good} is kept"
    values = ", ".join(f"{name}={value}" for name, value in bad.items())
    raise TrainingDivergedError(
        f"step {step}: {values}; {kept}. Try a lower optimizer.learning_rate, a longer "
        "schedule.warmup_steps, or optimizer.clip_norm=1.0."
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
    rows = read_metrics(workdir)
    speeds = [row["images_per_second"] for row in rows if "images_per_second" in row]
    results = {
        "step": run.total_steps,
        "seconds": progress.elapsed_seconds,
        "images_per_second": statistics.median(speeds) if speeds else 0.0,
        **results,
    }
    if jax.process_index() == 0:
        write_npz(Path(workdir) / PARAMS_FILE, params)
        write_json(Path(workdir) / RESULTS_FILE, results)
        logging.info("Wrote %s.", Path(workdir) / PARAMS_FILE)
    return results


class Trace:
    """Records updates first <= step < last into WORKDIR/profile, for TensorBoard or xprof."""

    def __init__(self, profile_steps: tuple[int, int], workdir: str):
        self._first, self._last = profile_steps
        self._folder = str(Path(workdir) / "profile")
        self._active = False

    def before(self, step: int) -> None:
        """To be called before each update."""
        if not self._active and self._first <= step < self._last:
            profiler.start(self._folder)
            self._active = True
        elif self._active and step >= self._last:
            self._stop()

    def _stop(self) -> None:
        if self._active:
            profiler.stop()
            self._active = False

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()


def _is_due(evaluator: ConfigDict, step: int, total_steps: int) -> bool:
    if step == 0:
        return evaluator.at_start
    every_steps = evaluator.every_steps
    return step == total_steps or bool(every_steps and step % every_steps == 0)


def _elapsed_seconds(workdir: str) -> float:
    rows = [row for row in read_metrics(workdir) if "elapsed_seconds" in row]
    return rows[-1]["elapsed_seconds"] if rows else 0.0


def _evaluated(workdir: str, step: int) -> dict[str, float]:
    """What a session that was killed after it has evaluated `step` has written of it."""
    rows = [row for row in read_metrics(workdir) if row["step"] == step and "loss" not in row]
    return {key: value for row in rows for key, value in row.items() if "/" in key}


def _finished_results(workdir: str, total_steps: int) -> dict[str, float] | None:
    path = Path(workdir) / RESULTS_FILE
    if not path.exists() or not (Path(workdir) / PARAMS_FILE).exists():
        return None
    results = read_json(path)
    return results if results.get("step") == total_steps else None
