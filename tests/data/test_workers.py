from __future__ import annotations

import dataclasses
import glob
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from vit_jax.data import workers
from vit_jax.data.pipeline import train_batches
from vit_jax.data.sources import ArraySpec
from vit_jax.errors import UserError

linux = pytest.mark.skipif(not os.path.isdir(workers.SHM), reason="no /dev/shm here")


@dataclasses.dataclass(frozen=True)
class Noise:
    """40 images of noise; one can be broken."""

    broken: int = -1
    num_examples: int = 40

    @property
    def element_spec(self) -> dict[str, ArraySpec]:
        return {"image": ArraySpec((6, 6, 3), np.dtype(np.uint8))}

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        if index == self.broken:
            raise UserError(f"example {index}: it is broken")
        return {"image": rng.integers(0, 256, (6, 6, 3), np.uint8), "label": index}


def shared_memory(pid):
    """Folders of a training process."""
    return glob.glob(f"{workers.SHM}/vit_jax-{pid}-*")


def images(pid):
    return glob.glob(f"{workers.SHM}/vit_jax-{pid}-*/*")


def children(pid):
    """Process ids whose parent is `pid`."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(entry))
    return found


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def test_workers_give_the_same_batches_in_the_same_order_and_name_a_bad_example():
    arguments = {"batch_size": 4, "seed": 1, "start_step": 2, "total_steps": 10}
    expected = list(train_batches(Noise(), **arguments))
    broken = int(expected[-1]["label"][2])
    received = []
    batches = train_batches(Noise(broken), **arguments, num_workers=2, num_threads=1)
    with batches, pytest.raises(UserError) as caught:
        received.extend(batches)
    assert str(caught.value) == f"example {broken}: it is broken"
    assert len(received) == 7
    for one, other in zip(received, expected[:-1], strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].dtype == other[key].dtype
            np.testing.assert_array_equal(one[key], other[key])
    if os.path.isdir(workers.SHM):
        assert shared_memory(os.getpid()) == []


# A training process; cloudpickle sends classes of __main__ to the workers by value.
TRAINING = """
import sys, time
import numpy as np
from vit_jax.data.pipeline import train_batches
from vit_jax.data.sources import ArraySpec

class Noise:
    num_examples = 1000
    element_spec = {"image": ArraySpec((64, 64, 3), np.dtype(np.uint8))}
    def example(self, index, rng):
        return {"image": rng.integers(0, 256, (64, 64, 3), np.uint8), "label": index}

if __name__ == "__main__":
    batches = train_batches(Noise(), batch_size=16, seed=0, total_steps=10**6, num_workers=1,
                            num_threads=1)
    kept = [next(batches) for _ in range(3)]
    print("ready", flush=True)
    if "wait" in sys.argv:
        time.sleep(600)
"""


def training(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@linux
def test_the_end_is_silent_and_leaves_nothing():
    """Although the iterator and its batches are alive when the interpreter ends."""
    with training() as process:
        out, err = process.communicate()
    assert (process.returncode, out, err) == (0, "ready\n", "")
    assert shared_memory(process.pid) == []


@linux
def test_workers_follow_a_killed_training_process():
    with training("wait") as process:
        assert process.stdout.readline() == "ready\n"
        started = children(process.pid)
        wait_until(lambda: images(process.pid))  # batches on their way
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(alive, started)))  # Python's resource tracker among them
        assert len(started) >= 2
        assert shared_memory(process.pid) == []
        # Nobody holds the pipes: whoever reads the log of a killed run sees its end.
        assert process.stdout.read() == ""
        process.stderr.read()


@linux
def test_the_next_run_removes_what_a_killed_group_left():
    with training("wait") as process:
        assert process.stdout.readline() == "ready\n"
        wait_until(lambda: images(process.pid))
        workers.remove_stale()
        assert shared_memory(process.pid), "removed the memory of a live run"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.read()
    assert shared_memory(process.pid)
    workers.remove_stale()
    assert shared_memory(process.pid) == []


@linux
def test_only_unlocked_folders_are_stale(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "SHM", str(tmp_path))
    (tmp_path / "vit_jax-1-dead").mkdir()
    (tmp_path / "vit_jax-1-dead" / "image").touch()
    (tmp_path / "other").mkdir()
    live, remove = workers._create_folder()
    workers.remove_stale()
    assert sorted(os.listdir(tmp_path)) == sorted([os.path.basename(live), "other"])
    remove()
    assert os.listdir(tmp_path) == ["other"]


def test_full_shared_memory_falls_back_to_the_pipe(tmp_path, caplog):
    send = workers._Send(str(tmp_path / "missing"))
    batch = {"image": np.ones((2, 3, 3, 1), np.uint8), "label": np.zeros(2, np.int32)}
    for _ in range(2):
        received = workers._receive(send(batch))
        np.testing.assert_array_equal(received["image"], batch["image"])
    assert len(caplog.records) == 1  # says it once


def test_received_images_are_writable_and_their_file_is_gone(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4, 1)[:, ::-1]
    read = workers._receive(workers._Send(str(tmp_path))({"image": array}))["image"]
    assert os.listdir(tmp_path) == []
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, array)
    read += 1
    np.testing.assert_array_equal(read, array + 1)
