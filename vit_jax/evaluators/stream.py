"""A whole split in batches on the devices, each example once: outputs, and their means."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from clu import metrics as clu_metrics
from jax.sharding import Mesh

from vit_jax.data.pipeline import (
    Batch,
    DeviceBatch,
    Examples,
    device_batches,
    eval_batches,
    local_rows,
)
from vit_jax.parameters.sharding import (
    batch_sharding,
    compiler_options,
    keep_batch_sharding,
    replicated,
    to_host,
)


@dataclasses.dataclass(frozen=True)
class Reader:
    """How to read a split for evaluation."""

    dataset: Examples
    mesh: Mesh
    batch_size: int  # examples per step over all devices of the mesh, which must divide it
    loader: dict[str, Any]  # keyword arguments of the host reader
    keys: tuple[str, ...] = ()  # of a batch to transfer, besides `mask`; () for all
    on_wait: Callable[[], None] = lambda: None  # before waiting for a batch: for the watchdog

    @contextlib.contextmanager
    def batches(self) -> Iterator[Iterator[DeviceBatch]]:
        """The batches of the split in order, sharded over the mesh.

        The last one is padded and the padding masked, so that all processes run the same number of
        steps and no example is dropped.
        """
        sharding = batch_sharding(self.mesh)
        rows = local_rows(sharding, self.batch_size)
        # Starting worker processes for each evaluation would take too long: use threads.
        num_threads = max(self.loader["num_threads"], self.loader["num_workers"])
        loader = {**self.loader, "num_workers": 0, "num_threads": num_threads}
        with eval_batches(
            self.dataset, batch_size=self.batch_size, rows=rows, **loader
        ) as host_batches:
            announced = self._announce(host_batches)
            yield device_batches(announced, sharding, batch_size=self.batch_size, keys=self.keys)

    def _announce(self, host_batches: Iterable[Batch]) -> Iterator[Batch]:
        self.on_wait()
        for batch in host_batches:
            yield batch
            self.on_wait()


OutputStep = Callable[[Any, DeviceBatch], dict[str, jax.Array]]


def compile_outputs(function: OutputStep, mesh: Mesh) -> OutputStep:
    """The step of `stream_outputs` that computes `function(params, batch)`, arrays [B, ...].

    Keep it for the next evaluation: each call of this function creates a step that compiles anew.
    """

    def outputs_of(params: Any, batch: DeviceBatch) -> dict[str, jax.Array]:
        with keep_batch_sharding():
            return {**function(params, batch), "mask": batch["mask"]}

    options = compiler_options(mesh)
    return jax.jit(outputs_of, out_shardings=batch_sharding(mesh), compiler_options=options)


def stream_outputs(
    step: OutputStep, params: Any, reader: Reader, *, on_batch: Callable[[], None] = lambda: None
) -> Iterator[dict[str, np.ndarray]]:
    """Applies a step of `compile_outputs` to a split; yields its outputs without padding.

    `on_batch` is called before each batch, in every process; its exceptions propagate.

    Yields:
      Host arrays [n, ...] for the next n <= batch_size examples in the order of the split; at most
      three batches are in memory.
    """
    waiting: Any = None
    with reader.batches() as batches:
        for batch in batches:
            on_batch()
            running = step(params, batch)  # the devices work while the host fetches the last one
            if waiting is not None:
                yield _real_rows(waiting)
            waiting = running
        yield _real_rows(waiting)


def _real_rows(outputs: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    on_host = to_host(outputs)
    mask = on_host.pop("mask") > 0
    return {name: values if mask.all() else values[mask] for name, values in on_host.items()}


class ObjectiveEvaluator:
    """Averages `objective.evaluate` (loss, accuracy, ...) over a dataset, on the devices."""

    example_keys: tuple[str, ...] = ()  # required keys of an example; () is the objective's

    def __init__(self, objective: Any, reader: Reader):
        self._reader = reader
        self.metric_names = (*objective.measures, "num_examples")

        def eval_step(params: Any, batch: Any) -> dict[str, clu_metrics.Average]:
            with keep_batch_sharding():
                measures = objective.evaluate(params, batch)
            return {
                name: clu_metrics.Average.from_model_output(values=values, mask=batch["mask"] > 0)
                for name, values in measures.items()
            }

        everywhere = replicated(reader.mesh)
        options = compiler_options(reader.mesh)
        self._eval_step = jax.jit(eval_step, out_shardings=everywhere, compiler_options=options)
        self._merge = jax.jit(
            lambda a, b: {name: value.merge(b[name]) for name, value in a.items()},
            out_shardings=everywhere,
        )

    def __call__(
        self, params: Any, *, on_batch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Means by name, and `num_examples`; `params` with the objective's constants."""
        total: Any = None
        with self._reader.batches() as batches:
            for batch in batches:
                on_batch()
                values, before = self._eval_step(params, batch), total
                total = values if total is None else self._merge(total, values)
                jax.block_until_ready(before)  # the host is at most two batches ahead
        total = jax.device_get(total)
        means = {name: float(value.compute()) for name, value in total.items()}
        count = int(next(iter(total.values())).count)
        return {**means, "num_examples": count}
