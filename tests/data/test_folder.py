"""Image folders: classes, order, layout errors, damaged files."""

import logging
import os
import pathlib

import numpy as np
import pytest

from tests import fixtures_data
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError


def labels(source):
    return [source[i]["label"] for i in range(len(source))]


def opened(root, split):
    dataset = create_dataset(name=str(root), split=split, preprocess="decode")
    return dataset.source, dataset.class_names


def touch_folder(root, counts, split="train"):
    """Files without content, for what depends on names only."""
    for name, count in counts.items():
        (root / split / name).mkdir(parents=True)
        for number in range(count):
            (root / split / name / f"{number:05d}.jpg").touch()
    return root


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    counts = {"train": {"cat": 6, "dog": 9, "Ant": 3}, "test": {"dog": 2, "cat": 4}}
    return fixtures_data.write_folder(tmp_path_factory.mktemp("small"), counts)


def test_classes_counts_and_contents(small):
    source, classes = opened(small, "train")
    assert classes == ("Ant", "cat", "dog")
    assert np.bincount(labels(source)).tolist() == [3, 6, 9]
    for index in range(len(source)):
        path = pathlib.Path(source.describe(index))
        assert path.read_bytes() == source[index]["image"]
        assert path.parent.name == classes[source[index]["label"]]
    other, classes = opened(small, "test+train[:3]")
    assert classes == ("Ant", "cat", "dog")  # although test has no Ant
    assert sorted(labels(other)[:6]) + labels(other)[6:] == [1] * 4 + [2] * 2 + labels(source)[:3]


def test_order_is_fixed_for_ever(tmp_path):
    """Another one would change every percent split and every resumed run."""
    source, _ = opened(touch_folder(tmp_path, {"a": 20, "b": 30}), "train")
    expected = ["train/a/00004.jpg", "train/b/00013.jpg", "train/b/00012.jpg"]
    assert source.relative_paths()[:3] == expected


def test_extensions_in_any_case_and_hidden_files(tmp_path, caplog):
    touch_folder(tmp_path, {"a": 1, "b": 1})
    for name in ("x.JPG", "y.Jpeg", "z.PNG", "w.WebP", "ä ö.jpg", "t.psd", ".hidden.jpg", "no"):
        (tmp_path / "train" / "a" / name).touch()
    (tmp_path / "train" / ".DS_Store").touch()
    (tmp_path / ".git" / "a").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        source, classes = opened(tmp_path, "train")
    assert classes == ("a", "b")
    assert np.bincount(labels(source)).tolist() == [6, 1]
    assert "not used: 1 .psd, 1 no\n" in caplog.text
    assert any("ä ö.jpg" in source.describe(i) for i in range(len(source)))


def test_layout_errors(tmp_path):
    def fails(name, message, split="train"):
        with pytest.raises(UserError, match=message) as caught:
            opened(tmp_path / name, split)
        assert "\n" not in str(caught.value)
        assert str(tmp_path / name) in str(caught.value) or "dataset.split" in str(caught.value)

    fails("missing", "No such file or directory")
    (tmp_path / "empty").mkdir()
    fails("empty", "no class folders; expected CLASS_NAME/IMAGE.jpg or train/CLASS_NAME")
    for split in ("train", "val"):  # without classes
        (tmp_path / "flat" / split).mkdir(parents=True)
        (tmp_path / "flat" / split / "1.jpg").touch()
    fails("flat", "no class folders")
    touch_folder(tmp_path / "one", {"cat": 2})
    fails("one", "only one class, 'cat'")
    touch_folder(tmp_path / "bare", {"cat": 2, "dog": 0})
    fails("bare", "no images in 'train/dog'")
    (tmp_path / "bare/train/dog/x.psd").touch()
    fails("bare", "no images in 'train/dog' or below .but 1 other files.; supported: .*jpg")
    touch_folder(tmp_path / "more", {"cat": 2, "dog": 2})
    touch_folder(tmp_path / "more", {"cow": 1}, "test")
    fails("more", "'train' lacks the classes cow", "test")
    fails("more", "unknown split 'fold'; known splits: test, train", "fold")
    fails("more", "selects no examples", "train[:10%]")
    (tmp_path / "file").touch()
    fails("file", "Not a directory")


