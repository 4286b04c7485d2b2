"""Image folders: classes, order, layout errors, damaged files."""

import dataclasses
import logging
import os
import pathlib

import cv2
import numpy as np
import pytest

from tests import fixtures_data
from vit_jax.data import folder
from vit_jax.data.datasets import create_dataset
from vit_jax.data.folder import FolderSource, open_folder
from vit_jax.errors import UserError


def labels(source):
    return [source[i]["label"] for i in range(len(source))]


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
    source, classes = open_folder(str(small), "train")
    assert classes == ("Ant", "cat", "dog")
    assert np.bincount(labels(source)).tolist() == [3, 6, 9]
    for index in range(len(source)):
        path = pathlib.Path(source.describe(index))
        assert path.read_bytes() == source[index]["image"]
        assert path.parent.name == classes[source[index]["label"]]
    other, classes = open_folder(str(small), "test+train[:3]")
    assert classes == ("Ant", "cat", "dog")  # although test has no Ant
    assert np.bincount(labels(other)[:6], minlength=3).tolist() == [0, 4, 2]
    assert labels(other)[6:] == labels(source)[:3]


def test_without_train_the_classes_are_those_of_all_splits(tmp_path):
    touch_folder(tmp_path, {"b": 1, "c": 2}, "fold0")
    touch_folder(tmp_path, {"a": 1, "c": 1}, "fold1")
    source, classes = open_folder(str(tmp_path), "fold1")
    assert classes == ("a", "b", "c")
    assert sorted(labels(source)) == [0, 2]


@pytest.mark.parametrize(
    "counts",
    [
        {"a": 50, "b": 50, "c": 50},
        {"a": 200, "b": 2, "c": 7, "d": 31},
        {"a": 2, "b": 3},
        {"a": 90, "b": 1, "c": 40},  # b's only image
    ],
)
def test_prefixes_and_suffixes_hold_every_class(tmp_path, counts):
    source, classes = open_folder(str(touch_folder(tmp_path, counts)), "train")
    order = labels(source)
    assert len(order) == sum(counts.values())
    all_classes = set(range(len(classes)))
    several = {number for number, name in enumerate(classes) if counts[name] > 1}
    for count in range(len(classes), len(order) + 1):
        assert set(order[:count]) == all_classes
        assert set(order[-count:]) >= several
    # In between, each class has its share: at most two examples away from it.
    for number, name in enumerate(classes):
        seen = np.cumsum(np.array(order) == number) / counts[name]
        expected = np.arange(1, len(order) + 1) / len(order)
        assert np.abs(seen - expected).max() * counts[name] <= len(classes)
    parts = [open_folder(str(tmp_path), each)[0] for each in ("train[:60%]", "train[60%:]")]
    assert parts[0].relative_paths() + parts[1].relative_paths() == source.relative_paths()


def test_order_depends_on_relative_names_only(tmp_path):
    counts = {"a": 20, "b": 30}
    one = touch_folder(tmp_path / "x", counts)
    two = touch_folder(tmp_path / "y", dict(reversed(counts.items())))
    names, same = (open_folder(str(root), "train")[0].relative_paths() for root in (one, two))
    assert names == same != sorted(names)
    # Fixed for ever: another order would change every percent split and every resumed run.
    assert names[:3] == ["train/a/00004.jpg", "train/b/00013.jpg", "train/b/00012.jpg"]


def test_extensions_in_any_case_and_hidden_files(tmp_path, caplog):
    touch_folder(tmp_path, {"a": 1, "b": 1})
    for name in ("x.JPG", "y.Jpeg", "z.PNG", "w.WebP", "ä ö.jpg", "t.psd", ".hidden.jpg", "no"):
        (tmp_path / "train" / "a" / name).touch()
    (tmp_path / "train" / ".DS_Store").touch()
    (tmp_path / ".git" / "a").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        source, classes = open_folder(str(tmp_path), "train")
    assert classes == ("a", "b")
    assert np.bincount(labels(source)).tolist() == [6, 1]
    assert "not used: 1 .psd, 1 no\n" in caplog.text
    assert any("ä ö.jpg" in source.describe(i) for i in range(len(source)))


