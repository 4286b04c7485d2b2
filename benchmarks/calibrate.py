"""What the clock of `benchmarks/tpu.py` says of work whose time is known.

    python benchmarks/calibrate.py
    python benchmarks/calibrate.py --published --clones=peers    # minutes each

Without --published: single operations on one chip, beside the least time that the data sheet allows
(products at the peak, bytes at the bandwidth) and XLA's own estimate. With it: updates of trainings
whose duration was published; that includes input, evaluations, checkpoints and start, which the
clock leaves out, and was measured with compilers of its time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax import ROOT, launch

sys.path.append(str(ROOT))

from benchmarks import common
from benchmarks.final_code import GHZ, compile_timed, write_final_code
from benchmarks.tpu import peer_update, planned
from vit_jax.parameters.sharding import create_mesh, replicated
from vit_jax.plan.topology import Topology, parse_topology, topology_devices

TOKENS, HIDDEN, SCORES = (64, 197, 768), (64, 197, 3072), (64, 12, 197, 197)
MLP_FLOPS = 2 * 64 * 197 * 768 * 3072
# name: (function, shapes of its arguments, dtype, operations in products)
WORK: dict[str, tuple[Any, list[tuple[int, ...]], str, float]] = {
    "product of 8192": (jnp.matmul, [(8192, 8192)] * 2, "bfloat16", 2 * 8192**3),
    "product of an MLP": (
        lambda x, w: jnp.einsum("bnd,de->bne", x, w),
        [TOKENS, (768, 3072)],
        "bfloat16",
        MLP_FLOPS,
    ),
    "gradient of its weights": (
        lambda x, y: jnp.einsum("bnd,bne->de", x, y),
        [TOKENS, HIDDEN],
        "bfloat16",
        MLP_FLOPS,
    ),
    "x + 1": (lambda x: x + 1, [(8192, 8192)], "float32", 0.0),
    "transposed copy": (lambda x: x.T + 0, [(8192, 8192)], "bfloat16", 0.0),
    "sum of rows": (lambda x: jnp.sum(x, axis=-1), [(16384, 8192)], "float32", 0.0),
    "GELU": (jax.nn.gelu, [HIDDEN], "bfloat16", 0.0),
    "softmax": (jax.nn.softmax, [SCORES], "float32", 0.0),
    "softmax in bfloat16": (jax.nn.softmax, [SCORES], "bfloat16", 0.0),
}
IMAGENET = 0.99 * 1_281_167  # big_vision keeps a hundredth for validation
DAY = 86_400
# name: (peer, or "" for ours; variant; images per TPUv3 core; core-seconds per image; source)
PUBLISHED: dict[str, tuple[str, str, int, float, str]] = {
    "S/16, 90 epochs": (
        "big_vision",
        "S/16",
        128,
        8 * 6.5 * 3600 / (90 * IMAGENET),
        "6 to 7 h on v3-8, big_vision, vit_s16_i1k.py",
    ),
    "Mixer-B/16, 300 epochs": (
        "",
        "Mixer-B/16",
        32,
        128 * 131 * 60 / (300 * IMAGENET),
        "2 h 11 min on v3-128, big_vision, mlp_mixer_i1k.py",
    ),
    "R50x1, 90 epochs": (
        "",
        "R50x1",
        32,
        128 * 32 * 60 / (90 * IMAGENET),
        "32 min on v3-128, big_vision, bit_i1k.py",
    ),
    "L/16, ImageNet-21k": (
        "official",
        "L/16",
        16,
        230 * DAY / (90 * 14_197_122),
        "230 core-days for 90 epochs, table 2 of the paper",
    ),
}


def main(argv: Sequence[str]) -> None:
    parser = common.create_parser(__doc__, "calibration")
    parser.add_argument("--topology", default="v5e:2x2", help="TPUs (default: v5e:2x2)")
    parser.add_argument("--published", action="store_true", help="trainings, not operations")
    parser.add_argument("--clones", default="peers", help="folder of the peers' clones")
    arguments = parser.parse_args(argv)
    write_final_code()
    if arguments.published:
        rows = [published(name, arguments.clones) for name in PUBLISHED]
    else:
        rows = [operation(name, parse_topology(arguments.topology)) for name in WORK]
    print(markdown(rows))
    arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with the same keys as a table."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def operation(name: str, topology: Topology) -> dict[str, Any]:
    """Microseconds of an operation on one chip: the least possible, and by both clocks."""
    function, shapes, dtype, flops = WORK[name]
    mesh = create_mesh(devices=topology_devices(topology)[:1])
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh)) for shape in shapes]
    step, code = compile_timed(mesh, jax.jit(function), arrays)
    chip = topology.chip
    assert chip
    least = max(flops / chip.device_peak_flops, step.hbm_bytes * chip.devices / chip.hbm_gb_s / 1e9)
    estimate = code.estimated_cycles / (GHZ[chip.name] * 1e9)
    return {
        "work": name,
        "least us": round(1e6 * least),
        "final code": round(1e6 * code.seconds),
        "ratio": round(code.seconds / least, 2),
        "XLA's estimate": round(1e6 * estimate),
        "its ratio": round(estimate / least, 2),
    }


def published(name: str, clones: str) -> dict[str, Any]:
    """Images per second of a TPUv3 core in a training: published, and by the clock."""
    peer, variant, images, seconds, source = PUBLISHED[name]
    topology = parse_topology("v3:2x2")
    overrides = ["model.dtype=float32", "optimizer.momentum_dtype=bfloat16"]
    config = common.create_config(variant, images * topology.num_devices, overrides)
    run, shapes = planned(config, topology)
    update: Any = run.jit_train_step()
    if peer:
        update, shapes = peer_update(peer, config, run, shapes[2], clones)
    _, code = compile_timed(run.mesh, update, shapes)
    clock = images / code.seconds
    return {
        "training": name,
        "code": peer or "vit_jax",
        "published images/s a core": round(1 / seconds),
        "by the clock": round(clock),
        "ratio": round(clock * seconds, 2),
        "source": source,
    }


if __name__ == "__main__":
    with launch.one_line_errors():
        main(sys.argv[1:])
