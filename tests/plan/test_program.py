"""What is read from the text of compiled programs: loops, collectives, bytes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.final_code import estimated_cycles
from vit_jax.plan.program import collective_traffic, executions, hbm_bytes, parse_program


def compiled(function: Any, *shapes: tuple[int, ...]) -> Any:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    return parse_program(text)


def test_an_addition_reads_and_writes_once() -> None:
    assert hbm_bytes(compiled(lambda x: x + 1.0, (1000,))) == 2 * 4000


def test_a_loops_body_counts_as_often_as_it_runs_and_reads_a_slice_of_a_stack() -> None:
    """Twice the layers are twice the bytes; whole stacks in every turn would be four times."""

    def loop(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c * w), None), x, weights)[0]

    programs = [compiled(loop, (4096,), (length, 4096)) for length in (50, 100)]
    for length, program in zip((50, 100), programs, strict=True):
        tanh = [
            times for instruction, times, _ in executions(program) if instruction.opcode == "tanh"
        ]
        assert tanh == [length]
    once, twice = map(hbm_bytes, programs)
    assert twice / once == pytest.approx(2.0, rel=0.02)  # what is outside of the loop stays
    slices = 100 * 4096 * 4
    assert slices < twice < 8 * slices


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
    assert traffic["reduce-scatter"].sent_bytes == 256 * 128 * 4 * 3 / 4  # padded to whole tiles
    assert traffic["all-reduce"].sent_bytes == 0  # nothing within the slice
    assert traffic["all-reduce"].network_bytes == 39 * 8 * 128 * 2
    assert estimated_cycles(program) == 12 * 100
    [loop] = [instruction for instruction in program if instruction.opcode == "while"]
    gathered = (64 * 128 + 256 * 128) * 2
    sliced = 64 * 128 * 2  # is read; what it is copied to lies in another memory: S(1)
    assert hbm_bytes(loop.called[0]) == gathered + sliced


# As XLA writes what runs while the device computes: the result names operands and targets. S(1) is
# the memory on the chip; several arrays may be gathered together.
STARTED = """HloModule m, is_scheduled=true

%fused (a: bf16[64,128], b: bf16[16,128]) -> bf16[64,128] {
  %a = bf16[64,128]{1,0} parameter(0)
  %b = bf16[16,128]{1,0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %d = bf16[64,128]{1,0} dynamic-update-slice(%a, %b, %zero, %zero)
}

ENTRY %main (p: bf16[64,128], v: bf16[64,128], u: bf16[16,128]) -> bf16[64,128] {
  %p = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %v = bf16[64,128]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %u = bf16[16,128]{1,0:T(8,128)(2,1)} parameter(2)
  ROOT %c = STARTED, replica_groups=[1,4]<=[4]
}
"""
BIG, CHIP, SMALL = "bf16[64,128]{1,0}", "bf16[64,128]{1,0:S(1)}", "bf16[16,128]{1,0}"
BYTES = 64 * 128 * 2


@pytest.mark.parametrize(
    ("started", "moved", "array"),
    [
        # To the chip, back, and within the memory.
        (f"({CHIP}, {BIG}, u32[]{{:S(2)}}) copy-start(%p)", BYTES, None),
        (f"({BIG}, {BIG}, u32[]{{:S(2)}}) copy-start(%p)", 2 * BYTES, None),
        # A slice is all that is read.
        (f"(({BIG}), {SMALL}, s32[]{{:S(2)}}) dynamic-slice-start(%p)", BYTES // 2, None),
        (
            f"(({BIG}, {SMALL}), {BIG}, s32[]{{:S(2)}}) dynamic-update-slice-start(%p, %u)",
            BYTES // 2,
            None,
        ),
        (
            f"(({BIG}, {SMALL}), {BIG}) fusion-start(%p, %u), kind=kLoop, calls=%fused",
            BYTES // 2,
            None,
        ),
        (f"({SMALL}, {BIG}) all-gather-start(%u)", BYTES * 5 // 4, BYTES),
        (f"{BIG} all-reduce-start(%p)", 2 * BYTES, BYTES),
        (f"({BIG}, {BIG}, u32[], u32[]) collective-permute-start(%p)", 2 * BYTES, BYTES),
        (
            f"(({SMALL}, {BIG}), ({BIG}, bf16[256,128])) all-gather-start(%u, %p)",
            BYTES * 25 // 4,
            5 * BYTES,
        ),
    ],
)
def test_what_runs_meanwhile(started: str, moved: int, array: int | None) -> None:
    program = parse_program(STARTED.replace("STARTED", started))
    assert hbm_bytes(program) == moved
    traffic = collective_traffic(program, [0] * 4).values()
    assert [kind.num_bytes for kind in traffic] == ([] if array is None else [array])


def test_between_nodes_each_device_sends_its_share() -> None:
    """Eight GPUs in two nodes: the network carries each byte of a node once, and back."""
    text = STARTED.replace("[1,4]<=[4]", "[1,8]<=[8]").replace("STARTED", f"{BIG} all-reduce(%p)")
    traffic = collective_traffic(parse_program(text), [0, 0, 0, 0, 1, 1, 1, 1])["all-reduce"]
    assert traffic.sent_bytes == 2 * 7 / 8 * BYTES
    assert traffic.network_bytes == 2 * 1 / 2 * BYTES / 4
