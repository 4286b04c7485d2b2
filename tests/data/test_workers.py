"""Worker processes: the same batches, and nothing left of them when the training has ended."""

import dataclasses
import os
import subprocess
import sys

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

    def of_lengths(self):
        return [self]

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


@pytest.mark.parametrize(("needed", "num_workers"), [(1, 2), (2**60, 1)])
def test_workers_give_the_same_batches_in_the_same_order_and_name_a_bad_example(
    needed, num_workers, monkeypatch
):
    """Through shared memory, and through a pipe where there is too little of it."""
    monkeypatch.setattr(workers, "_ROOM", needed)
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
    for batch, wanted in zip(received, expected[:-1], strict=True):
        assert batch.keys() == wanted.keys()
        for key in batch:
            assert batch[key].dtype == wanted[key].dtype
            np.testing.assert_array_equal(batch[key], wanted[key])


TRAINING = """
import sys, time
from tests.data.test_workers import Noise
from vit_jax.data import pipeline

if __name__ == "__main__":
    with pipeline.train_batches(Noise(), batch_size=16, seed=0, total_steps=10**6,
                                num_workers=1, num_threads=1) as batches:
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


def test_the_end_is_silent_and_workers_follow_a_killed_training_process():
    """Although batches are alive when the interpreter ends."""
    with training() as ended, training("wait") as killed:
        assert killed.stdout.readline() == "ready\n"
        killed.kill()
        # Workers hold the pipe too: whoever reads the log of a killed run sees its end.
        assert killed.stdout.read() == ""
        killed.stderr.read()
        out, err = ended.communicate()
    assert (ended.returncode, out, err) == (0, "ready\n", "")
