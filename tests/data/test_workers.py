"""Worker processes: the same batches, and nothing left of them when the training has ended."""

import dataclasses
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from vit_jax.data import workers
from vit_jax.data.pipeline import train_batches
from vit_jax.data.sources import ArraySpec
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Noise:
    """40 images of noise, with two more arrays; one can be broken."""

    broken: int = -1
    num_examples: int = 40
    balance: float = 0.0

    @property
    def element_spec(self):
        return {
            "image": ArraySpec((112, 112, 3), np.dtype(np.uint8)),
            "label": ArraySpec((), np.dtype(np.int32)),
            "depth": ArraySpec((112, 112), np.dtype(np.float32)),
        }

    def example(self, index, rng):
        if index == self.broken:
            raise UserError(f"example {index}: it is broken")
        return {
            "image": rng.integers(0, 256, (112, 112, 3), np.uint8),
            "label": np.int32(index),
            "depth": rng.random((112, 112), np.float32),
        }


@pytest.mark.parametrize(("folder", "num_workers"), [("", 2), ("nowhere", 1)])
def test_workers_give_the_same_batches_in_the_same_order_and_name_a_bad_example(
    folder, num_workers, tmp_path, monkeypatch
):
    """Also where there is no shared memory."""
    monkeypatch.setattr(workers, "SHARED_MEMORY", str(tmp_path / folder))
    arguments = {"batch_size": 4, "seed": 1, "start_step": 2, "total_steps": 10}
    with train_batches(Noise(), **arguments) as batches:
        expected = list(batches)
    broken = int(expected[-1]["label"][2])
    received = []
    running = train_batches(Noise(broken), **arguments, num_workers=num_workers, num_threads=1)
    with running as batches, pytest.raises(UserError) as caught:
        received.extend(batches)
    assert str(caught.value) == f"example {broken}: it is broken"
    assert len(received) == 7
    for one, other in zip(received, expected[:-1], strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert one[key].dtype == other[key].dtype
            np.testing.assert_array_equal(one[key], other[key])
    assert not list(tmp_path.iterdir())


TRAINING = """
import sys, time
from tests.data.test_workers import Noise
from vit_jax.data import pipeline, workers

if __name__ == "__main__":
    workers.SHARED_MEMORY = sys.argv[1]
    with pipeline.train_batches(Noise(), batch_size=16, seed=0, total_steps=10**6,
                                num_workers=1, num_threads=1) as batches:
        kept = [next(batches) for _ in range(3)]
        print("ready", flush=True)
        if "wait" in sys.argv:
            time.sleep(600)
"""


@pytest.fixture
def folder():
    """Shared memory of one test."""
    path = f"{workers.SHARED_MEMORY}/vit_jax_test_{os.getpid()}"
    os.mkdir(path)
    yield path
    os.rmdir(path)


def test_every_large_array_takes_shared_memory(folder):
    with train_batches(Noise(), batch_size=4, seed=0, total_steps=1) as batches:
        [batch] = batches
    sent = workers._send(folder, batch)
    assert {key for key, each in sent.items() if isinstance(each, tuple)} == {"image", "depth"}
    assert len(os.listdir(folder)) == 2
    received = workers._receive(sent)
    assert os.listdir(folder) == []
    for key, array in batch.items():
        np.testing.assert_array_equal(received[key], array)


def training(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_the_end_is_silent_and_leaves_nothing(folder):
    """Although batches are alive when the interpreter ends."""
    with training(folder) as process:
        out, err = process.communicate()
    assert (process.returncode, out, err) == (0, "ready\n", "")
    assert os.listdir(folder) == []


def test_workers_follow_a_killed_training_process(folder):
    with training(folder, "wait") as process:
        assert process.stdout.readline() == "ready\n"
        assert os.listdir(folder)
        process.kill()
        # Workers hold the pipe too: whoever reads the log of a killed run sees its end.
        assert process.stdout.read() == ""
        process.stderr.read()
    deadline = time.monotonic() + 30
    while os.listdir(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert os.listdir(folder) == []
