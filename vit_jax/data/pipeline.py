"""Batches of examples, on the host and on the devices. Batch t is a pure function of (seed, t).

So a run resumes from its step alone, with any number of processes, threads and workers. Grain
prefetches whole batches: its overhead is 20 us per element.

The order of an epoch is a permutation that needs no memory: a Feistel network, a bijection on a
power of two, reapplied until the result is an example (cycle walking). Eight rounds: with the four
of Grain's own shuffle, neighbours are correlated.
"""

import collections
import contextlib
import functools
import hashlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import grain
import jax
import numpy as np
from jax.sharding import Sharding

from vit_jax.data.datasets import Dataset
from vit_jax.data.mixture import Mixture
from vit_jax.data.sources import ArraySpec, describe
from vit_jax.errors import UserError

Batch = dict[str, np.ndarray]
Batches = contextlib.AbstractContextManager[Iterator[Batch]]
DeviceBatch = dict[str, jax.Array]
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
Picks = Callable[[np.ndarray], np.ndarray]  # the examples at positions of a run
_ROUNDS = 8


@runtime_checkable
class Examples(Protocol):
    """See datasets.Dataset."""

    @property
    def num_examples(self) -> int: ...

    @property
    def element_spec(self) -> Mapping[str, ArraySpec]: ...

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]: ...


def order(seed: Any, num_examples: int, position: np.ndarray, windows: Any = None) -> np.ndarray:
    """The examples, int64 [P], at positions [P] of a run; each epoch has every example once."""
    position = np.asarray(position, np.int64)
    epochs, within = np.divmod(position, num_examples)
    index = np.empty_like(position)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        if windows:
            index[chosen] = windows.examples(seed, int(epoch), within[chosen])
        else:
            index[chosen] = _permute(within[chosen], num_examples, _keys(seed, int(epoch)))
    return index  # [P]


