from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.test_tree import loop_tree
from vit_jax.errors import UserError
from vit_jax.pretrained.npz import read_npz, write_npz
from vit_jax.tree import flatten_names, stack_blocks


def test_round_trip_from_either_form_and_the_same_bytes(tmp_path: Path) -> None:
    tree = loop_tree()
    write_npz(tmp_path / "a.npz", tree)
    write_npz(tmp_path / "b.npz", stack_blocks(tree))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    read = flatten_names(read_npz(tmp_path / "a.npz"))
    for name, array in flatten_names(tree).items():
        np.testing.assert_array_equal(read[name], array.astype(np.float32))
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith("tmp")] == []


def test_the_names_in_the_file_are_the_official_flat_names(tmp_path: Path) -> None:
    write_npz(tmp_path / "a.npz", loop_tree())
    with np.load(tmp_path / "a.npz") as file:
        assert "Transformer/encoderblock_11/a/kernel" in file.files
        assert file["cls"].dtype == np.float32


def damaged(path: Path, kind: str) -> None:
    write_npz(path, loop_tree())
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
    elif kind == "single array":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
    elif kind == "no arrays":
        np.savez(path)
    elif kind == "integers":
        np.savez(path, a=np.zeros(3, int))


@pytest.mark.parametrize(
    "kind",
    [
        *("truncated", "flipped", "empty", "text", "pickle"),
        *("objects", "single array", "no arrays", "integers"),
    ],
)
def test_what_is_no_file_of_parameters_gives_one_clear_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "params.npz"
    damaged(path, kind)
    with pytest.raises(UserError, match=r"params\.npz") as error:
        read_npz(path)
    assert "\n" not in str(error.value)


def test_an_unwritable_place_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        write_npz(tmp_path / "missing" / "a.npz", loop_tree())
