"""Folders of Hugging Face `datasets`: what is read of them, and what is refused.

`datasets` is not here: the files are written by pyarrow in the layout that `save_to_disk` of
`datasets` 5.2 was seen to write (read by hand in that version's folders too).
"""

import contextlib
import json
import os
import pickle

import cv2
import numpy as np
import pyarrow
import pytest

from vit_jax.data.arrow import _table
from vit_jax.data.datasets import create_dataset
from vit_jax.data.pipeline import eval_batches
from vit_jax.errors import UserError

NAMES = ["cat", "dog", "emu"]
FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": NAMES, "_type": "ClassLabel"},
    "caption": {"dtype": "string", "_type": "Value"},
    "code": {"dtype": "int64", "_type": "Value"},
}
IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def png(value):
    return cv2.imencode(".png", np.full((6, 6, 3), value, np.uint8))[1].tobytes()


def columns(count, first=0):
    rows = range(first, first + count)
    return {
        "image": [{"bytes": png(i), "path": f"{i}.png"} for i in rows],
        "label": [i % 3 for i in rows],
        "caption": [f"a {i}" for i in rows],
        "code": [10 * (i % 3) for i in rows],
    }


def save(folder, columns, shards=1, features=FEATURES, split="train"):
    """One split; each file of several record batches, as larger ones are."""
    folder.mkdir(parents=True)
    kinds = {key: IMAGE if key == "image" else None for key in columns}
    table = pyarrow.table({k: pyarrow.array(v, kinds[k]) for k, v in columns.items()})
    told = json.dumps({"info": {"features": features}})
    table = table.replace_schema_metadata({"huggingface": told})
    names = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
    size = -(-len(table) // shards)
    for i, name in enumerate(names):
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table.slice(i * size, size), max_chunksize=3)
    state = {"_data_files": [{"filename": name} for name in names], "_split": split}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return str(folder)


def save_splits(folder, **splits):
    for name, rows in splits.items():
        save(folder / name, rows, shards=2, split=name)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return str(folder)


def opened(name, label_key=""):
    return create_dataset(name=name, split="train", preprocess="decode", label_key=label_key)


def values(dataset):
    """(label, grey value) of all examples."""
    with eval_batches(dataset, batch_size=4, num_threads=2) as opened:
        batches = list(opened)
    rows = [np.stack([b["label"], b["image"][:, 0, 0, 0]], 1)[b["mask"] > 0] for b in batches]
    return np.concatenate(rows).tolist()


def test_all_splits_and_files_are_read_in_order(tmp_path):
    name = save_splits(tmp_path / "d", train=columns(17), validation=columns(5, 50))
    options = {"name": name, "preprocess": "decode"}
    dataset = create_dataset(**options, split="train+test").check()
    assert dataset.class_names == tuple(NAMES)
    expected = [[i % 3, i] for i in (*range(17), *range(50, 55))]
    assert values(pickle.loads(pickle.dumps(dataset))) == expected
    assert dataset.labels().tolist() == [label for label, _ in expected]
    assert dataset.source.describe(18) == "validation[1]"
    other = save_splits(tmp_path / "e", train=columns(17, 1), validation=columns(5, 50))
    again = create_dataset(**{**options, "name": other}, split="train")
    assert again.fingerprint != create_dataset(**options, split="train").fingerprint


def test_columns_of_text_are_for_ops_and_labels_need_not_be_there(tmp_path):
    given = columns(3) | {"caption": ["to", None, "be"]}
    name = save(tmp_path / "d", {k: v for k, v in given.items() if k != "label"})
    options = {"name": name, "split": "train", "needs": ()}
    dataset = create_dataset(**options, preprocess="decode|tokenize(length=4)")
    assert set(dataset.element_spec) == {"image", "text"}
    texts = [dataset.example(i, np.random.default_rng(0))["text"].tolist() for i in range(3)]
    assert texts[1] == [1, 1, 1, 1]
    assert texts[0] != texts[2]
    with pytest.raises(UserError, match="no column 'code', but caption; preprocess reads it"):
        create_dataset(**options, preprocess="decode|tokenize('code')")


