"""Batches made in worker processes and passed on through shared memory."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
from absl import flags, logging

Batch = dict[str, np.ndarray]
SHARED_MEMORY = "/dev/shm"
_LARGE = 2**17  # bytes; smaller ones are as fast through a pipe


@contextlib.contextmanager
def in_processes(data: grain.IterDataset, num_workers: int) -> Iterator[grain.IterDataset]:
    """`data`, with every `num_workers`-th batch made by the same worker process, in order.

    Large arrays are passed as files in shared memory: 128 images of 224 pixels cost the training
    process 3 ms, against 20 through a pipe; Grain's own shared memory costs the worker 11 ms more.
    """
    if not flags.FLAGS.is_parsed():  # without absl.app; Grain reads a flag (google/grain#1355)
        flags.FLAGS.mark_as_parsed()
    folder = f"{SHARED_MEMORY}/vit_jax-{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):  # otherwise batches go through the pipe
        os.mkdir(folder, 0o700)
    # After the worker's threads, so that only batches being sent are in shared memory.
    data = data.map(functools.partial(_send, folder))
    keep = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)  # Grain's own copying is off
    data = grain.experimental.WithOptionsIterDataset(data, keep)
    options = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=1)
    start = functools.partial(_start_worker, folder, os.getpid())
    try:
        yield data.mp_prefetch(options, worker_init_fn=start).map(_receive)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # with unused batches


def _send(folder: str, batch: Batch) -> dict[str, Any]:
    """Moves each large array of a batch to a file in shared memory (in the worker)."""
    sent: dict[str, Any] = dict(batch)
    for key, array in batch.items():
        path = f"{folder}/{secrets.token_hex(8)}"
        try:
            if array.nbytes >= _LARGE:
                array.tofile(path)
                sent[key] = path, array.shape, array.dtype
        except OSError as error:  # missing or full: containers often have 64 MB
            Path(path).unlink(missing_ok=True)
            log = "%s; batches go through a pipe, which is slower."
            logging.log_first_n(logging.WARNING, log, 1, error)
    return sent


def _receive(batch: dict[str, Any]) -> Batch:
    """Maps the arrays in files, without a copy; their memory is freed with them."""
    for key, each in batch.items():
        if isinstance(each, tuple):
            path, shape, dtype = each
            batch[key] = np.asarray(np.memmap(path, dtype, "r+", shape=shape))
            os.unlink(path)
    return batch


def _start_worker(folder: str, parent: int, _index: int, _count: int) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the trainer decides
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(folder, parent), daemon=True).start()


def _exit_with_parent(folder: str, parent: int) -> None:
    """Ends this process soon after its parent, even if that gets a SIGKILL."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
