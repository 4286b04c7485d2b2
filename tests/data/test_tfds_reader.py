"""Prepared TFDS directories: both formats, every way to name them, damaged and missing ones."""

import json
import os
import pathlib
import re
import shutil

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests import fixtures_data
from vit_jax.data.datasets import create_dataset
from vit_jax.data.tfds_reader import find_prepared, open_prepared
from vit_jax.errors import UserError

SIZES = {"train": 50, "test": 13}
FORMATS = {"array_record": 1, "tfrecord": 3}  # format: shards


@pytest.fixture(scope="module", params=FORMATS)
def file_format(request):
    return request.param


@pytest.fixture(scope="module")
def data_dirs(tmp_path_factory):
    roots = {}
    for name, shards in FORMATS.items():
        roots[name] = tmp_path_factory.mktemp(name)
        fixtures_data.tiny_tfds("cifar10", roots[name], SIZES, file_format=name, shards=shards)
        fixtures_data.tiny_tfds(
            "imagenet2012", roots[name], {"train": 9, "validation": 4}, file_format=name
        )
    return roots


def open_cifar(data_dir, split, label_key=""):
    return open_prepared(find_prepared("cifar10", str(data_dir)), split, label_key)[0]


def contents(source):
    return [(source[i]["image"], source[i]["label"]) for i in range(len(source))]


@pytest.mark.parametrize("split", ["test", "train[:98%]", "train[-7:]+test[3:5]", "train[10:40]"])
def test_same_examples_as_tfds(data_dirs, file_format, split):
    builder = tfds.builder("cifar10", data_dir=data_dirs["array_record"])
    expected = builder.as_data_source(split)
    dataset = create_dataset(
        name="cifar10", split=split, preprocess="decode", data_dir=str(data_dirs[file_format])
    ).check()
    assert dataset.num_examples == len(expected)
    assert dataset.class_names == tuple(builder.info.features["label"].names)
    for index in range(len(expected)):
        example = dataset.example(index, np.random.default_rng(0))
        np.testing.assert_array_equal(example["image"], expected[index]["image"])
        assert example["label"] == expected[index]["label"]


def shard(directory, split):
    return sorted(directory.glob(f"cifar10-{split}.*"))[0]


def copied(data_dirs, file_format, to):
    shutil.copytree(data_dirs[file_format], to, dirs_exist_ok=True)
    return pathlib.Path(find_prepared("cifar10", str(to)))


@pytest.mark.parametrize("keep", [0, 0.999])
def test_truncated_files_are_named(data_dirs, file_format, tmp_path, keep):
    file = shard(copied(data_dirs, file_format, tmp_path), "train")
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    source = open_cifar(tmp_path, "train")
    with pytest.raises(UserError, match=re.escape(str(file))) as caught:
        source.check("skip")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=re.escape(str(file))):
        source[0]
    open_cifar(tmp_path, "test").check("error")  # the other split is whole


def test_missing_and_swapped_files_are_named(data_dirs, file_format, tmp_path):
    directory = copied(data_dirs, file_format, tmp_path)
    shutil.copy(shard(directory, "train"), shard(directory, "test"))
    with pytest.raises(
        UserError, match=r"cifar10-test.*has \d+ records, dataset_info.json says \d+"
    ):
        open_cifar(tmp_path, "test").check("error")
    shard(directory, "train").unlink()
    with pytest.raises(UserError, match=r"cifar10-train.*: No such file"):
        open_cifar(tmp_path, "train").check("error")


@pytest.mark.parametrize(
    ("split", "message"), [("train[9shard:]", "selects no examples"), ("train[", "; write ")]
)
def test_splits_that_are_none(data_dirs, split, message):
    with pytest.raises(UserError, match=rf"dataset\.split='{re.escape(split)}'.*{message}"):
        open_cifar(data_dirs["tfrecord"], split)


