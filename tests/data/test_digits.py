"""The embedded digits: contents, order, concurrent and interrupted preparation."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from sklearn import datasets as sklearn_datasets

from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.digits import prepare_digits
from vit_jax.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[2]


def digits(data_dir: pathlib.Path, split: str) -> Dataset:
    return create_dataset(
        name="digits", split=split, preprocess="decode(channels=1)", data_dir=str(data_dir)
    )


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("digits")
    prepare_digits(str(root))
    return root


def test_the_scans_in_their_order(data_dir: pathlib.Path) -> None:
    expected = sklearn_datasets.load_digits()
    rng = np.random.default_rng(0)
    splits = {"train": (0, 1497), "test": (1497, 1797), "train[300:600]": (300, 600)}
    for split, (start, stop) in splits.items():
        dataset = digits(data_dir, split).check()
        assert (dataset.num_examples, dataset.num_classes) == (stop - start, 10)
        examples = [dataset.example(i, rng) for i in range(dataset.num_examples)]
        labels = [example["label"] for example in examples]
        assert labels == expected.target[start:stop].tolist()
        images = np.stack([example["image"][..., 0] for example in examples])
        np.testing.assert_allclose(images * (16 / 255), expected.images[start:stop], atol=0.04)
    assert images.dtype == np.uint8


def test_a_second_call_prepares_nothing(
    data_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # importing it raises
    assert digits(data_dir, "train").num_examples == 1497


def test_scikit_learn_is_an_extra(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match=r"needs scikit-learn; install vit_jax\[embedded\]"):
        digits(tmp_path, "train")
    assert not list(tmp_path.rglob("*.json"))


def test_a_folder_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to .*set dataset.data_dir"):
        digits(tmp_path / "file", "train")


READ = """
import sys
from vit_jax.data.datasets import create_dataset
dataset = create_dataset(name="digits", split="test", preprocess="decode", data_dir=sys.argv[1])
print(dataset.num_examples, [dataset.source[i]["label"] for i in range(5)], dataset.fingerprint)
assert "tensorflow" not in sys.modules
"""


def start(code: str, data_dir: pathlib.Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(data_dir)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_three_processes_at_once(tmp_path: pathlib.Path) -> None:
    processes = [start(READ, tmp_path) for _ in range(3)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    assert len({out for out, _ in outputs}) == 1
    assert outputs[0][0].startswith("300 [")
    assert [path.name for path in (tmp_path / "sklearn_digits").iterdir()] == ["1.0.0"]


STALL = """
import sys, time
from vit_jax.data import digits
load = digits._load_scans
def stalling():
    images, labels = load()
    class Labels(list):
        def __iter__(self):
            for number, label in enumerate(labels):
                if number == 100:
                    print("half way", file=sys.__stdout__, flush=True)
                    time.sleep(600)
                yield label
        def __getitem__(self, rows):
            return self
    return images[:len(labels)], Labels(labels)
digits._load_scans = stalling
digits.prepare_digits(sys.argv[1])
"""


def test_a_killed_preparation_does_no_harm(tmp_path: pathlib.Path) -> None:
    process = start(STALL, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "half way\n"
    left = [path.name for path in (tmp_path / "sklearn_digits").iterdir()]
    assert left != []
    assert "1.0.0" not in left
    process.send_signal(signal.SIGKILL)
    process.communicate()
    dataset = digits(tmp_path, "train")
    assert dataset.check().num_examples == 1497
    assert dataset.source[1496]["label"] == sklearn_datasets.load_digits().target[1496]
