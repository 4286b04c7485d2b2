"""The manifest of a folder notices what happened to its files, and to itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vit_jax.checksums import MANIFEST, damaged_files, read_manifest, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "data").write_bytes(b"\0" * 1000)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "index").write_bytes(b"index")
    write_manifest(tmp_path, {"metrics": {"accuracy": 0.5, "loss": float("nan")}})
    return tmp_path


def test_an_intact_folder(folder: Path) -> None:
    assert damaged_files(folder) == []
    manifest = read_manifest(folder)
    assert manifest is not None
    assert sorted(manifest["files"]) == ["d/data", "empty", "index"]
    assert manifest["files"]["d/data"][0] == 1000
    assert manifest["note"]["metrics"]["accuracy"] == 0.5


def test_changed_missing_and_unreadable_files_are_named(folder: Path) -> None:
    (folder / "d" / "data").write_bytes(b"\0" * 999 + b"\1")
    (folder / "empty").unlink()
    (folder / "index").unlink()
    (folder / "index").mkdir()
    assert damaged_files(folder) == ["d/data", "empty", "index"]


def test_files_that_are_not_listed_do_not_count(folder: Path) -> None:
    (folder / ".DS_Store").write_bytes(b"x")
    assert damaged_files(folder) == []


def test_any_change_of_the_manifest_is_noticed(folder: Path) -> None:
    path = folder / MANIFEST
    original = path.read_bytes()
    content = json.loads(original)
    for position in range(len(original)):
        changed = bytearray(original)
        changed[position] ^= 0x04
        path.write_bytes(changed)
        if damaged_files(folder) == []:  # white space, or a digit beyond what a float holds
            got = json.loads(bytes(changed))
            assert json.dumps(got, sort_keys=True) == json.dumps(content, sort_keys=True)
        else:
            assert damaged_files(folder) == [MANIFEST]
    for other in (b"", b"[]", b"{}", b"null", original[:-9], b"\xff" + original):
        path.write_bytes(other)
        assert damaged_files(folder) == [MANIFEST]
    path.unlink()
    assert damaged_files(folder) == [MANIFEST]