def test_heic_is_an_image_where_it_can_be_read(tmp_path, caplog, monkeypatch):
    touch_folder(tmp_path, {"a": 1, "b": 1})
    for name in ("x.HEIC", "y.heif"):
        (tmp_path / "train" / "a" / name).touch()
    plain = tuple(each for each in folder.EXTENSIONS if each not in folder.HEIC)
    monkeypatch.setattr(folder, "EXTENSIONS", plain)
    assert len(open_folder(str(tmp_path), "train")[0]) == 2
    assert "1 .HEIC, 1 .heif; .heic is read with pip install -e '.[heic]'" in caplog.text
    caplog.clear()
    monkeypatch.setattr(folder, "EXTENSIONS", plain + folder.HEIC)
    assert len(open_folder(str(tmp_path), "train")[0]) == 4
    assert not caplog.text


def test_a_folder_of_classes_alone_is_split(tmp_path):
    counts = {"a": 500, "b": 100, "few": 2, "one": 1}
    touch_folder(tmp_path, counts, "photos")
    root = tmp_path / "photos"

    def files(split):
        source, classes = open_folder(str(root), split)
        assert classes == ("a", "b", "few", "one")
        assert source.drawn
        return set(source.relative_paths())

    train, test = files("train"), files("test")
    assert not train & test
    assert len(train | test) == 603
    shares = {name: sum(f.startswith(f"{name}/") for f in test) / counts[name] for name in counts}
    assert shares == pytest.approx({"a": 0.2, "b": 0.2, "few": 0.5, "one": 0.0}, abs=0.05)
    assert files("validation") == test
    # Whatever is added, no file goes over to the other side.
    for number in range(500, 900):
        (root / "b" / f"{number:05d}.jpg").touch()
    assert train <= files("train")
    assert test <= files("test")
    (root / "new").mkdir()
    with pytest.raises(UserError, match="no images in 'new'"):
        open_folder(str(root), "train")


@pytest.mark.parametrize("name", ["val", "valid", "validation", "dev"])
def test_what_is_held_out_has_many_names(name, tmp_path, caplog):
    touch_folder(tmp_path, {"a": 3, "b": 3})
    touch_folder(tmp_path, {"a": 1, "b": 2}, name)
    with caplog.at_level(logging.INFO):
        source, _ = open_folder(str(tmp_path), "test[:50%]+train")
    assert len(source) == 2 + 6
    assert f"has no split 'test': using '{name}'." in caplog.text


def test_layout_errors(tmp_path):
    def fails(name, message, split="train"):
        with pytest.raises(UserError, match=message) as caught:
            open_folder(str(tmp_path / name), split)
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
    fails("more", "class 'cow' of split 'test' is not a class of 'train'", "test")
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
    assert kept.fingerprint == skipping.check().fingerprint  # the same ones are dropped
    for index in range(kept.num_examples):  # and all that is left can be used
        example = kept.example(index, np.random.default_rng(0))
        assert example["image"].shape == (16, 16, 3)
        assert example["image"].dtype == np.uint8


def test_a_clean_folder_passes_and_a_lost_file_is_named(small):
    dataset = create_dataset(name=str(small), split="train", preprocess="decode")
    assert dataset.source.check("error").paths() == dataset.source.paths()
    lost = FolderSource(str(small), np.array([b"train/cat/gone.jpg"]), {})
    with pytest.raises(UserError, match=r"gone\.jpg\): No such file"):
        dataclasses.replace(dataset, source=lost).example(0, np.random.default_rng(0))
    with pytest.raises(UserError, match=r"1 of 1 files are missing.*gone\.jpg"):
        lost.check("error")


def test_numbers_are_classes_in_their_order(tmp_path):
    _, classes = open_folder(
        str(touch_folder(tmp_path, dict.fromkeys(["0", "10", "2", "1", "11"], 1))), "train"
    )
    assert classes == ("0", "1", "2", "10", "11")