@functools.lru_cache(maxsize=64)
def _keys(seed: Any, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"vit_jax order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS)
    return np.frombuffer(digest.digest(), "<u8")  # [_ROUNDS]


def _permute(values: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """A bijection on [0, size), applied to each of `values` [P]."""
    bits = max(2, (size - 1).bit_length())
    values = _feistel(values.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= size)
    while len(outside):  # less than half of the domain is outside: few iterations
        values[outside] = _feistel(values[outside], bits, keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)  # [P]


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A bijection on [0, 2^bits), for uint64 [P]; the two parts may differ by one bit in width."""
    low_bits, high_bits = bits // 2, bits - bits // 2
    high, low = values >> np.uint64(low_bits), values & np.uint64((1 << low_bits) - 1)
    for key in keys:
        # Swap the parts; the one being changed keeps its width.
        high, low = low, high ^ (_mix(low ^ key) >> np.uint64(64 - high_bits))
        high_bits, low_bits = low_bits, high_bits
    return high << np.uint64(low_bits) | low


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def example_rng(seed: int, position: int) -> np.random.Generator:
    """Random numbers for the example at a position of a run; no two (seed, position) share them."""
    key = np.array([seed % 2**64, position], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def _shuffled(dataset: Examples, seed: Any, position: np.ndarray) -> np.ndarray:
    windows = getattr(getattr(dataset, "source", None), "windows", None)
    return order(seed, dataset.num_examples, position, windows)


def _balanced(balance: Any, seed: int, position: np.ndarray) -> np.ndarray:
    """`order` for a balance.Balance: maps its slots to examples."""
    slots = order(seed, balance.num_slots, position)
    return balance.examples(position // balance.num_slots, slots)


def _mixed(mixture: Mixture, seed: int, position: np.ndarray) -> np.ndarray:
    """`order` for a mixture: of each set the next of its own epochs."""
    size = sum(mixture.counts)
    sets = np.repeat(np.arange(len(mixture.counts)), mixture.counts)
    sets = sets[_permute(np.arange(size), size, _keys((seed, "sets"), 0))]  # of a block
    blocks, within = np.divmod(position, size)
    index, start = np.empty_like(position), 0
    for number, part in enumerate(mixture.parts):
        chosen = sets[within] == number
        ranks = np.cumsum(sets == number) - 1  # among those of the set in a block
        nth = blocks[chosen] * mixture.counts[number] + ranks[within[chosen]]
        index[chosen] = start + _shuffled(part, (seed, number), nth)
        start += part.num_examples
    return index


def _train_rows(pick: Picks, batch_size: int, rows: np.ndarray, repeats: int, step: int) -> Rows:
    """The examples of a batch [n], the positions that seed their random numbers, and the mask."""
    positions, distinct = step * batch_size + rows, batch_size // repeats
    return pick(step * distinct + rows % distinct), positions, np.ones(len(rows), np.float32)


def _eval_rows(num_examples: int, batch_size: int, rows: np.ndarray, t: int) -> Rows:
    """The same in the split's order; the end is padded with masked copies of the last example."""
    positions = t * batch_size + rows
    indices = np.minimum(positions, num_examples - 1)
    return indices, indices, (positions < num_examples).astype(np.float32)


def batch_spec(dataset: Examples, batch_size: int) -> dict[str, ArraySpec]:
    """Shapes and dtypes of a batch."""
    spec = {**dataset.element_spec, "mask": ArraySpec((), np.dtype(np.float32))}
    return {key: ArraySpec((batch_size, *one.shape), one.dtype) for key, one in spec.items()}


def _build(
    datasets: Sequence[Examples], seed: int, draw: Callable[[int], Rows], step: int
) -> Batch:
    """Batch `step`: its examples, each with random numbers from (seed, its position).

    Of several datasets, which differ in the lengths of rows of patches, one is drawn.
    """
    indices, positions, mask = draw(step)
    dataset = datasets[int(_keys((seed, "length"), step)[0] % len(datasets))]
    spec = dataset.element_spec
    batch = {key: np.empty((len(mask), *one.shape), one.dtype) for key, one in spec.items()}
    for row, (index, position) in enumerate(zip(indices.tolist(), positions.tolist(), strict=True)):
        if row and position == positions[row - 1]:  # padding
            for array in batch.values():
                array[row] = array[row - 1]
            continue
        example = dataset.example(index, example_rng(seed, position))
        for key, one in spec.items():
            array = example[key]
            if array.shape != one.shape or array.dtype != one.dtype:
                gives = f"preprocess gives {key!r} as {describe(one)} and {describe(array)}"
                hint = "end with an op that fixes the size, such as resize(224)"
                raise UserError(f"{gives} (example {index}); {hint}.")
            batch[key][row] = array
    return {**batch, "mask": mask}


@contextlib.contextmanager
def host_batches(
    datasets: Sequence[Examples],
    seed: int,
    draw: Callable[[int], Rows],
    steps: range,
    *,
    num_threads: int = 0,
    num_workers: int = 0,
    prefetch: int = 2,
) -> Iterator[Iterator[Batch]]:
    """The batches of `steps`; see `_build`, whose arguments are pickled for workers.

    `num_workers` processes, or this one, run `num_threads`, each of which makes a whole batch, and
    prefetch `prefetch`; without threads, a batch is made on demand. All end with the context.
    """
    buffer_size = max(num_threads, prefetch) if num_threads else 0
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=buffer_size)
    make = functools.partial(_build, datasets, seed, draw)
    data = grain.MapDataset.source(steps).map(make).to_iter_dataset(options)
    if num_workers and steps:
        from vit_jax.data.workers import in_processes  # needed by few runs

        data = in_processes(data, min(num_workers, len(steps)))
    with contextlib.closing(_iterate(data)) as batches:
        yield batches


def _iterate(data: grain.IterDataset) -> Generator[Batch]:
    with contextlib.closing(iter(data)) as iterator:
        yield from iterator


def check_repeated_augmentation(repeats: int, batch_size: int) -> None:
    """Raises a UserError unless `repeats` divides the batch size."""
    if repeats < 1 or batch_size % repeats:
        key = f"dataset.repeated_augmentation={repeats}"
        raise UserError(f"{key} must divide dataset.batch_size={batch_size}.")


def train_batches(
    dataset: Dataset,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    total_steps: int,
    repeated_augmentation: int = 1,
    rows: np.ndarray | None = None,
    **loader: int,
) -> Batches:
    """The batches for the updates `start_step` .. `total_steps` - 1.

    Row r of batch t is at position i = t * batch_size + r of the run: in epoch i // N, where every
    example occurs once, or as balance.py or remote.py say. It is a function of (seed, i) alone.

    With `repeated_augmentation` = m (1901.09335; DeiT uses 3) a batch has B / m examples in m
    augmentations each, B / m rows apart, so that mixup's neighbours are different examples.

    This process holds `rows`, sorted ints [n], of the global batch, by default all; for `loader`
    see `host_batches`. Yields the arrays of an example, [n, ...] each, and "mask", float32 [n];
    UserError if an example cannot be read, or arrays differ in shape.
    """
    rows = np.arange(batch_size) if rows is None else rows
    pick: Picks = functools.partial(_shuffled, dataset, seed)
    if dataset.balance:
        from vit_jax.data.balance import Balance  # needed by few runs

        balance = Balance(dataset.labels(), dataset.balance, seed)
        pick = functools.partial(_balanced, balance, seed)
    elif isinstance(dataset, Mixture):
        pick = functools.partial(_mixed, dataset, seed)
    draw = functools.partial(_train_rows, pick, batch_size, rows, repeated_augmentation)
    steps = range(start_step, total_steps)
    return host_batches(dataset.of_lengths(), seed, draw, steps, **loader)


def eval_batches(
    dataset: Examples, *, batch_size: int, rows: np.ndarray | None = None, **loader: int
) -> Batches:
    """Every example once, in the order of the split, with the same random numbers each time.

    Arguments as for `train_batches`. The last batch is padded with masked copies (mask 0).
    """
    rows = np.arange(batch_size) if rows is None else rows
    draw = functools.partial(_eval_rows, dataset.num_examples, batch_size, rows)
    num_batches = -(-dataset.num_examples // batch_size)
    return host_batches([dataset], 0, draw, range(num_batches), **loader)


def local_rows(sharding: Sharding, batch_size: int) -> np.ndarray:
    """Sorted rows of a batch that this process holds, given the leading axis's sharding."""
    held = np.zeros(batch_size, bool)
    for index in sharding.addressable_devices_indices_map((batch_size,)).values():
        held[index] = True
    return np.flatnonzero(held)


def to_device(batch: Batch, sharding: Sharding, batch_size: int) -> DeviceBatch:
    """The global batch, of which `batch` has the rows `local_rows(sharding, batch_size)`."""
    rows = local_rows(sharding, batch_size)

    def place(local: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(batch_size)
            first = np.searchsorted(rows, start)  # a device's rows are contiguous in `rows` too
            return local[first : first + stop - start]

        return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, shard)

    return {name: place(local) for name, local in batch.items()}


def needed_keys(keys: Collection[str], batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of a batch to transfer: `keys`, `mask`, and with patches the grids of their images."""
    return (*keys, "mask", *({"grid"} & batch.keys() if "image" in keys else ()))


@contextlib.contextmanager
def train_batches_on(
    sharding: Sharding, keys: Collection[str], *, batch_size: int, **options: Any
) -> Iterator[Iterator[DeviceBatch]]:
    """`train_batches` on the devices; threads and workers end with the context."""
    rows = local_rows(sharding, batch_size)
    with train_batches(batch_size=batch_size, rows=rows, **options) as batches:
        yield device_batches(batches, sharding, batch_size=batch_size, keys=keys)


def device_batches(
    batches: Iterable[Batch],
    sharding: Sharding,
    *,
    batch_size: int,
    keys: Collection[str] = (),
    prefetch: int = 2,
) -> Iterator[DeviceBatch]:
    """Global batches, with the next `prefetch` in transfer while one is in use.

    JAX transfers asynchronously, so this needs no thread. The look-ahead grows by one a batch: the
    first step does not wait for the batches after its own. `batches` are this process's rows; only
    `keys` and `mask` are transferred, or everything if no key is named.
    """
    queue: collections.deque[DeviceBatch] = collections.deque()
    ahead = 0
    for batch in batches:
        chosen = {key: batch[key] for key in needed_keys(keys, batch)} if keys else batch
        queue.append(to_device(chosen, sharding, batch_size))
        if len(queue) > ahead:
            yield queue.popleft()
            ahead = min(ahead + 1, prefetch)
    yield from queue
