"""What is read from the text of compiled programs: loops, collectives, bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from vit_jax.hardware.flops import forward_flops
from vit_jax.plan.program import Computation, executions, parse_program
from vit_jax.plan.traffic import collective_traffic, first_group, hbm_bytes


def compiled(function: Any, *arguments: Any, **kwargs: Any) -> Computation:
    text = jax.jit(function, **kwargs).lower(*arguments).compile().as_text()
    assert text is not None
    return parse_program(text)


def floats(*shape: int, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def loop(x: jax.Array, weights: jax.Array) -> jax.Array:
    """A stack of layers, as `nn.scan` makes it."""
    return jax.lax.scan(lambda c, w: (jnp.tanh(c * w), None), x, weights)[0]


@pytest.mark.parametrize("length", [7, 100])
def test_a_loops_body_counts_as_often_as_it_runs(length: int) -> None:
    program = compiled(loop, floats(256), floats(length, 256))
    tanh = [times for each, times, _ in executions(program) if each.opcode == "tanh"]
    assert tanh == [length]


def test_a_loop_reads_a_slice_of_a_stack_per_turn() -> None:
    """Twice the layers are twice the bytes; whole stacks in every turn would be four times."""
    once, twice = (
        hbm_bytes(compiled(loop, floats(4096), floats(length, 4096))) for length in (50, 100)
    )
    assert twice / once == pytest.approx(2.0, rel=0.02)  # what is outside of the loop stays
    slices = 100 * 4096 * 4
    assert slices < twice < 8 * slices


def test_both_branches_of_a_conditional_are_read() -> None:
    """The older way to write it, in which a predicate chooses; the other has `{%a, %b}`."""
    text = """HloModule m

%yes (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %t = f32[8]{0} tanh(%a)
}

%no (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %e = f32[8]{0} exponential(%b)
}