def test_label_key(tmp_path):
    def example(split, index):
        return {**fixtures_data.cifar_example(split, index), "coarse_label": index % 3}

    folder = fixtures_data.tiny_tfds("cifar100", tmp_path, {"train": 6}, example=example)
    for label_key, count, labels in (
        ("", 100, [0, 1, 2, 3, 4, 5]),
        ("coarse_label", 20, [0, 0, 1, 1, 2, 2]),
    ):
        source, names = open_prepared(str(folder), "train", label_key)
        assert len(names) == count
        assert sorted(source[i]["label"] for i in range(6)) == labels
    message = r"label_key='id' is not a ClassLabel; set dataset\.label_key to .*coarse_label \("
    with pytest.raises(UserError, match=message):
        open_prepared(str(folder), "train", "id")


def test_configs_and_versions(tmp_path):
    root = str(tmp_path)
    for place in (
        "big/1.0.0",
        "big/1.2.0",
        "big/1.10.0",
        "big/incomplete.XYZ_1.11.0",
        "small/1.0.0",
    ):
        (tmp_path / "set" / place).mkdir(parents=True)
        (tmp_path / "set" / place / "dataset_info.json").touch()
    (tmp_path / "set/big/2.0.0").mkdir()  # made by a kill: it has no metadata
    assert find_prepared("set/big", root).endswith("big/1.10.0")
    assert find_prepared("set/big:1.2.0", root).endswith("big/1.2.0")
    with pytest.raises(UserError, match="one of the configs .*set/big:1.0.0, .*set/small:1.0.0"):
        find_prepared("set", root)
    for name in ("set/medium", "set:9.0.0"):
        with pytest.raises(UserError, match="prepared there: .*big:1.10.0"):
            find_prepared(name, root)


def test_names_without_data_are_errors_at_once(tmp_path, monkeypatch):
    def fails(name, message, data_dir=""):
        with pytest.raises(UserError, match=message) as caught:
            create_dataset(name=name, split="train", preprocess="decode", data_dir=data_dir)
        assert "\n" not in str(caught.value)
        assert "dataset.name=" in str(caught.value)
        assert name in str(caught.value) or name.startswith(".")

    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "env"))
    advice = "python scripts/prepare_data.py"
    fails("cifar10", rf"not prepared in {tmp_path}/env .*{advice} tfds cifar10 --data_dir=/.*/env$")
    fails("imagenet2012", rf"not prepared in .*{advice} imagenet2012 FOLDER --data_dir=/.*/env$")
    fails("cifar10", rf"not prepared in {tmp_path}/arg ", str(tmp_path / "arg"))
    with pytest.raises(UserError, match="'gs://x' is not a folder in a bucket"):
        find_prepared("cifar10", "gs://x")
    fails("cifar11", "no such dataset.*'digits', 'glyphs', the path of an image.*mean 'cifar10")
    fails("digit", "Did you mean 'digits'")
    fails("no/such/folder", "No such file or directory")
    fails("cifar 10", "is not a TFDS name")
    monkeypatch.delenv("TFDS_DATA_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    fails("cifar10", rf"not prepared in {tmp_path}/home/tensorflow_datasets")


def test_a_prepared_directory_is_a_name_too(data_dirs, monkeypatch):
    directory = find_prepared("cifar10", str(data_dirs["tfrecord"]))
    dataset = create_dataset(name=directory, split="test", preprocess="decode")
    assert dataset.num_examples == 13
    monkeypatch.chdir(data_dirs["tfrecord"])  # ./cifar10 is a folder here, but not of images
    dataset = create_dataset(name="cifar10", split="test", preprocess="decode", data_dir=".")
    assert dataset.num_examples == 13


def test_formats_without_random_access_are_refused(data_dirs, tmp_path):
    info_file = copied(data_dirs, "tfrecord", tmp_path) / "dataset_info.json"
    info = json.loads(info_file.read_text())
    info["fileFormat"] = "parquet"
    info_file.write_text(json.dumps(info))
    with pytest.raises(UserError, match="stored as parquet; prepare it as array_record"):
        open_cifar(tmp_path, "train")
    info_file.write_text("{")
    with pytest.raises(UserError, match="cannot read its metadata"):
        open_cifar(tmp_path, "train")


PLANTED = "planted_by_a_stranger.Image"


def plant(folder, monkeypatch, **files):
    """A prepared set whose metadata name a module that is beside it, and what it would leave."""
    fixtures_data.tiny_tfds("cifar10", folder, {"train": 3}, file_format="array_record", shards=1)
    directory = pathlib.Path(find_prepared("cifar10", str(folder)))
    (folder / "planted_by_a_stranger.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(folder))
    for name, change in files.items():
        path = directory / f"{name}.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return directory, folder / "ran"


def with_image(features, image):
    features["featuresDict"]["features"]["image"] = image
    return features


IMAGE = {"pythonClassName": PLANTED, "image": {"shape": {"dimensions": ["-1", "-1", "3"]}}}
LEGACY = {"type": PLANTED, "content": {"shape": [None, None, 3]}}
OWN = "tensorflow_datasets.core.features."
HIDDEN = {"type": f"{OWN}features_dict.FeaturesDict", "content": json.dumps({"image": IMAGE})}


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("features", lambda x: with_image(x, IMAGE)),
        ("features", lambda x: with_image(x, {"python_class_name": PLANTED, "image": {}})),
        ("features", lambda _: LEGACY),
        ("features", lambda _: HIDDEN | {"proto_cls": "tensorflow_datasets.FeaturesDict"}),
        ("features", lambda _: {"type": f"{OWN}features_dict.FeaturesDict", "content": LEGACY}),
        ("features", lambda _: {"pythonClassName": f"{OWN}..{PLANTED}", "image": {}}),
        ("dataset_info", lambda x: {**x, "features": {"pythonClassName": PLANTED, "image": {}}}),
    ],
)
def test_no_module_named_in_a_dataset_is_imported(tmp_path, monkeypatch, file, change):
    directory, ran = plant(tmp_path, monkeypatch, **{file: change})
    with pytest.raises(UserError, match="metadata .its feature '.*planted.*' is not one of TFDS's"):
        open_prepared(str(directory), "train")
    assert not ran.exists()


