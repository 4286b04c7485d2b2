"""The rules that all readers of labelled images share: splits, order, classes, labels."""

import dataclasses
import logging

import numpy as np
import pytest

from vit_jax.data.labelled import LabelledSource, Listing, rows_by
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Names(LabelledSource):
    """Images whose content is their name."""

    def read(self, index):
        return self.places[index].decode()


def listing(labels, splits=None, **options):
    """Images `0`, `1`, ... with a label each, or several, in the splits that are named."""
    source = Names(np.array([f"{i}".encode() for i in range(len(labels))]), {})
    rows = rows_by(splits or ["train"] * len(labels))
    return Listing("dataset.name='x'", source, rows, labels, **options)


def in_groups(counts, *, drawn=False, reverse=False):
    """Images `train/CLASS/00000.jpg`, ... in groups by class."""
    paths = [f"train/{name}/{i:05}.jpg" for name, count in counts.items() for i in range(count)]
    paths = paths[::-1] if reverse else paths
    groups = [path.split("/")[1] for path in paths]
    source = Names(np.array([path.encode() for path in paths]), {}, drawn=drawn)
    splits = dict.fromkeys(("train", "test") if drawn else ("train",), range(len(paths)))
    return Listing("x", source, splits, groups, groups=groups)


def images(listed, split="train"):
    source, _ = listed.open(split)
    return [source[i]["image"] for i in range(len(source))]


def labels(listed, split="train"):
    return listed.open(split)[0].columns["label"].tolist()


def test_the_classes_are_those_of_train_or_else_of_all_splits():
    listed = listing(["b", "a", "c", "b", "a"], ["train", "train", "train", "val", "val"])
    assert listed.open("val")[1] == ("a", "b", "c")  # although val has no c
    assert labels(listed, "val+train[:2]") == [1, 0, 1, 0]
    assert images(listed, "val+train[:2]") == ["3", "4", "0", "1"]
    folds = listing(["b", "c", "a", "c"], ["fold0", "fold0", "fold1", "fold1"])
    assert folds.open("fold1")[1] == ("a", "b", "c")
    numbers = listing(["0", "10", "2", "1", "11"])
    assert numbers.open("train")[1] == ("0", "1", "2", "10", "11")
    named = listing(["b", "a"], classes=("b", "c", "a"))
    assert (named.open("train")[1], labels(named)) == (("b", "c", "a"), [0, 2])


def test_labels_may_be_several_or_unwanted():
    source, _ = listing([["sky"], ["sea", "sky"], []], several=True).open("train")
    np.testing.assert_array_equal(source.columns["label"], [[0, 1], [1, 1], [0, 0]])
    plain = dataclasses.replace(source, columns={})
    source, classes = Listing("x", plain, {"train": [0, 1]}, None).open("train")
    assert (source[0], classes) == ({"image": "0"}, ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": ["a", "a"]}, "'x': a classifier needs two classes, not 1"),
        ({"labels": [[], []], "several": True}, "a classifier needs two classes, not 0"),
        (
            {"labels": [*"abcd"], "splits": ["train"] * 2 + ["val"] * 2},
            "'train' lacks the classes c, d of 'val'",
        ),
        ({"labels": ["a\nb", "c"]}, "class 'a.*nb' must be a single line of UTF-8"),
        ({"labels": ["caf\u00e9", "cafe\u0301"]}, "look the same; rename one"),
        ({"labels": ["\udcff", "c"]}, "must be a single line of UTF-8"),
        ({"labels": ["a", "b", ""]}, "1 example of 'train' without a label"),
    ],
)
def test_labels_that_make_no_classes(arguments, message):
    with pytest.raises(UserError, match=message) as error:
        listing(**arguments).open("train")
    assert str(error.value).isprintable()


def test_what_is_held_out_has_many_names(caplog):
    caplog.set_level(logging.INFO)
    for name in ("val", "valid", "validation", "dev"):
        listed = listing(["a", "b", "a", "b"], ["train", "train", name, name])
        assert images(listed, "test[:50%]+train") == ["2", "0", "1"]
        assert f"has no split 'test': using '{name}'." in caplog.text
    both = listing(["a", "b", "a", "b"], ["train", "train", "val", "test"])
    assert images(both, "val") == ["2"]
    with pytest.raises(UserError, match="unknown split 'dav'; known splits: train, val, test"):
        both.open("dav")


@pytest.mark.parametrize(
    "counts",
    [
        {"a": 50, "b": 50, "c": 50},
        {"a": 200, "b": 2, "c": 7, "d": 31},
        {"a": 2, "b": 3},
        {"a": 90, "b": 1, "c": 40},  # b's only image
    ],
)
def test_prefixes_and_suffixes_hold_every_class(counts):
    listed = in_groups(counts)
    order = labels(listed)
    assert len(order) == sum(counts.values())
    all_classes = set(range(len(counts)))
    several = {number for number, count in enumerate(counts.values()) if count > 1}
    for count in range(len(counts), len(order) + 1):
        assert set(order[:count]) == all_classes
        assert set(order[-count:]) >= several
    # In between, each class has its share: at most two examples away from it.
    for number, count in enumerate(counts.values()):
        seen = np.cumsum(np.array(order) == number) / count
        expected = np.arange(1, len(order) + 1) / len(order)
        assert np.abs(seen - expected).max() * count <= len(counts)
    assert images(listed, "train[:60%]") + images(listed, "train[60%:]") == images(listed)


def test_order_depends_on_names_only():
    names = images(in_groups({"a": 20, "b": 30}))
    assert names == images(in_groups({"a": 20, "b": 30}, reverse=True)) != sorted(names)


def test_a_fifth_of_each_class_is_held_out():
    def drawn(**counts):
        listed = in_groups(counts, drawn=True)
        assert listed.open("train")[0].drawn
        train, test = (set(images(listed, split)) for split in ("train", "validation"))
        assert not train & test
        assert len(train | test) == sum(counts.values())
        shares = [sum(f"/{name}/" in image for image in test) for name in counts]
        return train, test, shares

    train, test, shares = drawn(a=500, b=100, few=2, one=1)
    assert shares == [pytest.approx(100, abs=25), pytest.approx(20, abs=5), 1, 0]
    more_train, more_test, _ = drawn(a=500, b=500, few=2, one=1)
    assert train <= more_train  # whatever is added, no image goes over to the other side
    assert test <= more_test
    for size in (5, 10, 15, 20, 30):  # by hashes alone it was 13 to 40 percent
        *_, shares = drawn(**{f"c{i}": size for i in range(12)})
        assert np.abs(np.array(shares) - size / 5).max() <= 1


def test_doubts_are_warnings(caplog):
    listing([f"c{i}" for i in range(20)])
    assert "20 classes for 20 images" in caplog.text
    splits = ["train", "train", "train", "val"]
    listing([*"abab"], splits, files=("x", "y", None, "x"))
    assert "1 file in 'train' and in 'val': x." in caplog.text
