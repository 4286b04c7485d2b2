"""Data of the caller's own: every form gives what the same images give under a name."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import fixtures_data
from vit_jax.data.datasets import create_dataset
from vit_jax.data.memory import open_given
from vit_jax.errors import UserError

OPTIONS: dict[str, Any] = {
    "split": "train[1:]+test",
    "preprocess": "decode|resize(8)",
    "label_key": "",
    "on_bad_image": "error",
}


class Pairs:
    """As torchvision's data sets are."""

    def __init__(self, paths, classes):
        self.paths, self.classes = paths, classes

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        return Image.open(path), self.classes.index(path.parent.name)


class Series:
    """Values with names, as pandas has them: `[name]` is by name, iteration by place."""

    ndim = 1

    def __init__(self, values, names):
        self._values, self._names = list(values), list(names)

    def __len__(self):
        return len(self._values)

    def __iter__(self):
        return iter(self._values)

    def __getitem__(self, name):
        return self._values[self._names.index(name)]

    def __array__(self, dtype=None, copy=None):
        return np.array(self._values, dtype)


def photos(folder):
    """The files of an image folder by split, in its order."""
    for number in range(10):
        split, name = "train" if number < 7 else "test", ("cat", "ant", "bee")[number % 3]
        path = folder / split / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fixtures_data.encoded(fixtures_data.picture(number), "PNG"))
    files = {}
    for split in ("train", "test"):
        source = create_dataset(name=str(folder), **{**OPTIONS, "split": split}).source
        files[split] = [folder / source.describe(i) for i in range(len(source))]
    return files


def test_every_form_is_the_folder(tmp_path):
    paths = photos(tmp_path)
    options = {**OPTIONS, "split": "train+test"}
    expected = create_dataset(name=str(tmp_path), **options)

    labels = {split: [path.parent.name for path in paths[split]] for split in paths}
    classes = ["ant", "bee", "cat"]
    forms = {
        "paths": {s: (paths[s], labels[s]) for s in paths},
        "strings": {s: (np.array([*map(str, paths[s])]), labels[s]) for s in paths},
        "series": {
            s: (Series(paths[s], reversed(range(len(paths[s])))), Series(labels[s], labels[s]))
            for s in paths
        },
        "bytes": {s: ([p.read_bytes() for p in paths[s]], labels[s]) for s in paths},
        "pixels": {s: ([np.array(Image.open(p)) for p in paths[s]], labels[s]) for s in paths},
        "objects": {s: Pairs(paths[s], classes) for s in paths},
    }
    prints = set()
    for form, splits in forms.items():
        dataset = open_given(splits, "mine")(name="mine", **options)
        again = pickle.loads(pickle.dumps(dataset))  # as workers get it
        assert dataset.class_names == expected.class_names == tuple(classes)
        assert dataset.num_examples == expected.num_examples == 10
        for index in range(10):
            example = again.example(index, np.random.default_rng(0))
            wanted = expected.example(index, np.random.default_rng(0))
            np.testing.assert_array_equal(example["image"], wanted["image"], err_msg=form)
            assert example["label"] == wanted["label"]
        assert dataset.fingerprint == again.fingerprint
        prints.add(dataset.fingerprint)
    forms["pixels"]["test"][0][0][0, 0] ^= 1
    prints.add(open_given(forms["pixels"], "mine")(name="mine", **options).fingerprint)
    assert len(prints) == len(forms) - 1  # all files are equal; the pixels changed
    other = open_given(forms["pixels"], "mine")(name=str(tmp_path), **options)
    assert other.fingerprint == expected.fingerprint  # another name is another data set


