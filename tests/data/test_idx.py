"""IDX files: of MNIST and its kin, plain and compressed; cut, foreign and several sets."""

import gzip
import hashlib
import os

import numpy as np
import pytest

from vit_jax.data import idx
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError

SIZES = {"train": 40, "t10k": 20}
ANY = {"preprocess": "decode(channels=1)"}


def encoded(array, kind=8):
    header = bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def write(folder, prefix="", *, ending=".gz", first=0):
    """Images whose pixels say which they are, with labels 0 to 9 from `first` on; the images."""
    folder.mkdir(exist_ok=True)
    images = {}
    for split, count in SIZES.items():
        images[split] = np.arange(count * 12).reshape(count, 3, 4).astype(np.uint8)
        for kind, array in (("images", images[split]), ("labels", np.arange(count) % 10 + first)):
            content = encoded(array)
            file = folder / f"{prefix}{split}-{kind}-idx{array.ndim}-ubyte{ending}"
            file.write_bytes(gzip.compress(content) if ending == ".gz" else content)
    return images


def opened(name, split="train", **options):
    return create_dataset(name=str(name), split=split, **{**ANY, **options})


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_folder_as_downloaded(tmp_path, ending):
    images = write(tmp_path / "d", ending=ending)
    for split, stored in (("train", "train"), ("test", "t10k"), ("validation", "t10k")):
        dataset = opened(tmp_path / "d", split)
        assert dataset.class_names == tuple("0123456789")
        assert dataset.num_examples == SIZES[stored]
        for i in range(dataset.num_examples):
            example = dataset.example(i, np.random.default_rng(0))
            row = dataset.source.places[i]["row"]
            np.testing.assert_array_equal(example["image"][..., 0], images[stored][row])
            assert example["label"] == row % 10
    held_out = opened(tmp_path / "d", "train[30:]")
    assert np.bincount(held_out.labels()).tolist() == [1] * 10
    assert opened(tmp_path / "d", "train[:30]").shared(held_out) == 0


def test_without_labels(tmp_path):
    write(tmp_path / "d")
    for file in (tmp_path / "d").glob("*labels*"):
        file.unlink()
    assert opened(tmp_path / "d", needs=()).num_examples == 40
    with pytest.raises(UserError, match=r"labels-idx1-ubyte.gz cannot be read: No such file"):
        opened(tmp_path / "d")


def test_fashion_mnist_is_known_by_its_labels(tmp_path, monkeypatch):
    write(tmp_path / "d")
    digest = hashlib.sha256((np.arange(20) % 10).astype(np.uint8).tobytes()).hexdigest()
    monkeypatch.setattr(idx, "_FASHION_LABELS", {digest})
    names = opened(tmp_path / "d", "test").class_names
    assert (names[0], names[9], len(names)) == ("T-shirt/top", "Ankle boot", 10)


def test_emnist_is_turned_and_has_letters(tmp_path):
    images = write(tmp_path / "d", "emnist-letters-", first=1)
    write(tmp_path / "d", "emnist-digits-")
    mapping = tmp_path / "d" / "emnist-letters-mapping.txt"
    mapping.write_text("".join(f"{i} {64 + i} {96 + i}\n" for i in range(1, 11)))
    with pytest.raises(UserError, match="several sets: add one of emnist-digits-, emnist-letters-"):
        opened(tmp_path / "d")
    dataset = opened(tmp_path / "d" / "emnist-letters")
    assert dataset.class_names == tuple("ABCDEFGHIJ")
    example = dataset.example(7, np.random.default_rng(0))
    row = dataset.source.places[7]["row"]
    np.testing.assert_array_equal(example["image"][..., 0], images["train"][row].T)
    mapping.write_text("no numbers")
    with pytest.raises(UserError, match="mapping.txt is no table of labels and letters"):
        opened(tmp_path / "d" / "emnist-letters")


def test_damage_is_named(tmp_path):
    write(tmp_path / "d", ending="")
    file = tmp_path / "d" / "train-images-idx3-ubyte"
    whole = file.read_bytes()
    compressed = gzip.compress(whole)
    for content, message in (
        (b"", "no IDX file"),
        (whole[:3], "no IDX file"),
        (b"PK\3\4" + whole, "no IDX file"),
        (whole[:2] + b"\x0d" + whole[3:], "no IDX file of bytes"),
        (whole[:9], "header is damaged"),
        (whole[:4] + b"\xff" * 12 + whole[16:], "header is damaged"),
        (whole[:-1], r"size is not that of \[40, 3, 4\]; copy it again"),
        (whole + b"x", "size is not that of"),
        (compressed[:-9], "end-of-stream marker"),
        (compressed[:40] + b"\0" + compressed[41:], "cannot be read: "),
        (encoded(np.zeros((39, 3, 4))), r"'train' has images \[39, 3, 4\] but labels \[40\]"),
        (encoded(np.zeros((40, 3))), r"'train' has images \[40, 3\] but labels \[40\]"),
    ):
        file.unlink()  # what was read is kept
        idx.read_idx.cache_clear()
        file.write_bytes(content)
        with pytest.raises(UserError, match=message) as error:
            opened(tmp_path / "d")
        assert str(error.value).isprintable()
    file.unlink()
    os.mkfifo(file)
    idx.read_idx.cache_clear()
    with pytest.raises(UserError, match="a folder or a device"):
        opened(tmp_path / "d")


def test_a_change_of_labels_is_another_fingerprint(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    assert opened(tmp_path / "a").fingerprint == opened(tmp_path / "b").fingerprint
    file = tmp_path / "b" / "train-labels-idx1-ubyte.gz"
    before = file.stat().st_size
    file.write_bytes(gzip.compress(encoded((np.arange(40) + 1) % 10)))
    idx.read_idx.cache_clear()
    assert file.stat().st_size == before
    assert opened(tmp_path / "a").fingerprint != opened(tmp_path / "b").fingerprint
