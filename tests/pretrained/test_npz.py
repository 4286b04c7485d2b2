from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.parameters.test_names import loop_tree
from vit_jax.errors import UserError
from vit_jax.files.atomic import write_arrays
from vit_jax.parameters.names import flatten_names, stack_blocks
from vit_jax.pretrained.files.array_file import ArrayInfo, read_arrays
from vit_jax.pretrained.files.containers import open_container
from vit_jax.workdir.description import write_params


def read_npz(path: Path) -> dict[str, np.ndarray]:
    with open_container(path) as container:
        return read_arrays(container, container.arrays)


def test_round_trip_from_either_form_and_the_same_bytes(tmp_path: Path) -> None:
    tree = loop_tree()
    write_params(tmp_path / "a.npz", tree)
    write_params(tmp_path / "b.npz", stack_blocks(tree))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    read = read_npz(tmp_path / "a.npz")
    for name, array in flatten_names(tree).items():
        np.testing.assert_array_equal(read[name], array.astype(np.float32))
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith("tmp")] == []


def test_the_names_in_the_file_are_the_official_flat_names(tmp_path: Path) -> None:
    write_params(tmp_path / "a.npz", loop_tree())
    with np.load(tmp_path / "a.npz") as file:
        assert "Transformer/encoderblock_11/a/kernel" in file.files
        assert file["cls"].dtype == np.float32


def test_writing_gives_the_bytes_of_numpy_whatever_the_names(tmp_path: Path) -> None:
    arrays = {"head/kernel": np.ones((3, 2), np.float32), "step": np.asarray(3)}
    np.savez(tmp_path / "numpy.npz", **arrays)
    write_arrays(tmp_path / "ours.npz", arrays)
    assert (tmp_path / "ours.npz").read_bytes() == (tmp_path / "numpy.npz").read_bytes()
    write_arrays(tmp_path / "file.npz", {"file": np.zeros(2)})  # np.savez cannot take this name
    with open_container(tmp_path / "file.npz") as container:
        assert list(container.arrays) == ["file"]


def every_type() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((5, 3, 4))
    return {
        "float32": values.astype(np.float32),
        "float16": values.astype(np.float16),
        "float64": values,
        "bfloat16": values.astype(ml_dtypes.bfloat16),
        "big-endian": values.astype(">f4"),
        "big-endian integers": np.arange(6, dtype=">i8"),
        "fortran": np.asfortranarray(values.astype(np.float32)),
        "fortran float16": np.asfortranarray(values.astype(np.float16)),
        "scalar": np.float32(2.5),
        "empty": np.zeros((0, 3), np.float32),
        "integers": np.arange(-3, 3, dtype=np.int16),
        "booleans": np.asarray([True, False]),
        "long": rng.standard_normal(700_000),  # more than one chunk, and not a multiple of one
    }


@pytest.mark.parametrize("compressed", [False, True])
def test_every_type_and_order_is_read_as_float32_or_as_it_is(
    tmp_path: Path, compressed: bool
) -> None:
    arrays = every_type()
    (np.savez_compressed if compressed else np.savez)(tmp_path / "a.npz", **arrays)
    with open_container(tmp_path / "a.npz") as container:
        assert list(container.arrays) == list(arrays)
        assert container.arrays["bfloat16"] == ArrayInfo((5, 3, 4), "bfloat16")
        assert container.arrays["big-endian"] == ArrayInfo((5, 3, 4), "float32")
        read = read_arrays(container, arrays)
    for name, array in arrays.items():
        floats = array.dtype.kind in "fV"
        expected = array.astype(np.float32) if floats else array
        np.testing.assert_array_equal(read[name], expected, strict=not name.startswith("big"))
        assert read[name].flags.c_contiguous, name
        assert read[name].flags.writeable, name
        assert read[name].dtype.isnative, name


def test_an_honest_file_of_zeros_is_read_though_it_shrank_a_thousandfold(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", head=np.zeros((768, 21_843), np.float32))
    assert (tmp_path / "a.npz").stat().st_size < 100_000
    assert not read_npz(tmp_path / "a.npz")["head"].any()


def test_reading_takes_the_memory_of_the_arrays_once(tmp_path: Path) -> None:
    size = 32 << 20
    array = np.zeros(size // 4, np.float32)
    np.savez(tmp_path / "stored.npz", a=array)
    np.savez_compressed(tmp_path / "deflated.npz", a=array)
    for name in ("stored.npz", "deflated.npz"):
        tracemalloc.start()
        read_npz(tmp_path / name)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert size <= peak < 1.2 * size, name


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UserError, match="it holds pickled Python objects, which are never loaded"):
        open_container(tmp_path / "a.npz")


def damaged(path: Path, kind: str) -> None:
    write_params(path, loop_tree())
    content = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "flipped":
        middle = len(content) // 3
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("404 not found")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif kind == "objects":
        np.savez(path, a=np.array([{"a": 1}], dtype=object))
    elif kind == "records":
        np.savez(path, a=np.zeros(3, [("x", "f4"), ("y", "f4")]))
    elif kind == "texts":
        np.savez(path, a=np.array(["a"]))
    elif kind == "too large for float32":
        np.savez(path, a=np.asarray([1e300]))
    elif kind == "single array":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
    elif kind == "no arrays":
        np.savez(path)


@pytest.mark.parametrize(
    "kind",
    [
        *("truncated", "flipped", "empty", "text", "pickle", "objects", "records", "texts"),
        *("too large for float32", "single array", "no arrays"),
    ],
)
def test_what_is_no_file_of_parameters_gives_one_clear_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "params.npz"
    damaged(path, kind)
    with pytest.raises(UserError, match=r"params\.npz") as error:
        read_npz(path)
    assert "\n" not in str(error.value)


def test_an_unwritable_place_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file.*a.npz"):
        write_params(tmp_path / "missing" / "a.npz", loop_tree())


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a.npz", {"a": np.zeros(2)})
    before = (tmp_path / "a.npz").read_bytes()
    with pytest.raises(ValueError, match="Object arrays"):
        write_arrays(tmp_path / "a.npz", {"a": np.ones(2), "b": np.array([{}], object)})
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    assert (tmp_path / "a.npz").read_bytes() == before