@pytest.mark.parametrize(
    ("key", "names"), [("code", ("0", "10", "20")), ("caption", tuple(f"a {i}" for i in range(6)))]
)
def test_numbers_and_text_are_classes_by_their_value(tmp_path, key, names):
    dataset = opened(save(tmp_path / "d", columns(6)), key)
    assert dataset.class_names == names
    assert dataset.labels().tolist() == [i % len(names) for i in range(6)]


@pytest.mark.parametrize(
    ("change", "label_key", "message"),
    [
        ({"label": [0, -1, 2]}, "", r"1 example of 'train' without a label"),
        ({"label": [0, 2**32, 2]}, "", r"label is 4294967296 in train\[1\], which is no class"),
        ({"label": [0, -(2**32), 2]}, "", r"label is -4294967296 in train\[1\], which is no class"),
        ({"label": [0.5, 1.0, 2.0]}, "", r"label is 0.5 in train\[0\], which is no class"),
        ({"label": ["cat", "dog", "emu"]}, "", r"label is 'cat' in train\[0\], which is no class"),
        ({"label": [[0], [1], [2]]}, "", r"label is \[0\] in train\[0\], which is no class"),
        ({"code": [[0], [1], [2]]}, "code", r"code is \[0\] in train\[0\], which is no class"),
        ({"code": [0.5, float("nan"), 1]}, "code", "1 example of 'train' without a label"),
        ({"label": [0, None, 2]}, "", r"1 example of 'train' without a label"),
        ({}, "image", "label_key='image' must be one of label, caption, code"),
        ({}, "lable", "label_key='lable' must be one of"),
    ],
)
def test_labels_that_are_none_are_refused(tmp_path, change, label_key, message):
    with pytest.raises(UserError, match=message):
        opened(save(tmp_path / "d", columns(3) | change), label_key)


def test_an_image_may_be_a_path(tmp_path):
    given = columns(3)
    given["image"] = [{"bytes": None, "path": "a.png"}, {"bytes": None, "path": None}, None]
    dataset = opened(save(tmp_path / "d", given), "label")
    (tmp_path / "d" / "a.png").write_bytes(png(7))
    assert dataset.example(0, np.random.default_rng(0))["image"][0, 0, 0] == 7
    for index in (1, 2):
        with pytest.raises(UserError, match=rf"example {index} of .*: the image is missing"):
            dataset.example(index, np.random.default_rng(0))


def test_damaged_folders_are_named(tmp_path):
    name = save_splits(tmp_path / "d", train=columns(5), test=columns(5))
    file = tmp_path / "d" / "test" / "data-00001-of-00002.arrow"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match="data-00001-of-00002.arrow is not an Arrow stream"):
        opened(name)
    (tmp_path / "d" / "test" / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"state.json.*_data_files"):
        opened(name)
    given = columns(3)
    del given["image"]
    with pytest.raises(UserError, match="no Image feature; its columns: label"):
        opened(save(tmp_path / "f", given, features={}))


def test_files_that_name_other_classes_are_refused(tmp_path):
    name = save_splits(tmp_path / "d", train=columns(5))
    other = FEATURES | {"label": FEATURES["label"] | {"names": NAMES[::-1]}}
    save(tmp_path / "d" / "test", columns(5), features=other, split="test")
    (tmp_path / "d/dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(UserError, match="its files differ in the names of the classes of label"):
        opened(name)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": ["a"]}, "state.json has a value of the wrong type"),
        ({"_data_files": [{"filename": None}]}, "state.json has a value of the wrong type"),
        (
            {"_data_files": [{"filename": "a"}, {"filename": "./a"}]},
            "state.json lists a file twice",
        ),
        ({"_data_files": [{"filename": "../a"}]}, "lists a file twice, or one outside of"),
        ({"_data_files": [{"filename": "/etc/passwd"}]}, "lists a file twice, or one outside of"),
        ({"_data_files": [{"filename": "no"}]}, "no is not an Arrow stream: .*[Nn]o such file"),
        ({"_data_files": [{"filename": "pipe"}]}, "pipe is not an Arrow stream: it is a folder or"),
        ({"_data_files": [{"filename": "."}]}, "twice, or one outside of|not an Arrow stream"),
    ],
)
def test_only_files_of_the_folder_are_read(tmp_path, state, message):
    name = save(tmp_path / "d", columns(3))
    os.mkfifo(tmp_path / "d" / "pipe")
    (tmp_path / "d" / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=message):
        opened(name)


