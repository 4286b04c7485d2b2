"""ImageNet from its tars and folders: what TFDS itself would have prepared."""

import io
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests import fixtures_data
from tests import fixtures_imagenet as small
from vit_jax.data.datasets import create_dataset
from vit_jax.data_preparation.origins import validation_labels
from vit_jax.data_preparation.prepare import prepare_data
from vit_jax.errors import UserError


def shards(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.array_record-*")}


def examples(builder, split):
    """What TFDS's own reader gives: name, image file, label."""
    source = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
    rows = [source[index] for index in range(len(source))]
    return [(row["file_name"].decode(), bytes(row["image"]), int(row["label"])) for row in rows]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("imagenet")
    source = small.write_tars(root / "tars")
    prepare_data("imagenet2012", str(source), data_dir=str(root / "out"), shard_megabytes=0.01)
    return root / "out"


def test_the_set_is_the_one_that_tfds_prepares(prepared, tmp_path):
    """Examples, labels, order, class names: `train[99%:]` is everybody's `train[99%:]`."""
    labels = validation_labels()
    images = {
        "train": [(n, item) for n, rows in small.train_images().items() for item in rows.items()],
        "validation": list(zip(labels, small.validation_images().items(), strict=False)),
    }

    def example(split, index):
        label, (name, data) = images[split][index]
        return {"image": io.BytesIO(data), "label": label, "file_name": name}

    sizes = {split: len(rows) for split, rows in images.items()}
    fixtures_data.tiny_tfds("imagenet2012", tmp_path, sizes, example=example)
    theirs, ours = (tfds.builder("imagenet2012", data_dir=root) for root in (tmp_path, prepared))
    for split, count in {"train": 27, "validation": 10}.items():
        assert ours.info.splits[split].num_examples == count
        assert examples(ours, split) == examples(theirs, split)
    assert ours.info.splits["train"].num_shards > 1
    assert ours.info.features["label"].names == theirs.info.features["label"].names
    names = [name for name, _, _ in examples(ours, "train")]
    assert names != sorted(names)


@pytest.mark.parametrize(("tar", "flat"), [("", True), ("train", False), ("val", False)])
def test_trees_give_the_same_bytes(prepared, tmp_path, tar, flat):
    """Also where one split is a tar; class folders may be links, and validation images flat."""
    source = small.write_tree(tmp_path / "source", None if flat else validation_labels())
    if tar:
        whole = small.write_tars(tmp_path / "whole")
        (source / tar).rename(tmp_path / tar)
        (whole / f"ILSVRC2012_img_{tar}.tar").rename(source / f"ILSVRC2012_img_{tar}.tar")
    (tmp_path / "disk").mkdir()
    for path in source.glob("*/n*/"):
        path.rename(tmp_path / "disk" / f"{path.parent.name}{path.name}")
        path.symlink_to(tmp_path / "disk" / f"{path.parent.name}{path.name}")
    folder = prepare_data(
        "imagenet2012", str(source), data_dir=f"{tmp_path}/out", shard_megabytes=0.01
    )
    assert shards(folder) == shards(prepared / "imagenet2012/5.1.0")


def test_21k_from_every_layout(tmp_path):
    """A tar of tars, folders, and some of each with class tars as the command line packs them."""
    ids = ["n00004475", "n99000001", "n02084071", "n01440764"]
    images = small.train_images(dict(zip(ids, (8, 5, 0, 14), strict=True)))
    inner = {f"winter21/{wordnet_id}.tar": small.tar(files) for wordnet_id, files in images.items()}
    outer = small.tar({"winter21/README": b"text", **inner})
    (tmp_path / "whole.tar").write_bytes(outer)
    for layout in ("folders", "both"):
        for number, (wordnet_id, files) in enumerate(images.items()):
            folder = tmp_path / layout / wordnet_id
            folder.mkdir(parents=True)
            for name, data in files.items():
                (folder / name).write_bytes(data)
            if layout == "both" and number % 2:
                subprocess.run(["tar", "-C", folder, "-cf", f"{folder}.tar", "."], check=True)
                shutil.rmtree(folder)
    layouts = {}
    for layout in ("whole.tar", "folders", "both"):
        folder = prepare_data(
            "imagenet21k", str(tmp_path / layout), data_dir=str(tmp_path / f"out_{layout}"),
            shard_megabytes=0.01,
        )  # fmt: skip
        layouts[layout] = shards(folder)
        assert folder.parts[-2:] == ("imagenet21k", "1.0.0")
        assert not list(folder.parent.glob("*.incomplete"))
    assert len(layouts["whole.tar"]) > 1
    assert layouts["whole.tar"] == layouts["folders"] == layouts["both"]
    dataset = create_dataset(
        name="imagenet21k", split="full", preprocess="decode", data_dir=f"{tmp_path}/out_both"
    )
    assert dataset.class_names == ("n00004475", "n01440764", "n99000001")
    labels = [dataset.source[i]["label"] for i in range(27)]
    assert np.bincount(labels).tolist() == [8, 14, 5]
    builder = tfds.builder_from_directory(tmp_path / "out_both/imagenet21k/1.0.0")
    for name, image, label in examples(builder, "full"):
        wordnet_id = name.partition("_")[0]
        assert dataset.class_names[label] == wordnet_id
        assert images[wordnet_id][name] == image


def fails(kind, source, message):
    with pytest.raises(UserError, match=message) as caught:
        prepare_data(kind, str(source), data_dir=str(source.parent / "never"))
    assert "\n" not in str(caught.value)
    assert str(source) in str(caught.value)
    assert not list(source.parent.glob("never/*/[0-9].[0-9].[0-9]"))


def test_damaged_tars_are_named(tmp_path):
    whole = small.write_tars(tmp_path / "whole")
    train = (whole / "ILSVRC2012_img_train.tar").read_bytes()
    second = train.index(small.IDS[0].encode() + b".tar\0")  # header of the second class
    places = {"image": second - 1000, "between": second, "end": len(train)}
    for place, length in places.items():
        source = tmp_path / place
        source.mkdir()
        # A tar ends in zeros, as does each tar in it; the end of the last must be missing too.
        content = train[:length].rstrip(b"\0")[:-1] if place == "end" else train[:length]
        (source / "ILSVRC2012_img_train.tar").write_bytes(content)
        fails("imagenet2012", source, r"ILSVRC2012_img_train.tar.*: truncated")
    damaged = bytearray(train)
    inner = train.index(f"{small.IDS[417]}_3.JPEG".encode())
    damaged[inner : inner + 400] = b"x" * 400
    (tmp_path / "image" / "ILSVRC2012_img_train.tar").write_bytes(damaged)
    fails("imagenet2012", tmp_path / "image", f"{small.IDS[417]}: truncated or damaged at byte")
    (tmp_path / "image" / "ILSVRC2012_img_train.tar").write_bytes(b"<html>404</html>" * 100)
    fails("imagenet2012", tmp_path / "image", "not a tar")
    (tmp_path / "whole.tar.gz").touch()
    fails("imagenet21k", tmp_path / "whole.tar.gz", "gunzip it first")


def test_other_sources_are_refused(tmp_path):
    fails("imagenet2012", tmp_path / "missing", "No such file")
    (tmp_path / "empty").mkdir()
    fails("imagenet2012", tmp_path / "empty", "has none of ILSVRC2012_img_train.tar, ")
    fails("imagenet21k", tmp_path / "empty", "has no class tars such as n00004475.tar")
    (tmp_path / "none" / "train").mkdir(parents=True)
    fails("imagenet2012", tmp_path / "none", "train: has no class folders")
    (tmp_path / "none" / "train" / "n99000001").mkdir()
    fails("imagenet2012", tmp_path / "none", "n99000001 is not a class of ILSVRC 2012")
    (tmp_path / "odd" / "val").mkdir(parents=True)
    fails("imagenet2012", tmp_path / "odd", "no images of 'validation' ending in .jpg, ")
    (tmp_path / "odd" / "val" / "ILSVRC2012_val_00050001.JPEG").write_bytes(small.jpeg(0))
    fails("imagenet2012", tmp_path / "odd", "val_00050001.JPEG' is not named like")
    (tmp_path / "flat.tar").write_bytes(small.tar({"a.JPEG": small.jpeg(1)}))
    fails("imagenet21k", tmp_path / "flat.tar", "has no class tars")


def test_labels_of_the_validation_images_are_those_of_tfds():
    labels = validation_labels()
    assert len(labels) == 50_000
    assert np.unique(labels, return_counts=True)[1].tolist() == [50] * 1000
    assert tuple(sorted(set(labels))) == small.IDS
