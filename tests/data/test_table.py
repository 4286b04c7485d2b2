"""Tables of images: what is read from CSV and Parquet, splits, and what is refused."""

import contextlib
import csv
import os
import pickle
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError

ROWS = [
    (f"photos/{i:02}.png", ["cat", "dog"][i % 2], ["train", "val"][i % 4 == 3]) for i in range(24)
]


def write_images(root, names):
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(root / name), np.full((8, 8, 3), i * 3, np.uint8))


def write_table(path, columns):
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table(columns), path)
    else:
        with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            csv.writer(file, delimiter=delimiter).writerows(
                [list(columns), *zip(*columns.values(), strict=True)]
            )
    return str(path)


def columns(*names):
    return {name: [row[i] for row in ROWS] for i, name in enumerate(names)}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([["sky", None, " sea", ""], ["sky"]], ("sea", "sky")),
        (["sky|sea", "sky"], ("sea", "sky")),
        ([[1, 10], [2]], ("1", "2", "10")),
        ([[1.0, 10.0], [2.0]], ("1", "2", "10")),
    ],
)
def test_labels_of_parquet_are_lists_or_text(tmp_path, labels, expected):
    rows = {"path": ["a", "b"], "labels": labels, "split": ["train"] * 2}
    assert opened(write_table(tmp_path / "t.parquet", rows)).class_names == expected


@pytest.mark.parametrize("ending", ["CSV", "tsv", "parquet"])
def test_rows_are_examples(tmp_path, ending):
    write_images(tmp_path, [row[0] for row in ROWS])
    name = write_table(tmp_path / f"photos.{ending}", columns("path", "label", "split"))
    for split, known in (("train", "train"), ("test", "val")):
        dataset = opened(name, split).check()
        assert dataset.class_names == ("cat", "dog")
        examples = set()
        for i in range(dataset.num_examples):
            path = Path(dataset.source.describe(i))
            example = dataset.example(i, np.random.default_rng(0))
            assert example["image"][0, 0, 0] == int(path.stem) * 3
            label = dataset.class_names[example["label"]]
            examples.add((str(path.relative_to(tmp_path)), label, known))
        assert examples == {row for row in ROWS if row[2] == known}


def test_a_table_is_the_folder_that_it_lists(tmp_path):
    """The same order, the same fifth held out; the column may be `file_name`."""
    names = [f"{kind}/{i}.png" for kind in ("ant", "bee") for i in range(40)]
    write_images(tmp_path, names)
    rows = {"file_name": names, "label": [name.partition("/")[0] for name in names]}
    table = write_table(tmp_path / "all.csv", rows)
    for split in ("train[:7]", "test", "train+test[3:]"):
        dataset, folder = opened(table, split), opened(str(tmp_path), split)
        assert dataset.class_names == folder.class_names
        assert dataset.source.relative_paths() == folder.source.relative_paths()
        np.testing.assert_array_equal(dataset.labels(), folder.labels())
        assert dataset.source.drawn


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_several_labels(tmp_path, ending):
    given = [["sky"], ["sea", "sky"], [], ["sand", "sea"]]
    names = [f"{i}.png" for i in range(4)]
    write_images(tmp_path, names)
    labels: list[Any] = ["|".join(names) for names in given] if ending == "csv" else given
    rows = {"path": names, "labels": labels, "split": ["train"] * 4}
    dataset = opened(write_table(tmp_path / f"t.{ending}", rows))
    assert dataset.class_names == ("sand", "sea", "sky")
    encoded = {
        dataset.source.describe(i): dataset.example(i, np.random.default_rng(0))["label"]
        for i in range(4)
    }
    for name, expected in zip(names, ([0, 0, 1], [0, 1, 1], [0, 0, 0], [1, 1, 0]), strict=True):
        np.testing.assert_array_equal(encoded[str(tmp_path / name)], expected)
    assert dataset.element_spec["label"].shape == (3,)


def opened(name, split="train", **kwargs):
    return create_dataset(name=name, split=split, preprocess="decode|resize(8)", **kwargs)


