"""Where devices stand in a mesh, with stand-ins for machines of many slices and hosts."""

import dataclasses
import itertools
import logging
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from vit_jax.errors import TransientError, UserError
from vit_jax.hardware.devices import (
    NO_TPU,
    arrange_devices,
    device_groups,
    mesh_sizes,
    quiet_libtpu,
    split_sizes,
)
from vit_jax.parameters.sharding import create_mesh


@dataclasses.dataclass(frozen=True)
class Device:
    """What JAX tells of a device, as far as its place is concerned."""

    id: int
    process_index: int
    slice_index: int | None
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


@pytest.mark.parametrize("attached", [False, True])
def test_libtpu_is_told_that_there_is_no_tpu(attached: bool, monkeypatch) -> None:
    monkeypatch.setattr("os.environ", {"TPU_SKIP_MDS_QUERY": "1"} if not attached else {})
    quiet_libtpu()
    assert os.environ == ({} if attached else NO_TPU)


def test_without_a_tpu_commands_do_not_begin_with_warnings_of_libtpu() -> None:
    pytest.importorskip("libtpu", reason="no TPU compiler: pip install -e '.[tpu]'")
    program = "from vit_jax.hardware.devices import all_devices; print(all_devices()[0].platform)"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    environment = {name: v for name, v in environment.items() if not name.startswith("TPU_")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    if done.stdout != "tpu\n":
        assert (done.stdout, done.stderr) == ("cpu\n", "")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Unable to initialize backend 'tpu': ABORTED: already in use by pid 7", TransientError),
        ("Unable to initialize backend 'tpu': NOT_FOUND: no device found", UserError),
    ],
)
def test_devices_that_do_not_start_are_told(text, kind, monkeypatch):
    def fails() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr("jax.devices", fails)
    with pytest.raises(UserError, match=f"^cannot initialize the devices: {text}$") as error:
        create_mesh()
    assert type(error.value) is kind


def tpu_slices(num_slices: int, rows: int = 4, columns: int = 4) -> list[Device]:
    """v5e slices of 4 chips per host; the ids of a slice are not consecutive."""
    chips = rows * columns
    return [
        Device(
            id=num_slices * chip + index,
            process_index=(index * chips + chip) // 4,
            slice_index=index,
            coords=(chip % columns, chip // columns, 0),
        )
        for chip in range(chips)
        for index in range(num_slices)
    ]


def gpu_hosts(num_hosts: int, *, processes_per_host: int, numbered: bool) -> list[Device]:
    return [
        Device(
            id=i,
            process_index=i * processes_per_host // 8,
            slice_index=i // 8 if numbered else None,
            platform="gpu",
            device_kind="NVIDIA H100 80GB HBM3",
        )
        for i in range(8 * num_hosts)
    ]


@pytest.mark.parametrize("sizes", [(2, 16, 1), (4, 2, 4)])
def test_parameters_stay_within_a_slice_and_data_crosses(sizes: tuple[int, ...]) -> None:
    devices = tpu_slices(2)
    assert [d.slice_index for d in devices[:2]] == [0, 1]  # in the order given they are mixed
    array = arrange_devices(devices, sizes)
    assert array.shape == sizes
    assert {d.id for d in array.flat} == set(range(32))
    slices = np.vectorize(lambda d: d.slice_index)(array)
    first_half, second_half = np.split(slices, 2)
    assert not first_half.any()
    assert second_half.all()


def test_what_has_to_cross_crosses_as_little_as_can_be() -> None:
    """32 devices for parameters on slices of 16: tensor stays inside, fsdp has one border."""
    slices = np.vectorize(lambda d: d.slice_index)(arrange_devices(tpu_slices(2), (1, 8, 4)))[0]
    assert not slices[:4].any()
    assert slices[4:].all()


@pytest.mark.parametrize(
    ("processes_per_host", "numbered"),
    [(8, True), (1, False)],
    ids=["process per GPU", "without slice_index"],
)
def test_hosts_of_gpus_are_groups(processes_per_host: int, numbered: bool) -> None:
    devices = gpu_hosts(4, processes_per_host=processes_per_host, numbered=numbered)
    kind, groups = device_groups(devices[::-1])
    assert kind == "host"
    assert [sorted(d.id // 8 for d in group) for group in groups] == [[i] * 8 for i in range(4)]
    hosts = np.vectorize(lambda d: d.id // 8)(arrange_devices(devices[::-1], (4, 4, 2)))
    assert hosts.tolist() == [[[i] * 2] * 4 for i in range(4)]


def test_groups_of_different_sizes_are_one() -> None:
    devices = gpu_hosts(2, processes_per_host=1, numbered=True)[:12]
    _, groups = device_groups(devices)
    assert [len(group) for group in groups] == [12]
    assert [d.id for d in arrange_devices(devices, (3, 4, 1)).flat] == list(range(12))


def test_every_mesh_can_be_cut_into_groups() -> None:
    meshes = [(24, 1, 1), (1, 24, 1), (2, 3, 4), (4, 6, 1), (1, 2, 12), (3, 8, 1)]
    for sizes, group_size in itertools.product(meshes, [1, 2, 6, 8, 12, 24]):
        outer, inner = split_sizes(sizes, group_size)
        assert math.prod(inner) == group_size
        assert tuple(a * b for a, b in zip(outer, inner, strict=True)) == sizes


def test_one_config_is_hybrid_on_any_number_of_slices() -> None:
    assert mesh_sizes(-1, 0, 1, 32, 16, "slice") == (2, 16, 1)
    assert mesh_sizes(-1, 0, 4, 64, 16, "slice") == (4, 4, 4)
    assert mesh_sizes(2, -1, 1, 32, 16, "slice") == (2, 16, 1)  # the same, counted by the user
    assert dict(create_mesh(fsdp=0).shape) == {"data": 1, "fsdp": 8, "tensor": 1}
    with pytest.raises(UserError, match=r"mesh.tensor must divide the 16 devices of one slice"):
        mesh_sizes(-1, 0, 3, 32, 16, "slice")
    with pytest.raises(UserError, match="mesh.tensor=-1"):
        mesh_sizes(1, 0, -1, 32, 16, "slice")
    with pytest.raises(UserError, match="does not match the 32 devices"):
        mesh_sizes(1, 0, 1, 32, 16, "slice")


@pytest.mark.parametrize(
    ("sizes", "warned"), [({"fsdp": 4, "tensor": 4}, False), ({"data": 1, "fsdp": 32}, True)]
)
def test_parameters_that_cross_are_warned_of(sizes, warned, caplog):
    with caplog.at_level(logging.WARNING):
        mesh = create_mesh(**sizes, devices=tpu_slices(2))
    assert mesh.devices.size == 32
    assert ("the 16 devices of one slice" in caplog.text) == warned
    assert ("mesh.fsdp=0" in caplog.text) == warned
