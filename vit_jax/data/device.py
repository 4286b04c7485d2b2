"""Host batches to global arrays on the devices."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from vit_jax.data.pipeline import Batch, train_batches

DeviceBatch = dict[str, jax.Array]


def local_rows(sharding: Sharding, batch_size: int) -> np.ndarray:
    """Rows of a batch that this process holds by the leading axis's sharding, each once, sorted."""
    held = np.zeros(batch_size, bool)
    for index in sharding.addressable_devices_indices_map((batch_size,)).values():
        held[index] = True
    return np.flatnonzero(held)


def to_device(batch: Batch, sharding: Sharding, batch_size: int) -> DeviceBatch:
    """The global batch, of which `batch` holds the rows `local_rows(sharding, batch_size)`."""
    rows = local_rows(sharding, batch_size)

    def place(local: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(batch_size)
            first = np.searchsorted(rows, start)  # a device's rows are consecutive in `rows` too
            return local[first : first + stop - start]

        return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, shard)

    return {name: place(local) for name, local in batch.items()}


@contextlib.contextmanager
def train_batches_on(
    sharding: Sharding, keys: Collection[str], *, batch_size: int, **options: Any
) -> Iterator[Iterator[DeviceBatch]]:
    """`pipeline.train_batches` on the devices; threads and workers end with the context."""
    rows = local_rows(sharding, batch_size)
    with train_batches(batch_size=batch_size, rows=rows, **options) as host_batches:
        yield device_batches(host_batches, sharding, batch_size=batch_size, keys=keys)


def device_batches(
    host_batches: Iterable[Batch],
    sharding: Sharding,
    *,
    batch_size: int,
    keys: Collection[str] = ("image", "label"),
    prefetch: int = 2,
) -> Iterator[DeviceBatch]:
    """Global batches, of which the next `prefetch` are on their way while one is in use.

    Plain look-ahead does that without a thread: JAX starts a transfer and returns, as it does with
    a step, so the devices compute while this waits for the host's next batch.

    `host_batches` are this process's rows of every batch, `sharding` is that of the leading axis;
    the devices are given the `keys` and `mask`.
    """
    queue: collections.deque[DeviceBatch] = collections.deque()
    for batch in host_batches:
        batch = {key: batch[key] for key in (*keys, "mask")}
        queue.append(to_device(batch, sharding, batch_size))
        if len(queue) > prefetch:
            yield queue.popleft()
    yield from queue
