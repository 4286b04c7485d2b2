"""The rules that all readers of labelled images share: splits, order, classes, labels."""

import dataclasses
import hashlib
import itertools
import logging
import pickle

import numpy as np
import pytest

from vit_jax.data.datasets import Dataset
from vit_jax.data.folder import FolderSource
from vit_jax.data.labelled import LabelledSource, Listing, rows_by
from vit_jax.data.preprocess import Chain
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class Names(LabelledSource):
    """Images whose content is their name, stored in this order."""

    def read(self, index):
        return self.places[index].decode()


class Files(Names):
    """Images that are files of their own."""

    keeps_order = False


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
    source = Files(np.array([path.encode() for path in paths]), {}, drawn=drawn)
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
    assert labels(listed, "val+train") == [1, 0, 1, 0, 2]
    assert images(listed, "val+train") == ["3", "4", "0", "1", "2"]
    folds = listing(["b", "c", "a", "c"], ["fold0", "fold0", "fold1", "fold1"])
    assert folds.open("fold1")[1] == ("a", "b", "c")
    numbers = listing(["0", "10", "2", "1", "11"])
    assert numbers.open("train")[1] == ("0", "1", "2", "10", "11")
    padded = listing(["010", "2", "001.0", "007"])
    assert padded.open("train")[1] == ("001.0", "2", "007", "010")
    assert listing(["3", "003", "cat"]).open("train")[1] == ("003", "3", "cat")  # no numbers
    named = listing(["b", "a"], classes=("b", "c", "a"))
    assert (named.open("train")[1], labels(named)) == (("b", "c", "a"), [0, 2])


def test_labels_may_be_several_or_unwanted():
    source, _ = listing([["sky"], ["sea", "sky"], []], several=True).open("train")
    several = [source[i]["label"] for i in range(3)]
    np.testing.assert_array_equal(several, [[0, 1], [1, 1], [0, 0]])
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
        ({"labels": ["x" * 1001, "c"]}, "class 'x+ must be a single line of UTF-8, at most 1,000"),
        ({"labels": ["caf\u00e9", "cafe\u0301"]}, "look the same; rename one"),
        ({"labels": ["\udcff", "c"]}, "must be a single line of UTF-8"),
        ({"labels": ["003", "17", "3.0"]}, "'003' and '3.0' are the same number; rename one"),
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
        assert images(listed, "test+train") == ["2", "3", "0", "1"]
        assert f"has no split 'test': using '{name}'." in caplog.text
    both = listing(["a", "b", "a", "b"], ["train", "train", "val", "test"])
    assert images(both, "val") == images(both, "validation") == ["2"]
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


def test_nearly_as_many_classes_as_images_are_doubted(caplog):
    listing([f"c{i}" for i in range(20)])
    assert "20 classes for 20 images" in caplog.text


@pytest.mark.parametrize(
    "names", [("Training", "Testing"), ("seg_train", "seg_test"), ("TRAIN", "TestSet")]
)
def test_splits_in_other_words(names, caplog):
    caplog.set_level(logging.INFO)
    train, test = names
    listed = listing(["a", "b", "b", "a"], [train, train, test, test])
    assert images(listed, "train") == images(listed, train) == ["0", "1"]
    assert images(listed, "test") == images(listed, "val") == ["2", "3"]
    assert caplog.text.count(f"has no split 'train': using '{train}'.") == 1
    with pytest.raises(UserError, match="'train' lacks the classes c of 'test'"):
        listing(["a", "b", "c"], [train, train, test])


def test_two_splits_of_the_same_word_keep_their_names():
    listed = listing(["a", "b", "a", "b"], ["Train1", "Train1", "Train2", "Train2"])
    assert images(listed, "Train2") == ["2", "3"]
    with pytest.raises(UserError, match="unknown split 'train'; known splits: Train1, Train2"):
        listed.open("train")
    listed = listing(["a", "b", "a", "b"], ["test", "test", "Test 2", "val"])
    assert images(listed, "test") == ["0", "1"]


