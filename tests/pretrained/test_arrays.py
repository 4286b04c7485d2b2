"""Files of named arrays: what they hold, or a line that says why not."""

import gzip
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import flax.serialization
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tests import golden
from tests.flat_params import small
from vit_jax.errors import UserError
from vit_jax.files.paths import write_arrays
from vit_jax.pretrained.arrays import read_arrays, write_safetensors
from vit_jax.trees import flatten_names, unflatten_names
from vit_jax.workdir.description import write_params

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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"\n<!DOCTYPE html>\n<html><body>Sign in", "an HTML or XML page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied", "an HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a Git LFS pointer"),
        (gzip.compress(b"weights", mtime=0), "gzip-compressed"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "an HDF5 file"),
        (file_of(np.save, np.zeros(3)), "a single numpy array"),
        (pickle.dumps({"a": 1}), "a pickle; pickled code is never run"),
        (flax.serialization.msgpack_serialize({"a": {"b": np.zeros(3)}})[:-1], "or damaged"),
        (zip_of(**{"word/document.xml": b"text"}), "other contents .'word/document.xml'"),
        (zip_of(**{"a.npy": b"text"}), "incomplete or damaged"),
        (b"404: Not Found\nline two", "unknown format, .*starts with b'404: Not Found\\\\nline"),
        (b'{"model_type": "vit"}', "it starts with b'{.model_type"),
        (bytes(range(200, 256)), "of an unknown format, or damaged"),
        (b"PK\3\4" + bytes(200), "incomplete or damaged"),
        (file_of(np.savez), "it has no arrays"),
        (file_of(np.savez, a=np.array([{"a": 1}], object)), "Object arrays cannot be loaded"),
        (file_of(np.savez, a=np.zeros(3, [("x", "f4"), ("y", "f4")])), "has non-numeric type"),
        (file_of(np.savez, a=np.array(["text"])), "has non-numeric type"),
        (zip_of(**{"a\nb.npy": file_of(np.save, np.zeros(2))}), "not the name of an array"),
    ],
)
def test_what_else_a_file_may_be_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "weights.npz"  # the name says nothing
    path.write_bytes(content)
    refused(path, message)


def test_what_is_not_a_file_is_said(tmp_path: Path) -> None:
    for name, message in (("none", "No such file"), ("", "Is a directory")):
        refused(tmp_path / name, message)


def test_the_name_of_a_file_does_not_matter(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a.pth", ARRAYS)
    write_safetensors(tmp_path / "a.npz", ARRAYS, {})
    for name in ("a.pth", "a.npz"):
        np.testing.assert_equal(read_arrays(tmp_path / name), ARRAYS)


def test_our_own_files_from_either_form_of_the_blocks(tmp_path: Path) -> None:
    """With the official flat names, as numpy reads and writes them."""
    tree = unflatten_names(small())
    write_params(tmp_path / "a.npz", tree, golden.VIT)
    write_params(tmp_path / "b.npz", golden.VIT.stack(tree), golden.VIT)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    read = read_arrays(tmp_path / "a.npz")
    assert "Transformer/encoderblock_0/LayerNorm_0/scale" in read
    for name, array in flatten_names(tree).items():
        np.testing.assert_array_equal(read[name], array.astype(np.float32))
    np.savez(tmp_path / "numpy.npz", **read)
    assert (tmp_path / "numpy.npz").read_bytes() == (tmp_path / "a.npz").read_bytes()
    write_arrays(tmp_path / "file.npz", {"file": np.zeros(2)})  # np.savez cannot take this name
    assert list(read_arrays(tmp_path / "file.npz")) == ["file"]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_files_of_every_type(tmp_path: Path, save: Any) -> None:
    arrays = TYPED | {
        "big-endian": np.arange(6, dtype=">f4"),
        "long": np.random.default_rng(0).standard_normal(700_000),  # more than one chunk
    }
    save(tmp_path / "a.npz", **arrays)
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
    (tmp_path / "b").touch()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": "model-3.safetensors"}, "No such file"),
        *(
            ({"a": file}, "not a weight file next to it")
            for file in ("model.safetensors.index.json", "../model-1.safetensors", "/etc/passwd")
        ),
        ({"a": "model-2.safetensors"}, "disagrees with its files, first on 'a'"),
        ({"c": None}, "disagrees with its files, first on 'c'"),
        ({"d": "model-2.safetensors"}, "disagrees with its files, first on 'd'"),
        ({"a": 3}, r"index\.json: it is incomplete or damaged"),
    ],
)
def test_an_index_that_lies_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    refused(write_shards(tmp_path, **changes), message)


def test_an_honest_file_of_zeros_is_read_though_it_shrank_a_thousandfold(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", head=np.zeros((768, 21_843), np.float32))
    assert (tmp_path / "a.npz").stat().st_size < 100_000
    assert not read_arrays(tmp_path / "a.npz")["head"].any()


def test_an_array_longer_than_its_shape_is_refused(tmp_path: Path) -> None:
    """Else a header that is damaged would hide from the checksum."""
    content = zip_of(**{"a.npy": file_of(np.save, np.zeros(4, np.float32)) + bytes(4)})
    (tmp_path / "a.npz").write_bytes(content)
    refused(tmp_path / "a.npz", "has more data than its shape")
