"""Split expressions mean what they mean in TFDS, and parts of sources are read in turn."""

import numpy as np
import pytest

from tests.data.test_memory import Series
from vit_jax.data.sources import SlicedSource, by_place, resolve_split, split_word
from vit_jax.errors import UserError

LENGTHS = {"train": 99, "test": 10}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("train[:98%]", [("train", 0, 97)]),
        ("train[-10%:]", [("train", 89, 99)]),
        ("train[33.3%:66.6%]", [("train", 33, 66)]),
        ("train[:-7]", [("train", 0, 92)]),
        ("test + train[:1]", [("test", 0, 10), ("train", 0, 1)]),
        ("all", [("train", 0, 99), ("test", 0, 10)]),
        ("train[10:20]+train[10:20]", [("train", 10, 20)] * 2),
    ],
)
def test_what_an_expression_selects(expression, expected):
    assert resolve_split(expression, LENGTHS, LENGTHS.__getitem__) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("tran", r"unknown split 'tran'; known splits: train, test. Did you mean 'train'\?"),
        ("train+", "Unrecognized split format: ''; write 'train', "),
        ("train[5]", "only support slice syntax"),
        ("train[:120%]", r"should be in \[-100, 100\]"),
        ("train[:101]", "incompatible with 99 examples"),
        ("train[:2shard]", "shards can only be selected in a prepared TFDS dataset"),
        ("test[:1%]", "selects no examples"),
    ],
)
def test_bad_expressions_are_one_line_errors(expression, message):
    with pytest.raises(UserError, match=message) as caught:
        resolve_split(expression, LENGTHS, LENGTHS.__getitem__)
    assert "\n" not in str(caught.value)
    assert "dataset.split=" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("Training", "train"),
        ("train2017", "train"),
        ("TrainSet", "train"),
        ("asl_alphabet_test", "test"),
        ("TESTING SET", "test"),
        ("Validation", "validation"),
        ("my-dev.set", "dev"),
        ("evaluation", "val"),
        ("train_test_overlap", ""),
        ("trainer", ""),
        ("latest", ""),
        ("fold1", ""),
    ],
)
def test_what_the_name_of_a_split_means(name, word):
    assert split_word(name) == word


def test_images_are_taken_by_place():
    rows = Series(["x", "y", "z"], [2, 0, 1])
    assert by_place(rows, "images") == ["x", "y", "z"] != [rows[i] for i in range(3)]
    pixels = np.zeros((3, 4, 4), np.uint8)
    assert by_place(pixels, "images") is pixels
    for items in ({"a": 1}, {1}, iter("ab"), (i for i in "ab")):
        with pytest.raises(UserError, match=r"images: a \w+ is no sequence; pass a list"):
            by_place(items, "images")


def test_how_many_examples_two_parts_share():
    sources = {"train": range(100), "test": range(10)}

    def part(split):
        return SlicedSource(sources, split)

    assert part("test").shared(part("train")) == 0
    assert part("train[80%:]").shared(part("train[:90]")) == 10
    assert part("train[80%:]+test[:3]").shared(part("train[:90]+test")) == 13
