"""The doors through which files are read."""

import os
import pathlib

import pytest

from vit_jax.errors import UserError
from vit_jax.files.paths import (
    parse_json,
    read_file,
    read_json,
    read_object,
    to_path,
    write_atomically,
)


@pytest.fixture
def odd(tmp_path: pathlib.Path) -> dict[str, pathlib.Path]:
    """What is no file, by what would happen on opening it."""
    paths = {name: tmp_path / name for name in ("waits", "endless", "folder", "circle", "nowhere")}
    os.mkfifo(paths["waits"])
    paths["endless"].symlink_to("/dev/zero")
    paths["folder"].mkdir()
    paths["circle"].symlink_to(paths["circle"])
    paths["nowhere"].symlink_to(tmp_path / "missing")
    return paths


@pytest.mark.parametrize("name", ["waits", "endless", "folder", "circle", "nowhere"])
def test_what_is_no_file_is_not_opened(odd: dict[str, pathlib.Path], name: str) -> None:
    with pytest.raises(OSError):
        read_file(odd[name])
    with pytest.raises(UserError, match=f"{name} cannot be read: [^.]+[.]$"):
        read_json(odd[name])


def test_a_file_has_a_largest_size(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 0 MiB"):
        read_file(path, 4)


def test_json_is_json_of_bounded_depth(tmp_path: pathlib.Path) -> None:
    assert parse_json(b'{"a": [1]}') == {"a": [1]}
    for text in ("", "[1,", "{'a': 1}", "[" * 10**6, '{"a":' * 10**6, b"\xff\xfe"):
        with pytest.raises(ValueError):
            parse_json(text)
    path = tmp_path / "results.json"
    for number in ("NaN", "-Infinity", "1e999"):
        path.write_text(f'{{"step": 1, "test/accuracy": {number}}}')
        with pytest.raises(UserError, match="damaged, 'test/accuracy' is (nan|-?inf); restore"):
            read_object(path, step=int)


def test_a_path_and_a_message_hold_no_control_characters() -> None:
    with pytest.raises(UserError, match=r"a\\x00b is no path"):
        to_path("a\0b")
    assert str(UserError("x\x1b[2J\0\r\n\u202e\udcff")) == r"x\x1b[2J\x00\r\n\u202e\udcff"


def test_what_is_no_file_is_not_replaced(odd: dict[str, pathlib.Path]) -> None:
    for name in ("waits", "endless", "folder"):
        before = odd[name].lstat()
        with pytest.raises(OSError, match="a folder or a device, not a file"):
            write_atomically(odd[name], "")
        assert odd[name].lstat() == before
    assert not list(odd["folder"].parent.glob("*.unfinished"))
