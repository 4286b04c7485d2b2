"""Batches of examples on the host. Batch t is a pure function of (seed, t).

It is the same for any number of processes, threads and workers and from any start, so a run
resumes from its step alone. Grain makes batches ahead of time, in threads or in worker processes.
An element for Grain is a whole batch: its bookkeeping costs 20 us per element.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import grain
import numpy as np
from absl import flags, logging

from vit_jax.data.order import example_rng, order
from vit_jax.data.sources import ArraySpec, describe
from vit_jax.errors import UserError

Batch = dict[str, np.ndarray]
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
_LABEL = ArraySpec((), np.dtype(np.int32))
SHARED_MEMORY = "/dev/shm"


class Examples(Protocol):
    """What is asked of a dataset here; see datasets.Dataset."""

    @property
    def num_examples(self) -> int: ...

    @property
    def element_spec(self) -> Mapping[str, ArraySpec]: ...

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]: ...


def _train_rows(
    num_examples: int, batch_size: int, rows: np.ndarray, seed: int, repeats: int, step: int
) -> Rows:
    """The examples of a batch [n], the positions that their random numbers belong to, a mask."""
    positions = step * batch_size + rows
    distinct = batch_size // repeats
    indices = order(seed, num_examples, step * distinct + rows % distinct)
    return indices, positions, np.ones(len(rows), np.float32)


def _eval_rows(num_examples: int, batch_size: int, rows: np.ndarray, t: int) -> Rows:
    """The same for a split in its order; after its end come masked copies of the last example."""
    positions = t * batch_size + rows
    indices = np.minimum(positions, num_examples - 1)
    return indices, indices, (positions < num_examples).astype(np.float32)


def batch_spec(dataset: Examples, batch_size: int) -> dict[str, ArraySpec]:
    """Shapes and dtypes of a batch."""
    image, label = (dataset.element_spec.get(key, _LABEL) for key in ("image", "label"))
    label_dtype = np.dtype(np.uint8 if label.shape else np.int32)
    return {
        "image": ArraySpec((batch_size, *image.shape), image.dtype),
        "label": ArraySpec((batch_size, *label.shape), label_dtype),
        "mask": ArraySpec((batch_size,), np.dtype(np.float32)),
    }


def _build(dataset: Examples, seed: int, draw: Callable[[int], Rows], step: int) -> Batch:
    """Batch `step`: its examples, each with the random numbers of (seed, its position)."""
    indices, positions, mask = draw(step)
    spec, whole = dataset.element_spec["image"], batch_spec(dataset, len(indices))
    images, labels = (np.empty(whole[key].shape, whole[key].dtype) for key in ("image", "label"))
    for row, (index, position) in enumerate(zip(indices.tolist(), positions.tolist(), strict=True)):
        if row and position == positions[row - 1]:  # padding
            images[row], labels[row] = images[row - 1], labels[row - 1]
            continue
        example = dataset.example(index, example_rng(seed, position))
        image = example["image"]
        if (image.shape, image.dtype) != (spec.shape, spec.dtype):
            raise UserError(
                f"preprocess gives {describe(spec)} and {describe(image)} (example {index}); end "
                "it with an op that fixes the size, such as resize(224)."
            )
        images[row], labels[row] = image, example["label"]
    return {"image": images, "label": labels, "mask": mask}


class HostBatches(Iterator[Batch], contextlib.AbstractContextManager[Any]):
    """An iterator of batches that owns threads or processes; `close` ends them, silently."""

    def __init__(
        self,
        dataset: Examples,
        seed: int,
        draw: Callable[[int], Rows],
        steps: range,
        *,
        num_threads: int = 0,
        num_workers: int = 0,
        prefetch: int = 2,
    ):
        """
        Args:
          dataset, seed, draw: what a batch is made of, see `_build`; workers get them by pickle.
          steps: numbers of the batches.
          num_threads: per process; each makes a whole batch. 0: batches are made when asked for.
          num_workers: processes that make batches; 0: this process does.
          prefetch: batches to make ahead, per process; at least one per thread.
        """
        buffer_size = max(num_threads, prefetch) if num_threads else 0
        options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=buffer_size)
        make = functools.partial(_build, dataset, seed, draw)
        data = grain.MapDataset.source(steps).map(make).to_iter_dataset(options)
        self._batches = _iterate(data, min(num_workers, len(steps)))
        # It also runs when this object is dropped, and before the interpreter joins its children.
        self._close = weakref.finalize(self, self._batches.close)

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """Ends threads and processes; no batch comes after it."""
        self._close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _iterate(data: grain.IterDataset, num_workers: int) -> Generator[Batch]:
    folder = f"{SHARED_MEMORY}/vit_jax-{secrets.token_hex(8)}"
    if num_workers:
        with contextlib.suppress(OSError):  # without it batches take the pipe
            os.mkdir(folder, 0o700)
        data = _in_processes(data, num_workers, folder)
    iterator = iter(data)
    try:
        yield from iterator
    finally:
        iterator.close()
        shutil.rmtree(folder, ignore_errors=True)  # with the batches that nobody asked for


def _in_processes(data: grain.IterDataset, num_workers: int, folder: str) -> grain.IterDataset:
    """`data`, with each `num_workers`-th batch made by another process, in the same order.

    Images travel as files in `folder`. A batch of 128 at 224 pixels costs the training process 3 ms
    then, through a pipe 20; Grain's shared memory costs the worker 11 ms more.
    """
    if not flags.FLAGS.is_parsed():  # outside of absl.app; Grain reads a flag (google/grain#1355)
        flags.FLAGS.mark_as_parsed()
    # After the worker's threads, so that only batches that are sent are in shared memory.
    data = data.map(functools.partial(_send, folder))
    # Grain itself copies nothing to shared memory.
    keep = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
    data = grain.experimental.WithOptionsIterDataset(data, keep)
    options = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=1)
    start = functools.partial(_start_worker, folder, os.getpid())
    return data.mp_prefetch(options, worker_init_fn=start).map(_receive)


def _send(folder: str, batch: Batch) -> dict[str, Any]:
    """Moves a batch's images to a file in shared memory, in the worker."""
    image, path = batch["image"], f"{folder}/{secrets.token_hex(8)}"
    try:
        image.tofile(path)
    except OSError as error:  # there is none, or it is full: containers often have 64 MB
        Path(path).unlink(missing_ok=True)
        message = "%s; batches are sent through a pipe, which is slower."
        logging.log_first_n(logging.WARNING, message, 1, error)
        return batch
    return {**batch, "image": (path, image.shape, image.dtype)}


