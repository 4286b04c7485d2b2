"""Preparation as such: order, bytes, refusals; and everything that interrupts it."""

import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import time

import cv2
import numpy as np
import pytest

from tests import fixtures_data, tiny
from tests import fixtures_imagenet as small
from vit_jax.data.datasets import create_dataset
from vit_jax.data.folder import FolderSource
from vit_jax.data.pipeline import train_batches
from vit_jax.data.tfds_reader import TfdsSource
from vit_jax.data_preparation.prepare import build_tfds, check_prepared, prepare_data
from vit_jax.errors import UserError

COUNTS = {"train": {"cat": 9, "dog": 14}, "test": {"cat": 3, "dog": 2}}


@pytest.fixture
def photos(tmp_path):
    return fixtures_data.write_folder(tmp_path / "photos", COUNTS)


def prepare(source, data_dir, **options):
    return prepare_data("folder", str(source), data_dir=str(data_dir), **options)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_prepared_folder_gives_the_folders_own_batches(photos, tmp_path):
    folder = prepare(photos, tmp_path / "out", shard_megabytes=0.002)
    assert len(list(folder.glob("photos-train.array_record-*"))) > 2
    options = {"preprocess": "official_train(8)", "data_dir": str(tmp_path / "out")}
    for split in ("train", "train[3:20]", "test"):
        runs = []
        for name in ("photos", str(photos)):
            dataset = create_dataset(name=name, split=split, **options)
            assert dataset.class_names == ("cat", "dog")
            with train_batches(dataset, batch_size=4, seed=1, total_steps=9) as batches:
                runs.append(list(batches))
        for one, other in zip(*runs, strict=True):
            for key in one:
                np.testing.assert_array_equal(one[key], other[key])


def test_splits_are_prepared_under_plain_names(tmp_path):
    counts = {"Training": {"cat": 3, "dog": 2}, "Testing": {"cat": 1, "dog": 1}}
    prepare(fixtures_data.write_folder(tmp_path / "photos", counts), tmp_path / "out")
    for split, count in (("train", 5), ("test", 2)):
        for data_dir, name in ((f"{tmp_path}/out", "photos"), ("", f"{tmp_path}/photos")):
            options = {"name": name, "data_dir": data_dir, "preprocess": "decode"}
            assert create_dataset(split=split, **options).num_examples == count


def test_a_prepared_set_comes_before_the_folder_of_its_name(photos, tmp_path, monkeypatch):
    prepare(photos, tmp_path / "out")
    monkeypatch.chdir(photos.parent)
    options = {"name": "photos", "split": "train", "preprocess": "decode"}
    assert isinstance(create_dataset(**options).source, FolderSource)
    opened = create_dataset(**options, data_dir=str(tmp_path / "out"))
    assert isinstance(opened.source, TfdsSource)


def test_resized_copy(tmp_path):
    folder = tmp_path / "photos" / "train"
    sizes = {"large": (60, 90), "tall": (80, 40), "small": (20, 30)}
    for number, (name, size) in enumerate(sizes.items()):
        (folder / name).mkdir(parents=True)
        grey = cv2.GaussianBlur(fixtures_data.picture(number, size=size, channels=1), (5, 5), 2)
        image = np.repeat(grey[..., None], 3, axis=2)  # JPEG halves the resolution of colours
        (folder / name / "x.png").write_bytes(fixtures_data.encoded(image, "PNG"))
    out = prepare(folder.parent, tmp_path / "out", resize=30, quality=98)
    assert out == tmp_path / "out" / "photos_30" / "1.0.0"
    resized, stored = (
        create_dataset(
            name=name, split="train", preprocess="decode", data_dir=str(tmp_path / "out")
        )
        for name in ("photos_30", str(folder.parent))
    )
    shapes = {"large": (30, 45), "tall": (60, 30), "small": (20, 30)}
    for index in range(3):
        small, large = (data.example(index, np.random.default_rng(0)) for data in (resized, stored))
        height, width = shapes[stored.class_names[small["label"]]]
        expected = cv2.resize(large["image"], (width, height), interpolation=cv2.INTER_AREA)
        error = np.abs(small["image"].astype(int) - expected).mean()
        assert error < 1  # level of 255: what JPEG at 98 rounds
    assert "'resize': 30" in json.loads((out / "dataset_info.json").read_text())["description"]


def test_unreadable_images_are_listed_and_refused_or_skipped(photos, tmp_path):
    broken = fixtures_data.broken_images()
    for name in ("half.jpg", "text.png", "empty.jpg"):
        (photos / "train" / "cat" / name).write_bytes(broken[name])
    message = r"3 images cannot be decoded, such as /.*cat/\w+\.\w+;"
    with pytest.raises(UserError, match=message) as e:
        prepare(photos, tmp_path / "out", shard_megabytes=0.002)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out/photos/1.0.0").exists()
    listed = (tmp_path / "out/photos/1.0.0.incomplete/prepared/unreadable_images.txt").read_text()
    stamps = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("prepared/*_record-*")}
    assert stamps
    folder = prepare(photos, tmp_path / "out", shard_megabytes=0.002, on_bad_image="skip")
    # Nothing is written twice for that.
    assert stamps == {path.name: path.stat().st_mtime_ns for path in folder.glob("*_record-*")}
    assert (folder / "unreadable_images.txt").read_text() == listed
    names = [os.path.basename(line) for line in listed.splitlines()]
    assert sorted(names) == ["empty.jpg", "half.jpg", "text.png"]
    dataset = create_dataset(name=str(folder), split="train", preprocess="decode").check()
    assert dataset.num_examples == 23
    assert check_prepared(str(folder)) == []


