from __future__ import annotations

import argparse
import collections
import pathlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vit_jax.errors import UserError
from vit_jax.pretrained.files.array_file import ArrayInfo, read_arrays
from vit_jax.pretrained.files.containers import open_container

both_formats = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])


def save(value: Any, path: Path, zipped: bool = True) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)


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
        "the last": values[1, 2],
        "permuted bfloat16": values.to(torch.bfloat16).permute(1, 2, 0),
        "tied": tied,
        "tied too": tied,
        "part of the tied": tied[2:],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "size one": torch.ones(2, 1, 2)[:, :, :1],
        "large": torch.arange(600_000).to(torch.float16),
    }


def as_loaded(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


@both_formats
def test_every_tensor_is_what_torch_saved(tmp_path: Path, zipped: bool) -> None:
    tensors = every_tensor()
    save(tensors, tmp_path / "a.pth", zipped)
    with open_container(tmp_path / "a.pth") as container:
        assert list(container.arrays) == list(tensors)
        assert container.arrays["torch.bfloat16"] == ArrayInfo((2, 3, 4), "bfloat16")
        read = read_arrays(container, tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], as_loaded(tensor), strict=True)
        assert read[name].flags.c_contiguous, name
        assert read[name].flags.writeable, name


def test_a_part_of_a_storage_is_checked_with_all_of_it(tmp_path: Path) -> None:
    large = torch.arange(1 << 16, dtype=torch.float32)
    save({"head": large[-10:]}, tmp_path / "a.pth")
    with open_container(tmp_path / "a.pth") as container:
        np.testing.assert_array_equal(container.read("head"), as_loaded(large[-10:]))
    content = bytearray((tmp_path / "a.pth").read_bytes())
    content[len(content) // 2] ^= 1  # outside the part, and all the same damaged
    (tmp_path / "a.pth").write_bytes(content)
    with (
        open_container(tmp_path / "a.pth") as container,
        pytest.raises(UserError, match="damaged"),
    ):
        container.read("head")


def checkpoint() -> dict[str, Any]:
    """What DeiT's and similar scripts save: arguments, optimizer, schedule, counters."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60])
    arguments = argparse.Namespace(
        lr=0.1, size=torch.Size([1, 2]), device=torch.device("cpu"), dtype=torch.float32
    )
    arguments.output = pathlib.Path("out")
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedule.state_dict(),
        "epoch": 3,
        "best": np.float64(0.5),
        "history": np.arange(3.0),
        "model_ema": {key: value + 1 for key, value in model.state_dict().items()},
        "args": arguments,
    }


@both_formats
def test_the_parameters_of_a_checkpoint_are_found(tmp_path: Path, zipped: bool) -> None:
    saved = checkpoint()
    save(saved, tmp_path / "a.pth", zipped)
    with open_container(tmp_path / "a.pth") as container:
        assert list(container.arrays) == ["weight", "bias"]
        np.testing.assert_array_equal(container.read("bias"), as_loaded(saved["model"]["bias"]))


ONE, TWO = {"w": torch.ones(2)}, {"w": torch.ones(3)}


def test_a_path_that_python_3_13_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pathlib._local", pathlib)
    monkeypatch.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
    save({"model": ONE, "output": pathlib.Path("out")}, tmp_path / "a.pth")
    with open_container(tmp_path / "a.pth") as container:
        assert list(container.arrays) == ["w"]


@pytest.mark.parametrize(
    "saved",
    [
        {"state_dict": ONE, "teacher": TWO},
        {"state_dict": {"model": ONE, "step": 1}},
        {"module": ONE, "epoch": 1},
        {"model": {"name": "vit"}, "weights": ONE},
        {**ONE, "extra": TWO, "n": 1},
        {"model": {**ONE, 3: 1}},
    ],
)
def test_which_entry_is_taken(tmp_path: Path, saved: dict[str, Any]) -> None:
    save(saved, tmp_path / "a.pth")
    with open_container(tmp_path / "a.pth") as container:
        assert container.arrays == {"w": ArrayInfo((2,), "float32")}


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"student": ONE, "teacher": TWO}, r"several state dicts \('student', 'teacher'\)"),
        ({"model": {"name": "vit"}}, "no state dict"),
        (torch.ones(3), "no state dict"),
        ([torch.ones(3)], "no state dict"),
        ({}, "no state dict"),
        ({3: torch.ones(3)}, "no name of an array"),
        ({"a\n": torch.ones(3)}, "no name of an array"),
        ({"a": torch.ones(1).expand(10**9)}, "does not fit the data"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "'torch.ComplexFloatStorage'"),
        ({"a": torch.ones(2).to(torch.float8_e5m2)}, "_rebuild_tensor_v3|Float8"),
        ({"a": torch.ones(2, 2).to_sparse()}, "torch._utils._rebuild_sparse_tensor"),
        ({"a": {(1, 2): 3}}, "as a key"),
        ({"a": True, 2.5: 3}, "as a key"),
        ({"model": collections.deque([1])}, "'collections.deque'"),
        (torch.nn.Linear(2, 2), "'torch.nn.modules.linear.Linear'.*torch.save.model.state_dict"),
    ],
)
@both_formats
def test_what_is_no_state_dict_is_refused(
    tmp_path: Path, saved: Any, message: str, zipped: bool
) -> None:
    save(saved, tmp_path / "a.pth", zipped)
    with pytest.raises(UserError, match=message) as error:
        open_container(tmp_path / "a.pth")
    assert "\n" not in str(error.value)


def test_many_names_for_the_same_data_are_refused(tmp_path: Path) -> None:
    shared = torch.zeros(1 << 22, dtype=torch.uint8)  # 4 MiB
    save({f"a{i}": shared for i in range(200)}, tmp_path / "a.pth")  # 800 MiB
    with pytest.raises(UserError, match=r"share 4\d* bytes and claim 838860800"):
        open_container(tmp_path / "a.pth")


@pytest.mark.parametrize("rest", [b"", b"\x05", b"\0" * 100])
def test_a_stream_that_does_not_end_where_it_should(tmp_path: Path, rest: bytes) -> None:
    save({"a": torch.ones(2)}, tmp_path / "a.pth", zipped=False)
    content = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "a.pth").write_bytes(content + rest if rest else content[:-1])
    with pytest.raises(UserError, match="storages end at byte"):
        open_container(tmp_path / "a.pth")
