"""Files damaged by accident, by the thousand: the true arrays, or one clear line.

Bytes of a sound file are cut, flipped, moved or added, drawn from fixed seeds. What has checksums
must then give the true arrays bit for bit, or a UserError.
"""

import io
import random
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


def npz() -> bytes:
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


CHECKED = (npz, pth)
UNCHECKED = (tensors, pth_stream)

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
    """Blocks changed for each other, repeated, dropped, blanked; garbage before and after."""
    rng = random.Random(2)
    for _ in range(75):
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
def test_a_file_cut_short_is_always_refused(tmp_path: Path, make: Callable[[], bytes]) -> None:
    content = make()
    assert read(tmp_path / "a", content) is not None
    for size in [*range(0, len(content), 9), len(content) - 1, len(content) - 2]:
        assert read(tmp_path / "a", content[:size]) is None, size


@pytest.mark.parametrize("make", CHECKED + UNCHECKED)
@pytest.mark.parametrize("damage", [flips, disorder])
def test_with_checksums_damage_never_changes_a_number(
    tmp_path: Path, make: Callable[[], bytes], damage: Callable[[bytes], Iterator[bytes]]
) -> None:
    content = make()
    expected = read(tmp_path / "a", content)
    results = [read(tmp_path / "a", damaged) for damaged in damage(content)]
    assert make in UNCHECKED or all(result in (None, expected) for result in results)
    assert results.count(None) > (30 if make in UNCHECKED else 100)
