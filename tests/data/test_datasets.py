"""`create_dataset`: what it makes of a name, and what every dataset offers."""

from __future__ import annotations

import multiprocessing
import pathlib
import pickle
import shutil

import numpy as np
import pytest

from tests import fixtures_data
from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.sources import ArraySpec
from vit_jax.errors import UserError

SPEC = "decode|resize(12)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    counts = {"train": {"cat": 5, "dog": 4}, "test": {"cat": 2, "dog": 2}}
    return fixtures_data.write_folder(tmp_path_factory.mktemp("folder"), counts)


@pytest.fixture(scope="module")
def all_kinds(folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    data_dir = tmp_path_factory.mktemp("tfds")
    fixtures_data.tiny_tfds("cifar10", data_dir, {"train": 9}, file_format="tfrecord", shards=2)
    names = {"folder": str(folder), "cifar10": "cifar10", "digits": "digits"}
    return {
        kind: create_dataset(name=name, split="train[:9]", preprocess=SPEC, data_dir=str(data_dir))
        for kind, name in names.items()
    }


KINDS = ["folder", "cifar10", "digits"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_every_dataset_offers(all_kinds: dict[str, Dataset], kind: str) -> None:
    dataset = all_kinds[kind].check()
    assert dataset.num_examples == 9
    assert dataset.num_classes == len(dataset.class_names) == (2 if kind == "folder" else 10)
    assert dataset.element_spec["image"] == ArraySpec((12, 12, 3), np.dtype(np.uint8))
    assert dataset.element_spec["label"].shape == ()


def read_all(dataset: Dataset) -> list[bytes]:
    rng = np.random.default_rng(0)
    return [dataset.example(i, rng)["image"].tobytes() for i in range(dataset.num_examples)]


def test_a_spawned_process_reads_the_same(all_kinds: dict[str, Dataset]) -> None:
    datasets = [all_kinds[kind] for kind in KINDS]
    expected = [read_all(dataset) for dataset in datasets]  # so files are open when they are sent
    assert len({image for images in expected for image in images}) > 20
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(read_all, datasets) == expected


def test_fingerprint_tells_data_apart(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def fingerprint(root: pathlib.Path, split: str = "train", preprocess: str = SPEC) -> str:
        dataset = create_dataset(name=str(root), split=split, preprocess=preprocess)
        assert pickle.loads(pickle.dumps(dataset)).fingerprint == dataset.fingerprint
        return dataset.fingerprint

    one = fingerprint(folder)
    assert one == fingerprint(folder)
    assert one == fingerprint(folder, preprocess="decode|resize(24)")  # the same data
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    assert one == fingerprint(moved)
    assert len({one, fingerprint(folder, "train[:9]"), fingerprint(folder, "test")}) == 3
    (moved / "train" / "dog").rename(moved / "train" / "wolf")
    renamed = fingerprint(moved)
    (moved / "train" / "wolf" / "000.jpg").write_bytes(b"other")
    assert len({one, renamed, fingerprint(moved)}) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "dataset.name is empty"),
        ({"on_bad_image": "ignore"}, "dataset.on_bad_image='ignore' is unknown"),
        ({"label_key": "fine"}, "dataset.label_key='fine' is for TFDS names"),
        ({"preprocess": "decode|resise(3)"}, "unknown op 'resise'"),
        ({"split": "trian"}, "dataset.split='trian': unknown split.*Did you mean 'train'"),
    ],
)
def test_bad_arguments(folder: pathlib.Path, arguments: dict[str, str], message: str) -> None:
    defaults = {"name": str(folder), "split": "train", "preprocess": SPEC}
    with pytest.raises(UserError, match=message) as caught:
        create_dataset(**{**defaults, **arguments})
    assert "\n" not in str(caught.value)


def test_folder_names(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in (folder.name, f"./{folder.name}", f"~/{folder.name}", f"{folder}/"):
        dataset = create_dataset(name=name, split="test", preprocess=SPEC)
        assert dataset.class_names == ("cat", "dog")
    monkeypatch.chdir(folder)
    assert create_dataset(name=".", split="test", preprocess=SPEC).num_examples == 4


def test_embedded_sets_take_arguments_and_splits() -> None:
    name = "glyphs(size=6, num_examples=50, num_test=50)"
    plain = create_dataset(name=name, split="train[10:12]+test[:1]", preprocess="decode")
    rng = np.random.default_rng(0)
    assert [plain.example(i, rng)["label"] for i in range(plain.num_examples)] == [10, 11, 0]
    assert plain.check() is plain
    larger = create_dataset(name="glyphs(size=16)", split="train", preprocess="decode(channels=1)")
    assert larger.element_spec["image"].shape == (16, 16, 1)
    assert plain.fingerprint != larger.fingerprint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("glyphs(sise=16)", r"unknown argument 'sise'\. Did you mean 'size'"),
        ("glyphs(16)", "too many positional arguments"),
        ("glyphs(size=100000)", r"glyphs\(size=100000\): size must be from 4 to 1024"),
        ("glyphs(size=print())", "arguments must be literals"),
        ("glyphs(size=16", "was never closed"),
    ],
)
def test_wrong_arguments_of_embedded_sets(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        create_dataset(name=name, split="train", preprocess="decode")
    assert f"dataset.name {name!r}" in str(caught.value)
