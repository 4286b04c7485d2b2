"""The manifest of a folder notices what happened to its files, and to itself."""

import errno
import json
from pathlib import Path

import pytest

from vit_jax.files.manifest import (
    MANIFEST,
    damaged_files,
    read_manifest,
    read_or_none,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "data").write_bytes(b"\0" * 1000)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "index").write_bytes(b"index")
    write_manifest(tmp_path, {"metrics": {"accuracy": 0.5, "loss": float("nan")}})
    return tmp_path


def test_changed_missing_and_unreadable_files_are_named(folder):
    (folder / ".DS_Store").write_bytes(b"x")  # is not listed
    assert damaged_files(folder) == []
    manifest = read_manifest(folder)
    assert manifest is not None
    assert sorted(manifest["files"]) == ["d/data", "empty", "index"]
    assert manifest["files"]["d/data"][0] == 1000
    assert manifest["note"]["metrics"]["accuracy"] == 0.5
    (folder / "d" / "data").write_bytes(b"\0" * 999 + b"\1")
    (folder / "empty").unlink()
    (folder / "index").unlink()
    (folder / "index").mkdir()
    assert damaged_files(folder) == ["d/data", "empty", "index"]


@pytest.mark.parametrize("which", ["data", MANIFEST])
def test_what_cannot_be_read_now_is_not_called_damaged(folder, monkeypatch, which):
    opened = Path.open

    def fails(path, *args, **kwargs):
        if path.name == which:
            raise OSError(errno.ESTALE, "no luck")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(OSError, match="no luck"):
        damaged_files(folder)


@pytest.mark.parametrize(("failures", "expected"), [(1, "content"), (2, None)])
def test_a_bad_sector_says_so_twice(failures, expected):
    errors = [OSError(errno.EIO, "no luck")] * failures

    def read():
        if errors:
            raise errors.pop()
        return "content"

    assert read_or_none(read) == expected


def test_any_change_of_the_manifest_is_noticed(folder):
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