def test_a_stream_without_its_end_is_refused(tmp_path):
    """Cut anywhere, also between batches, or ended by a flipped bit before its last batch."""
    name, file = save(tmp_path / "d", columns(9)), tmp_path / "d" / "data-00000-of-00001.arrow"
    content = file.read_bytes()
    ends = [i for i in range(len(content)) if content.startswith(b"\xff\xff\xff\xff", i)]
    assert len(ends) == 5  # schema, three batches, the end
    cuts = [content[:end] for end in (0, 4, *ends, len(content) - 1)]
    ended = [content[: end + 4] + bytes(4) + content[end + 8 :] for end in ends[:-1]]
    for damaged in (*cuts, *ended, content + b"x", content + content):
        file.unlink()  # other tables may map it
        file.write_bytes(damaged)
        _table.cache_clear()
        with pytest.raises(UserError, match=r"\.arrow is not an Arrow stream"):
            opened(name)


def test_no_flipped_bit_ends_the_process(tmp_path):
    name, file = save(tmp_path / "d", columns(9)), tmp_path / "d" / "data-00000-of-00001.arrow"
    content, rng = file.read_bytes(), np.random.default_rng(0)
    for place in [110, 203, 249, *rng.integers(len(content), size=200)]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.integers(8)
        file.unlink()
        file.write_bytes(damaged)
        _table.cache_clear()
        with contextlib.suppress(UserError):
            dataset = opened(name)
            assert dataset.num_examples == 9
            for i in range(9):
                with contextlib.suppress(ValueError):
                    dataset.source[i]


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([1], "says nothing usable of its columns"),
        ({"image": 1, "label": [FEATURES["label"]]}, "has no Image feature"),
        (FEATURES | {"label": {"names": 5, "_type": "ClassLabel"}}, "says nothing usable"),
        ({"label": FEATURES["label"], "photo": {"_type": "Image"}}, "other columns than it says"),
        ({"label": FEATURES["label"], "code": {"_type": "Image"}}, "code is int64"),
    ],
)
def test_what_is_said_of_columns_may_be_wrong(tmp_path, features, message):
    with pytest.raises(UserError, match=message):
        opened(save(tmp_path / "d", columns(3), features=features))


def test_columns_of_one_name_are_refused(tmp_path):
    name, file = save(tmp_path / "d", columns(3)), tmp_path / "d" / "data-00000-of-00001.arrow"
    table = pyarrow.ipc.open_stream(file.read_bytes()).read_all()
    for key in ("label", "image"):
        doubled = table.append_column(key, table[key])
        with pyarrow.ipc.new_stream(str(file), doubled.schema) as writer:
            writer.write_table(doubled)
        _table.cache_clear()
        with pytest.raises(UserError, match=f"Field .*{key}.* exists 2 times"):
            opened(name)


def test_parts_of_sorted_examples_have_every_class(tmp_path):
    given = columns(30) | {"label": [i // 10 for i in range(30)]}
    name = save(tmp_path / "d", given, split="train_set")
    for split, count in (("train[:70%]", 7), ("train[70%:]", 3)):
        dataset = create_dataset(name=name, split=split, preprocess="decode")
        assert np.bincount(dataset.labels()).tolist() == [count] * 3
        assert all(label == grey // 10 for label, grey in values(dataset))
