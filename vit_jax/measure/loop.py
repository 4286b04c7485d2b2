"""What the loop costs over the bare update, measured against a plain reference in one run."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
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
from vit_jax.multihost.agreement import PreemptionNotice
from vit_jax.parameters.sharding import batch_sharding, create_mesh, keep_batch_sharding
from vit_jax.run import Run, create_run
from vit_jax.train import create_clock, train
from vit_jax.training.step import Batch, Metrics, TrainState
from vit_jax.workdir.checkpoints import CheckpointManager
from vit_jax.workdir.metrics import MetricWriter


def in_memory(dataset: Dataset, num_examples: int) -> Dataset:
    """The first examples, preprocessed once and for all: reading them costs nothing."""
    count = min(num_examples, dataset.num_examples)
    examples = [dataset.example(i, np.random.default_rng(i)) for i in range(count)]
    decode = parse(f"decode(channels={examples[0]['image'].shape[-1]})")
    return dataclasses.replace(dataset, source=examples, preprocess=decode)


def reference_step(run: Run) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The update as one writes it first: no mesh, no accumulation, no average."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(jax.random.key(run.config.seed), state.step)

        def loss_fn(params: Any) -> tuple[jax.Array, Metrics]:
            with keep_batch_sharding():
                return run.objective.loss(params, batch, rng)

        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = run.tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), {"loss": loss}

    return step


def device_batch(run: Run) -> Batch:
    """The first examples of a run, on its devices."""
    size, rng = run.dataset.num_examples, np.random.default_rng(0)
    examples = [run.dataset.example(i % size, rng) for i in range(run.batch_size)]
    batch = {
        "image": np.stack([example["image"] for example in examples]),
        "label": np.array([example["label"] for example in examples], np.int32),
        "mask": np.ones(run.batch_size, np.float32),
    }
    return jax.device_put(batch, batch_sharding(run.mesh))


class TakeTurns(MetricWriter):
    """A writer that lets the reference run whenever the loop has written a line of metrics.

    So each turn of the loop has a turn of the reference right after it, and a machine whose speed
    drifts does so for both.
    """

    def __init__(self, workdir: str, run: Run, steps: int):
        super().__init__(workdir, start_step=0, tensorboard=run.config.log.tensorboard)
        self._steps = steps
        self._images = steps * run.batch_size
        self._step, self._batch = reference_step(run), device_batch(run)
        self._state = jax.jit(run.init_state)(jax.random.key(run.config.seed))
        self._start: float | None = None  # of the loop's turn
        self.speeds: dict[str, list[float]] = {"loop": [], "reference": []}

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        super().write(step, metrics)
        now = time.perf_counter()
        for _ in range(self._steps):
            self._state, _ = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        end = time.perf_counter()
        print(f"turn {step // self._steps}", file=sys.stderr)
        if self._start is not None:  # the first turn of both compiles
            self.speeds["loop"].append(self._images / (now - self._start))
            self.speeds["reference"].append(self._images / (end - now))
        self._start = end


def benchmark_loop(config: ConfigDict, *, steps: int, rounds: int) -> dict[str, Any]:
    """Images per second of our loop and of the reference, in turn.

    The loop is `vit_jax.train.train` with everything it does between two checkpoints. The reference
    runs its update on one batch that is on the device already. Compilation, checkpoints and
    evaluation are left out on both sides.

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
    config.log.every_steps, config.log.every_seconds = steps, 0.0
    config.duration.steps = steps * (rounds + 1)
    mesh = create_mesh(**config.mesh)
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as workdir:
        run = create_run(config, mesh)
        run = dataclasses.replace(run, dataset=in_memory(run.dataset, 4 * run.batch_size))
        checkpoints = CheckpointManager(workdir, every_steps=10**9, keep=1)
        state = run.initial_state(checkpoints)
        writer, clock = TakeTurns(workdir, run, steps), create_clock(run, 0, {})
        train(run, state, workdir, checkpoints, writer, clock, PreemptionNotice())
        for each in (clock, writer, checkpoints):
            each.close()
    pairs = zip(writer.speeds["loop"], writer.speeds["reference"], strict=True)
    ratios = [loop / plain for loop, plain in pairs]
    return {**writer.speeds, "ratios": ratios, "overhead": 1.0 - statistics.median(ratios)}