def test_damaged_images_are_reported_before_training(tmp_path, caplog):
    root = fixtures_data.write_folder(tmp_path, {"train": {"a": 8, "b": 8}})
    broken = fixtures_data.broken_images()
    for name, data in broken.items():
        (root / "train" / "b" / name).write_bytes(data)
    for name, data in fixtures_data.odd_images().items():
        (root / "train" / "a" / name).write_bytes(data)
    dataset = create_dataset(name=str(root), split="train", preprocess="decode|resize(16)")
    with pytest.raises(UserError, match="fix or delete them") as caught:
        dataset.check()
    assert f"{len(broken)} of {dataset.num_examples} images cannot be read" in str(caught.value)
    for name in broken:
        assert f"/train/b/{name}" in str(caught.value)

    skipping = create_dataset(
        name=str(root), split="train", preprocess="decode|resize(16)", on_bad_image="skip"
    )
    with caplog.at_level(logging.WARNING):
        kept = skipping.check()
    assert "skipped" in caplog.text
    assert kept.num_examples == dataset.num_examples - len(broken)
    assert kept.fingerprint != dataset.fingerprint
    for index in range(kept.num_examples):  # all that is left can be used
        assert kept.example(index, np.random.default_rng(0))["image"].shape == (16, 16, 3)
    (root / "train/a/grey.jpg").unlink()
    with pytest.raises(UserError, match=r"1 of \d+ files cannot be opened: .*grey\.jpg"):
        skipping.check()


def test_a_class_whose_images_are_all_damaged_is_named(tmp_path, caplog):
    root = fixtures_data.write_folder(tmp_path, {"train": {"a": 2, "b": 1, "c": 2}})
    for path in (root / "train" / "b").iterdir():
        path.write_bytes(b"no image")
    options = {"name": str(root), "split": "train", "preprocess": "decode|resize(16)"}
    create_dataset(**options, on_bad_image="skip").check()
    assert "train: no images left of b." in caplog.text


@pytest.mark.parametrize(
    ("paths", "split", "counts"),
    [
        (["train/a/1.jpg", "train/a/x/y/2.jpg", "train/b/1.jpg"], "train", {"a": 2, "b": 1}),
        (["a/2023/1.jpg", "a/2024/2.jpg", "b/2023/1.jpg"], "train+test", {"a": 2, "b": 1}),
        (["one/a/1.jpg", "one/b/1.jpg", "two/a/1.jpg"], "one", {"a": 1, "b": 1}),
        (["train/1.jpg", "bus/1.jpg", "bus/2.jpg"], "train+test", {"bus": 2, "train": 1}),
        (["valid/x/1.jpg", "invalid/x/1.jpg"], "train+test", {"invalid": 1, "valid": 1}),
        (
            ["test tube/1.jpg", "steam_train/1.jpg", "a/1.jpg", "b/1.jpg", "c/1.jpg"],
            "train+test",
            {"a": 1, "b": 1, "c": 1, "steam_train": 1, "test tube": 1},
        ),
        (["Training/a/1.jpg", "Training/b/1.jpg", "Testing/a/1.jpg"], "test", {"a": 1, "b": 0}),
        (["Train/a/1.jpg", "Train/b/1.jpg", "Meta/x/1.jpg"], "train", {"a": 1, "b": 1}),
        (
            [
                "seg_train/seg_train/a/1.jpg",
                "seg_train/seg_train/b/1.jpg",
                "seg_test/seg_test/a/2.jpg",
            ],
            "train+test",
            {"a": 2, "b": 1},
        ),
        (
            ["train/03/1.jpg", "train/2/1.jpg", "train/10/1.jpg"],
            "train",
            {"2": 1, "03": 1, "10": 1},
        ),
    ],
)
def test_images_lie_below_their_class(tmp_path, paths, split, counts):
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    source, classes = opened(tmp_path, split)
    numbers = np.bincount(labels(source), minlength=len(classes)).tolist()
    assert dict(zip(classes, numbers, strict=True)) == counts


def test_links_are_followed_once_and_pipes_are_no_images(tmp_path, caplog):
    root = touch_folder(tmp_path / "root", {"a": 1, "b": 1})
    far = touch_folder(tmp_path / "disk", {"a": 2}) / "train/a"
    (root / "train/a/linked").symlink_to(far)
    (root / "train/a/again").symlink_to(root / "train")
    os.mkfifo(root / "train/b/pipe.jpg")
    assert len(opened(root, "train")[0]) == 5  # `again` leads to b's image too
    assert "not used: 2 .jpg" in caplog.text  # the pipe, by both ways


