"""Batches of a whole split on the devices, each example once, and what a function makes of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.data.device import DeviceBatch, device_batches, local_rows
from vit_jax.data.pipeline import Examples, eval_batches
from vit_jax.parameters.sharding import batch_sharding, keep_batch_sharding, to_host


@contextlib.contextmanager
def padded_batches(
    dataset: Examples, *, mesh: Mesh, batch_size: int, loader: dict[str, Any]
) -> Iterator[Iterator[DeviceBatch]]:
    """The batches of a split in its order, sharded over the mesh.

    The last one is padded to full size and the padding masked, so that every process runs the same
    number of steps and no example is dropped. `loader` are keyword arguments of the reader.
    """
    sharding = batch_sharding(mesh)
    rows = local_rows(sharding, batch_size)
    with eval_batches(dataset, batch_size=batch_size, rows=rows, **loader) as host_batches:
        yield device_batches(host_batches, sharding, batch_size=batch_size)


def stream_outputs(
    function: Callable[[Any, DeviceBatch], dict[str, jax.Array]],
    params: Any,
    dataset: Examples,
    *,
    mesh: Mesh,
    batch_size: int,
    loader: dict[str, Any],
) -> Iterator[dict[str, np.ndarray]]:
    """Applies `function(params, batch)` to a split; yields its outputs without the padding.

    Args:
      function: gives arrays [B, ...]; it is compiled once.
      params: on the devices.
      dataset: see `pipeline.Examples`.
      mesh: devices; `batch_size` must divide over them.

    Yields:
      Host arrays [n, ...] for the next n <= batch_size examples in the order of the split; no more
      than three batches are held at a time.
    """

    def outputs_of(params: Any, batch: DeviceBatch) -> dict[str, jax.Array]:
        with keep_batch_sharding():
            return {**function(params, batch), "mask": batch["mask"]}

    step = jax.jit(outputs_of, out_shardings=batch_sharding(mesh))
    count = 0
    waiting: Any = None
    with padded_batches(dataset, mesh=mesh, batch_size=batch_size, loader=loader) as batches:
        for batch in batches:
            running = step(params, batch)  # the devices have work while the host takes the last
            if waiting is not None:
                yield (outputs := _real_rows(waiting))
                count += len(next(iter(outputs.values())))
            waiting = running
        yield (outputs := _real_rows(waiting))
        count += len(next(iter(outputs.values())))
    if count != dataset.num_examples:
        raise RuntimeError(f"counted {count} examples of {dataset.num_examples}.")


def _real_rows(outputs: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    on_host = to_host(outputs)
    mask = on_host.pop("mask") > 0
    return {name: values if mask.all() else values[mask] for name, values in on_host.items()}
