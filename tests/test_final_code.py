"""The clock of TPU programs: known work, compiled in full, and the text that libtpu writes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.final_code import FinalCode, compile_timed, count_cycles, folder
from vit_jax.parameters.sharding import create_mesh, replicated
from vit_jax.plan.topology import parse_topology, topology_devices

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v6e": "v6e:2x2"}


def code_of(name: str, function: Callable[..., Any], *shapes: tuple[int, ...]) -> FinalCode:
    """Of a function of bfloat16 arrays, on one chip."""
    pytest.importorskip("libtpu", reason="no TPU compiler: pip install -e '.[tpu]'")
    mesh = create_mesh(devices=topology_devices(parse_topology(CHIPS[name]))[:1])
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=replicated(mesh)) for shape in shapes
    ]
    _, code = compile_timed(mesh, jax.jit(function), arrays)
    assert not code.unparsed
    return code


def total(code: FinalCode, resource: str) -> float:
    return sum(getattr(cost, resource) for cost in code.costs)


@pytest.mark.parametrize(("name", "tflops"), [("v4", 275), ("v6e", 918)])
def test_a_large_product_takes_what_the_data_sheet_says(name: str, tflops: float) -> None:
    """Within 1 %: the data sheet's figure is rounded."""
    code = code_of(name, jnp.matmul, (2048, 2048), (2048, 512))
    flops = 2 * 2048 * 2048 * 512
    assert total(code, "matrix_unit") == pytest.approx(flops / (tflops * 1e12), rel=0.01)


def test_a_sum_of_arrays_takes_its_bytes() -> None:
    code = code_of("v5e", lambda x: x + 1, (8192, 8192))
    [add] = code.costs
    assert add.memory == pytest.approx(2 * 2 * 8192**2 / 819e9)
    assert add.core < add.memory == add.seconds == code.seconds


def test_equal_instructions_share_their_code() -> None:
    def layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x

    code = code_of("v5e", layers, *[(512, 512)] * 9)
    products = [cost for cost in code.costs if "dot_general" in cost.op_name]
    written = [path for path in folder().glob("*-01-final_bundles.txt") if "tanh" in path.name]
    assert len(written) < len(products)
    assert all(cost.matrix_unit for cost in products)


def bundles(*lines: str) -> list[str]:
    return [f"  {index:#x} : > {{ {line} }}" for index, line in enumerate(lines)]


def loop(start: str, limit: str, *body: str) -> list[str]:
    """As libtpu writes a loop of bundles: six besides `body`."""
    return [
        f"%s1 = smov {start} /* Start region 1 */",
        "%s2 = sphi %s1, %s3 ;; %s3 = sadd.s32 4, %s2 /* Start region 7 */",
        *body,
        f"%p1 = scmp.ge.s32.totalorder %s3, {limit} ;; sbr.rel (!%p1) target = $region7",
        *[""] * 4,  # run before the branch is taken
    ]


def test_bundles_of_a_loop_count_as_often_as_it_runs() -> None:
    cycles = count_cycles(bundles(*loop("2", "21", "%v1 = vadd.f32 %v2, %v3")))
    assert cycles.core == 1 + 5 * 7  # from 2 by 4 up to 21: 5 turns
    assert cycles.unknown_loops == 0


def test_the_stages_of_a_pipeline_overlap() -> None:
    stages = [
        line.replace("%s2 = sphi", "/* iteration index, stage = 2 */ %s2 = sphi")
        for line in loop("0", "20")
    ]
    assert count_cycles(bundles(*stages)).core == 1 + (5 - 2) * 6
    # The last one may be left as a test of the counter only.
    tested = [line.replace("stage = 2", "stage = 1") for line in stages]
    assert count_cycles(bundles(*tested)).core == 1 + (5 - 1) * 6
    tested[2:2] = ["%p2 = scmp.ge.s32.totalorder %s2, 2"]
    assert count_cycles(bundles(*tested)).core == 1 + (5 - 2) * 7


def test_a_loop_of_unknown_length_is_counted_once_and_said() -> None:
    cycles = count_cycles(bundles(*loop("0", "%s9")))
    assert cycles.core == 7
    assert cycles.unknown_loops == 1


def test_the_busiest_matrix_unit_counts() -> None:
    products = [
        "%1 = vmatmul.bf16.gmra.mxu0 %v1 ;; %2 = vmatmul.f32.gmra.mxu1 %v2",
        "%3 = vmatmul.lmr.bf16.gmra.16.mxu1 ;; %4 = vmatmul.msk.bf16.vlgmr.msra.gmra.mxu0 %v4",
    ]
    assert count_cycles(bundles(*products)).matrix_unit == 16 + 16