ENTRY %main (p: pred[], x: f32[8]) -> f32[8] {
  %p = pred[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %c = f32[8]{0} conditional(%p, %x, %x), BRANCHES
}
"""
    for branches in (
        "true_computation=%yes, false_computation=%no",
        "branch_computations={%no, %yes}",
    ):
        program = parse_program(text.replace("BRANCHES", branches))
        opcodes = {each.opcode for each, _, _ in executions(program)}
        assert {"tanh", "exponential"} <= opcodes


def test_the_input_gradient_of_a_strided_convolution_costs_what_the_convolution_does() -> None:
    """Of a window on the dilated gradient only one term in stride^2 is not zero."""
    image, kernel = floats(1, 12, 12, 4), floats(3, 3, 4, 8)

    def conv(x: jax.Array, k: jax.Array) -> jax.Array:
        dimensions = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=dimensions)

    def gradient(x: jax.Array, k: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda x: conv(x, k), x)(conv(x, k))[0]

    assert forward_flops(gradient, image, kernel) == 2 * forward_flops(conv, image, kernel)


def test_an_addition_reads_and_writes_once() -> None:
    assert hbm_bytes(compiled(lambda x: x + 1.0, floats(1000))) == 2 * 4000


def test_gradients_are_reduced_where_parameters_are_copied() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    program = compiled(
        jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)),
        floats(64, 32, sharding=whole),
        floats(16, 64, sharding=rows),
        out_shardings=whole,
    )
    [(kind, traffic)] = collective_traffic(program, [0] * 8).items()
    assert (kind, traffic.count) == ("all-reduce", 1)
    assert traffic.num_bytes == 64 * 32 * 4
    assert traffic.sent_bytes == 2 * 7 / 8 * 64 * 32 * 4  # a ring: seven parts, there and back


def test_split_parameters_are_gathered() -> None:
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())
    program = compiled(lambda w: w + 1.0, floats(64, 32, sharding=split), out_shardings=whole)
    [(kind, traffic)] = collective_traffic(program, [0] * 8).items()
    assert (kind, traffic.count) == ("all-gather", 1)
    assert traffic.num_bytes == 64 * 32 * 4
    assert traffic.sent_bytes == 7 / 8 * 64 * 32 * 4


# As the TPU compiler writes it: layouts with memory spaces, loops without a noted length, groups as
# axes of a mesh, a reduce-scatter as a fusion, and transfers between slices as messages to hosts.
TPU_PROGRAM = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%all-reduce-scatter (input: f32[256,16]) -> f32[64,16] {
  %input = f32[256,16]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[256,16]{1,0:T(8,128)} all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%add
  %zero = s32[]{:T(128)} constant(0)
  ROOT %cut = f32[64,16]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={64,16}
}

%body (state: (s32[], bf16[64,128])) -> (s32[], bf16[64,128]) {
  %state = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = bf16[64,128]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %all-gather.1 = bf16[256,128]{1,0:T(8,128)(2,1)} all-gather(%x), channel_id=2, replica_groups=mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}, dimensions={0}, use_global_device_ids=true
  %y = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} slice(%all-gather.1), slice={[0:64], [0:128]}, backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %next = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}) tuple(%i, %y)
}

%condition (state.1: (s32[], bf16[64,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  %state.1 = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (p: f32[256,16], q: (s32[], bf16[64,128])) -> f32[64,16] {
  %p = f32[256,16]{1,0:T(8,128)} parameter(0)
  %q = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}) parameter(1)
  %while.1 = (s32[]{:T(128)}, /*index=1*/bf16[64,128]{1,0:T(8,128)(2,1)}) while(%q), condition=%condition, body=%body
  %after-all.1 = token[] after-all()
  %send.1 = (bf16[39,8,128]{2,1,0:T(8,128)(2,1)}, u32[], token[]) send(%p, %after-all.1), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_megascale_reduce_operation="SUM",_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %fusion.1 = f32[64,16]{1,0:T(8,128)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter
}
"""  # noqa: E501


def test_the_text_of_a_tpu_program() -> None:
    program = parse_program(TPU_PROGRAM)
    traffic = collective_traffic(program, [0, 0, 0, 0, 1, 1, 1, 1])
    assert set(traffic) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert traffic["all-gather"].count == 12
    assert traffic["all-gather"].sent_bytes == 12 * 256 * 128 * 2 * 3 / 4  # in groups of four
    assert traffic["reduce-scatter"].count == 1
    assert traffic["reduce-scatter"].sent_bytes == 256 * 16 * 4 * 3 / 4
    assert traffic["all-reduce"].sent_bytes == 0  # nothing within the slice
    assert traffic["all-reduce"].network_bytes == 39 * 8 * 128 * 2


def test_what_stays_on_the_chip_moves_no_bytes() -> None:
    program = parse_program(TPU_PROGRAM)
    [loop] = [each for each in program if each.opcode == "while"]
    body = hbm_bytes(loop.called[0])
    gathered = (64 * 128 + 256 * 128) * 2
    sliced = 64 * 128 * 2  # is read; what it is copied to lies in another memory: S(1)
    assert body == gathered + sliced


# As XLA writes what goes on while the device computes: the result names operands and targets. S(1)
# is the memory on the chip; several arrays may be gathered together.
STARTED = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p: bf16[128,64], v: bf16[128,64], u: bf16[32,64]) -> bf16[128,64] {
  %p = bf16[128,64]{1,0:T(8,128)(2,1)} parameter(0)
  %v = bf16[128,64]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %u = bf16[32,64]{1,0:T(8,128)(2,1)} parameter(2)
  ROOT STARTED
}
"""
WHOLE = 128 * 64 * 2


@pytest.mark.parametrize(
    ("started", "moved"),
    [
        # To the chip, back, and within the memory.
        (
            "%c = (bf16[128,64]{1,0:S(1)}, bf16[128,64]{1,0}, u32[]{:S(2)}) copy-start(%p)",
            WHOLE,
        ),
        (
            "%c = (bf16[128,64]{1,0}, bf16[128,64]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%v)",
            WHOLE,
        ),
        ("%c = (bf16[128,64]{1,0}, bf16[128,64]{1,0}, u32[]{:S(2)}) copy-start(%p)", 2 * WHOLE),
        # A slice is all that is read.
        (
            "%c = ((bf16[128,64]{1,0}), bf16[32,64]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%p)",
            WHOLE // 4,
        ),
        (
            "%c = ((bf16[128,64]{1,0}), bf16[32,64]{1,0}, s32[]{:S(2)}) dynamic-slice-start(%p)",
            WHOLE // 2,
        ),
        (
            "%c = ((bf16[128,64]{1,0}, bf16[32,64]{1,0}), bf16[128,64]{1,0}, s32[]{:S(2)}) "
            "dynamic-update-slice-start(%p, %u)",
            WHOLE // 2,
        ),
        ("%c = (bf16[32,64]{1,0}, bf16[128,64]{1,0}) all-gather-start(%u)", WHOLE * 5 // 4),
        ("%c = bf16[128,64]{1,0} all-reduce-start(%p), to_apply=%add", 2 * WHOLE),
    ],
)
def test_bytes_of_what_goes_on_meanwhile(started: str, moved: int) -> None:
    assert hbm_bytes(parse_program(STARTED.replace("STARTED", started))) == moved


@pytest.mark.parametrize(
    ("started", "kind", "whole"),
    [
        ("%c = (bf16[32,64], bf16[128,64]) all-gather-start(%u)", "all-gather", WHOLE),
        (
            "%c = ((bf16[32,64], bf16[128,64]), (bf16[128,64], bf16[512,64])) "
            "all-gather-start(%u, %p)",
            "all-gather",
            5 * WHOLE,
        ),
        ("%c = ((bf16[128,64]), bf16[32,64]) reduce-scatter-start(%p)", "reduce-scatter", WHOLE),
        ("%c = ((bf16[128,64]), bf16[128,64]) all-to-all-start(%p)", "all-to-all", WHOLE),
        ("%c = bf16[128,64] all-reduce-start(%p), to_apply=%add", "all-reduce", WHOLE),
        (
            "%c = (bf16[128,64], bf16[128,64], u32[], u32[]) collective-permute-start(%p)",
            "collective-permute",
            WHOLE,
        ),
    ],
)
def test_collectives_that_go_on_meanwhile(started: str, kind: str, whole: int) -> None:
    text = STARTED.replace("STARTED", f"{started}, replica_groups=[1,4]<=[4]")
    [(found, traffic)] = collective_traffic(parse_program(text), [0] * 4).items()
    assert (found, traffic.num_bytes) == (kind, whole)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", [[0, 1], [2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1, 2, 3]]),
    ],
)
def test_who_talks_to_whom(text: str, groups: list[list[int]]) -> None:
    assert first_group(text, 4) == groups[0]


def test_between_nodes_each_device_sends_its_share() -> None:
    """Eight GPUs in two nodes: the network carries each byte of a node once, and back."""
    text = """HloModule m

ENTRY %main (p: f32[1000]) -> f32[1000] {
  %p = f32[1000]{0} parameter(0)
  ROOT %r = f32[1000]{0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
}
"""
    traffic = collective_traffic(parse_program(text), [0, 0, 0, 0, 1, 1, 1, 1])["all-reduce"]
    assert traffic.sent_bytes == 2 * 7 / 8 * 4000
    assert traffic.network_bytes == 2 * 1 / 2 * 4000 / 4
