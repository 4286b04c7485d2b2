"""The drawn glyphs: a pure function of (seed, index), held-out typefaces, likeness to the scans."""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import string
import sys

import cv2
import matplotlib
import numpy as np
import pytest
from matplotlib import font_manager
from sklearn import datasets as sklearn_datasets
from sklearn import neighbors

from vit_jax.data import glyphs
from vit_jax.data.datasets import create_dataset
from vit_jax.data.glyphs import CLASSES, Face, GlyphSource, glyph_splits
from vit_jax.errors import UserError


def images(source: GlyphSource, indices: range) -> np.ndarray:
    return np.stack([source[i]["image"] for i in indices])  # [N, S, S, 1]


def test_contents() -> None:
    splits = glyph_splits(size=20, num_examples=1000, num_test=300)
    assert {name: len(source) for name, source in splits.items()} == {"train": 1000, "test": 300}
    for source in splits.values():
        assert source.class_names == CLASSES
        example = source[len(CLASSES) + 3]
        assert (example["image"].shape, example["image"].dtype) == ((20, 20, 1), np.uint8)
        assert type(example["label"]) is int
        labels = [source[i]["label"] for i in range(2 * len(CLASSES))]
        np.testing.assert_array_equal(np.bincount(labels), 2)


def test_classes_partition_the_alphabet() -> None:
    assert sorted("".join(CLASSES)) == sorted(string.digits + string.ascii_letters)


def test_an_image_depends_on_seed_and_index_only() -> None:
    source = glyph_splits(seed=3)["train"]
    indices = range(40)
    expected = images(source, indices)
    copy = pickle.loads(pickle.dumps(source))  # to a spawned worker: without the drawn glyphs
    assert len(pickle.dumps(source)) < 10_000
    np.testing.assert_array_equal(images(copy, indices[::-1])[::-1], expected)
    longer = glyph_splits(seed=3, num_examples=10**9, num_test=1)["train"]
    np.testing.assert_array_equal(images(longer, indices), expected)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        drawn = pool.map(lambda i: images(copy, range(i, i + 1))[0], indices)
        np.testing.assert_array_equal(np.stack(list(drawn)), expected)


def test_other_seeds_splits_and_indices_give_other_images() -> None:
    splits = glyph_splits(seed=1)
    sources = (splits["train"], splits["test"], glyph_splits(seed=2)["train"])
    same_label = range(0, 20 * len(CLASSES), len(CLASSES))
    drawn = np.concatenate([images(source, same_label) for source in sources])
    assert len(np.unique(drawn, axis=0)) == len(drawn) == 60


def test_a_small_image_is_the_area_average_of_a_large_one() -> None:
    small, large = (glyph_splits(size=size)["train"] for size in (8, 32))
    for index in range(20):
        scan = cv2.resize(large[index]["image"], (8, 8), interpolation=cv2.INTER_AREA)
        np.testing.assert_array_equal(small[index]["image"][:, :, 0], scan)


@pytest.mark.parametrize("size", [7, 24, 100])
def test_any_size_shows_the_same_glyph(size: int) -> None:
    source, reference = (glyph_splits(size=each)["train"] for each in (size, 32))
    for index in range(10):
        pictures = [each[index]["image"] for each in (source, reference)]
        flat = [cv2.resize(p, (7, 7), interpolation=cv2.INTER_AREA).ravel() for p in pictures]
        assert np.corrcoef(flat)[0, 1] > 0.97


def test_no_typeface_is_on_both_sides() -> None:
    def families(part: tuple[tuple[Face, ...], ...]) -> set[str]:
        fonts = {
            font_manager.get_font(
                os.path.join(matplotlib.get_data_path(), "fonts", "ttf", face.file)
            ).family_name
            for family in part
            for face in family
        }
        return {font.split()[0] for font in fonts}  # "DejaVu Sans Mono" -> "DejaVu"

    train, test = families(glyphs.TRAIN_FAMILIES), families(glyphs.TEST_FAMILIES)
    assert train == {"DejaVu", "STIXGeneral"}
    assert test == {"cmr10", "cmb10", "cmti10", "cmss10", "cmtt10"}


def test_every_face_draws_letters_and_digits() -> None:
    """Fonts resemble each other, but not the boxes and symbols that some draw for letters."""

    def likeness(face: Face, other: Face, chars: str) -> float:
        drawn = (
            [cv2.resize(glyphs._drawing(each, c), (12, 12), interpolation=cv2.INTER_AREA).ravel()]
            for c in chars
            for each in (face, other)
        )
        pairs = np.reshape(np.array(list(drawn), np.float64), (len(chars), 2, -1))
        return float(np.mean([np.corrcoef(pair)[0, 1] for pair in pairs]))

    faces = [f for family in glyphs.TRAIN_FAMILIES + glyphs.TEST_FAMILIES for f in family]
    assert len(set(faces)) == len(faces)
    for chars in (string.digits, "CLTUVZ", "covxz"):
        assert likeness(Face("LastResortHE-Regular.ttf"), faces[0], chars) < 0.2
        for face in faces:
            assert likeness(face, faces[0], chars) > 0.25, (face, chars)


def test_like_the_scans() -> None:
    """Same polarity, ink and height; nearest neighbours among glyphs know most of the scans."""
    scans = sklearn_datasets.load_digits()
    pixels, labels = scans.data[:600] / 16, scans.target[:600]
    source = glyph_splits(size=8)["train"]
    digits = [i for i in range(8000) if i % len(CLASSES) < 10]
    drawn = np.stack([source[i]["image"].ravel() for i in digits]) / 255  # [N, 64]
    assert abs(drawn.mean() - pixels.mean()) < 0.06
    rows = drawn.reshape(-1, 8, 8).max(axis=(0, 2)), drawn.reshape(-1, 8, 8)[:, [0, 7]].max(axis=2)
    assert (rows[0] > 0.9).all()
    assert rows[1].mean() > 0.5
    model = neighbors.KNeighborsClassifier(5).fit(drawn, [i % len(CLASSES) for i in digits])
    assert model.score(pixels, labels) > 0.6  # guessing gets 0.1


def test_as_a_dataset() -> None:
    dataset = create_dataset(
        name="glyphs(size=12, num_examples=100, num_test=60, seed=5)",
        split="train[50:]",
        preprocess="decode(channels=1)|resize(24)",
    )
    assert (dataset.num_examples, dataset.num_classes) == (50, 50)
    example = dataset.example(0, np.random.default_rng(0))
    assert example["image"].shape == (24, 24, 1)
    expected = glyph_splits(size=12, seed=5)["train"][50]["image"]
    np.testing.assert_array_equal(
        example["image"][:, :, 0], cv2.resize(expected, (24, 24), interpolation=cv2.INTER_LINEAR)
    )


@pytest.mark.parametrize(
    "arguments", [{"size": 3}, {"num_examples": 0}, {"num_test": 0}, {"seed": -1}]
)
def test_wrong_arguments(arguments: dict[str, int]) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(ValueError, match=f"{name}={value} must be from"):
        glyph_splits(**arguments)


@pytest.mark.parametrize("package", ["matplotlib", "PIL"])
def test_missing_packages_are_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = glyph_splits()["train"]
    glyphs._field.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs {package}; install vit_jax\[embedded\]"):
        source[0]
