"""Plans with the TPU compiler, which runs without a TPU; where it is not installed, none."""

from __future__ import annotations

from typing import Any

import pytest

from tests import tiny
from vit_jax.errors import UserError
from vit_jax.hardware.chips import CHIPS
from vit_jax.plan.compiled import TooLargeError, argument_bytes, compile_step
from vit_jax.plan.devices import topology_devices, topology_mesh
from vit_jax.plan.estimate import step_time
from vit_jax.plan.plan import build_subject
from vit_jax.plan.subject import Subject
from vit_jax.plan.topology import SHAPES, parse_topology

pytest.importorskip(
    "libtpu",
    reason="no TPU compiler (no TPU is needed): pip install -e '.[tpu]' in an environment of its "
    "own, then JAX_PLATFORMS=cpu python -m pytest tests/plan/test_tpu.py",
)

SLICE = parse_topology("v5e-4")
NO_SIZES: dict[str, Any] = {"num_examples": None, "num_classes": None}


def run_on(topology: Any = SLICE, **overrides: Any) -> Subject:
    sizes = {"model__hidden_size": 128, "model__mlp_dim": 256, "model__num_layers": 2}
    config = tiny.config(**sizes, **overrides)
    return build_subject(config, topology, **NO_SIZES)


def test_an_update_for_a_slice() -> None:
    subject = run_on(mesh__fsdp=4, model__scan=True)
    step = compile_step(subject, full=False)
    assert step.memory.arguments >= argument_bytes(subject)  # with padding
    assert {"all-gather", "reduce-scatter"} & set(step.traffic)
    time = step_time(step, SLICE, model_flops=1e9, full_compile=True)
    assert time is not None
    assert time.predicted > 0
    assert time.compiler is not None  # its estimates were found in the text


def test_more_than_the_memory_is_told_not_shown_as_a_traceback() -> None:
    subject = run_on(dataset__batch_size=2**20)
    with pytest.raises(TooLargeError) as error:
        compile_step(subject, full=False)
    assert error.value.temporary_bytes is not None
    [v5e] = [chip for chip in CHIPS if chip.name == "v5e"]
    assert error.value.temporary_bytes > v5e.hbm_bytes
    assert f"{v5e.hbm_bytes / 2**30:.2f}G" in str(error.value)


def test_a_slice_of_many_hosts_is_one_group() -> None:
    mesh = topology_mesh(parse_topology("v5e:8x8"), data=-1, fsdp=0, tensor=1)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 64, "tensor": 1}
    mesh = topology_mesh(parse_topology("2xv5e:4x4"), data=-1, fsdp=0, tensor=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 8, "tensor": 2}


def test_traffic_between_slices_is_seen() -> None:
    topology = parse_topology("2xv5e-4")
    step = compile_step(run_on(topology), full=False)
    parameters = step.traffic["all-reduce"].network_bytes
    assert parameters > 0


@pytest.mark.parametrize("name", SHAPES)
def test_the_compiler_knows_every_product(name: str) -> None:
    for size in SHAPES[name]:
        topology = parse_topology(f"{name}-{size}")
        if topology.num_chips > 256:  # a second each
            continue
        devices = topology_devices(topology)
        assert len(devices) == topology.num_devices
        assert topology.chip is not None
        assert devices[0].device_kind in topology.chip.device_kinds


def test_shapes_that_it_does_not_know() -> None:
    with pytest.raises(UserError, match="the TPU compiler says"):
        topology_devices(parse_topology("v5e:3x5"))
