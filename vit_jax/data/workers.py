"""Worker processes that end with the training process and leave nothing behind.

Grain (0.2.18) spawns them, but a training process that is killed takes neither them nor their
shared memory along. Here a worker watches its parent and ends within a second of it, and images
travel as files in a folder of the iterator in /dev/shm, each deleted as it is opened. Closing the
iterator removes the folder, a worker that outlives its parent does too. The training process holds
a lock on the folder, so that the next run can tell, and remove, what is left of processes that were
all killed at once. (Python's `shared_memory` has a tracker, which complains about killed runs.)
"""

from __future__ import annotations

import fcntl
import functools
import glob
import logging
import mmap
import multiprocessing
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags

SHM = "/dev/shm"


def spread(
    data: grain.IterDataset, num_workers: int
) -> tuple[grain.IterDataset, Callable[[], None]]:
    """`data`, with each `num_workers`-th batch made by another process, in the same order.

    Returns:
      The dataset, and what to call when its iterator is closed.
    """
    if not flags.FLAGS.is_parsed():  # outside of absl.app; Grain reads a flag (google/grain#1355)
        flags.FLAGS.mark_as_parsed()
    folder, clean_up = _create_folder()
    # After the worker's threads, so that only batches that are sent are in shared memory.
    data = data.map(_Send(folder))
    keep = grain.experimental.DatasetOptions(min_shm_size=2**62)  # Grain itself copies nothing
    data = grain.experimental.WithOptionsIterDataset(data, keep)
    options = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=1)
    data = data.mp_prefetch(options, worker_init_fn=functools.partial(_start_worker, folder))
    return data.map(_receive), clean_up


def _create_folder() -> tuple[str, Callable[[], None]]:
    """A locked folder in shared memory ("" where there is none for us), and what removes it."""
    remove_stale()
    try:
        hidden = tempfile.mkdtemp(prefix=f".vit_jax-{os.getpid()}-", dir=SHM)
    except OSError:
        return "", lambda: None
    lock = os.open(hidden, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = os.path.join(SHM, os.path.basename(hidden)[1:])  # seen by `remove_stale` from here on
    os.rename(hidden, folder)

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)

    return folder, remove


def remove_stale() -> None:
    """Removes the folders of this user's training processes that no longer exist."""
    for folder in glob.glob(os.path.join(SHM, "vit_jax-*")):
        try:
            lock = os.open(folder, os.O_RDONLY)
        except OSError:  # another user's, or another process was faster
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # in use
        finally:
            os.close(lock)


class _Send:
    """Moves a batch's images to shared memory, in the worker."""

    def __init__(self, folder: str):
        self._folder = folder

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        if not self._folder:
            return batch
        image, path = batch["image"], f"{self._folder}/{secrets.token_hex(8)}"
        try:
            with open(path, "xb") as file:
                file.write(np.ascontiguousarray(image).data)
        except OSError as error:  # it is full: containers often have 64 MB
            self._folder = ""
            Path(path).unlink(missing_ok=True)
            logging.getLogger(__name__).warning(
                "%s: %s; batches are sent through a pipe, which is slower.", SHM, error.strerror
            )
            return batch
        return {**batch, "image": (path, image.shape, image.dtype)}


def _receive(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """Maps the images, without a copy; their memory is freed with them."""
    if not isinstance(batch["image"], tuple):
        return batch
    path, shape, dtype = batch["image"]
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    os.unlink(path)
    return {**batch, "image": np.frombuffer(memory, dtype).reshape(shape)}


def _start_worker(folder: str, _index: int, _count: int) -> None:
    """Runs in the main thread of a new worker."""
    # Ctrl-C and a scheduler's SIGTERM reach the whole process group. The training process decides
    # what becomes of them, and may still want batches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, args=(folder,), daemon=True).start()


def _follow_parent(folder: str) -> None:
    """Ends this process soon after its parent, which a SIGKILL gives no chance to say goodbye."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # `join` returns at once when the parent's end of a pipe closes; a process that it forked can
    # hold that open, hence the second look.
    while parent.is_alive() and os.getppid() == parent.pid:
        parent.join(timeout=1)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
