from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.pretrained.files.containers import open_container

# Pickles that run code when they are loaded.


class Run:
    """Pickled as a call of os.system, the way every textbook attack is."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def attacks(command: str) -> dict[str, bytes]:
    raw = command.encode()
    text = b"X" + struct.pack("<L", len(raw)) + raw
    name = f"{os.system.__module__} system".replace(" ", "\n").encode() + b"\n"
    return {
        "REDUCE of a GLOBAL": b"\x80\x02c" + name + text + b"\x85R.",
        "REDUCE of a STACK_GLOBAL": pickle.dumps(Run(command), 4),
        "REDUCE of text opcodes": pickle.dumps(Run(command), 0),
        "INST": b"(S'" + raw + b"'\ni" + name + b".",
        "OBJ": b"(c" + name + text + b"o.",
        "NEWOBJ": b"\x80\x02c" + name + text + b"\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04c" + name + text + b"\x85}\x92.",
        "BUILD": b"\x80\x02cargparse\nNamespace\n)\x81}X\x04\0\0\0evil"
        + b"c" + name + text + b"\x85Rsb.",
        "an item of a dict": pickle.dumps({"model": {"a": Run(command)}}, 2),
        "a list": pickle.dumps([[[Run(command)]]], 2),
        "an argument of a call": b"\x80\x02ctorch\ndevice\nc" + name + text + b"\x85R\x85R.",
        "a persistent id": b"\x80\x02c" + name + text + b"\x85RQ.",
        "dots in a name": b"\x80\x04\x8c\x05torch\x8c\x0c_utils.os.ls\x93" + text + b"\x85R.",
        "eval": b"\x80\x02c__builtin__\neval\nX\x01\0\0\x001\x85R.",
        "a harmless class with a hook": b"\x80\x02ccollections\nOrderedDict\n"
        + b"c" + name + b"\x85R.",
        "extension registry": b"\x80\x02\x82\x01)R.",
    }  # fmt: skip


def zip_with(pickled: bytes, data: dict[str, bytes] | None = None) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in (data or {}).items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def stream_with(pickled: bytes) -> bytes:
    start = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
    return b"".join(pickle.dumps(part, 2) for part in start) + pickled + pickle.dumps([], 2)


@pytest.mark.parametrize("kind", attacks(""))
@pytest.mark.parametrize("wrap", [zip_with, stream_with], ids=["zip", "stream"])
def test_pickled_code_is_never_run(
    tmp_path: Path, kind: str, wrap: Callable[[bytes], bytes]
) -> None:
    marker = tmp_path / "marker"
    pickled = attacks(f"touch {marker}")[kind]
    (tmp_path / "a.pth").write_bytes(wrap(pickled))
    with pytest.raises(UserError, match=r"a\.pth: ") as error:
        open_container(tmp_path / "a.pth")
    assert not marker.exists()
    assert "\n" not in str(error.value)


def test_the_attacks_are_real(tmp_path: Path) -> None:
    """Python's own unpickler does run them: otherwise the test above would show nothing."""
    marker = tmp_path / "marker"
    for kind in ("REDUCE of a GLOBAL", "REDUCE of text opcodes", "INST", "an item of a dict"):
        pickle.loads(attacks(f"touch {marker}")[kind])
        assert marker.exists(), kind
        marker.unlink()


def test_a_refused_global_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(zip_with(attacks("")["REDUCE of a GLOBAL"]))
    with pytest.raises(UserError, match=r"'posix.system', and code in pickles is never run"):
        open_container(tmp_path / "a.pth")


# Pickles that eat memory, time or the stack.


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


HUGE = 1 << 31
STORAGE = (
    b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x02tQ"  # 2 elements
)


