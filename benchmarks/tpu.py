"""What the update takes on a TPU that is not here, by its compiler, beside JAX peers.

    python benchmarks/tpu.py --variant=B/16 --against=official,big_vision --clones=peers
    python benchmarks/tpu.py --variant=L/16 --topology=v4:2x2x1 --config.mesh.fsdp=4

Mcycles of 1.5 GHz: the compiler's estimate of every instruction, and a model of the attention
kernel, which it leaves out: products at the peak plus bytes at the bandwidth. GB to and from HBM;
GiB at the peak. All of one device, with 64 images, fully optimized: a minute or more each.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax import launch

sys.path.append(str(launch.ROOT))

from benchmarks import common
from benchmarks.peers import CLONES, check_peer, jax_peer
from vit_jax.errors import UserError, check_known
from vit_jax.hardware.chips import Chip
from vit_jax.hardware.flops import jaxpr_flops
from vit_jax.parameters.sharding import batch_sharding, replicated, with_shardings
from vit_jax.plan.program import executions, parse_program
from vit_jax.plan.subject import planned_run, step_arguments
from vit_jax.plan.topology import parse_topology
from vit_jax.plan.traffic import hbm_bytes
from vit_jax.run import Run

CLOCK_HZ = 1.5e9  # that of v5e


def main(argv: Sequence[str]) -> None:
    parser = common.arguments_parser(__doc__, "tpu")
    parser.add_argument("--variant", default="B/16", help="sizes of the model (default: B/16)")
    parser.add_argument("--topology", default="v5e:2x2", help="TPUs (default: v5e:2x2)")
    parser.add_argument("--against", type=common.names, default=[], help=f"of {','.join(CLONES)}")
    parser.add_argument("--clones", default="peers", help="folder of the peers' clones")
    arguments, overrides = parser.parse_known_args(argv)
    topology = parse_topology(arguments.topology)
    if topology.kind != "tpu" or topology.chip is None:
        raise UserError("--topology must name TPUs, such as v5e:2x2.")
    bfloat16 = ("--config.model.dtype=bfloat16", "--config.optimizer.momentum_dtype=bfloat16")
    config = common.create_config(
        arguments.variant, 64 * topology.num_devices, [*bfloat16, *overrides]
    )
    for peer in arguments.against:
        check_known("--against", peer, CLONES)
        check_peer(peer, config.model, arguments.clones)

    run, _ = planned_run(
        config, topology, num_examples=common.NUM_EXAMPLES, num_classes=common.NUM_CLASSES
    )
    shapes = step_arguments(run)
    found = {"vit_jax": costs(run.mesh, run.jit_train_step(), shapes, topology.chip)}
    for peer in arguments.against:
        update, theirs = peer_update(peer, config, run, shapes[2], arguments.clones)
        found[peer] = costs(run.mesh, update, theirs, topology.chip)

    per_device = run.batch_size // topology.num_devices
    case = f"update, {config.model.dtype}, {per_device} images a device"
    if config.model.dropout_rate:
        case += f", dropout {config.model.dropout_rate}"
    cases = []
    for unit in found["vit_jax"]:
        figures = {name: [each[unit]] for name, each in found.items()}
        cases += common.compare(arguments.variant, case, unit, figures)
    common.write_result(arguments.json, cases, argv)


def peer_update(
    peer: str, config: ConfigDict, run: Run, batch: Any, clones: str
) -> tuple[Any, tuple[Any, ...]]:
    """A peer's jitted update on the mesh of our run, and shapes of what it takes.

    Its state is whole on every device.
    """
    init, update = jax_peer(peer, config, common.NUM_CLASSES, clones)
    images, labels = batch["image"], batch["label"]
    one = jax.ShapeDtypeStruct((1, *images.shape[1:]), images.dtype)
    state = jax.eval_shape(lambda images: init(jax.random.key(0), images), one)
    whole, split = replicated(run.mesh), batch_sharding(run.mesh)
    shardings: Any = jax.tree.map(lambda _: whole, state)
    step = jax.jit(
        update,
        in_shardings=(shardings, split, split),
        out_shardings=(shardings, whole),
        donate_argnums=0,
    )
    return step, (with_shardings(state, shardings), images, labels)


def costs(mesh: Mesh, update: Any, shapes: Sequence[Any], chip: Chip) -> dict[str, float]:
    """What an update takes on each device, by unit."""
    with jax.set_mesh(mesh):
        traced = update.trace(*shapes)
        compiled = traced.lower().compile()
    program = parse_program(compiled.as_text())
    estimate = sum(
        times * int(match[1])
        for each, times, fused in executions(program)
        if not fused and (match := re.search(r'"estimated_cycles":"(\d+)"', each.text))
    )
    flops, num_bytes = kernel_costs(traced.jaxpr.jaxpr) / mesh.size
    # As if neither overlapped the other.
    seconds = flops / (chip.tflops * 1e12) + num_bytes / (chip.hbm_gb_s * 1e9)
    kernels = seconds * chip.devices * CLOCK_HZ
    print(f"{estimate / 1e6:.1f} Mcycles by the compiler, {kernels / 1e6:.1f} of kernels")
    return {
        "Mcycles": (estimate + kernels) / 1e6,
        "GB": hbm_bytes(program) / 1e9,
        "GiB": compiled.memory_analysis().peak_memory_in_bytes / 2**30,
    }


def kernel_costs(jaxpr: Jaxpr) -> np.ndarray:
    """Operations, all padding included, and bytes of the attention kernels over all devices."""
    total = np.zeros(2)
    for eqn in jaxpr.eqns:
        inner = jaxprs_in_params(eqn.params)
        if eqn.primitive.name == "pallas_call":
            mapping, stated = eqn.params["grid_mapping"], eqn.params["cost_estimate"]
            blocks = [each.transformed_block_aval.inner_aval for each in mapping.block_mappings]
            turns, block_bytes = (
                math.prod(mapping.grid),
                sum(x.size * x.dtype.itemsize for x in blocks),
            )
            num_bytes = stated.bytes_accessed if stated else turns * block_bytes
            total += turns * sum(map(jaxpr_flops, inner)), num_bytes
            continue
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        times *= eqn.params["mesh"].size if eqn.primitive.name == "shard_map" else 1
        total += times * sum(map(kernel_costs, inner), np.zeros(2))
    return total


if __name__ == "__main__":
    with launch.one_line_errors():
        main(sys.argv[1:])