IMAGES = np.zeros((3, 4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({}, "dataset must be {'train': (images, labels), or"),
        ({"train": (IMAGES, [0, 1])}, "split 'train': 3 images but 2 labels"),
        ({"train": (IMAGES / 255, [0, 1, 0])}, "float64 [3, 4, 4, 3]; they must be uint8 [N, H"),
        ({"train": iter([1])}, "is list_iterator; it must be (images, labels), or an object"),
        ({"train": (IMAGES, [0, -1, 0])}, "labels from -1 to 0; use 0, 1, ..."),
        (
            {"train": (IMAGES, [0, 1, 0]), "test": (IMAGES, [2, 0, 0])},
            "'train' lacks the classes 2",
        ),
        ({"train": (IMAGES, ["a", None, "b"])}, "labels [3] must be integers or class names"),
        (
            {"train": ({1: "a", 0: "b"}, [0, 1])},
            "split 'train': a dict is no sequence; pass a list",
        ),
        ({"train": (IMAGES, {0, 1, 2})}, "split 'train': a set is no sequence; pass a list"),
        ({"train": Pairs([], ["a"]), "test": Pairs([], ["b"])}, "the same .classes"),
        ({"train": Pairs([], None)}, ".classes is None, not a list"),
        ({"a b": (IMAGES, [0, 1, 0])}, "split 'a b'; a name has letters, digits, _ and -"),
    ],
)
def test_mistakes(splits, message):
    with pytest.raises(UserError) as error:
        open_given(splits, "mine")
    assert message in str(error.value)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_files_are_checked_before_the_training(tmp_path, as_bytes):
    paths = photos(tmp_path)["train"]
    names = [path.parent.name for path in paths]
    expected = open_given({"train": (paths, names)}, "x")
    (bad := tmp_path / "bad.png").write_bytes(paths[0].read_bytes()[:90])
    images = [path.read_bytes() if as_bytes else path for path in [bad, *paths]]
    opened = open_given({"train": (images, ["dog", *names])}, "x")
    options = {**OPTIONS, "split": "train", "name": "x"}
    with pytest.raises(
        UserError, match=r"1 of 8 images cannot be read: (.*bad.png|train\[0\]): it does"
    ):
        opened(**options)
    dataset = opened(**{**options, "on_bad_image": "skip"})
    rng = np.random.default_rng(0)
    assert dataset.num_examples == 7
    for i in range(7):
        wanted, example = expected(**options).example(i, rng), dataset.example(i, rng)
        np.testing.assert_array_equal(example["image"], wanted["image"])
        assert dataset.class_names[example["label"]] == names[i]


def first_image(image, exif=True):
    options = {**OPTIONS, "split": "train", "preprocess": f"decode(exif={exif})|resize(8)"}
    dataset = open_given({"train": (image, [0])}, "mine")(name="mine", **options)
    return dataset.example(0, np.random.default_rng(0))["image"]


def test_grey_arrays_and_photographs_of_pillow(tmp_path):
    grey = np.random.default_rng(0).integers(0, 256, (1, 9, 9), np.uint8)
    np.testing.assert_array_equal(first_image(grey), first_image(grey[..., None].repeat(3, axis=3)))
    path, tags = tmp_path / "photo.jpg", Image.Exif()
    tags[0x0112] = 6  # a quarter turn
    Image.fromarray(fixtures_data.picture(0)).save(path, exif=tags)
    for exif in (True, False):
        expected = first_image([path], exif)
        np.testing.assert_array_equal(first_image([Image.open(path)], exif), expected)


def test_a_label_that_is_no_class_is_named():
    class Wrong(Pairs):
        def __getitem__(self, _index):
            return IMAGES[0], 1

    dataset = open_given({"train": Wrong([Path("a")], ["a"])}, "mine")(
        name="mine", **{**OPTIONS, "split": "train"}
    )
    with pytest.raises(UserError, match=r"example 0 of mine train \(train\[0\]\): label 1 is not"):
        dataset.example(0, np.random.default_rng(0))


def test_transparent_images_of_pillow(caplog):
    pixels = fixtures_data.picture(0, size=(8, 8), channels=4)
    pixels[:, :, 3] = 0
    images = [Image.fromarray(pixels)] * 2
    opened = open_given({"train": (images, ["a", "b"])}, "x")
    options = {**OPTIONS, "split": "train", "name": "x"}
    white = opened(**{**options, "preprocess": "decode"}).example(0, np.random.default_rng(0))
    assert white["image"].min() == 255
    assert "2 of 2 images with transparent pixels" in caplog.text
    with pytest.raises(UserError, match="transparent pixels: preprocess must start with decode"):
        opened(**{**options, "preprocess": "resize(8)"})


def test_splits_are_asked_for_by_plain_words_and_parts_have_every_class():
    labels = [i // 10 for i in range(30)]
    images = np.arange(30, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)
    given = {"Training": (images, labels), "Test": (images[:1], [0])}
    opened = open_given(given, "x")

    def dataset(split):
        return opened(**{**OPTIONS, "split": split, "name": "x"})

    assert dataset("train").labels().tolist() == labels
    assert dataset("test").class_names == ("0", "1", "2")
    part = dataset("train[:60%]")
    assert np.bincount(part.labels()).tolist() == [6, 6, 6]
    assert part.shared(dataset("train[60%:]")) == 0
    assert part.shared(dataset("train[50%:]")) == 3


def test_a_file_in_two_splits_is_counted(tmp_path):
    (paths := photos(tmp_path)["train"])[0].parent.joinpath("copy.png").symlink_to(paths[0])
    link = paths[0].parent / "copy.png"
    opened = open_given({"train": (paths, [0, 1] * 3 + [0]), "test": ([link], [0])}, "x")
    train, test = (opened(**{**OPTIONS, "split": s, "name": "x"}) for s in ("train", "test"))
    assert test.shared(train) == 1
