"""`create_dataset`: what it makes of a name, and what every dataset offers."""

import multiprocessing
import pickle
import re
import shutil

import numpy as np
import pytest

from tests import fixtures_data
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError

SPEC = "decode|resize(12)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    counts = {"train": {"cat": 5, "dog": 4}, "test": {"cat": 2, "dog": 2}}
    return fixtures_data.write_folder(tmp_path_factory.mktemp("folder"), counts)


def read_all(dataset):
    rng = np.random.default_rng(0)
    return [dataset.example(i, rng)["image"].tobytes() for i in range(dataset.num_examples)]


def test_a_spawned_process_reads_the_same(folder, tmp_path):
    fixtures_data.tiny_tfds("cifar10", tmp_path, {"train": 9}, file_format="tfrecord", shards=2)
    options = {"split": "train[:9]", "preprocess": SPEC, "data_dir": str(tmp_path)}
    datasets = [create_dataset(name=name, **options) for name in (str(folder), "cifar10", "digits")]
    expected = [read_all(dataset) for dataset in datasets]  # so files are open when they are sent
    assert len({image for images in expected for image in images}) > 20
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(read_all, datasets) == expected


def test_fingerprint_tells_data_apart(folder, tmp_path):
    def fingerprint(root, split="train", preprocess=SPEC):
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
        ({"name": "glyphs(sise=16)"}, r"'glyphs\(sise=16\)': .*unknown argument 'sise'\. Did you"),
        ({"on_bad_image": "ignore"}, "dataset.on_bad_image='ignore' is unknown"),
        ({"label_key": "fine"}, "dataset.label_key='fine' is only for TFDS names"),
    ],
)
def test_bad_arguments(folder, arguments, message):
    defaults = {"name": str(folder), "split": "train", "preprocess": SPEC}
    with pytest.raises(UserError, match=message) as caught:
        create_dataset(**{**defaults, **arguments})
    assert "\n" not in str(caught.value)


def test_folder_names(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in (folder.name, f"./{folder.name}", f"~/{folder.name}", f"{folder}/"):
        dataset = create_dataset(name=name, split="test", preprocess=SPEC)
        assert dataset.class_names == ("cat", "dog")
    monkeypatch.chdir(folder)
    assert create_dataset(name=".", split="test", preprocess=SPEC).num_examples == 4


def test_a_tfds_set_without_labels(tmp_path):
    fixtures_data.Unlabelled(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    keys = {"preprocess": "decode|resize(16)", "data_dir": str(tmp_path)}
    with pytest.raises(UserError, match="no label; set dataset.label_key"):
        create_dataset(name="unlabelled", split="train", **keys)
    dataset = create_dataset(name="unlabelled", split="train", **keys, needs=())
    assert dataset.element_spec.keys() == {"image"}


def test_images_without_labels_need_no_class_folders(tmp_path):
    fixtures_data.write_folder(tmp_path, {"train": {"cat": 3}, "extra": {"cow": 2, "cat": 1}})
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "x.jpg").write_bytes(fixtures_data.encoded(fixtures_data.picture(0)))
    for split, count in {"train": 3, "extra": 3, "test": 1, "all": 7}.items():
        dataset = create_dataset(name=str(tmp_path), split=split, preprocess="decode", needs=())
        assert dataset.check().num_examples == count
    with pytest.raises(UserError, match="no class folders"):
        create_dataset(name=str(tmp_path / "test"), split="train", preprocess="decode")
    options = {"split": "train", "preprocess": "decode", "needs": ()}
    assert create_dataset(name=str(tmp_path / "test"), **options).num_examples == 1


@pytest.mark.parametrize(
    "name", ["a.XLSX", "a.npz", "a.h5", "a.tar.gz", "a.zip", "a.jsonl", "a.tfrecord"]
)
def test_files_that_are_not_read(tmp_path, monkeypatch, name):
    advice = "expected a .csv, .tsv or .parquet .*, or a .tar; unpack .*; arrays are .* in Python"
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    for path in (name, f"{tmp_path}/{name}"):
        with pytest.raises(UserError, match=f"{re.escape(name)}': Not a directory; {advice}"):
            create_dataset(name=path, split="train", preprocess=SPEC)
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match="No such file or directory"):
        create_dataset(name=path, split="train", preprocess=SPEC)
    fixtures_data.write_folder(tmp_path / name, {"train": {"a": 1, "b": 1}})
    assert create_dataset(name=path, split="train", preprocess=SPEC).num_examples == 2


def test_what_it_is_in_a_line(folder):
    dataset = create_dataset(name=str(folder), split="test", preprocess=SPEC)
    line = f"Data: {folder} test, 4 images of 12x12x3, 2 classes: cat, dog."
    assert dataset.summary == line
    unlabelled = create_dataset(name=str(folder), split="test", preprocess=SPEC, needs=())
    assert unlabelled.summary.endswith("4 images of 12x12x3, no labels.")


def test_the_same_examples_are_found_whatever_the_data_are_called(folder, tmp_path):
    fixtures_data.tiny_tfds("cifar10", tmp_path, {"train": 9, "test": 3}, shards=2)
    (tmp_path / "link").symlink_to(folder)
    files = [*folder.glob("train/*/00[01].jpg")]
    rows = "".join(f"{file},{file.parent.name},a\n" for file in files)
    (tmp_path / "t.csv").write_text(f"path,label,split\n{rows}")

    def dataset(name, split):
        return create_dataset(name=str(name), split=split, preprocess=SPEC, data_dir=str(tmp_path))

    train = dataset(folder, "train")
    assert dataset(folder, "test").shared(train) == 0
    assert dataset(tmp_path / "link", "test+train[:2]").shared(train) == 2
    assert dataset(tmp_path / "t.csv", "a").shared(train) == 4
    part = dataset("cifar10", "train[:5]")
    assert dataset("cifar10:3.0.2", "train[3:]+test").shared(part) == 2
    assert dataset("digits", "train").shared(dataset("digits", "train[:7]")) == 7
    assert (
        dataset("digits", "train").shared(dataset("glyphs(size=12, num_examples=9)", "train")) == 0
    )
    assert dataset("digits", "train").shared(train) == 0