def touch_files(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (
            [f"fold{k}/{name}/1.jpg" for k in (1, 2) for name in ("a", "b")],
            "'fold1', 'fold2' all hold 'a', 'b', which looks like splits; name the splits train",
        ),
        (
            [f"{name}/{split}/1.jpg" for split in ("train", "val") for name in ("a", "b")],
            "'a', 'b' all hold 'train', 'val', .*; put the splits above the classes",
        ),
        (["Training/1.jpg", "Testing/1.jpg"], "no class folders"),
        (["seg_train/1.jpg", "seg_test/1.jpg", "seg_pred/1.jpg"], "no class folders"),
        (
            ["train/1.jpg", "train/metadata.csv"],
            "or the table .*/train/metadata.csv as dataset.name",
        ),
        (["1.jpg", "labels.csv"], "or the table .*/labels.csv as dataset.name"),
        (["train/3/1.jpg", "train/003/1.jpg"], "'003' and '3' are the same number; rename one"),
    ],
)
def test_layouts_that_are_no_classes(tmp_path, paths, message):
    with pytest.raises(UserError, match=message):
        opened(touch_files(tmp_path, *paths), "train")


def test_one_of_several_unnamed_splits_can_be_asked_for(tmp_path):
    touch_files(tmp_path, *(f"fold{k}/{name}/1.jpg" for k in (1, 2) for name in ("a", "b")))
    source, classes = opened(tmp_path, "fold2")
    assert (sorted(source.relative_paths()), classes) == (
        ["fold2/a/1.jpg", "fold2/b/1.jpg"],
        ("a", "b"),
    )


def test_images_that_are_in_no_class_folder_are_counted(tmp_path, caplog):
    paths = ["train/a/1.jpg", "train/b/1.jpg", "test/a/1.jpg", "test/b/1.jpg"]
    touch_files(tmp_path, *paths)
    opened(tmp_path, "train")
    assert not caplog.records
    touch_files(tmp_path, "0.jpg", "train/1.jpg", "train/2.jpg", "test/3.jpg", "extra/x.jpg")
    opened(tmp_path, "train")
    assert (
        "no class folder: 1 image in '.', 1 image in 'extra', 2 images in 'train'." in caplog.text
    )
    caplog.clear()
    flat = touch_files(tmp_path / "flat", "a/1.jpg", "b/1.jpg", "c.png")
    assert len(opened(flat, "train+test")[0]) == 2
    assert "no class folder: 1 image in '.'." in caplog.text
    caplog.clear()
    options = {"preprocess": "decode", "needs": ()}
    assert create_dataset(name=f"{flat}/a", split="train", **options).num_examples == 1
    assert not caplog.records


def test_without_labels_all_pictures_are_train_unless_folders_are_splits(tmp_path, caplog):
    options = {"preprocess": "decode", "needs": ()}
    mixed = touch_files(
        tmp_path / "mixed", "1.jpg", "cats/old/2.jpg", "cats/new/3.jpg", "dogs/4.jpg"
    )
    for split, count in {"train": 4, "all": 4, "cats": 2, "cats+dogs": 3}.items():
        assert create_dataset(name=str(mixed), split=split, **options).num_examples == count
    with pytest.raises(UserError, match="unknown split 'test'"):
        create_dataset(name=str(mixed), split="test", **options)
    parts = touch_files(tmp_path / "parts", "train/1.jpg", "val/2.jpg", "val/3.jpg")
    assert create_dataset(name=str(parts), split="val", **options).num_examples == 2
    messages = [record.message for record in caplog.records]
    assert all("1 image in '.'" in text for text in messages)  # of cats alone, and of cats+dogs
    assert len(messages) == 2


def test_masks_beside_their_images_are_named(tmp_path, caplog):
    touch_files(tmp_path, "a/1.jpg", "a/2.b.jpg", "a/3_masked.jpg", "b/IMG_1.jpg")
    opened(tmp_path, "train+test")
    assert not caplog.records
    touch_files(
        tmp_path, "a/1.mask.png", "b/IMG_1_mask_2.png", "b/x/y (1).jpg", "b/x/y (1)_Mask.png"
    )
    assert len(opened(tmp_path, "train+test")[0]) == 8
    assert (
        "3 images named like masks (a/1.mask, b/IMG_1_mask_2, b/x/y (1)_Mask) count" in caplog.text
    )


def test_a_link_is_the_file_that_it_leads_to(tmp_path):
    """Without folders of splits both are in the same."""
    touch_files(tmp_path, *(f"{name}/{i}.jpg" for name in "ab" for i in range(10)))
    for name in "ab":
        for i in range(10):
            (tmp_path / name / f"copy{i}.jpg").symlink_to(tmp_path / name / f"{i}.jpg")
    train, test = (
        create_dataset(name=str(tmp_path), split=split, preprocess="decode")
        for split in ("train", "test")
    )
    assert train.num_examples + test.num_examples == 40
    assert test.shared(train) == 0
