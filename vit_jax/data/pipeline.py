"""Batches of examples on the host. Batch t is a pure function of (seed, t).

It is the same for any number of processes, threads and workers and from any start, so a run
resumes from its step alone and there is no iterator state to save. `TrainBatches` and
`EvalBatches` are that function; Grain calls it ahead of time, in threads or in worker processes.
An element for Grain is a whole batch: its bookkeeping costs 20 us per element, which small images
such as digits would feel.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import grain
import numpy as np

from vit_jax.data.order import example_rng, order
from vit_jax.data.sources import ArraySpec, describe
from vit_jax.errors import UserError

Batch = dict[str, np.ndarray]
_LABEL = ArraySpec((), np.dtype(np.int32))


class Examples(Protocol):
    """What is asked of a dataset here; see datasets.Dataset."""

    @property
    def num_examples(self) -> int: ...

    @property
    def element_spec(self) -> Mapping[str, ArraySpec]: ...

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class TrainBatches:
    """Batches `start_step` .. `total_steps` - 1; item k is batch start_step + k."""

    dataset: Examples
    batch_size: int
    rows: np.ndarray
    seed: int
    start_step: int
    total_steps: int
    repeated_augmentation: int

    def __len__(self) -> int:
        return max(0, self.total_steps - self.start_step)

    def __getitem__(self, k: int) -> Batch:
        step = self.start_step + k
        positions = step * self.batch_size + self.rows
        distinct = self.batch_size // self.repeated_augmentation
        places = step * distinct + self.rows % distinct
        indices = order(self.seed, self.dataset.num_examples, places)
        return _build(self.dataset, indices, self.seed, positions, np.ones(len(positions)))


@dataclasses.dataclass(frozen=True)
class EvalBatches:
    """The split in its order; after its end, masked copies of the last example fill the batch."""

    dataset: Examples
    batch_size: int
    rows: np.ndarray

    def __len__(self) -> int:
        return -(-self.dataset.num_examples // self.batch_size)

    def __getitem__(self, t: int) -> Batch:
        positions = t * self.batch_size + self.rows
        mask = positions < self.dataset.num_examples
        indices = np.minimum(positions, self.dataset.num_examples - 1)
        return _build(self.dataset, indices, 0, indices, mask)


def _build(
    dataset: Examples, indices: np.ndarray, seed: int, keys: np.ndarray, mask: np.ndarray
) -> Batch:
    """The examples `indices` [n], each with the random numbers of (seed, its key)."""
    spec = dataset.element_spec["image"]
    images = np.empty((len(indices), *spec.shape), spec.dtype)  # [n, H, W, C]
    label = dataset.element_spec.get("label", _LABEL)
    labels = np.empty((len(indices), *label.shape), np.uint8 if label.shape else np.int32)
    for row, (index, key) in enumerate(zip(indices.tolist(), keys.tolist(), strict=True)):
        if row and key == keys[row - 1]:  # padding
            images[row], labels[row] = images[row - 1], labels[row - 1]
            continue
        example = dataset.example(index, example_rng(seed, key))
        image = example["image"]
        if (image.shape, image.dtype) != (spec.shape, spec.dtype):
            raise UserError(
                f"preprocess gives {describe(spec)} and {describe(image)} (example {index}); end "
                "it with an op that fixes the size, such as resize(224)."
            )
        images[row], labels[row] = image, example["label"]
    return {"image": images, "label": labels, "mask": mask.astype(np.float32)}


def _close(iterators: list[Any], clean_up: Callable[[], None]) -> None:
    # Let go of it too: Grain complains about iterators that are alive when the interpreter ends.
    while iterators:
        iterators.pop().close()
    clean_up()


class HostBatches(Iterator[Batch], AbstractContextManager[Any]):
    """An iterator of batches that owns threads or processes; `close` ends them, silently."""

    def __init__(
        self,
        batches: TrainBatches | EvalBatches,
        *,
        num_threads: int = 0,
        num_workers: int = 0,
        prefetch: int = 2,
    ):
        """
        Args:
          batches: to make.
          num_threads: per process; each makes a whole batch. 0: batches are made when asked for.
          num_workers: processes that make batches; 0: this process does.
          prefetch: batches to make ahead, per process; at least one per thread.
        """
        buffer_size = max(num_threads, prefetch) if num_threads else 0
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=buffer_size)
        self._iterators: list[Any] = []
        clean_up: Callable[[], None] = lambda: None  # noqa: E731
        if count := len(batches):
            data = grain.MapDataset.source(batches).to_iter_dataset(options)
            if num_workers:
                from vit_jax.data import workers

                data, clean_up = workers.spread(data, min(num_workers, count))
            self._iterators.append(iter(data))
        # It also runs when this object is dropped, and before the interpreter joins its children.
        self._close = weakref.finalize(self, _close, self._iterators, clean_up)

    def __next__(self) -> Batch:
        try:
            return next(self._iterators[0] if self._iterators else iter(()))
        except Exception:  # StopIteration too
            self.close()
            raise

    def close(self) -> None:
        """Ends threads and processes; no batch comes after it."""
        self._close()

    def __exit__(self, *_: object) -> None:
        self.close()


def check_repeated_augmentation(repeats: int, batch_size: int) -> None:
    """Raises UserError unless a batch holds a whole number of examples, `repeats` times each."""
    if repeats < 1 or batch_size % repeats:
        raise UserError(
            f"dataset.repeated_augmentation={repeats} must be at least 1 and divide "
            f"dataset.batch_size={batch_size}."
        )


def train_batches(
    dataset: Examples,
    *,
    batch_size: int,
    seed: int,
    start_step: int = 0,
    total_steps: int,
    repeated_augmentation: int = 1,
    rows: np.ndarray | None = None,
    **loader: int,
) -> HostBatches:
    """The batches that update parameters, `start_step` .. `total_steps` - 1.

    Row r of batch t is at position i = t * batch_size + r of the run: epoch i // N, where every
    example comes once per epoch. The example and its augmentation depend on (seed, i) only.

    With `repeated_augmentation` = m (1901.09335; DeiT has 3) a batch holds B / m examples in m
    augmentations each: rows r, r + B / m, ... show one example. They are that far apart so that
    mixup's neighbours are different examples, and processes hold different draws, as with DeiT's
    sampler. An epoch still is N images, of N / m examples; m epochs show every example m times
    (DeiT draws its N / m anew in every epoch).

    Args:
      dataset: see `Examples`; with workers it is sent to other processes, by pickle.
      batch_size: global.
      seed: of order and augmentation.
      start_step: number of finished updates.
      total_steps: of the whole run.
      repeated_augmentation: m; divides the batch size.
      rows: which rows of the global batch this process holds, sorted ints [n]; all by default.
      loader: see `HostBatches`.

    Returns:
      Iterator of {"image" [n, H, W, C], "label" int32 [n] or uint8 [n, K], "mask" float32 [n] of
      ones}.

    Raises:
      UserError: (when iterating) an example cannot be read, or images differ in shape.
    """
    rows = np.arange(batch_size) if rows is None else rows
    batches = TrainBatches(
        dataset, batch_size, rows, seed, start_step, total_steps, repeated_augmentation
    )
    return HostBatches(batches, **loader)


def eval_batches(
    dataset: Examples, *, batch_size: int, rows: np.ndarray | None = None, **loader: int
) -> HostBatches:
    """Every example once, in the order of the split; arguments as for `train_batches`.

    The last batch is filled with masked copies (mask 0), so that every process gets the same
    number of batches. Random ops draw the same numbers each time.
    """
    rows = np.arange(batch_size) if rows is None else rows
    return HostBatches(EvalBatches(dataset, batch_size, rows), **loader)
