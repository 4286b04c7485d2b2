"""What the loop costs over the bare update, measured against a plain reference in one run."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax.data.datasets import Dataset
from vit_jax.data.preprocess import parse
from vit_jax.multihost.preemption import PreemptionNotice
from vit_jax.parameters.sharding import batch_sharding, create_mesh
from vit_jax.run import Run, create_run
from vit_jax.train import create_clock, train
from vit_jax.training.state import TrainState
from vit_jax.training.step import Batch, Metrics
from vit_jax.workdir.checkpoints import CheckpointManager
from vit_jax.workdir.metrics import MetricWriter


@dataclasses.dataclass(frozen=True)
class InMemory:
    """Examples that are ready: reading costs nothing, so that the loop itself is what is timed."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "label": int(self.labels[index])}


def in_memory(dataset: Dataset, num_examples: int) -> Dataset:
    """The first examples of a dataset, preprocessed once and for all."""
    count = min(num_examples, dataset.num_examples)
    examples = [dataset.example(i, np.random.default_rng(i)) for i in range(count)]
    images = np.stack([example["image"] for example in examples])
    labels = np.array([example["label"] for example in examples])
    channels = images.shape[-1]
    return dataclasses.replace(
        dataset, source=InMemory(images, labels), preprocess=parse(f"decode(channels={channels})")
    )


def reference_step(
    run: Run, tx: optax.GradientTransformation
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The update as one writes it first: no mesh, no accumulation, no average."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(jax.random.key(run.config.seed), state.step)

        def loss_fn(params: Any) -> tuple[jax.Array, Metrics]:
            return run.objective.loss(params, batch, rng)

        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), {"loss": loss}

    return step


class TakeTurns(MetricWriter):
    """A writer that lets the reference run whenever the loop has written a line of metrics.

    So each turn of the loop has a turn of the reference right after it, and a machine whose speed
    drifts does so for both.
    """

    def __init__(
        self, workdir: str, *, tensorboard: bool, images: int, reference: Callable[[], Any]
    ):
        super().__init__(workdir, start_step=0, tensorboard=tensorboard)
        self._images = images
        self._reference = reference
        self._start: float | None = None  # of the loop's turn; the first one compiles
        self.speeds: dict[str, list[float]] = {"loop": [], "reference": []}

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        super().write(step, metrics)
        now = time.perf_counter()
        if self._start is not None:
            self.speeds["loop"].append(self._images / (now - self._start))
            self._reference()
            self.speeds["reference"].append(self._images / (time.perf_counter() - now))
        self._start = time.perf_counter()


def benchmark_step(config: ConfigDict, *, steps: int, rounds: int) -> dict[str, Any]:
    """Images per second of our loop and of the reference, in turn.

    The loop is `vit_jax.train.train` with everything it does between two checkpoints: reading
    ahead, transfer, sharded update, fetching and checking of metrics, `metrics.jsonl`, TensorBoard.
    The reference runs its update on one batch that is on the device already. Compilation,
    checkpoints and evaluation are left out on both sides.

    Args:
      config: recipe; its model, batch size and optimizer are used on examples held in memory.
      steps: updates per turn, and between two lines of metrics.
      rounds: loop and reference take turns so many times.

    Returns:
      `{"loop": [images/s per turn], "reference": [...], "ratios": [...], "overhead": 1 - median
      ratio of loop to reference}`.
    """
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.evaluators = ConfigDict()
    config.log.every_steps = steps
    config.duration.steps = steps * (rounds + 1)  # the first turn compiles and is not timed
    mesh = create_mesh(**config.mesh)
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as workdir:
        run = create_run(config, mesh)
        run = dataclasses.replace(run, dataset=in_memory(run.dataset, 4 * run.batch_size))
        checkpoints = CheckpointManager(workdir, every_steps=10**9, keep=1)
        writer = TakeTurns(
            workdir,
            tensorboard=config.log.tensorboard,
            images=steps * run.batch_size,
            reference=compiled_reference(run, steps),
        )
        train(
            run,
            run.initial_state(checkpoints),
            workdir,
            checkpoints,
            writer,
            clock := create_clock(run, 0, {}),
            PreemptionNotice(),
        )
        clock.close()
        writer.close()
        checkpoints.close()
    pairs = zip(writer.speeds["loop"], writer.speeds["reference"], strict=True)
    ratios = [loop / plain for loop, plain in pairs]
    return {**writer.speeds, "ratios": ratios, "overhead": 1.0 - statistics.median(ratios)}


def compiled_reference(run: Run, steps: int) -> Callable[[], None]:
    """A function that runs so many updates of the reference and waits for them."""
    step = reference_step(run, run.tx)
    state = jax.jit(run.init_state)(jax.random.key(run.config.seed))
    size = run.dataset.num_examples
    examples = [
        run.dataset.example(i % size, np.random.default_rng(i)) for i in range(run.batch_size)
    ]
    batch = {
        "image": np.stack([example["image"] for example in examples]),
        "label": np.array([example["label"] for example in examples], np.int32),
        "mask": np.ones(run.batch_size, np.float32),
    }
    batch = jax.device_put(batch, batch_sharding(run.mesh))
    state, _ = step(state, batch)
    jax.block_until_ready(state)

    def turn() -> None:
        nonlocal state
        for _ in range(steps):
            state, _ = step(state, batch)
        jax.block_until_ready(state)

    return turn
