"""PyTorch's files by an attacker: they end in one line soon, and change nothing outside."""

import argparse
import collections
import pickle
import pickletools
import random
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.pretrained.test_arrays import refused
from tests.pretrained.test_torch_file import STORAGE, stream_with, tensor, zip_with
from vit_jax.errors import UserError
from vit_jax.pretrained import torch_file
from vit_jax.pretrained.arrays import read_arrays


def text(value: str) -> bytes:
    return b"X" + struct.pack("<L", len(value)) + value.encode()


GOOD = tensor()[2:-1]  # pushes a state dict

# A tuple that is short, and as a tree has 2**60 leaves; at the end of the memo.
BUSHY = b"\x80\x04)\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60)) + b"0" * 61
LEVELS = b"".join(
    b"}(" + b"".join(text(key) + b"h%c" % n for key in ("model", "model_ema", "teacher")) + b"u\x94"
    for n in range(200)
)
ITEMS = b"".join(text(f"{n}") + b"N" for n in range(20_000))
LONG = b"\x80\x04(" + b"N" * 500_000 + b"t\x940"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n("
HOSTILE = {  # what took hours, gigabytes or the process down with it
    "a nested key": b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.",
    "a bushy key": BUSHY + b"}h\x3cNs.",
    "a set of a bushy tuple": BUSHY + b"\x8f(h\x3c\x90(h\x3c\x91.",
    "keys of one hash": b"\x80\x02}("
    + b"".join(pickle.dumps(n * (2**61 - 1), 2)[2:-1] + b"N" for n in range(40_000))
    + b"u.",
    "one dict in many": b"\x80\x04}\x94" + LEVELS + b".",
    "one long dict in many": b"\x80\x04}(" + ITEMS + b"u\x940}("
    + ITEMS.replace(b"N", b"h\0") + b"u.",
    "many long calls": LONG + b"cfoo\nbar\n\x94" + b"h\1h\0R0" * 20_000 + b".",
    "many long names": b"\x80\x04" + text("x" * 500_000) + b"\x94" + b"h\0h\0\x930" * 20_000 + b".",
    "a bushy storage": BUSHY + b"}" + text("a") + REBUILD + b"h\x3cK\0K\2\x85K\1\x85\x89NtRs.",
    "bushy sizes": BUSHY + b"}" + text("a") + REBUILD + STORAGE + b"K\0h\x3ch\x3c\x89NtRs.",
    "expanded": tensor(shape=(10**6, 10**6), strides=(0, 0)),
    "a million digits": b"\x80\x02\x8b" + struct.pack("<L", 400_000) + b"1" * 400_000 + b".",
    "a length that lies": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "a storage of 2**62": tensor().replace(b"K\2tQ", b"\x8a\x08\0\0\0\0\0\0\0\x40tQ"),
    "millions of marks": b"\x80\x02" + b"(" * (3 << 20) + b".",
    "a class in place": b"\x80\x02(ifoo\nbar\n.",
    "names of a megabyte": b"\x80\x02}("
    + b"".join(text(c * 1_000_000) + GOOD for c in "ab")
    + b"u.",
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_time_and_memory_are_bounded(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.pth").write_bytes(zip_with(HOSTILE[kind], {"data/0": bytes(8)}))
    refused(tmp_path / "a.pth")


def test_keys_of_the_stream_are_strings(tmp_path: Path) -> None:
    start = stream_with(b"\x80\x02}.")[: -len(pickle.dumps([], 2))]
    (tmp_path / "a.pth").write_bytes(start + b"\x80\x02])" + b"\x85" * 300_000 + b"a.")
    refused(tmp_path / "a.pth")


def process() -> list[str]:
    """What a pickle might reach and change."""
    kinds = [x for x in vars(torch_file).values() if isinstance(x, type)]
    owners = (*kinds, collections.OrderedDict, argparse.Namespace, torch_file, pickle)
    types = [np.dtype(ml_dtypes.bfloat16), *map(np.dtype, ("f2", "f4", "f8", "i8", "u1", "?"))]
    contents = [{k: v for k, v in vars(x).items() if k != "__builtins__"} for x in owners]
    return [*map(repr, contents), *(f"{x.str} {x.name} {x.itemsize}" for x in types)]


STATE = b"(K\x03X\x01\0\0\0VNNNK\x01K\x01K\0t"  # of a dtype whose items have one byte


@pytest.mark.parametrize(
    "state", [STATE, b"}" + text("append") + b"Ns", b"N}" + text("V") + b"Ns\x86"]
)
def test_a_pickle_changes_nothing_outside(tmp_path: Path, state: bytes) -> None:
    before = process()
    values = np.asarray([1.5, -2.0], "<f4")
    for name in ("torch BFloat16Storage", "collections OrderedDict", "foo bar", "torch Size"):
        target = b"c" + name.replace(" ", "\n").encode() + b"\n"
        pickled = b"\x80\x02" + target + state + b"b0" + GOOD + b"."
        (tmp_path / "a.pth").write_bytes(zip_with(pickled, {"data/0": values.tobytes()}))
        np.testing.assert_array_equal(read_arrays(tmp_path / "a.pth")["a"], values)
        assert process() == before, name


def programs() -> list[bytes]:
    """Random opcodes after what they may change or call, then a state dict."""
    rng = random.Random(0)
    operands = {"uint1": b"\1", "uint2": b"\1\0", "int4": b"\1\0\0\0", "uint4": b"\0\0\0\x80"}
    codes = [
        opcode.code.encode("latin-1") + (operands[opcode.arg.name] if opcode.arg else b"")
        for opcode in pickletools.opcodes
        if opcode.arg is None or opcode.arg.name in operands
    ]
    names = (b"torch\nBFloat16Storage", b"collections\nOrderedDict", b"foo\nbar", b"torch\nSize")
    targets = [*(b"c" + name + b"\n" for name in names), b"}", STORAGE]
    values = (STATE, b")", b"}" + text("append") + b"Ns")
    calls = (b"b", b"R", b"a", b"Q")
    return [
        b"\x80\x04"
        + b"".join(
            rng.choice(targets) + rng.choice(values) + rng.choice(rng.choice((calls, codes)))
            for _ in range(rng.randrange(1, 4))
        )
        + GOOD
        + b"."
        for _ in range(400)
    ]


def test_random_programs_change_nothing_outside(tmp_path: Path) -> None:
    before, path, loaded = process(), tmp_path / "a.pth", 0
    values = np.asarray([1.5, -2.0], "<f4")
    for number, pickled in enumerate(programs()):
        wrap = zip_with(pickled, {"data/0": values.tobytes()}), stream_with(pickled)
        path.write_bytes(wrap[number % 4 == 0])
        try:
            np.testing.assert_array_equal(read_arrays(path)["a"], values)
            loaded += 1
        except UserError:
            refused(path)
    assert process() == before
    assert 40 < loaded < 360