def test_records_elsewhere_are_not_read(tmp_path, monkeypatch):
    def change(info):
        for split in info["splits"]:
            split["filepathTemplate"] = "../other/{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        return info

    directory, _ = plant(tmp_path, monkeypatch, dataset_info=change)
    with pytest.raises(UserError, match="records are elsewhere, in .*/other"):
        open_prepared(str(directory), "train")


def test_metadata_have_bounds(tmp_path, monkeypatch):
    def change(features):
        label = features["featuresDict"]["features"]["label"]
        label["classLabel"]["numClasses"] = "1000000000000"
        return features

    directory, _ = plant(tmp_path, monkeypatch, features=change)
    with pytest.raises(UserError, match="no label"):
        open_prepared(str(directory), "train")
    os.mkfifo(directory / "label.labels.txt")
    with pytest.raises(UserError, match="metadata .it is a folder or a device, not a file"):
        open_prepared(str(directory), "train")
    (directory / "label.labels.txt").unlink()
    (directory / "features.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="metadata .it is nested too deep"):
        open_prepared(str(directory), "train")


def test_flipped_bits_are_named_or_change_nothing(tmp_path, file_format):
    fixtures_data.tiny_tfds("cifar10", tmp_path, {"train": 9}, file_format=file_format, shards=1)
    [file] = [path for path in tmp_path.rglob("*-train*") if path.is_file()]
    whole, before = file.read_bytes(), contents(open_cifar(tmp_path, "train"))
    end, refused = len(whole.rstrip(b"\0")), []
    for place in [*range(8), *np.random.default_rng(0).integers(end, size=72)]:
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        file.unlink()  # the first reader holds the old one
        file.write_bytes(content)
        try:
            after = contents(open_cifar(tmp_path, "train").check("error"))
        except UserError as error:
            refused.append(str(error))
        else:  # a TFRecord does not protect its values
            assert after == before or file_format == "tfrecord"
    assert len(refused) > (10 if file_format == "array_record" else 7)
    assert all("-train" in text and text.isprintable() for text in refused)


def test_a_record_without_an_image_is_named(tmp_path):
    fixtures_data.tiny_tfds("cifar10", tmp_path, {"train": 3}, file_format="tfrecord", shards=1)
    [file] = [path for path in tmp_path.rglob("*-train*") if path.is_file()]
    fixtures_data.write_tfrecord(file, [b"", b"", b""])
    with pytest.raises(UserError, match=r"-train.*, record 1 has no image or no label"):
        open_cifar(tmp_path, "train")[1]