def tensor(offset: int = 0, shape: Any = (2,), strides: Any = (1,), more: bytes = b"") -> bytes:
    """The pickle of {"a": a tensor} over a storage of two float32."""

    def inner(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    parts = STORAGE, inner(offset), inner(shape), inner(strides), b"\x89N" + more
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + b"".join(parts) + b"tR"
    return b"\x80\x02}X\x01\0\0\0a" + call + b"s."


@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(opcodes(b"N" * 300_000), id="opcodes"),
        pytest.param(opcodes(b"N", b"\x85" * 100_000, b"}\x940h\0"), id="nested tuples"),
        pytest.param(opcodes(b"}", b"N", b"\x85" * 100_000, b"Ns"), id="nested tuple as a key"),
        pytest.param(opcodes(b"}N" + b"2\x86" * 60 + b"Ns"), id="laughs as a key"),
        pytest.param(opcodes(b"]" * 100_000, b"a" * 50_000), id="nested lists"),
        pytest.param(opcodes(b"(" * 100_000), id="marks"),
        pytest.param(opcodes(b"Nr" + struct.pack("<L", HUGE - 1)), id="memo"),
        pytest.param(opcodes(b"Np" + b"9" * 4000 + b"\n"), id="memo of text"),
        pytest.param(opcodes(b"\x8b" + struct.pack("<l", HUGE - 1)), id="LONG4"),
        pytest.param(opcodes(b"L" + b"9" * 100_000 + b"L\n"), id="long text"),
        pytest.param(opcodes(b"B" + struct.pack("<L", HUGE)), id="bytes"),
        pytest.param(opcodes(b"\x8e" + struct.pack("<Q", 1 << 62)), id="long bytes"),
        pytest.param(opcodes(b"\x96" + struct.pack("<Q", 1 << 62)), id="bytearray"),
        pytest.param(opcodes(b"X" + struct.pack("<L", HUGE)), id="text"),
        pytest.param(opcodes(b"\x95" + struct.pack("<Q", 1 << 62)), id="frame"),
        pytest.param(opcodes(b"S'\\d'\n"), id="odd escape"),
        pytest.param(opcodes(b"}\x94h\0h\0s"), id="dict in itself"),
        pytest.param(opcodes(b"(N" + b"2\x86" * 60 + b"Nd"), id="dict of a mark"),
        pytest.param(opcodes(b"\x8f(N" + b"2\x86" * 60 + b"\x90"), id="set"),
        pytest.param(opcodes(b"(N" + b"2\x86" * 60 + b"\x91"), id="frozen set"),
        pytest.param(opcodes(b"}\x94\x8c\x05modelh\0s"), id="model in itself"),
        pytest.param(opcodes(b"(N" + b"2t\x94(h\0" * 30_000 + b"t"), id="laughs"),
        pytest.param(
            opcodes(
                b"(",
                b"N" * 100_000,
                b"t\x94",
                b"\x8c\x05torch\x8c\x04Size\x93\x94" + b"h\1h\0\x85R" * 20_000,
            ),
            id="copies of a long tuple",
        ),
        pytest.param(opcodes(b"0" * 5), id="empty stack"),
        pytest.param(opcodes(b"h\5"), id="empty memo"),
        pytest.param(opcodes(b"t"), id="no mark"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x80\x04N", id="no end"),
        pytest.param(b"\xff" * 100, id="no opcodes"),
        pytest.param(b"\x80\x02" + b"N0" * (9 << 20) + b".", id="size"),
        pytest.param(tensor(offset=-1), id="negative offset"),
        pytest.param(tensor(offset=1), id="offset"),
        pytest.param(tensor(shape=(3,)), id="shape"),
        pytest.param(tensor(shape=(-2,)), id="negative shape"),
        pytest.param(tensor(shape=(2.0,)), id="fractions"),
        pytest.param(tensor(shape=(True,)), id="truth"),
        pytest.param(tensor(strides=(2,)), id="strides"),
        pytest.param(tensor(strides=(-1,)), id="negative strides"),
        pytest.param(tensor(strides=(1, 1)), id="number of strides"),
        pytest.param(tensor(shape=(10**15,), strides=(0,)), id="expanded"),
        pytest.param(tensor(shape=(1,) * 40, strides=(1,) * 40), id="dimensions"),
        pytest.param(tensor(shape=(0, 2**62, 2**62), strides=(1, 1, 1)), id="huge and empty"),
        pytest.param(tensor().replace(b"X\x01\0\0\x000", b"X\x01\0\0\x001"), id="no such storage"),
        pytest.param(tensor().replace(b"FloatS", b"DoubleS"), id="type of the storage"),
        pytest.param(tensor().replace(b"K\x02tQ", b"K\x01tQ"), id="size of the storage"),
        pytest.param(tensor().replace(b"storage", b"garbage"), id="kind of storage"),
    ],
)
def test_hostile_pickles_take_little(tmp_path: Path, pickled: bytes) -> None:
    (tmp_path / "a.pth").write_bytes(zip_with(pickled, {"data/0": bytes(8)}))
    tracemalloc.start()
    try:
        with (
            pytest.raises(UserError, match=r"a\.pth") as error,
            open_container(tmp_path / "a.pth") as container,
        ):
            container.read("a")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 128 << 20
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_the_hand_made_tensor_is_read_where_it_is_sound(tmp_path: Path) -> None:
    values = np.asarray([1.5, -2.0], "<f4")
    (tmp_path / "a.pth").write_bytes(zip_with(tensor(), {"data/0": values.tobytes()}))
    with open_container(tmp_path / "a.pth") as container:
        np.testing.assert_array_equal(container.read("a"), values)
    big = {"data/0": values.astype(">f4").tobytes(), "byteorder": b"big"}
    (tmp_path / "a.pth").write_bytes(zip_with(tensor(), big))
    with open_container(tmp_path / "a.pth") as container:
        np.testing.assert_array_equal(container.read("a"), values)


@pytest.mark.parametrize("data", [b"", bytes(4), bytes(7), bytes(12)])
def test_a_storage_of_another_size_than_it_says_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.pth").write_bytes(zip_with(tensor(), {"data/0": data}))
    with (
        open_container(tmp_path / "a.pth") as container,
        pytest.raises(UserError, match=r"a\.pth: storage '0' has"),
    ):
        container.read("a")


def test_no_module_is_imported(tmp_path: Path) -> None:
    """A pickle that names a module does not import it: importing alone would run its code."""
    (tmp_path / "a.pth").write_bytes(zip_with(b"\x80\x02cantigravity\nnothing\n."))
    with pytest.raises(UserError, match="'antigravity.nothing'"):
        open_container(tmp_path / "a.pth")
    assert "antigravity" not in sys.modules
