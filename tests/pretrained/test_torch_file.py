"""PyTorch's files: what torch saved, or a line that says why not; no code in them is ever run."""

import argparse
import collections
import datetime
import io
import os
import pickle
import pickletools
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pretrained.test_arrays import refused
from vit_jax.errors import UserError
from vit_jax.pretrained.arrays import read_arrays


def every_tensor() -> dict[str, Any]:
    values = torch.arange(24.0).reshape(2, 3, 4) / 7
    tied = torch.arange(5.0)
    types = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16)
    return {
        "float32": values,
        **{str(dtype): values.to(dtype) for dtype in (*types, torch.int8, torch.uint8)},
        "bool": values > 1,
        "parameter": torch.nn.Parameter(values),
        "permuted": values.permute(2, 0, 1),
        "every other": values[1, :, ::2],
        "permuted bfloat16": values.to(torch.bfloat16).permute(1, 2, 0),
        "tied": tied,
        "part of the tied": tied[2:],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "size one": torch.ones(2, 1, 2)[:, :, :1],
    }


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
def test_every_tensor_is_what_torch_saved(tmp_path: Path, zipped: bool) -> None:
    tensors = every_tensor()
    torch.save(tensors, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    read = read_arrays(tmp_path / "a.pth")
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype.name == str(tensor.dtype).removeprefix("torch.")
        expected = tensor.detach().to(torch.float64).numpy()
        np.testing.assert_array_equal(read[name].astype(np.float64), expected, strict=True)


def test_the_parameters_of_a_checkpoint_are_read(tmp_path, caplog):
    """Beside what DeiT's and similar scripts save: arguments, optimizer, counters."""
    model = torch.nn.Linear(3, 2)
    size, device = torch.Size([1, 2]), torch.device("cpu")
    saved = {
        "model": model.state_dict(),
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
        "epoch": 3,
        "best": np.float64(0.5),
        "history": collections.deque([np.arange(3.0)]),
        "model_ema": {key: value + 1 for key, value in model.state_dict().items()},
        "args": argparse.Namespace(size=size, device=device, dtype=torch.int8, out=Path("out")),
    }
    torch.save(saved, tmp_path / "a.pth")
    read = read_arrays(tmp_path / "a.pth")
    assert list(read) == ["weight", "bias"]
    # Of a model and its average the latter, as timm takes, unless one is named.
    np.testing.assert_array_equal(read["bias"], saved["model_ema"]["bias"].numpy())
    assert "'model_ema' is used" in caplog.text
    named = read_arrays(tmp_path / "a.pth", "model")
    np.testing.assert_array_equal(named["bias"], saved["model"]["bias"].numpy())
    with pytest.raises(UserError, match="no state dict 'what', only model, model_ema"):
        read_arrays(tmp_path / "a.pth", "what")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_protocols_and_what_scripts_save(tmp_path: Path, protocol: int, zipped: bool) -> None:
    state_dict = collections.OrderedDict(a=torch.nn.Parameter(torch.arange(3.0)))
    state_dict._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    saved = {
        "state_dict": state_dict,
        "args": argparse.Namespace(out=Path("out"), tags={"a"}, frozen=frozenset("ab")),
        "when": datetime.datetime(2026, 11, 28),
        "kind": pickletools.StackObject("int", int, ""),  # an object with state
        "losses": [0.5, np.float32(1), np.arange(3), b"raw", bytearray(b"raw"), 1 << 70, 1j],
        "counts": collections.defaultdict(int, {1: 2, (1, 2): 3}),
    }
    options: dict[str, Any] = {"_use_new_zipfile_serialization": zipped}
    torch.save(saved, tmp_path / "a.pth", pickle_protocol=protocol, **options)
    read = read_arrays(tmp_path / "a.pth")
    np.testing.assert_array_equal(read.pop("a"), np.arange(3, dtype=np.float32), strict=True)
    assert not read
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pth", pickle_protocol=protocol, **options)
    refused(tmp_path / "a.pth", "never run.; torch.save.model.state_dict")


def test_tensors_that_share_a_storage_share_memory(tmp_path: Path) -> None:
    whole = torch.arange(1000.0)
    torch.save({f"{n}": whole[n:] for n in range(50)}, tmp_path / "a.pth")
    read = read_arrays(tmp_path / "a.pth")
    assert all(np.shares_memory(read["0"], array) for array in read.values())


ONE, TWO = {"w": torch.ones(2)}, {"w": torch.ones(3)}


def test_which_entry_is_taken(tmp_path: Path) -> None:
    for saved in (
        {"state_dict": ONE, "teacher": TWO},
        {"state_dict": {"model": ONE, "step": 1}},
        {"module": ONE, "epoch": 1},
        {"model": {"name": "vit"}, "weights": ONE},
        {**ONE, "extra": TWO, "n": 1},
        {"model": {**ONE, 3: 1, (1, 2): 3}},
    ):
        torch.save(saved, tmp_path / "a.pth")
        read = read_arrays(tmp_path / "a.pth")
        assert {name: array.shape for name, array in read.items()} == {"w": (2,)}


def test_what_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    wrong: list[tuple[Any, str]] = [
        ({"img": ONE, "txt": TWO}, r"several state dicts \('img', 'txt'\)"),
        ({"model": {"name": "vit"}}, "no state dict"),
        ([torch.ones(3)], "no state dict"),
        ({"a\n": torch.ones(3)}, "not the name of an array"),
        ({(1, 2): torch.ones(3)}, "not the name of an array"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "tensors of an unsupported type"),
        ({"a": torch.ones(2).to(torch.float8_e5m2)}, "_rebuild_tensor_v3.*not supported"),
        ({"a": torch.ones(2, 2).to_sparse()}, "torch._utils._rebuild_sparse_tensor"),
        (torch.nn.Linear(2, 2), "never run.; torch.save.model.state_dict"),
    ]
    for saved, message in wrong:
        torch.save(saved, tmp_path / "a.pth")
        refused(tmp_path / "a.pth", message)


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
        "INST": b"(S'" + raw + b"'\ni" + name + b".",
        "BUILD": b"\x80\x02cargparse\nNamespace\n)\x81}X\x04\0\0\0evil"
        + b"c" + name + text + b"\x85Rsb.",
        "an item of a dict": pickle.dumps({"model": {"a": Run(command)}}, 2),
        "an argument of a call": b"\x80\x02ctorch\ndevice\nc" + name + text + b"\x85R\x85R.",
        "a harmless class with a hook": b"\x80\x02ccollections\nOrderedDict\n"
        + b"c" + name + b"\x85R.",
        "a module": b"\x80\x02cantigravity\nnothing\n.",  # importing alone would run its code
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


@pytest.mark.parametrize("wrap", [zip_with, stream_with], ids=["zip", "stream"])
def test_pickled_code_is_never_run(tmp_path: Path, wrap: Callable[[bytes], bytes]) -> None:
    marker = tmp_path / "marker"
    for kind, content in attacks(f"touch {marker}").items():
        (tmp_path / "a.pth").write_bytes(wrap(content))
        refused(tmp_path / "a.pth")
        assert not marker.exists(), kind
    assert "antigravity" not in sys.modules


STORAGE = (
    b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x02tQ"  # 2 elements
)


def tensor(offset: int = 0, shape: Any = (2,), strides: Any = (1,)) -> bytes:
    """The pickle of {"a": a tensor} over a storage of two float32."""

    def inner(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    parts = STORAGE, inner(offset), inner(shape), inner(strides), b"\x89N"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + b"".join(parts) + b"tR"
    return b"\x80\x02}X\x01\0\0\0a" + call + b"s."


def test_tensors_stay_within_their_data(tmp_path: Path) -> None:
    path, values = tmp_path / "a.pth", np.asarray([1.5, -2.0], "<f4")
    for pickled in (
        b"",
        b"\x80\x02" + b"N0" * (9 << 20) + b".",
        b"\x80\x04}\x94\x8c\x05modelh\0s.",  # a dict in itself
        tensor(offset=-1),
        tensor(offset=1),
        tensor(shape=(3,)),
        tensor(shape=(-2,)),
        tensor(strides=(-1,)),
        tensor(strides=(2**63 - 1,)),
        tensor().replace(b"X\x01\0\0\x000", b"X\x01\0\0\x001"),  # no such storage
        tensor().replace(b"FloatS", b"DoubleS"),
    ):
        path.write_bytes(zip_with(pickled, {"data/0": values.tobytes()}))
        refused(path)
    # One that is sound is read.
    big_endian = {"data/0": values.astype(">f4").tobytes(), "byteorder": b"big"}
    for data in ({"data/0": values.tobytes()}, big_endian):
        path.write_bytes(zip_with(tensor(), data))
        np.testing.assert_array_equal(read_arrays(path)["a"], values)
