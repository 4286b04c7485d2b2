"""WebDataset tars: names, splits, labels, columns, the index in the cache, and what is refused."""

import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest

from tests.data.test_arrow import png, values
from vit_jax.data import tars
from vit_jax.data.datasets import create_dataset
from vit_jax.data.tars import find_tars
from vit_jax.errors import UserError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))


def sample(number, label):
    return {"png": png(number), "cls": str(label).encode(), "txt": f"a {number}".encode()}


def write(path, samples):
    """A tar of {key: {ending: bytes}}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for key, members in samples.items():
            for ending, content in members.items():
                member = tarfile.TarInfo(f"{key}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def root(tmp_path):
    """Two tars of 5 images for training, one of 4 to hold out; classes 0, 2 and 10."""
    labels = [0, 2, 10]
    for name, first, count in (("train-000", 0, 5), ("train-001", 5, 5), ("val-000", 50, 4)):
        samples = {f"d/{i:03}": sample(i, labels[i % 3]) for i in range(first, first + count)}
        write(tmp_path / "data" / f"{name}.tar", samples)
    return tmp_path / "data"


@pytest.mark.parametrize("pattern", ["", "/{train,val}-{000..001}.tar"])
def test_all_tars_are_read_in_order(root, pattern):
    if pattern:
        write(root / "val-001.tar", {})
    options = {"name": f"{root}{pattern}", "preprocess": "decode"}
    dataset = create_dataset(**options, split="train+test").check()
    assert dataset.class_names == ("0", "2", "10")
    expected = [[i % 3, i] for i in (*range(10), *range(50, 54))]
    assert values(pickle.loads(pickle.dumps(dataset))) == expected
    assert dataset.labels().tolist() == [label for label, _ in expected]
    assert dataset.source.describe(6) == f"{root}/train-001.tar: d/006.png"
    before = dataset.fingerprint
    os.utime(root / "train-000.tar", (1, 1))
    assert create_dataset(**options, split="train+test").fingerprint == before
    write(root / "train-001.tar", {f"d/{i:03}": sample(i, [2, 10, 0][i % 3]) for i in range(5, 10)})
    assert create_dataset(**options, split="train+test").fingerprint != before


def test_headers_are_read_once(root, monkeypatch):
    first = create_dataset(name=str(root), split="train", preprocess="decode")
    scanned = []
    scan = tars._scan
    monkeypatch.setattr(tars, "_scan", lambda tar: scanned.append(tar) or scan(tar))
    again = create_dataset(name=str(root), split="train", preprocess="decode")
    assert values(again) == values(first)
    assert scanned == []
    os.utime(root / "train-000.tar", (1, 1))
    assert values(create_dataset(name=str(root), split="train", preprocess="decode"))
    assert scanned == [f"{root}/train-000.tar"]
    for path in (root.parent / "cache" / "tars").iterdir():
        path.write_bytes(b"damaged")
    assert values(create_dataset(name=str(root), split="train", preprocess="decode"))


def test_names_and_json_are_labels_and_columns_too(tmp_path):
    given = [("ant", {"label": "ant", "title": "x"}), ("bee", {"label": "bee", "title": "y"})]
    samples = {
        f"{i}": {"JSON": json.dumps(fields).encode(), "PNG": png(i)}
        for i, (_, fields) in enumerate(given)
    }
    path = str(write(tmp_path / "a.tar", samples))
    dataset = create_dataset(
        name=path, split="train", preprocess="decode|tokenize('title', length=2)"
    )
    assert dataset.class_names == ("ant", "bee")
    texts = [dataset.example(i, np.random.default_rng(0))["text"].tolist() for i in range(2)]
    assert texts[0][0] + 1 == texts[1][0]  # x, y
    unlabelled = write(tmp_path / "b.tar", {"1": {"png": png(1), "txt": b"x"}})
    dataset = create_dataset(
        name=str(unlabelled),
        split="train",
        preprocess="decode|tokenize('txt', length=2)",
        needs_label=False,
    )
    assert dataset.element_spec.keys() == {"image", "text"}
    assert dataset.example(0, np.random.default_rng(0))["text"].tolist() == texts[0]


def test_which_folders_hold_tars(root, tmp_path):
    assert len(find_tars(str(root))) == 3
    for split in ("Training", "seg_val"):
        write(tmp_path / "deep" / split / "0.tar", {})
    paths = find_tars(str(tmp_path / "deep"))
    assert tars._splits_of("x", paths) == ["train", "val"]
    (tmp_path / "deep" / "Training" / "ant").mkdir()  # a folder of images beside its archive
    assert find_tars(str(tmp_path / "deep")) == []
    assert find_tars(str(tmp_path / "nowhere")) == []
    assert find_tars("/x/{08..11}{a,b}.tar")[::3] == ["/x/08a.tar", "/x/09b.tar", "/x/11a.tar"]


def test_what_is_missing_or_damaged_is_named(root):
    def fails(name, message, preprocess="decode", **options):
        with pytest.raises(UserError, match=message):
            create_dataset(name=f"{root}{name}", split="train", preprocess=preprocess, **options)

    fails("/train-{000..002}.tar", r"train-002.tar cannot be read: No such file")
    write(root / "more.tar", {"1": sample(1, 0), "2": {"png": png(2)}})
    fails("/more.tar", r"1 image without KEY.cls or 'label' in KEY.json, first .*2.png")
    message = "without KEY.caption or 'caption' in KEY.json"
    fails("/more.tar", message, "decode|tokenize", needs_label=False)
    write(root / "more.tar", {"1": {"txt": b"x"}})
    fails("/more.tar", r"no images in 1 tar \(.*/more.tar\)")
    (root / "train-001.tar").write_bytes(b"x" * 2000)
    fails("", r"train-001.tar cannot be read: .*(header|read)")


def test_a_tar_that_became_shorter_is_an_error_of_its_example(root):
    dataset = create_dataset(name=str(root), split="train", preprocess="decode")
    tar = root / "train-000.tar"
    tar.write_bytes(tar.read_bytes()[:600])
    with pytest.raises(UserError, match=r"example 4 of .*d/004.png\): the tar is truncated"):
        dataset.example(4, np.random.default_rng(0))


def test_the_split_of_a_tar_is_in_its_name(caplog):
    for names, splits in {
        ("/test/Train-0.tar", "/test/imagenet_validation_000.tar"): ["train", "validation"],
        ("/data/Testing/0.tar",): ["test"],
        ("/my_test/0.tar", "/my_test/1.tar"): ["train", "train"],
    }.items():
        assert tars._splits_of("x", list(names)) == splits
    assert not caplog.records
    assert tars._splits_of("x", ["/d/val-0.tar", "/d/held_out.tar"]) == ["val", "train"]
    assert "no split in the name of /d/held_out.tar: used as 'train'" in caplog.text


def test_masks_and_thumbnails_are_no_images(tmp_path, caplog):
    others = {"0.orig.png": png(0), "thumb.jpg": png(0), "zz.mask.png": png(0)}
    given = {f"{i}": {**others, **sample(i + 1, i)} for i in range(3)}
    path = write(tmp_path / "a.tar", {**given, "about": {"txt": b"x"}})
    dataset = create_dataset(name=str(path), split="train", preprocess="decode")
    assert values(dataset) == [[0, 1], [1, 2], [2, 3]]
    assert "a.tar: no image in 1 of its samples: about" in caplog.text


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"1": {"jpg": png(1), "png": png(2), "cls": b"0"}}, "1.jpg, 1.png in one sample, '1'"),
        ({"cat": {"1.jpg": png(1), "2.jpg": png(2)}}, "cat.1.jpg, cat.2.jpg in one sample"),
        ({"1": {"rgb.png": png(1), "cls": b"0"}}, "1.rgb.png in .*; call its image KEY.jpg"),
    ],
)
def test_samples_that_are_not_one_image(tmp_path, samples, message):
    path = write(tmp_path / "a.tar", samples)
    with pytest.raises(UserError, match=message):
        create_dataset(name=str(path), split="train", preprocess="decode")


def test_parts_of_sorted_samples_have_every_class(tmp_path):
    path = write(tmp_path / "a" / "train.tar", {f"{i:02}": sample(i, i // 10) for i in range(30)})
    parts = []
    for split, count in (("train[:70%]", 7), ("train[70%:]", 3)):
        dataset = create_dataset(name=str(path), split=split, preprocess="decode")
        assert np.bincount(dataset.labels()).tolist() == [count] * 3
        parts.append(values(dataset))
    path.parent.rename(tmp_path / "b")
    moved = create_dataset(name=f"{tmp_path}/b", split="train[:70%]", preprocess="decode")
    assert values(moved) == parts[0]