def test_a_part_of_what_keeps_its_order_has_every_class():
    names = [name for name in "abcde" for _ in range(10)]
    order = [str(i) for i in range(50)]
    for labelled in (names, None):
        source = Names(np.array([f"{i}".encode() for i in range(50)]), {})
        listed = Listing("x", source, {"train": range(50)}, labelled)
        assert images(listed) == order
        parts = [images(listed, split) for split in ("train[:80%]", "train[80%:]")]
        assert sorted(parts[0] + parts[1], key=int) == order
        for part in parts:
            assert part == sorted(part, key=int)
            if labelled:
                assert {names[int(i)] for i in part} == {*"abcde"}
        assert parts[1] != order[40:]


def test_a_file_in_several_rows_is_in_one_split():
    paths = np.array([f"{'./' * (i % 3)}{i // 3}".encode() for i in range(60)])
    files = [f"{i // 3}" for i in range(60)]
    for groups in ((), ["cat", "dog", "cat"] * 20):
        source = Names(paths, {}, drawn=True)
        splits = dict.fromkeys(("train", "test"), range(60))
        listed = Listing("x", source, splits, None, groups=groups, files=files)
        train, test = ({i.rpartition("/")[2] for i in images(listed, s)} for s in ("train", "test"))
        assert not train & test
        assert len(train | test) == 20
        assert len(test) in range(3, 6)
    once = Listing("x", Names(paths[:3], {}, drawn=True), dict.fromkeys(splits, range(3)), None)
    assert (len(images(once)), len(images(once, "test"))) == (2, 1)


def test_data_without_splits_say_how_many_are_left_out(caplog):
    caplog.set_level(logging.INFO)
    listed = in_groups({"a": 50, "b": 50}, drawn=True)
    count = len(images(listed, "test"))
    assert f"x has no splits: 'test' is {count} of 100 images, 'train+test' is all." in caplog.text
    caplog.clear()
    assert len(images(listed, "train+test")) == 100
    assert "no splits" not in caplog.text


def test_files_are_the_same_by_any_path(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/1.jpg").touch()
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "2.jpg").symlink_to("a/1.jpg")
    names = ("a/1.jpg", "a/../a/1.jpg", "b/1.jpg", "2.jpg", "a//1.jpg", "b/missing.jpg")
    source = FolderSource(np.array([*map(str.encode, names)]), {}, str(tmp_path))
    assert [*map(source.file_ids().tolist().index, source.file_ids())] == [0, 0, 0, 0, 0, 5]


def test_several_labels_take_memory_by_their_number():
    given = [[f"c{i}", f"c{(7 * i) % 5000}"] for i in range(5000)]
    source, classes = listing(given, several=True).open("train")
    assert len(pickle.dumps(source)) < 1 << 20  # and not 5,000 x 5,000 bytes
    for i in (0, 17, 4999):
        label = source[i]["label"]
        assert label.shape == (5000,)
        assert {classes[j] for j in np.flatnonzero(label)} == {*given[i]}
    dataset = Dataset("x", "train", source, Chain(()), classes)
    assert dataset.labels()[17].tolist() == source[17]["label"].tolist()


def test_the_order_is_kept():
    """A hash of what the first version gave: runs that resume go on with it."""
    digest = hashlib.sha256()
    for drawn, count in itertools.product((False, True), (0, 1, 2, 5, 300)):
        names = [f"{'abc'[i % 3]}/{i * 7 % 13 if i % 2 else i}".encode() for i in range(count)]
        files = [f"f{i * i % 41}" for i in range(count)]
        for chosen, groups in itertools.product(
            (files, ()), (["g"[i % 5 :] for i in range(count)], ())
        ):
            source = Names(np.array(names, np.bytes_), {}, drawn=drawn)
            splits = dict.fromkeys(("train", "test"), range(count))
            listed = Listing("x", source, splits, None, groups=groups, files=chosen)
            for split in splits:
                digest.update(np.asarray(listed._ordered(split), "<i8").tobytes())
    assert digest.hexdigest()[:16] == "71e2291a89e745dc"
