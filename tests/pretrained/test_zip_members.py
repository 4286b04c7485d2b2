from __future__ import annotations

import functools
import io
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.pretrained.files.containers import open_container

_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")

# Hostile zip files, made by hand: `zipfile` does not write them.


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@functools.lru_cache(maxsize=1)
def deflated(content: bytes) -> bytes:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    return deflate.compress(content) + deflate.flush()


def zip_of(
    *members: tuple[str, bytes],
    method: int = 0,
    flags: int = 0,
    size: int | None = None,
    start: int | None = None,
    rest: bytes = b"",
) -> bytes:
    """A zip file whose directory claims `size`, and `start` as the place of the last member.

    `rest` follows the data of each member, and counts as part of it.
    """
    body, directory = b"", b""
    for name, content in members:
        raw = name.encode()
        data = (deflated(content) if method == 8 else content) + rest
        claimed = len(content) if size is None else size
        numbers = (zlib.crc32(content), len(data), claimed)
        at = len(body) if start is None or name != members[-1][0] else start
        body += _LOCAL.pack(b"PK\3\4", 20, flags, method, 0, 0, *numbers, len(raw), 0) + raw + data
        sizes = (len(raw), 0, 0, 0, 0, 0)
        directory += _ENTRY.pack(b"PK\1\2", 20, 20, flags, method, 0, 0, *numbers, *sizes, at) + raw
    count = len(members)
    end = _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), len(body), 0)
    return body + directory + end


A = npy(np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(zip_of(("a.npy", A), ("a.npy", A)), "lists one twice", id="twice"),
        pytest.param(zip_of(("a.npy", A), flags=1), "encrypted", id="encrypted"),
        pytest.param(zip_of(("a.npy", A), method=12), "neither stored nor deflated", id="bzip2"),
        pytest.param(zip_of(("a\nb.npy", A)), "no name of an array", id="line break"),
        pytest.param(zip_of(("\x1b[2J.npy", A)), "no name of an array", id="terminal"),
        pytest.param(zip_of(("a" * 5000 + ".npy", A)), "no name of an array", id="long name"),
        pytest.param(zip_of(("a.npy", A), ("b.txt", A)), "'b.txt' and the like", id="no array"),
        pytest.param(zip_of(("a.npy", A), start=1 << 31), "damaged", id="beyond the file"),
        pytest.param(zip_of(("a.npy", A), size=4), "damaged", id="shorter"),
        pytest.param(zip_of(("a.npy", A), method=8, size=1 << 28), "cannot have", id="growth"),
        pytest.param(zip_of(("a.npy", A + b"\0")), "cannot have 17 bytes", id="one byte more"),
        pytest.param(zip_of(("a.npy", A[:-1])), "cannot have 15 bytes", id="one byte less"),
        pytest.param(zip_of(("a.npy", b"hello")), "damaged", id="text inside"),
        pytest.param(b"MZ" + zip_of(("a.npy", A)), "of no known kind", id="bytes before"),
    ],
)
def test_hostile_zip_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        open_container(tmp_path / "a.npz")
    assert str(tmp_path / "a.npz") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        pytest.param(zip_of(("/etc/a.npy", A)), "/etc/a", id="absolute"),
        pytest.param(zip_of(("../a.npy", A)), "../a", id="outside"),
        pytest.param(zip_of(("a.npy", A), method=8, rest=bytes(1000)), "a", id="bytes behind"),
    ],
)
def test_odd_zip_files_write_nothing(tmp_path: Path, content: bytes, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.npz").write_bytes(content)
    with open_container(folder / "a.npz") as container:
        np.testing.assert_array_equal(container.read(name), np.zeros(4, np.float32))
    assert [path.name for path in tmp_path.rglob("*")] == ["folder", "a.npz"]


def header(text: str, version: int = 1) -> bytes:
    size = struct.pack("<H" if version == 1 else "<L", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + size + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 60,)}"),
        header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**62},)}}"),
        header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': (0, {2**61}, {2**61})}}"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"),
        header(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(1,) * 100}}}") + b"\0" * 4,
        header("(" * 4000),
        header("-" * 4000 + "1"),
        header("{'descr': '\\d', 'fortran_order': False, 'shape': (1,)}"),
        header("{'descr': 1L, "),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", 9) + b"\0" * 4,
        header(" " * 60_000),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
    ],
)
def test_hostile_array_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(zip_of(("a.npy", content)))
    with (
        pytest.raises(UserError, match=r"a\.npz") as error,
        open_container(tmp_path / "a.npz") as container,
    ):
        container.read("a")
    assert "\n" not in str(error.value)


def bombs() -> dict[str, bytes]:
    zeros = npy(np.zeros(1 << 23, np.float32))  # 32 MiB that shrink to 32 KiB
    short = npy(np.zeros(8000, np.float32))
    return {
        "claim to expand": zip_of(*((f"a{i}.npy", zeros) for i in range(17)), method=8),
        "Bad CRC-32 for file": zip_of(("a0.npy", A + bytes(32 << 20)), method=8, size=len(A)),
        "expected 32000 bytes got 31999": zip_of(("a0.npy", short[:-1]), method=8, size=len(short)),
    }


@pytest.mark.parametrize(("message", "content"), bombs().items(), ids=["many", "longer", "shorter"])
def test_zip_bombs_are_not_unpacked(tmp_path: Path, message: str, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    tracemalloc.start()
    try:
        with (
            pytest.raises(UserError, match=message),
            open_container(tmp_path / "a.npz") as container,
        ):
            container.read("a0")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
