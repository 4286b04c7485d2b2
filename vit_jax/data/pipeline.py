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
from typing import Any, Protocol

import cv2
import grain
import numpy as np

from vit_jax.data import workers
from vit_jax.data.order import example_rng, order
from vit_jax.errors import UserError, as_user_error

Batch = dict[str, np.ndarray]


class Examples(Protocol):
    """What is asked of a dataset here; see datasets.Dataset."""

    @property
    def source(self) -> Any: ...

    @property
    def num_examples(self) -> int: ...

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
    repeated_augmentation: int = 1

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
    images = labels = np.empty(0)
    for row, (index, key) in enumerate(zip(indices.tolist(), keys.tolist(), strict=True)):
        if row and key == keys[row - 1]:  # padding
            images[row], labels[row] = images[row - 1], labels[row - 1]
            continue
        example = _example(dataset, index, example_rng(seed, key))
        image = example["image"]
        if row == 0:
            images = np.empty((len(indices), *image.shape), image.dtype)  # [n, H, W, C]
            labels = np.empty(len(indices), np.int32)
        elif image.shape != images.shape[1:] or image.dtype != images.dtype:
            raise _shape_error(_spec(images[0]), f"{_spec(image)} (example {index})")
        images[row], labels[row] = image, example["label"]
    return {"image": images, "label": labels, "mask": mask.astype(np.float32)}


def _spec(image: np.ndarray) -> str:
    return f"{image.dtype} {list(image.shape)}"


def _shape_error(one: str, other: str) -> UserError:
    return UserError(
        f"preprocess gives images of different shapes, {one} and {other}; "
        "end it with an op that fixes the size, such as resize(224) or central_crop(224)."
    )


def _example(dataset: Examples, index: int, rng: np.random.Generator) -> dict[str, Any]:
    """One preprocessed example; an error says which one it was."""
    try:
        return dataset.example(index, rng)
    except UserError:  # the dataset has said it all
        raise
    except Exception as error:
        where = f"example {index}"
        if hasattr(dataset.source, "describe"):
            where += f" ({dataset.source.describe(index)})"
        if isinstance(error, ValueError | OSError | cv2.error):
            raise as_user_error(f"{where}: {error}", error) from error
        # A bug: with its traceback, also through worker processes.
        raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error


def _close(iterators: list[Any], prefix: str) -> None:
    # Let go of it too: Grain complains about iterators that are alive when the interpreter ends.
    while iterators:
        iterators.pop().close()
    workers.remove_shared(prefix)


class HostBatches:
    """An iterator of batches that owns threads or processes; `close` ends them, silently."""

    def __init__(
        self,
        batches: TrainBatches | EvalBatches,
        *,
        num_threads: int,
        num_workers: int,
        prefetch: int,
    ):
        self._remaining = len(batches)
        self._spec = ""
        self._iterators: list[Any] = []
        buffer_size = max(num_threads, prefetch) if num_threads else 0
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=buffer_size)
        prefix = ""
        if self._remaining:
            data = grain.MapDataset.source(batches).to_iter_dataset(options)
            if num_workers:
                data, prefix = workers.spread(data, min(num_workers, self._remaining))
            self._iterators.append(iter(data))
        # It also runs when this object is dropped, and before the interpreter joins its children.
        self._close = weakref.finalize(self, _close, self._iterators, prefix)

    def __len__(self) -> int:
        """How many batches are still to come."""
        return self._remaining

    def __iter__(self) -> HostBatches:
        return self

    def __next__(self) -> Batch:
        if not self._remaining:
            self.close()
            raise StopIteration
        try:
            batch = next(self._iterators[0])
            spec = _spec(batch["image"][0])
            if self._spec and spec != self._spec:
                raise _shape_error(self._spec, spec)
        except Exception:
            self.close()
            raise
        self._spec = spec
        self._remaining -= 1
        return batch

    def close(self) -> None:
        """Ends threads and processes; no batch comes after it."""
        self._remaining = 0
        self._close()

    def __enter__(self) -> HostBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_repeated_augmentation(repeats: int, batch_size: int) -> None:
    """Raises UserError unless a batch holds a whole number of examples, `repeats` times each."""
    if repeats < 1 or batch_size % repeats:
        nearest_size = max(1, batch_size // repeats) * repeats if repeats > 0 else batch_size
        raise UserError(
            f"dataset.repeated_augmentation={repeats} must be at least 1 and divide "
            f"dataset.batch_size={batch_size}; use a batch size such as {nearest_size}."
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
    num_threads: int = 0,
    num_workers: int = 0,
    prefetch: int = 2,
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
      num_threads: per process; each makes a whole batch. 0: batches are made when asked for.
      num_workers: processes that make batches; 0: this process does.
      prefetch: batches to make ahead, per process; at least one per thread.

    Returns:
      Iterator of {"image" [n, H, W, C], "label" int32 [n], "mask" float32 [n] of ones}.

    Raises:
      UserError: m does not divide the batch size; (when iterating) an example cannot be read, or
        images differ in shape.
    """
    check_repeated_augmentation(repeated_augmentation, batch_size)
    rows = np.arange(batch_size) if rows is None else rows
    batches = TrainBatches(
        dataset, batch_size, rows, seed, start_step, total_steps, repeated_augmentation
    )
    return HostBatches(batches, num_threads=num_threads, num_workers=num_workers, prefetch=prefetch)


def eval_batches(
    dataset: Examples,
    *,
    batch_size: int,
    rows: np.ndarray | None = None,
    num_threads: int = 0,
    num_workers: int = 0,
    prefetch: int = 2,
) -> HostBatches:
    """Every example once, in the order of the split; arguments as for `train_batches`.

    The last batch is filled with masked copies (mask 0), so that every process gets the same
    number of batches. Random ops draw the same numbers each time.
    """
    rows = np.arange(batch_size) if rows is None else rows
    return HostBatches(
        EvalBatches(dataset, batch_size, rows),
        num_threads=num_threads,
        num_workers=num_workers,
        prefetch=prefetch,
    )
