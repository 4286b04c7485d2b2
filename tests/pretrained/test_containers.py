from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flax.serialization
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from vit_jax.errors import UserError
from vit_jax.files.atomic import write_arrays
from vit_jax.pretrained.files.array_file import ArrayInfo, read_arrays
from vit_jax.pretrained.files.containers import open_container
from vit_jax.pretrained.files.safetensors import write_safetensors

ARRAYS = {
    "blocks.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "head.bias": np.asarray([0.5, -2.0], np.float32),
}


def file_of(write: Any, *arguments: Any) -> bytes:
    file = io.BytesIO()
    write(file, *arguments)
    return file.getvalue()


def archive(name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as content:
        content.writestr(name, "text")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (
            b"\n<!DOCTYPE html>\n<html><body>Sign in",
            "an HTML or XML page",
        ),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied", "an HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a Git LFS pointer"),
        (gzip.compress(b"weights", mtime=0), "gzip-compressed"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
        (file_of(np.save, np.zeros(3)), "a single array of numpy"),
        (pickle.dumps({"a": 1}), "a pickle, and pickled code is never run"),
        (pickle.dumps({"a": 1}, 2), "a pickle, and pickled code is never run"),
        (flax.serialization.msgpack_serialize({"params": {"a": np.zeros(3)}}), "a msgpack file"),
        (archive("word/document.xml"), "a zip file of 'word/document.xml' and the like"),
        (archive("a.npy"), "incomplete or damaged"),
        (b"404: Not Found\nline two", "of no known kind, .*begins with b'404: Not Found\\\\nline"),
        (b'{"model_type": "vit"}', "it begins with b'{.model_type"),
        (bytes(range(200, 256)), "of no known kind, or damaged"),
        (b"PK\3\4" + bytes(200), "incomplete or damaged"),
    ],
)
def test_what_else_a_file_may_be_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "weights.npz"  # the name says nothing
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        open_container(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_the_name_of_a_file_does_not_matter(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a.pth", ARRAYS)
    write_safetensors(tmp_path / "a.npz", ARRAYS, {})
    for name in ("a.pth", "a.npz"):
        with open_container(tmp_path / name) as container:
            read = read_arrays(container, ARRAYS)
        for key, array in ARRAYS.items():
            np.testing.assert_array_equal(read[key], array, strict=True)


def test_what_is_not_a_file_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("none", "No such file"), (".", "a folder"), ("pipe", "not a file")):
        with pytest.raises(UserError, match=message):
            open_container(tmp_path / name)


def test_a_closed_container_reads_no_more(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", ARRAYS, {})
    with open_container(tmp_path / "a") as container:
        pass
    with pytest.raises(ValueError, match="closed"):
        container.read("head.bias")


def test_threads_may_read_from_one_container(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"a{i}": rng.standard_normal(100_000).astype(np.float32) for i in range(16)}
    np.savez(tmp_path / "a.npz", **arrays)
    barrier = threading.Barrier(4)

    def read(name: str) -> np.ndarray:
        if name in ("a0", "a1", "a2", "a3"):
            barrier.wait(timeout=60)  # at least four at the same time
        return container.read(name)

    with open_container(tmp_path / "a.npz") as container, ThreadPoolExecutor(4) as pool:
        for array, expected in zip(pool.map(read, arrays), arrays.values(), strict=True):
            np.testing.assert_array_equal(array, expected)


TYPED: dict[str, np.ndarray] = {
    **{f"f{n}": np.arange(3).astype(f"f{n // 8}") / 3 for n in (16, 32, 64)},
    **{f"i{n}": np.arange(-1, 2).astype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    **{f"u{n}": np.arange(3).astype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    "bf16": (np.arange(6) / 3).astype(ml_dtypes.bfloat16).reshape(3, 2),
    "bool": np.asarray([True, False]),
    "scalar": np.asarray(1.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}


def test_safetensors_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in TYPED.items()}
    safetensors.numpy.save_file(arrays, tmp_path / "a", metadata={"format": "pt"})
    with open_container(tmp_path / "a") as container:
        assert container.arrays["bf16"] == ArrayInfo((3, 2), "bfloat16")
        assert set(container.arrays) == set(TYPED)
        for name, array in safetensors.numpy.load_file(tmp_path / "a").items():
            expected = array.astype(np.float32) if name[0] in "fb" and name != "bool" else array
            np.testing.assert_array_equal(container.read(name), expected, strict=True)


def test_safetensors_are_written_so_that_the_library_reads_them(tmp_path: Path) -> None:
    typed = TYPED | {"big-endian": np.arange(3, dtype=">f4")}
    write_safetensors(tmp_path / "a", typed, {"näme": "ä"})
    read = safetensors.numpy.load_file(tmp_path / "a")
    assert set(read) == set(typed)
    for name, array in typed.items():
        np.testing.assert_array_equal(read[name], array, strict=name != "big-endian")
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
    with safetensors.safe_open(tmp_path / "a", framework="np") as file:
        assert file.metadata() == {"näme": "ä"}


def test_safetensors_have_the_same_bytes_in_whatever_order(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", TYPED, {"format": "pt"})
    write_safetensors(tmp_path / "b", dict(reversed(TYPED.items())), {"format": "pt"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_what_safetensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        write_safetensors(tmp_path / "a", {"a": np.asarray(["text"])}, {})
    with pytest.raises(OSError, match="missing/a"):
        write_safetensors(tmp_path / "missing" / "a", {"a": np.zeros(2)}, {})
    assert not list(tmp_path.iterdir())


def tensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, end: int, shape: Any = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


SOUND = json.dumps({"a": entry(0, 8)}).encode()


def test_any_byte_other_than_zero_is_true(tmp_path: Path) -> None:
    """A bool of another byte than 0 and 1 would be equal to neither."""
    content = tensors({"a": entry(0, 3, (3,), "BOOL")}, b"\x02\x00\xff")
    (tmp_path / "a.safetensors").write_bytes(content)
    with open_container(tmp_path / "a.safetensors") as container:
        assert container.read("a").tobytes() == b"\x01\x00\x01"


def test_a_sound_header_is_read_with_its_padding(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(tensors(SOUND + b" " * 1000, bytes(8)))
    with open_container(tmp_path / "a.safetensors") as container:
        assert container.arrays == {"a": ArrayInfo((2,), "float32")}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(tensors({"a": entry(0, 8)}, bytes(7)), id="data cut short"),
        pytest.param(tensors({"a": entry(0, 8)}, bytes(9)), id="data too long"),
        pytest.param(tensors({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), id="overlap"),
        pytest.param(tensors({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)), id="gap"),
        pytest.param(tensors({"a": entry(8, 0)}, bytes(8)), id="backwards"),
        pytest.param(tensors({"a": entry(0, 8, (3,))}, bytes(8)), id="shape"),
        pytest.param(tensors({"a": entry(0, 8, (-2,))}, bytes(8)), id="negative"),
        pytest.param(tensors({"a": entry(0, 8, (2**63, 2**63))}, bytes(8)), id="huge"),
        pytest.param(tensors({"a": entry(0, 8, dtype="F33")}, bytes(8)), id="type"),
        pytest.param(tensors({"a": entry(0, 2, dtype="F4")}, bytes(2)), id="type of numpy"),
        pytest.param(tensors({"a": entry(0, 16, (2,), "C64")}, bytes(16)), id="complex"),
        pytest.param(tensors({"a": entry(0, 2, (2,), "F8_E5M2")}, bytes(2)), id="float8"),
        pytest.param(tensors({"a\n": entry(0, 8)}, bytes(8)), id="line break in a name"),
        pytest.param(tensors({"": entry(0, 8)}, bytes(8)), id="no name"),
        pytest.param(tensors({}), id="nothing"),
        pytest.param(tensors({"a": entry(0, 8)}, bytes(8), 2**62), id="length"),
        pytest.param(tensors({"a": entry(0, 8)}, bytes(8), 2**31), id="length of 2 GB"),
        pytest.param(tensors(b'{"a":' * 5000), id="nested"),
        pytest.param(tensors(b'{"a":' + b"[" * 5000), id="nested lists"),
        pytest.param(tensors(b'{"a": 1}'), id="other JSON"),
        pytest.param(tensors(b'{"\xff": 1}'), id="not UTF-8"),
        pytest.param(tensors({"__metadata__": {"a": {}}}), id="notes that are no texts"),
    ],
)
def test_damaged_safetensors_give_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.safetensors") as error:
        open_container(tmp_path / "a.safetensors")
    assert "\n" not in str(error.value)


def write_shards(folder: Path, **changes: Any) -> Path:
    write_safetensors(folder / "model-1.safetensors", {"a": ARRAYS["head.bias"]}, {"x": "1"})
    write_safetensors(folder / "model-2.safetensors", {"b": np.arange(3), "c": np.arange(2)}, {})
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"} | {
        "c": "model-2.safetensors"
    }
    weight_map = {name: file for name, file in (weight_map | changes).items() if file is not None}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": weight_map}))
    return index


def test_a_model_in_several_files_reads_as_one(tmp_path: Path) -> None:
    index = write_shards(tmp_path)
    with open_container(index) as container:
        assert container.path == index
        assert list(container.arrays) == ["a", "b", "c"]
        read = read_arrays(container, container.arrays)
    np.testing.assert_array_equal(read["a"], ARRAYS["head.bias"], strict=True)
    np.testing.assert_array_equal(read["b"], np.arange(3), strict=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": "/etc/passwd"}, "'/etc/passwd', not a file beside it"),
        ({"a": "../model-1.safetensors"}, "'../model-1.safetensors', not a file beside it"),
        ({"a": ".."}, "Is a directory"),
        ({"a": "model-3.safetensors"}, "No such file"),
        ({"a": "model.safetensors.index.json"}, "of no known kind"),
        ({"a": "model-2.safetensors"}, "disagree, first about 'a'"),
        ({"c": None}, "disagree, first about 'c'"),
        ({"d": "model-2.safetensors"}, "disagree, first about 'd'"),
        ({"a": 3}, r"index\.json: it is incomplete or damaged"),
        ({"a": ["model-1.safetensors"]}, r"index\.json: it is incomplete or damaged"),
    ],
)
def test_an_index_that_lies_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        open_container(write_shards(tmp_path, **changes))


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 9000])
def test_what_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(UserError, match=r"index\.json"):
        open_container(tmp_path / "index.json")
