"""The scans as scikit-learn has them; the glyphs: a pure function of (seed, index), held-out
typefaces, likeness to the scans."""

import concurrent.futures
import pickle
import string
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import font_manager
from sklearn import datasets as sklearn_datasets

from vit_jax.data import glyphs
from vit_jax.data.datasets import create_dataset
from vit_jax.data.glyphs import CLASSES, glyph_splits
from vit_jax.errors import UserError


def test_the_scans_in_their_order():
    expected = sklearn_datasets.load_digits()
    rng = np.random.default_rng(0)
    splits = {"train": (0, 1497), "test": (1497, 1797), "train[300:600]": (300, 600)}
    for split, (start, stop) in splits.items():
        dataset = create_dataset(name="digits", split=split, preprocess="decode(channels=1)")
        assert (dataset.num_examples, dataset.num_classes) == (stop - start, 10)
        examples = [dataset.example(i, rng) for i in range(dataset.num_examples)]
        labels = [example["label"] for example in examples]
        assert labels == expected.target[start:stop].tolist()
        images = np.stack([example["image"][..., 0] for example in examples])
        np.testing.assert_allclose(images * (16 / 255), expected.images[start:stop], atol=0.04)
    assert images.dtype == np.uint8


@pytest.mark.parametrize(
    ("name", "package"), [("digits", "scikit-learn"), ("glyphs(size=4)", "matplotlib")]
)
def test_packages_of_the_extra_are_named(name, package, monkeypatch):
    glyphs._field.cache_clear()
    glyphs._font.cache_clear()
    for module in ("sklearn", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it raises
    with pytest.raises(UserError, match=rf"the package {package}: .*'.\[embedded\]'"):
        _ = create_dataset(name=name, split="train", preprocess="decode").element_spec


def images(source, indices):
    return np.stack([source[i]["image"] for i in indices])  # [N, S, S, 1]


def test_classes_partition_the_alphabet_and_take_turns():
    assert sorted("".join(CLASSES)) == sorted(string.digits + string.ascii_letters)
    splits = glyph_splits(size=20, num_examples=1000, num_test=300)
    assert {name: len(source) for name, source in splits.items()} == {"train": 1000, "test": 300}
    for source in splits.values():
        assert (source[0]["image"].shape, source[0]["image"].dtype) == ((20, 20, 1), np.uint8)
        labels = [source[i]["label"] for i in range(2 * len(CLASSES))]
        np.testing.assert_array_equal(np.bincount(labels), 2)


def test_an_image_depends_on_seed_split_and_index_only():
    source = glyph_splits(seed=3)["train"]
    indices = range(40)
    expected = images(source, indices)
    copy = pickle.loads(pickle.dumps(source))  # to a spawned worker: without the drawn glyphs
    assert len(pickle.dumps(source)) < 10_000
    longer = glyph_splits(seed=3, num_examples=10**9, num_test=1)["train"]
    np.testing.assert_array_equal(images(longer, indices), expected)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        drawn = pool.map(lambda i: images(copy, range(i, i + 1))[0], reversed(indices))
        np.testing.assert_array_equal(np.stack(list(drawn))[::-1], expected)
    sources = (source, glyph_splits(seed=3)["test"], glyph_splits(seed=2)["train"])
    same_label = range(0, 20 * len(CLASSES), len(CLASSES))
    all_drawn = np.concatenate([images(source, same_label) for source in sources])
    assert len(np.unique(all_drawn, axis=0)) == len(all_drawn) == 60


def test_no_typeface_is_on_both_sides():
    def fonts(part):
        folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
        files = {folder / face.file for family in part for face in family}
        # "DejaVu Sans Mono" -> "DejaVu"
        return {font_manager.get_font(str(file)).family_name.split()[0] for file in files}

    assert fonts(glyphs.TRAIN_FAMILIES) == {"DejaVu", "STIXGeneral"}
    assert fonts(glyphs.TEST_FAMILIES) == {"cmr10", "cmb10", "cmti10", "cmss10", "cmtt10"}


def test_another_alphabet():
    splits = glyph_splits(size=12, num_test=80, alphabet="greek_cyrillic")
    train, test = splits["train"], splits["test"]
    assert len(set(train.classes)) == 40
    assert not set(train.classes) & set(CLASSES)
    assert train.classes == test.classes
    assert not set(train.families) & set(test.families)
    drawn = images(test, range(80))
    assert drawn.any(axis=(1, 2, 3)).all()
    # A font draws the characters that it lacks as the same box.
    plain = [[glyphs._drawing(face, char) for char in train.classes] for face in test.families[0]]
    for face in plain:
        assert len({drawing.tobytes() for drawing in face}) == 40
    with pytest.raises(UserError, match="alphabet='greek' must be one of latin, greek_cyrillic"):
        create_dataset(name="glyphs(alphabet='greek')", split="train", preprocess="decode")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("glyphs(num_examples=1000000000000)", r"num_examples=1000000000000 is not below 2\^31"),
        (f"glyphs(seed={'9' * 5000})", "has more than 4,096 characters"),
    ],
)
def test_numbers_have_bounds(name, message):
    with pytest.raises(UserError, match=message):
        create_dataset(name=name, split="train", preprocess="decode")
