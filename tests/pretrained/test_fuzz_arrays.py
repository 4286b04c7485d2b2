"""Damaged and hostile files by the thousand: the true arrays, or one clear line.

Everything is drawn from fixed seeds. Damage by accident: bytes of a sound file are cut, flipped,
moved or added; what has checksums must then give the true arrays bit for bit, or a UserError.
Damage by intent: the content is changed and the checksums are made to fit.
"""

from __future__ import annotations

import io
import os
import random
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

from vit_jax.errors import UserError
from vit_jax.pretrained.arrays import read_arrays

_RNG = np.random.default_rng(0)
ARRAYS = {
    "head/kernel": _RNG.standard_normal((4, 5)).astype(np.float32),
    "head/bias": _RNG.standard_normal(5).astype(np.float16),
    "step": np.asarray(7, np.int32),
}
_MAX_GROWTH_KB = 300 << 10


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, **ARRAYS)
    return file.getvalue()


def npz_compressed() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **ARRAYS)
    return file.getvalue()


def tensors() -> bytes:
    half = {"half": ARRAYS["head/kernel"].astype(ml_dtypes.bfloat16)}
    return safetensors.numpy.save(ARRAYS | half, {"format": "pt"})


def pth(zipped: bool = True) -> bytes:
    file = io.BytesIO()
    state = {name: torch.from_numpy(array.copy()) for name, array in ARRAYS.items()}
    state["view"] = state["head/kernel"].T[1:]
    saved = {"model": state, "epoch": 3}
    torch.save(saved, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def pth_stream() -> bytes:
    return pth(zipped=False)


CHECKED = (npz, npz_compressed, pth)
UNCHECKED = (tensors, pth_stream)

Arrays = dict[str, tuple[str, tuple[int, ...], bytes]]


class Reader:
    """Reads damaged content from a file and keeps watch over memory and open files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refused = 0
        self._before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._files = len(os.listdir("/proc/self/fd"))

    def read(self, content: bytes) -> Arrays | None:
        """All arrays (type, shape, bytes), or None where a UserError says why not."""
        self.path.write_bytes(content)
        try:
            arrays = read_arrays(self.path)
        except UserError as error:
            text = str(error)
            assert "\n" not in text
            assert str(self.path) in text
            assert len(text) < 1000
            self.refused += 1
            return None
        return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in arrays.items()}

    def truth(self, content: bytes) -> Arrays:
        arrays = self.read(content)
        assert arrays is not None
        return arrays

    def check(self) -> None:
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._before
        assert growth < _MAX_GROWTH_KB
        assert len(os.listdir("/proc/self/fd")) <= self._files


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path / "weights")
    yield reader
    reader.check()


def flips(content: bytes) -> Iterator[bytes]:
    """Every byte once, in one random bit."""
    rng = random.Random(1)
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.randrange(8)
        yield bytes(damaged)


def disorder(content: bytes) -> Iterator[bytes]:
    """Blocks changed for each other, repeated, dropped, blanked; garbage before and after."""
    rng = random.Random(2)
    for _ in range(150):
        size = rng.choice([1, 8, 64, 512])
        a, b = (rng.randrange(max(len(content) - size, 1)) for _ in range(2))
        swapped = bytearray(content)
        swapped[a : a + size], swapped[b : b + size] = content[b : b + size], content[a : a + size]
        yield bytes(swapped[: len(content)])
        yield content[:a] + content[b:]
        yield content[:a] + bytes(size) + content[a + size :]
        yield content[:a] + rng.randbytes(size) + content[a + size :]
    for size in (1, 22, 100, 70_000):
        yield content + bytes(size)
        yield content + rng.randbytes(size)
        yield rng.randbytes(size) + content
    yield content + content


@pytest.mark.parametrize("make", CHECKED + UNCHECKED)
def test_a_file_cut_short_is_always_refused(reader: Reader, make: Callable[[], bytes]) -> None:
    content = make()
    reader.truth(content)
    for size in [*range(0, len(content), 3), len(content) - 1, len(content) - 2]:
        assert reader.read(content[:size]) is None, size


@pytest.mark.parametrize("make", CHECKED + UNCHECKED)
@pytest.mark.parametrize("damage", [flips, disorder])
def test_with_checksums_damage_never_changes_a_number(
    reader: Reader, make: Callable[[], bytes], damage: Callable[[bytes], Iterator[bytes]]
) -> None:
    content = make()
    expected = reader.truth(content)
    for damaged in damage(content):
        arrays = reader.read(damaged)
        assert arrays is None or arrays == expected or make in UNCHECKED
    assert reader.refused > (100 if make in UNCHECKED else 300)


def mutations(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    """A few bytes replaced by random or by telling ones; some pieces inserted or removed."""
    rng = random.Random(seed)
    telling = [b"\xff" * 8, b"\0" * 8, b"\x7f\xff\xff\xff", b"9" * 9, *map(bytes, zip(b"(.-R\x94"))]
    for _ in range(count):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            position = rng.randrange(len(damaged))
            piece = rng.choice([rng.randbytes(rng.randint(1, 4)), rng.choice(telling)])
            removed = rng.choice([0, 1, len(piece)])
            damaged[position : position + removed] = piece
        yield bytes(damaged)


def rezipped(content: bytes, name: str, replacement: bytes) -> bytes:
    """A zip file with one member replaced, with the checksum that belongs to it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        for member in old.namelist():
            new.writestr(member, replacement if member == name else old.read(member))
    return file.getvalue()


def member(content: bytes, end: str) -> tuple[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        name = next(name for name in archive.namelist() if name.endswith(end))
        return name, archive.read(name)


def test_pickles_changed_by_intent_are_survived(reader: Reader) -> None:
    content = pth()
    name, pickled = member(content, "data.pkl")
    assert reader.truth(rezipped(content, name, pickled)) == reader.truth(content)
    for mutated in mutations(pickled, 3, 1000):
        reader.read(rezipped(content, name, mutated))
    assert reader.refused > 500


def test_array_headers_changed_by_intent_are_survived(reader: Reader) -> None:
    content = npz()
    name, array = member(content, "head/kernel.npy")
    for mutated in mutations(array[:80], 4, 1000):
        reader.read(rezipped(content, name, mutated + array[80:]))
    assert reader.refused > 500


def test_headers_of_safetensors_changed_by_intent_are_survived(reader: Reader) -> None:
    content = tensors()
    (size,) = struct.unpack("<Q", content[:8])
    for mutated in mutations(content[8 : 8 + size], 7, 1000):
        reader.read(struct.pack("<Q", len(mutated)) + mutated + content[8 + size :])
    assert reader.refused > 500
