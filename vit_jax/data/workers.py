"""Worker processes that end with the training process and leave nothing behind.

Grain (0.2.18) spawns them, but a training process that is killed takes neither them nor their
shared memory along. Here

* a worker watches its parent and ends within a second of it;
* images travel as files in /dev/shm (shared memory), which the receiver deletes as it opens them.
  Their names tell the training process and the iterator: closing the iterator removes what was on
  its way, a worker that outlives its parent does too, and the next run removes what is left of
  processes that no longer exist, should all have been killed at once.

Python's own `shared_memory` would need a tracker process, which complains about killed runs.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import logging
import mmap
import multiprocessing
import os
import re
import secrets
import signal
import threading
from typing import Any

import grain
import numpy as np
from absl import flags

SHM = "/dev/shm"
_NAME = re.compile(r"(?:sem\.)?vit_jax-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<start>\d+)-.*")


@dataclasses.dataclass(frozen=True)
class SharedArray:
    """Where an array lies in shared memory."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def write(cls, path: str, array: np.ndarray) -> SharedArray:
        """Raises OSError when shared memory is full (in containers it is often 64 MB)."""
        try:
            with open(path, "xb") as file:
                file.write(np.ascontiguousarray(array).data)
        except OSError:
            _unlink(path)
            raise
        return cls(path, array.shape, array.dtype)

    def read(self) -> np.ndarray:
        """The array, without a copy; its memory is freed with it. To be called once."""
        with open(self.path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        _unlink(self.path)
        return np.frombuffer(memory, self.dtype).reshape(self.shape)


def spread(data: grain.IterDataset, num_workers: int) -> tuple[grain.IterDataset, str]:
    """`data`, with each `num_workers`-th batch made by another process, in the same order.

    Returns:
      The dataset, and what to hand to `remove_shared` when its iterator is closed.
    """
    if not flags.FLAGS.is_parsed():  # outside of absl.app; Grain reads a flag (google/grain#1355)
        flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=1)
    if not os.path.isdir(SHM):
        start = functools.partial(_start_worker, "")
        return data.mp_prefetch(options, worker_init_fn=start), ""
    remove_stale()
    name = _run_name(os.getpid())
    # Semaphores of multiprocessing are files in /dev/shm too.
    multiprocessing.current_process()._config["semprefix"] = f"/{name}"  # type: ignore[attr-defined]
    prefix = os.path.join(SHM, f"{name}{secrets.token_hex(4)}-")
    # After the worker's threads, so that only batches that are sent are in shared memory.
    data = data.map(_Send(prefix))
    keep = grain.experimental.DatasetOptions(min_shm_size=2**62)  # Grain itself copies nothing
    data = grain.experimental.WithOptionsIterDataset(data, keep)
    data = data.mp_prefetch(options, worker_init_fn=functools.partial(_start_worker, prefix))
    return data.map(_receive), prefix


class _Send:
    """Moves a batch's images to shared memory, in the worker."""

    def __init__(self, prefix: str):
        self._prefix = prefix
        self._full = False

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        if self._full:
            return batch
        try:
            path = f"{self._prefix}{secrets.token_hex(8)}"
            return {**batch, "image": SharedArray.write(path, batch["image"])}
        except OSError as error:
            self._full = True
            logging.getLogger(__name__).warning(
                "%s: %s; batches are sent through a pipe, which is slower.", SHM, error.strerror
            )
            return batch


def _receive(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    image = batch["image"]
    return {**batch, "image": image.read() if isinstance(image, SharedArray) else image}


def _start_worker(prefix: str, index: int, count: int) -> None:
    """Runs in the main thread of a new worker."""
    # Ctrl-C and a scheduler's SIGTERM reach the whole process group. The training process decides
    # what becomes of them, and may still want batches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(
        target=_follow_parent, args=(prefix,), name="follow-parent", daemon=True
    ).start()


def _follow_parent(prefix: str) -> None:
    """Ends this process soon after its parent, which a SIGKILL gives no chance to say goodbye."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # `join` returns at once when the parent's end of a pipe closes; a process that it forked can
    # hold that open, hence the second look.
    while parent.is_alive() and os.getppid() == parent.pid:
        parent.join(timeout=1)
    remove_shared(prefix)
    os._exit(1)


def remove_shared(prefix: str) -> None:
    """Deletes what was on its way through an iterator that is closed; nothing without prefix."""
    if not prefix:
        return
    for path in glob.glob(glob.escape(prefix) + "*"):
        _unlink(path)


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:  # another user's, or another process was faster
        return False
    return True


def _run_name(pid: int) -> str:
    """Names a training process; process ids alone are used again."""
    return f"vit_jax-{_namespace()}-{pid}-{_start_time(pid)}-"


def _namespace() -> int:
    """Containers may share /dev/shm, but not their process ids."""
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return None


def remove_stale() -> None:
    """Removes shared memory of training processes of this user that no longer exist."""
    namespace = str(_namespace())
    for name in os.listdir(SHM):
        match = _NAME.fullmatch(name)
        if match is None or match["namespace"] != namespace:
            continue
        if _start_time(int(match["pid"])) == int(match["start"]):
            continue
        if _unlink(os.path.join(SHM, name)):
            logging.getLogger(__name__).info("removed shared memory %s of a killed run", name)
