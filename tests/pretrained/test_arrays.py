"""Files of named arrays: what they hold, or a line that says why not."""

import functools
import gzip
import io
import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.serialization
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

from vit_jax.errors import UserError
from vit_jax.pretrained.arrays import looks_like_a_page, read_arrays, write_safetensors

ARRAYS = {
    "blocks.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "head.bias": np.asarray([0.5, -2.0], np.float32),
}
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


def refused(path: Path, message: str = "cannot read") -> None:
    with pytest.raises(UserError, match=message) as error:
        read_arrays(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 500


def file_of(write: Any, *arguments: Any, **arrays: Any) -> bytes:
    file = io.BytesIO()
    write(file, *arguments, **arrays)
    return file.getvalue()


def zip_of(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


CONTENTS = [
    (b"", "it is empty"),
    (b"\n<!DOCTYPE html>\n<html><body>Sign in", "an HTML or XML page"),
    (b"\xef\xbb\xbf\r\n\r\n<!-- moved -->\n<html>", "an HTML or XML page"),
    ("\n<?xml version='1.0'?><Error>".encode("utf-16"), "an HTML or XML page"),
    (b" " * 2000 + b"<html>", "an HTML or XML page"),
    (b'{"weight_map": ' + b"[" * 200_000, "nested too deep"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a Git LFS pointer"),
    (gzip.compress(b"weights", mtime=0), "gzip-compressed"),
    (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
    (file_of(np.save, np.zeros(3)), "a single numpy array"),
    (pickle.dumps({"a": 1}), "a pickle; pickled code is never run"),
    (flax.serialization.msgpack_serialize({"a": {"b": np.zeros(3)}})[:-1], "or damaged"),
    (zip_of(**{"word/document.xml": b"text"}), "other contents .'word/document.xml'"),
    (zip_of(**{"a.npy": b"text"}), "incomplete or damaged"),
    (b"404: Not Found\nline two", "unknown format, .*starts with b'404: Not Found\\\\nline"),
    (bytes(range(200, 256)), "of an unknown format, or damaged"),
    (file_of(np.savez), "it has no arrays"),
    (file_of(np.savez, a=np.array([{"a": 1}], object)), "Object arrays cannot be loaded"),
    (file_of(np.savez, a=np.zeros(3, [("x", "f4"), ("y", "f4")])), "has non-numeric type"),
    (zip_of(**{"a\nb.npy": file_of(np.save, np.zeros(2))}), "not the name of an array"),
]


def test_what_else_a_file_may_be_is_said(tmp_path: Path) -> None:
    for content, message in CONTENTS:
        (tmp_path / "weights.npz").write_bytes(content)  # the name says nothing
        refused(tmp_path / "weights.npz", message)


def test_what_is_not_a_file_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    what = "it is a folder or a device"
    for name, message in (("none", "No such file"), ("", what), ("pipe", what)):
        refused(tmp_path / name, message)


def test_npz_files_of_every_type(tmp_path: Path) -> None:
    arrays = TYPED | {
        "big-endian": np.arange(6, dtype=">f4"),
        "long": np.random.default_rng(0).standard_normal(700_000),  # more than one chunk
    }
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    read = read_arrays(tmp_path / "a.npz")
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array, strict=True)
        assert read[name].flags.writeable


def test_safetensors_of_every_type_both_ways(tmp_path: Path) -> None:
    typed = TYPED | {"big-endian": np.arange(3, dtype=">f4")}
    write_safetensors(tmp_path / "a", typed, {"näme": "ä"})
    for read in (safetensors.numpy.load_file(tmp_path / "a"), read_arrays(tmp_path / "a")):
        assert set(read) == set(typed)
        for name, array in typed.items():
            np.testing.assert_array_equal(read[name], array, strict=name != "big-endian")
    with safetensors.safe_open(tmp_path / "a", framework="np") as file:
        assert file.metadata() == {"näme": "ä"}
    write_safetensors(tmp_path / "b", dict(reversed(typed.items())), {"näme": "ä"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def write_shards(folder: Path, **changes: Any) -> Path:
    write_safetensors(folder / "model-1.safetensors", {"a": ARRAYS["head.bias"]}, {"x": "1"})
    write_safetensors(folder / "model-2.safetensors", {"b": np.arange(3), "c": np.arange(2)}, {})
    files = {"a": "model-1.safetensors"} | dict.fromkeys("bc", "model-2.safetensors")
    weight_map = {name: file for name, file in (files | changes).items() if file is not None}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 48}, "weight_map": weight_map}))
    return index


def test_a_model_in_several_files_reads_as_one(tmp_path: Path) -> None:
    read = read_arrays(write_shards(tmp_path))
    assert list(read) == ["a", "b", "c"]
    np.testing.assert_array_equal(read["a"], ARRAYS["head.bias"], strict=True)
    np.testing.assert_array_equal(read["b"], np.arange(3), strict=True)


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    lies: list[tuple[dict[str, Any], str]] = [
        ({"a": "model-3.safetensors"}, "No such file"),
        ({"a": "../model-1.safetensors"}, "not a weight file next to it"),
        ({"a": "model-2.safetensors"}, "disagrees with its files, first on 'a'"),
        ({"c": None}, "disagrees with its files, first on 'c'"),
        ({"a": 3}, r"index\.json: it is incomplete or damaged"),
    ]
    for changes, message in lies:
        refused(write_shards(tmp_path, **changes), message)


def test_an_index_of_an_index_is_refused(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a"), ("c", "link")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"weight_map": {"w": f"{other}.json"}}))
    (tmp_path / "link.json").symlink_to("c.json")
    for name in ("a", "c"):
        refused(tmp_path / f"{name}.json", "it is an index, listed as a weight file")


def test_no_weights_are_taken_for_a_page() -> None:
    for length in range(0, 100_000_000, 9_973):  # of the header of a safetensors file
        assert not looks_like_a_page(length.to_bytes(8, "little") + b'{"a":{"dtype":"F32"')
    assert not looks_like_a_page(b"<a {".ljust(8, b"\0") + b'{"a":')


def test_an_honest_file_of_zeros_is_read_though_it_shrank_a_thousandfold(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", head=np.zeros((768, 21_843), np.float32))
    assert (tmp_path / "a.npz").stat().st_size < 100_000
    assert not read_arrays(tmp_path / "a.npz")["head"].any()


def test_an_array_longer_than_its_shape_is_refused(tmp_path: Path) -> None:
    """Else a header that is damaged would hide from the checksum."""
    content = zip_of(**{"a.npy": file_of(np.save, np.zeros(4, np.float32)) + bytes(4)})
    (tmp_path / "a.npz").write_bytes(content)
    refused(tmp_path / "a.npz", "has more data than its shape")


_RNG = np.random.default_rng(0)
RANDOM = {
    "head/kernel": _RNG.standard_normal((4, 5)).astype(np.float32),
    "head/bias": _RNG.standard_normal(5).astype(np.float16),
    "step": np.asarray(7, np.int32),
}


def npz() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **RANDOM)
    return file.getvalue()


def tensors() -> bytes:
    half = {"half": RANDOM["head/kernel"].astype(ml_dtypes.bfloat16)}
    return safetensors.numpy.save(RANDOM | half, {"format": "pt"})


def pth(zipped: bool = True) -> bytes:
    file = io.BytesIO()
    state = {name: torch.from_numpy(array.copy()) for name, array in RANDOM.items()}
    state["view"] = state["head/kernel"].T[1:]
    saved = {"model": state, "epoch": 3}
    torch.save(saved, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


CHECKED = (npz, pth)
UNCHECKED = (tensors, functools.partial(pth, zipped=False))

Arrays = dict[str, tuple[str, tuple[int, ...], bytes]]


def read(path: Path, content: bytes) -> Arrays | None:
    """All arrays (type, shape, bytes), or None where a UserError of one line says why not."""
    path.write_bytes(content)
    try:
        arrays = read_arrays(path)
    except UserError as error:
        text = str(error)
        assert "\n" not in text
        assert str(path) in text
        return None
    return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in arrays.items()}


def flips(content: bytes) -> Iterator[bytes]:
    """Every third byte, in one random bit."""
    rng = random.Random(1)
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.randrange(8)
        yield bytes(damaged)


def disorder(content: bytes) -> Iterator[bytes]:
    """Blocks dropped, blanked or replaced; garbage before and after."""
    rng = random.Random(2)
    for _ in range(75):
        size = rng.choice([1, 8, 64, 512])
        start = rng.randrange(max(len(content) - size, 1))
        for block in (b"", bytes(size), rng.randbytes(size)):
            yield content[:start] + block + content[start + size :]
    for size in (1, 22, 100, 70_000):
        yield content + rng.randbytes(size)
        yield rng.randbytes(size) + content
    yield content + content


@pytest.mark.parametrize("make", CHECKED + UNCHECKED)
def test_a_file_cut_short_is_always_refused(tmp_path: Path, make: Callable[[], bytes]) -> None:
    content = make()
    assert read(tmp_path / "a", content) is not None
    for size in [*range(0, len(content), 9), len(content) - 1, len(content) - 2]:
        assert read(tmp_path / "a", content[:size]) is None, size


@pytest.mark.parametrize("make", CHECKED + UNCHECKED)
@pytest.mark.parametrize("damage", [flips, disorder])
def test_with_checksums_damage_never_changes_a_number(tmp_path, make, damage):
    content = make()
    expected = read(tmp_path / "a", content)
    results = [read(tmp_path / "a", damaged) for damaged in damage(content)]
    assert make in UNCHECKED or all(result in (None, expected) for result in results)
    assert results.count(None) > (30 if make in UNCHECKED else 100)
