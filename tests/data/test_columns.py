"""Columns beside image and label: an op reads their text and adds an array."""

import numpy as np
import pytest

from tests.data.test_pipeline import assert_equal, collect
from tests.data.test_table import write_images, write_table
from tests.fixtures_data import write_folder
from vit_jax.data import preprocess
from vit_jax.data.datasets import create_dataset
from vit_jax.data.pipeline import batch_spec, eval_batches, train_batches
from vit_jax.errors import UserError
from vit_jax.inference.images import Images
from vit_jax.models.description import Description
from vit_jax.plan.subject import Noise

SPEC = "decode|resize(8)"
NAMES = [f"{i:02}.png" for i in range(24)]
CAPTIONS = [f"{i} gnus" for i in range(24)]


def opened(name, split="train", spec=f"{SPEC}|tokenize(length=9)", **kwargs):
    return create_dataset(name=str(name), split=split, preprocess=spec, **kwargs)


@pytest.fixture(params=["csv", "parquet"])
def table(request, tmp_path):
    """24 images with two columns of which one is a number."""
    write_images(tmp_path, NAMES)
    rows = {"path": NAMES, "caption": CAPTIONS, "label": ["cat", "dog"] * 12}
    rows |= {"price": [i / 4 for i in range(24)], "split": ["train"] * 24}
    return write_table(tmp_path / f"t.{request.param}", rows)


def text(tokens):
    return "".join(chr(token + 29) for token in tokens if token > 2)


def test_text_becomes_an_array_of_the_right_example(table):
    dataset = opened(table).check()
    assert dataset.element_spec.keys() == {"image", "label", "text"}
    for i in range(24):
        example = dataset.example(i, np.random.default_rng(0))
        assert example["image"][0, 0, 0] == 3 * int(text(example["text"]).split()[0])
    spec = batch_spec(dataset, 4)
    assert (spec["text"].shape, spec["text"].dtype) == ((4, 9), np.int32)
    assert (spec["label"].shape, spec["label"].dtype) == ((4,), np.int32)
    unlabelled = opened(table, needs=())
    assert unlabelled.element_spec.keys() == {"image", "text"}
    assert set(dataset.source[0]) == {"image", "label", "caption"}  # others are not read


def test_the_same_batches_from_any_start(tmp_path):
    write_images(tmp_path, NAMES)
    rows = {"path": NAMES, "caption": CAPTIONS, "split": ["train"] * 24}
    dataset = opened(write_table(tmp_path / "t.csv", rows), needs=())
    arguments = {"batch_size": 8, "seed": 3, "total_steps": 7}
    expected = collect(train_batches(dataset, **arguments))
    assert expected.keys() == {"image", "text", "mask"}
    assert expected["text"].shape == (7, 8, 9)
    batches = collect(train_batches(dataset, **arguments, start_step=3, num_threads=2))
    assert_equal(batches, {key: value[3:] for key, value in expected.items()})
    padded = collect(eval_batches(dataset, batch_size=9))
    assert padded["mask"].sum() == 24
    np.testing.assert_array_equal(padded["text"][-1, -3:], padded["text"][-1, [5, 5, 5]])


def test_columns_that_are_not_there_are_named(table, tmp_path):
    photos = write_folder(tmp_path / "photos", {"train": {"cat": 1, "dog": 1}})
    spec = f"{SPEC}|tokenize|tokenize('title')"
    with pytest.raises(UserError, match="no column 'title', but path, caption, label, price"):
        opened(table, spec=spec)
    with pytest.raises(UserError, match="'glyphs' has no column 'title', but caption; preprocess"):
        opened("glyphs", spec=spec)
    for name in (photos, "digits", "cifar10"):
        with pytest.raises(UserError, match=f"'{name}' has no column 'caption', but none; prep"):
            opened(name, spec=spec)
    with pytest.raises(UserError, match="column 'label'; .* another name"):
        opened(table, spec=f"{SPEC}|tokenize('label')")


def test_an_image_may_have_several_captions(tmp_path):
    write_images(tmp_path, NAMES)
    rows = {"path": NAMES[:3] * 2, "caption": ["a", "b", "c", "d", "e", "f"]}
    rows["split"] = ["train"] * 6
    name = write_table(tmp_path / "t.csv", rows)
    dataset = opened(name, needs=())
    rng = np.random.default_rng(0)
    examples = [dataset.example(i, rng) for i in range(6)]
    pairs = sorted((text(example["text"]), example["image"][0, 0, 0] // 3) for example in examples)
    assert pairs == [("a", 0), ("b", 1), ("c", 2), ("d", 0), ("e", 1), ("f", 2)]
    first, rows["caption"][5] = dataset.fingerprint, "g"
    write_table(tmp_path / "t.csv", rows)
    assert opened(name, needs=()).fingerprint != first


def test_images_alone_and_data_that_are_planned():
    """Neither has columns."""
    spec = f"{SPEC}|tokenize(length=9)|value_range"
    description = Description(
        model={}, image_shape=(8, 8, 3), grid=(1, 1), class_names=(), eval_preprocess=spec
    )
    images = Images([np.zeros((9, 9, 3), np.uint8)], description)
    example = images.example(0, np.random.default_rng(0))
    assert (example.keys(), images.failures) == ({"image"}, {})
    assert example["image"].dtype == np.float32
    chain = preprocess.parse(spec)
    example = chain(Noise(5, 0, chain.columns)[2], np.random.default_rng(0))
    assert example["text"].shape == (9,)
