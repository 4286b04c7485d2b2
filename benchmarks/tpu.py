"""What the update takes on a TPU that is not here, by its compiler, beside JAX peers.

    python benchmarks/tpu.py --variant=B/16 --against=official,big_vision --clones=peers --parts
    python benchmarks/tpu.py --variant=L/16 --topology=v4:2x2x1 --largest_batch

ms: by the compiler's final code, see `benchmarks/final_code.py`; the same clock for all. Mcycles:
XLA's own estimate from before code generation, without kernels and collectives: not to be compared
where one of them has kernels. GB to and from HBM; GiB at the peak. All of one device, with 64
images, fully optimized: a minute or more each.

--parts: the ms of each part of the model, and what bounds it.

--largest_batch: how many images fit on a device (figure 13 of the paper, while training), and the
figures with 64, or with those that fit.
"""

from __future__ import annotations

import bisect
import collections
import re
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax import ROOT, launch
from vit_jax.arguments import names, split_overrides

sys.path.append(str(ROOT))

from benchmarks import common
from benchmarks.final_code import FinalCode, clear_final_code, compile_timed, write_final_code
from benchmarks.peers import CLONES, check_peer, jax_peer
from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.parameters.sharding import batch_sharding, replicated, with_shardings
from vit_jax.plan.cost import CompiledStep, TooLargeError, compile_update
from vit_jax.plan.subject import planned_run
from vit_jax.plan.topology import Topology, parse_topology
from vit_jax.run import Run


def main(argv: Sequence[str]) -> None:
    parser = common.create_parser(__doc__, "tpu")
    parser.add_argument("--variant", default="B/16", help="sizes of the model (default: B/16)")
    parser.add_argument("--topology", default="v5e:2x2", help="TPUs (default: v5e:2x2)")
    parser.add_argument("--against", type=names, default=[], help=f"of {','.join(CLONES)}")
    parser.add_argument("--clones", default="peers", help="folder of the peers' clones")
    parser.add_argument("--largest_batch", action="store_true", help="first find what fits")
    parser.add_argument("--parts", action="store_true", help="print the time of each part")
    overrides, rest = split_overrides(argv)
    arguments = parser.parse_args(rest)
    topology = parse_topology(arguments.topology)
    if topology.kind != "tpu":
        raise UserError("--topology must name TPUs, such as v5e:2x2.")
    write_final_code()
    bfloat16 = ("model.dtype=bfloat16", "optimizer.momentum_dtype=bfloat16")
    config = common.create_config(
        arguments.variant, 64 * topology.num_devices, [*bfloat16, *overrides]
    )
    for peer in arguments.against:
        check_known("--against", peer, CLONES)
        check_peer(peer, config.model, arguments.clones)

    cases = []
    if arguments.largest_batch:
        fit = largest_per_device(config, topology)
        if not fit:
            raise UserError("--largest_batch: not even one image fits on each device.")
        fitting = {"vit_jax": [float(fit)]}
        cases += common.compare(arguments.variant, "that fit on a device", "images", fitting)
        config.dataset.batch_size = min(fit, 64) * topology.num_devices
    run, shapes = planned(config, topology)
    subjects = {"vit_jax": (run.jit_train_step(), shapes)}
    for peer in arguments.against:
        subjects[peer] = peer_update(peer, config, run, shapes[2], arguments.clones)
    figures_of = {}
    for name, (update, shapes) in subjects.items():
        step, code = compile_timed(run.mesh, update, shapes)
        figures_of[name] = costs(step, code)
        shown = (f"{value:.2f} {unit}" for unit, value in figures_of[name].items())
        print(f"{name}: {', '.join(shown)}")
        if arguments.parts:
            print(parts_table(code))

    per_device = run.batch_size // topology.num_devices
    case = f"update, {config.model.dtype}, {per_device} images a device"
    if config.model.dropout_rate:
        case += f", dropout {config.model.dropout_rate}"
    for unit in figures_of["vit_jax"]:
        figures = {name: [costs_of[unit]] for name, costs_of in figures_of.items()}
        cases += common.compare(arguments.variant, case, unit, figures)
    common.write_result(arguments.json, cases, argv)


def planned(config: ConfigDict, topology: Topology) -> tuple[Run, Any]:
    """A run for devices that are not here, and the shapes that its update takes."""
    sizes = {"num_examples": common.NUM_EXAMPLES, "num_classes": common.NUM_CLASSES}
    run, _ = planned_run(config, topology, **sizes)
    return run, run.step_arguments()


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


def costs(step: CompiledStep, code: FinalCode) -> dict[str, float]:
    """What an update takes on each device, by unit."""
    return {
        "ms": 1e3 * code.seconds,
        "Mcycles by XLA's estimate": code.estimated_cycles / 1e6,
        "GB": step.hbm_bytes / 1e9,
        "GiB": step.memory["peak"] / 2**30,
    }


# What the names of JAX's operations contain; the first that matches.
PARTS = {
    "attention core": "attention_forward|attention_backward|hqk|hk->|splash|softmax"
    r"|MultiHeadDotProductAttention_\d+/(?!query|key|value|out)",
    "q, k, v, out": "/(query|key|value|out|query_key_value)/",
    "MLP": "MlpBlock",
    "norms": r"[Nn]orm(_\d+)?/",
    "embeddings": "embedding|posembed|/cls",
    "head": "head|logits",
    "optimizer and rest": "",
}


def parts_table(code: FinalCode) -> str:
    """Milliseconds by part of the model, in all and for each resource alone."""
    totals: dict[str, Any] = collections.defaultdict(lambda: np.zeros(5))
    for cost in code.costs:
        part = next(name for name, text in PARTS.items() if re.search(text, cost.op_name))
        if cost.overlapped:
            part = "beside the others"
        elif cost.links:
            part = "collectives"
        resources = (cost.core, cost.matrix_unit, cost.memory, cost.links)
        totals[part] += (cost.seconds, *resources)
    lines = ["| part | ms | core | matrix unit | memory | links |", "|---|---|---|---|---|---|"]
    for part, seconds in sorted(totals.items(), key=lambda item: -item[1][0]):
        cells = " | ".join(f"{1e3 * value:.2f}" for value in seconds)
        lines.append(f"| {part} | {cells} |")
    unparsed = code.unparsed
    missing = 1e3 * sum(cost.seconds for cost in unparsed)
    lines.append(
        f"{len(unparsed)} of {len(code.costs)} instructions ({missing:.2f} ms) have a loop of "
        "unknown length, counted as one iteration, or no code."
    )
    return "\n".join(lines)


def largest_per_device(config: ConfigDict, topology: Topology) -> int:
    """Images on a device that fit: a power of two, or one and a half of one; 0 if not even one.

    By the fast compile, whose memory is up to 10 % off.
    """
    sizes = sorted({size for n in range(15) for size in (2**n, 2**n * 3 // 2)})

    def too_large(per_device: int) -> bool:
        trial = config.copy_and_resolve_references()
        trial.dataset.batch_size = per_device * topology.num_devices
        run, shapes = planned(trial, topology)
        clear_final_code()
        try:
            compile_update(run.mesh, run.jit_train_step(), shapes, full=False)
        except TooLargeError:
            return True
        return False

    count = bisect.bisect_left(sizes, True, key=too_large)
    return sizes[count - 1] if count else 0


if __name__ == "__main__":
    with launch.one_line_errors():
        main(sys.argv[1:])