@pytest.mark.parametrize(
    ("paths", "split", "counts"),
    [
        (["train/a/1.jpg", "train/a/x/y/2.jpg", "train/b/1.jpg"], "train", {"a": 2, "b": 1}),
        (["a/1.jpg", "b/1.jpg", "b/x/2.jpg"], "train+test", {"a": 1, "b": 2}),
        (["a/2023/1.jpg", "a/2024/2.jpg", "b/2023/1.jpg"], "train+test", {"a": 2, "b": 1}),
        (["train/1.jpg", "bus/1.jpg", "bus/2.jpg"], "train+test", {"bus": 2, "train": 1}),
        (["one/a/1.jpg", "one/b/1.jpg", "two/a/1.jpg"], "one", {"a": 1, "b": 1}),
        (
            ["train/n1/images/1.jpg", "train/n2/images/1.jpg", "val/images/1.jpg"],
            "train",
            {"n1": 1, "n2": 1},
        ),
    ],
)
def test_images_lie_below_their_class(tmp_path, paths, split, counts):
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    source, classes = open_folder(str(tmp_path), split)
    assert dict(zip(classes, np.bincount(labels(source)).tolist(), strict=True)) == counts


def test_links_are_followed_once_and_pipes_are_no_images(tmp_path, caplog):
    root = touch_folder(tmp_path / "root", {"a": 1, "b": 1})
    far = touch_folder(tmp_path / "disk", {"a": 2}) / "train/a"
    (root / "train/a/linked").symlink_to(far)
    (root / "train/a/again").symlink_to(root / "train")
    os.mkfifo(root / "train/b/pipe.jpg")
    assert len(open_folder(str(root), "train")[0]) == 5  # `again` leads to b's image too
    assert "not used: 2 .jpg" in caplog.text  # the pipe, by both ways


def test_a_small_class_holds_out_a_fifth_but_for_one_file(tmp_path):
    """By hashes alone it was 13 to 40 percent."""
    for size in (5, 10, 15, 20, 30):
        root = touch_folder(tmp_path / str(size), {f"c{i}": size for i in range(12)}, ".").resolve()
        counts = np.bincount(labels(open_folder(str(root), "test")[0]), minlength=12)
        assert np.abs(counts - size / 5).max() <= 1
        assert counts.sum() + len(open_folder(str(root), "train")[0]) == 12 * size


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", b"\xff".decode(errors="surrogateescape")])
def test_names_of_classes_are_lines_of_text(tmp_path, name):
    root = touch_folder(tmp_path, {name: 1, "c": 1})
    with pytest.raises(UserError, match="must be a single line of UTF-8") as found:
        open_folder(str(root), "train")
    assert str(found.value).isprintable()


def test_names_of_every_script_are_classes(tmp_path):
    """With a space without a break, a joiner, or the ideographic space."""
    names = ["caf\u00e9\u00a0noir", "\u0645\u06cc\u200c\u062e", "\u732b\u3000\u72ac"]
    root = touch_folder(tmp_path, dict.fromkeys(names, 1))
    (root / "train" / names[0] / "__1.jpg").touch()
    source, classes = open_folder(str(root), "train")
    assert (set(classes), len(source)) == (set(names), 4)


def test_two_forms_of_one_name_are_refused_and_many_classes_said(tmp_path, caplog):
    root = touch_folder(tmp_path / "a", {"caf\u00e9": 1, "cafe\u0301": 1})
    with pytest.raises(UserError, match="two forms of Unicode"):
        open_folder(str(root), "train")
    open_folder(str(touch_folder(tmp_path / "b", {f"c{i}": 1 for i in range(20)})), "train")
    assert "20 classes for 20 images" in caplog.text


def test_remarks_of_decoders_name_their_file(tmp_path, caplog, capfd):
    rng = np.random.default_rng(0)
    root = fixtures_data.write_folder(tmp_path, {"train": {"a": 2, "b": 2}})
    for name, ending, flags in (
        ("half", ".jpg", ()),
        ("broken", ".tif", (cv2.IMWRITE_TIFF_COMPRESSION, 5)),
    ):
        content = bytearray(
            cv2.imencode(ending, rng.integers(0, 255, (64, 96, 3), np.uint8), flags)[1]
        )
        middle = len(content) // 2
        content[middle : middle + 100] = rng.bytes(100)
        (root / f"train/a/{name}{ending}").write_bytes(content)
    dataset = create_dataset(name=str(root), split="train", preprocess="decode")
    with pytest.raises(UserError, match="1 of 6 images cannot be read: .*broken.tif"):
        dataset.check()
    assert "broken.tif is treated as damaged" in caplog.text
    assert capfd.readouterr().err == ""
