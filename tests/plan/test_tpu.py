"""Plans with the TPU compiler, which runs without a TPU; where it is not installed, none."""

from typing import Any

import pytest

from tests import tiny
from vit_jax.errors import UserError
from vit_jax.hardware.chips import CHIPS, find_chip
from vit_jax.parameters.sharding import create_mesh
from vit_jax.plan.cost import CompiledStep, TooLargeError, compile_update, step_costs, step_time
from vit_jax.plan.plan import make_plan
from vit_jax.plan.subject import planned_run
from vit_jax.plan.topology import SHAPES, Topology, parse_topology, topology_devices
from vit_jax.run import Run

pytest.importorskip(
    "libtpu",
    reason="no TPU compiler (no TPU is needed): pip install -e '.[tpu]' in an environment of its "
    "own, then JAX_PLATFORMS=cpu python -m pytest tests/plan/test_tpu.py",
)

SLICE = parse_topology("v5e-4")


def tiny_run(topology: Topology, **overrides: Any) -> Run:
    sizes = {"model__hidden_size": 128, "model__mlp_dim": 256}
    return planned_run(tiny.config(**sizes | overrides), topology)[0]


def compile_for(topology: Topology, **overrides: Any) -> CompiledStep:
    return costs_of(tiny_run(topology, **overrides))


def costs_of(run: Run) -> CompiledStep:
    compiled = compile_update(run.mesh, run.jit_train_step(), run.step_arguments(), full=False)
    return step_costs(run.mesh, *compiled)


def test_an_update_for_a_slice() -> None:
    # So large that XLA would cut products with split kernels into parts, and send shards between.
    sizes = {"model__hidden_size": 512, "model__mlp_dim": 2048, "dataset__batch_size": 2048}
    sizes |= {f"dataset__{key}": "decode|resize(64)" for key in ("preprocess", "eval_preprocess")}
    sizes |= {"model__num_layers": 2, "model__scan": True, "model__dtype": "bfloat16"}
    step = compile_for(SLICE, mesh__fsdp=4, **sizes)
    assert {"all-gather", "reduce-scatter"} & set(step.traffic)
    assert "collective-permute" not in step.traffic
    time = step_time(step, SLICE)
    assert time is not None
    assert time.predicted >= min(time.memory, time.links) > 0


def test_chips_send_each_other_gradients_in_bfloat16() -> None:
    config = tiny.config(model__hidden_size=128, model__mlp_dim=256)
    float32 = make_plan(config, SLICE, full_compile=True).step
    bfloat16 = compile_for(parse_topology("2xv5e-4"), model__dtype="bfloat16")
    assert float32
    whole, half = (step.traffic["all-reduce"].num_bytes for step in (float32, bfloat16))
    assert half < 0.6 * whole  # the head and the norms are float32
    networks = [step.traffic["all-reduce"].network_bytes for step in (float32, bfloat16)]
    assert networks[1] > networks[0] == 0  # between two slices


def test_more_than_the_memory_is_told_not_shown_as_a_traceback() -> None:
    decode = "decode|resize(64)"
    large = {"dataset__preprocess": decode, "dataset__eval_preprocess": decode}
    with pytest.raises(TooLargeError, match=f"{CHIPS['v5e'].hbm_gib:.2f}G"):
        compile_for(SLICE, dataset__batch_size=2**20, **large)


def test_a_slice_of_many_hosts_is_one_group() -> None:
    mesh = create_mesh(fsdp=0, devices=topology_devices(parse_topology("v5e:8x8")))
    assert dict(mesh.shape) == {"data": 1, "fsdp": 64, "tensor": 1}
    mesh = create_mesh(fsdp=0, tensor=2, devices=topology_devices(parse_topology("2xv5e:4x4")))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 8, "tensor": 2}


@pytest.mark.parametrize("name", SHAPES)
def test_the_compiler_knows_every_product(name: str) -> None:
    for size in SHAPES[name]:
        topology = parse_topology(f"{name}-{size}")
        if topology.num_chips > 256:  # a second each
            continue
        devices = topology_devices(topology)
        assert len(devices) == topology.num_devices
        assert topology.chip is not None
        assert find_chip(devices[0].device_kind) == topology.chip


def test_shapes_that_it_does_not_know() -> None:
    with pytest.raises(UserError, match="the TPU compiler says"):
        topology_devices(parse_topology("v5e:3x5"))


HEADS_SPLIT = {"mesh__data": 1, "mesh__fsdp": -1, "mesh__tensor": 2}


@pytest.mark.parametrize(
    ("name", "attention", "mesh"),
    [("v5e-4", "splash", HEADS_SPLIT), ("v4-8", "auto", HEADS_SPLIT), ("v6e-4", "auto", {})],
)
def test_attention_kernels_compile_for(name: str, attention: str, mesh: dict[str, int]) -> None:
    """Forward and backward, in bfloat16; updates for v5e above have the kernels of `auto`."""
    sizes = {"model__num_heads": 4, "model__dtype": "bfloat16"}
    sizes |= {"model__attention": attention, "model__dropout_rate": 0.1}
    run = tiny_run(parse_topology(name), **sizes, **mesh)
    step = costs_of(run)
    # Without the padding of the kernels: all but the gradient of the pixels, which the product of
    # the patches on v4 traces for XLA to drop.
    model = run.train_flops_per_image() * run.batch_size
    assert 0.9 * model < step.executed_flops
    # JAX's kernel states no cost: every step of its grid counts, padding included.
    if attention != "splash":
        assert step.executed_flops <= model