@pytest.mark.parametrize("name", [b"cat ", b"caf\xe9", b"cat\ndog"])
def test_names_of_classes_that_would_not_come_back(photos, tmp_path, name):
    """TFDS keeps them in a file, one per line, without blanks at their ends."""
    train = os.fsencode(photos / "train")
    os.rename(train + b"/cat", train + b"/" + name)
    shutil.rmtree(photos / "test")
    with pytest.raises(UserError, match="cannot be a class name|must be a single line of UTF-8"):
        prepare(photos, tmp_path / "out")
    assert not list(tmp_path.rglob("*_record-*"))  # said before any work


def test_what_is_there_stays(photos, tmp_path):
    folder = prepare(photos, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prepare(photos, tmp_path / "out") == folder
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(UserError, match="already exists, made from something else"):
        prepare(photos, tmp_path / "out", shard_megabytes=1)
    (photos / "train" / "cat" / "new.jpg").write_bytes(small.jpeg(1))
    with pytest.raises(UserError, match="already exists, made from something else"):
        prepare(photos, tmp_path / "out")


def test_a_changed_source_or_option_is_noticed(photos, tmp_path):
    bad = photos / "train" / "cat" / "bad.jpg"
    bad.write_bytes(b"no image")
    with pytest.raises(UserError, match="cannot be decoded"):
        prepare(photos, tmp_path / "out")
    with pytest.raises(UserError, match=r"started with resize=0, not 8; use the same, or delete"):
        prepare(photos, tmp_path / "out", resize=8, name="photos")
    bad.write_bytes(small.jpeg(1))
    with pytest.raises(UserError, match="started with source_fingerprint=.*; use the same, or"):
        prepare(photos, tmp_path / "out")


def test_one_process_at_a_time(photos, tmp_path):
    work = tmp_path / "out" / "photos_set" / "1.0.0.incomplete"
    work.mkdir(parents=True)
    with open(work / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is working there"):
            prepare(photos, tmp_path / "out", name="photos_set")
    prepare(photos, tmp_path / "out", name="photos_set")


def test_arguments_are_checked(photos, tmp_path):
    def fails(message, **arguments):
        given = {"kind": "folder", "source": str(photos), "data_dir": f"{tmp_path}/out"}
        with pytest.raises(UserError, match=message):
            prepare_data(**{**given, **arguments})

    fails("kind='image' is unknown", kind="image")
    fails("on_bad_image='keep' is unknown", on_bad_image="keep")
    fails("num_workers=0, .*flags out of range", num_workers=0)
    fails("quality=101, .*flags out of range", quality=101)
    fails("shard_megabytes=nan: flags out of range", shard_megabytes=float("nan"))
    fails("--data_dir='gs://bucket/x': only file system paths", data_dir="gs://bucket/x")
    fails("--name='a/b'", name="a/b")
    fails("would be inside its own source", data_dir=str(photos.parent))
    (tmp_path / "file").touch()
    fails("cannot be written .Not a directory", data_dir=str(tmp_path / "file"))
    assert not (tmp_path / "out").exists()


def test_tfds_prepares_by_itself(tmp_path):
    """A set that needs no network; see `fixtures_data.Unlabelled`."""
    folder = build_tfds("unlabelled", str(tmp_path))
    assert folder == str(tmp_path / "unlabelled" / "1.0.0")
    assert check_prepared(folder) == []
    assert build_tfds("unlabelled", str(tmp_path)) == folder
    with pytest.raises(UserError, match=r"'cifar11' is not a TFDS .*\. Did you mean 'cifar10"):
        build_tfds("cifar11", str(tmp_path))


SCRIPT = [sys.executable, str(tiny.ROOT / "scripts" / "prepare_data.py"), "folder"]


def many_photos(root):
    counts = {"train": {"cat": 60, "dog": 60}, "test": {"cat": 2, "dog": 2}}
    return fixtures_data.write_folder(root, counts)


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(photos, tmp_path):
    """By a limit on the size of files, which fails a write as a full disk does."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limit[1]))
    try:
        with pytest.raises(
            UserError, match=r"array_record.*cannot be written \(.*resumes"
        ) as error:
            prepare(photos, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.unfinished"))
    assert check_prepared(str(prepare(photos, tmp_path / "out"))) == []


def test_kills_change_no_byte(tmp_path):
    """SIGKILL while two threads write."""
    source = many_photos(tmp_path / "photos")
    arguments = ["--shard_megabytes=0.001", "--num_workers=2"]
    receipts = tmp_path / "killed twice/photos/1.0.0.incomplete/receipts"
    command = [*SCRIPT, str(source), f"--data_dir={tmp_path}/killed twice", *arguments]
    with subprocess.Popen(command, env=tiny.environment()) as process:
        deadline = time.monotonic() + 120
        while len(list(receipts.glob("*.json"))) < 10 and time.monotonic() < deadline:
            time.sleep(0.001)
        process.kill()
    assert len(list(receipts.glob("*.json"))) >= 10
    assert not (tmp_path / "killed twice/photos/1.0.0").exists()
    options = {"env": tiny.environment(), "capture_output": True, "text": True}
    result = subprocess.run(command, **options, check=True)
    flags = f"--config.dataset.name=photos '--config.dataset.data_dir={tmp_path / 'killed twice'}'"
    assert result.stdout == f"{tmp_path / 'killed twice/photos/1.0.0'}\n{flags}\n"
    undisturbed = prepare(source, tmp_path / "whole", shard_megabytes=0.001)
    assert files(tmp_path / "killed twice/photos/1.0.0") == files(undisturbed)
    assert os.listdir(tmp_path / "killed twice/photos") == ["1.0.0"]