def test_the_fingerprint_knows_the_labels(tmp_path):
    write_images(tmp_path, [row[0] for row in ROWS])
    rows = columns("path", "label", "split")
    first = opened(write_table(tmp_path / "a.csv", rows)).fingerprint
    assert opened(write_table(tmp_path / "b.parquet", rows)).fingerprint == first
    rows["label"][0] = "dog"
    assert opened(write_table(tmp_path / "a.csv", rows)).fingerprint != first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("file,label a,x", r"no column 'path' or 'file_name', but file"),
        ("path,lable a,x", "no column 'label' or 'labels', but .*Did you"),
        ("path,label", "a classifier needs two classes, not 0"),
        ("path,label,split a,x,train b,y,", "no split in row 2, the first of 1"),
        ("path,label a,x b,", "no label in row 2, the first of 1"),
        ("path,label a,b,c", "row 1 has 3 values for 2 columns"),
        ("", "no column 'path' or 'file_name', but none"),
        ("path,label,label a,x,y", "it has several columns 'label'"),
        ("split,path,label,split a,b,x,b", "it has several columns 'split'"),
        ("path,label,labels a,x,y", "has both 'label' and 'labels'; keep one"),
        ("path,file_name,label a,a,x", "has both 'path' and 'file_name'; keep one"),
        ('path,label "a,x b,y', "cannot be read: unexpected end of data"),
        (f"path,label a,x {'b' * 5000},y", "path in row 2 has a NUL or more than 4,096 bytes"),
        ("path,label a\0,x b,y", "path in row 1 has a NUL|line contains NUL"),
        (f"path,label a,x {'b' * 200_000},y", "cannot be read: field larger than field limit"),
    ],
)
def test_mistakes_are_one_line(tmp_path, content, message):
    (tmp_path / "t.csv").write_text("\n".join(content.split()))
    with pytest.raises(UserError, match=message) as error:
        opened(str(tmp_path / "t.csv"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_what_is_no_table(tmp_path, ending):
    (tmp_path / f"t.{ending}").write_bytes("path,label\n".encode("utf-16"))
    with pytest.raises(UserError, match="cannot be read: .*(utf-8|[Pp]arquet)"):
        opened(str(tmp_path / f"t.{ending}"))


def test_one_file_under_several_names(tmp_path):
    write_images(tmp_path, ["a.png", "b.png"])
    rows = {"path": ["a.png", "b.png", f"{tmp_path}/a.png"], "label": ["x", "y", "x"]}
    table = write_table(tmp_path / "t.csv", {**rows, "split": ["train", "train", "test"]})
    train, test = (opened(table, split) for split in ("train", "test"))
    assert test.shared(train) == 1
    rows["path"][2] = "./a.png"
    with pytest.raises(UserError, match="listed twice in 'train'"):
        opened(write_table(tmp_path / "t.csv", rows))


def test_a_cell_that_is_no_text_is_named(tmp_path):
    table = write_table(tmp_path / "t.parquet", {"path": ["a.png", "b.png"], "label": [[1], [2]]})
    with pytest.raises(UserError, match=r"label of row 1: \[1\] is neither text nor a number"):
        opened(table)


def test_other_delimiters_are_seen_in_the_header(tmp_path):
    for delimiter in (";", "\t"):
        rows = [["path", "label"], ["a, b.png", "x"], ["b.png", "y"]]
        (tmp_path / "t.csv").write_text("\n".join(map(delimiter.join, rows)))
        assert opened(str(tmp_path / "t.csv"), "train+test").class_names == ("x", "y")
        (tmp_path / "t.csv").write_text(delimiter.join(["path", "lable"]))
        with pytest.raises(UserError, match="no column 'label' or 'labels', but path, lable"):
            opened(str(tmp_path / "t.csv"))


def test_splits_that_are_drawn_share_no_file(tmp_path):
    """Here each file has three paths, and one a link; columns of text make them different rows."""
    names = [f"{i:02}.png" for i in range(40)]
    write_images(tmp_path, names)
    (tmp_path / "link.png").symlink_to(names[7])
    spelled = [*names, *(f"./{name}" for name in names), *(f"{tmp_path}/{n}" for n in names)]
    rows = {"path": [*spelled, "link.png"], "caption": [str(i) for i in range(121)]}
    name = write_table(
        tmp_path / "t.csv", {**rows, "label": [f"c{i % 40 % 2}" for i in range(121)]}
    )
    train, test = (
        create_dataset(name=name, split=split, preprocess="decode|tokenize")
        for split in ("train", "test")
    )
    assert train.num_examples + test.num_examples == 121
    assert 12 < test.num_examples < 30
    assert test.shared(train) == 0


def test_splits_in_any_spelling(tmp_path):
    write_images(tmp_path, ["a.png", "b.png", "c.png", "d.png"])
    rows = {"path": ["a.png", "b.png", "c.png", "d.png"], "label": [*"xyxy"]}
    name = write_table(tmp_path / "t.csv", {**rows, "split": ["Training"] * 2 + ["TEST"] * 2})
    paths = [opened(name, split).source.relative_paths() for split in ("train", "test", "TEST")]
    assert [*map(sorted, paths)] == [["a.png", "b.png"], ["c.png", "d.png"], ["c.png", "d.png"]]


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_a_table_is_a_file(tmp_path, ending):
    os.mkfifo(tmp_path / f"pipe.{ending}")
    (tmp_path / f"folder.{ending}").mkdir()
    (tmp_path / f"zero.{ending}").symlink_to("/dev/zero")
    for kind in ("pipe", "folder", "zero"):
        with pytest.raises(UserError, match="cannot be read: it is a folder or a device"):
            opened(str(tmp_path / f"{kind}.{ending}"))


def test_columns_of_one_name_in_parquet(tmp_path):
    table = pyarrow.table([["a", "b"]] * 3, names=["path", "label", "label"])
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(UserError, match="several columns 'label'"):
        opened(str(tmp_path / "t.parquet"))


def test_rows_of_parquet_are_in_proportion_to_its_bytes(tmp_path):
    rows = {"path": ["a"] * 100_000, "label": ["b"] * 100_000}
    with pytest.raises(UserError, match="100,000 rows in [0-9,]+ bytes cannot differ"):
        opened(write_table(tmp_path / "t.parquet", rows))


def test_many_splits_are_not_all_named(tmp_path):
    rows = {"path": [f"{i}" for i in range(5000)], "split": [f"s{i}" for i in range(5000)]}
    name = write_table(tmp_path / "t.csv", rows | {"label": ["a", "b"] * 2500})
    with pytest.raises(UserError, match="known splits: s0, s1, .* and 4980 more") as error:
        opened(name, "train")
    assert len(str(error.value)) < 1000


def test_flipped_bits_of_parquet_lose_no_row(tmp_path):
    """With checksums of pages no value changes either."""
    file, count = tmp_path / "t.parquet", 40
    rows = pyarrow.table({"path": [f"{i}" for i in range(count)], "label": ["a", "b"] * 20})
    for checked in (False, True):
        parquet.write_table(rows, file, row_group_size=15, write_page_checksum=checked)
        good, content = opened(str(file), "train+test"), file.read_bytes()
        rng = np.random.default_rng(0)
        for place in rng.integers(len(content), size=150):
            damaged = bytearray(content)
            damaged[place] ^= 1 << rng.integers(8)
            file.write_bytes(damaged)
            with contextlib.suppress(UserError):
                dataset = opened(str(file), "train+test")
                assert dataset.num_examples == count
                if checked:
                    assert dataset.source.relative_paths() == good.source.relative_paths()
                    np.testing.assert_array_equal(dataset.labels(), good.labels())


def test_one_long_cell_does_not_widen_all(tmp_path):
    rows = {
        "path": [f"{i}" for i in range(3000)] + ["a" * 4000],
        "label": ["a", "b", "c" * 900] * 1000 + ["a"],
    }
    dataset = opened(write_table(tmp_path / "t.csv", rows), "train+test")
    assert len(pickle.dumps(dataset.source)) < 1 << 20
    assert "a" * 4000 in dataset.source.relative_paths()


def test_a_table_that_may_be_cut_is_doubted(tmp_path, caplog):
    name, file = write_table(tmp_path / "t.csv", columns("path", "label")), tmp_path / "t.csv"
    opened(name)
    assert "is the file whole?" not in caplog.text
    file.write_text(file.read_text()[:-2])  # the csv module writes \r\n
    opened(name)
    assert "t.csv: its last line has no end; is the file whole?" in caplog.text