def _receive(batch: dict[str, Any]) -> Batch:
    """Maps the images, without a copy; their memory is freed with them."""
    if isinstance(batch["image"], np.ndarray):
        return batch
    path, shape, dtype = batch["image"]
    image = np.memmap(path, dtype, "r+", shape=shape)
    os.unlink(path)
    return {**batch, "image": np.asarray(image)}


def _start_worker(folder: str, parent: int, _index: int, _count: int) -> None:
    """Runs in the main thread of a new worker."""
    # Ctrl-C and a scheduler's SIGTERM reach the whole process group. The training process decides
    # what becomes of them, and may still want batches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, args=(folder, parent), daemon=True).start()


def _follow_parent(folder: str, parent: int) -> None:
    """Ends this process soon after its parent, which a SIGKILL gives no chance to say goodbye."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


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
    augmentations each, B / m rows apart, so that mixup's neighbours are different examples, and
    processes hold different draws, as with DeiT's sampler. An epoch still is N images, of N / m
    examples; m epochs show every example m times (DeiT draws its N / m anew in every epoch).

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
    draw = functools.partial(
        _train_rows, dataset.num_examples, batch_size, rows, seed, repeated_augmentation
    )
    return HostBatches(dataset, seed, draw, range(start_step, total_steps), **loader)


def eval_batches(
    dataset: Examples, *, batch_size: int, rows: np.ndarray | None = None, **loader: int
) -> HostBatches:
    """Every example once, in the order of the split; arguments as for `train_batches`.

    The last batch is filled with masked copies (mask 0), so that every process gets the same
    number of batches. Random ops draw the same numbers each time.
    """
    rows = np.arange(batch_size) if rows is None else rows
    draw = functools.partial(_eval_rows, dataset.num_examples, batch_size, rows)
    num_batches = -(-dataset.num_examples // batch_size)
    return HostBatches(dataset, 0, draw, range(num_batches), **loader)
