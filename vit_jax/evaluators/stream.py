"""A whole split in batches on the devices, each example once: outputs, and their means."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.data import pipeline
from vit_jax.data.pipeline import Batch, DeviceBatch, Examples
from vit_jax.parameters.sharding import (
    batch_sharding,
    compiler_options,
    keep_batch_sharding,
    replicated,
    to_host,
)

Hook = Callable[[], None]
OutputStep = Callable[[Any, DeviceBatch], dict[str, jax.Array]]


def nothing() -> None:
    """A hook that does nothing."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """How to read a split for evaluation."""

    dataset: Examples
    mesh: Mesh
    batch_size: int  # examples per step over all devices of the mesh, which must divide it
    loader: dict[str, Any]  # keyword arguments of the host reader
    keys: tuple[str, ...] = ()  # of a batch to transfer, besides `mask`; () for all
    on_wait: Hook = nothing  # before waiting for a batch: for the watchdog

    @contextlib.contextmanager
    def batches(self) -> Iterator[Iterator[DeviceBatch]]:
        """The batches of the split in order, sharded over the mesh.

        The last one is padded and the padding masked, so that all processes run the same number of
        steps and no example is dropped.
        """
        sharding = batch_sharding(self.mesh)
        size, rows = self.batch_size, pipeline.local_rows(sharding, self.batch_size)
        # Starting worker processes for each evaluation would take too long: use threads.
        num_threads = max(self.loader["num_threads"], self.loader["num_workers"])
        loader = {**self.loader, "num_workers": 0, "num_threads": num_threads}
        with pipeline.eval_batches(self.dataset, batch_size=size, rows=rows, **loader) as batches:
            announced = self._announce(batches)
            yield pipeline.device_batches(announced, sharding, batch_size=size, keys=self.keys)

    def outputs(self, step: OutputStep, params: Any, on_batch: Hook) -> dict[str, np.ndarray]:
        """What `stream_outputs` yields, as arrays of the whole split, [N, ...]."""
        parts = list(stream_outputs(step, params, self, on_batch=on_batch))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _announce(self, host_batches: Iterable[Batch]) -> Iterator[Batch]:
        self.on_wait()
        for batch in host_batches:
            yield batch
            self.on_wait()


def compile_outputs(function: OutputStep, mesh: Mesh, sharding: Any = None) -> OutputStep:
    """The step of `stream_outputs` that computes `function(params, batch)`, arrays [B, ...].

    Keep it for the next evaluation: each call of this function creates a step that compiles anew.
    `sharding`: of the outputs, by default that of the batch.
    """

    def outputs_of(params: Any, batch: DeviceBatch) -> dict[str, jax.Array]:
        with keep_batch_sharding():
            return {**function(params, batch), "mask": batch["mask"]}

    sharding, options = sharding or batch_sharding(mesh), compiler_options(mesh)
    return jax.jit(outputs_of, out_shardings=sharding, compiler_options=options)


def stream_outputs(
    step: OutputStep, params: Any, reader: Reader, *, on_batch: Hook = nothing
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
    """Averages `objective.evaluate` (loss, accuracy, ...) over a dataset."""

    example_keys: tuple[str, ...] = ()  # required keys of an example; () is the objective's

    def __init__(self, objective: Any, reader: Reader):
        self._reader, everywhere = reader, replicated(reader.mesh)
        self._step = compile_outputs(objective.evaluate, reader.mesh, everywhere)
        self.metric_names = (*objective.measures, "num_examples")

    def __call__(self, params: Any, *, on_batch: Hook = nothing) -> dict[str, float]:
        """Means by name, and `num_examples`; `params` with the objective's constants."""
        values = self._reader.outputs(self._step, params, on_batch)
        means = {name: float(np.mean(x, dtype=np.float64)) for name, x in values.items()}
        return {**means, "num_examples": len(next(iter(values.values())))}
