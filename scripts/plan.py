"""Plans a training on machines that are not here: its memory, its time, and whether it fits.

    python scripts/plan.py --config=configs/pretrain.py:H/14,imagenet21k --topology=v5e:8x8
    python scripts/plan.py --config=configs/pretrain.py:B/16,imagenet2012 --topology=v3-8 \\
        --config.train_step.accumulation_steps=4 --output=/tmp/plan
    python scripts/plan.py --config=configs/quickstart.py --topology=cpu:8

The update itself is compiled for the topology; nothing is executed, and no accelerator is used.
TPUs need the extra [tpu] (the compiler, not a TPU), GPUs the wheels named in the error. TOPOLOGY
is a shape in chips (v5e:16x16, v4:4x4x4), a product name (v5e-256, v3-8, v5p-16), several slices
(2xv5e:16x16), GPUs of one node (H100:8) or of several (H100:4x8), or cpu:N, N virtual devices.

The fast compile is up to 10 % off in memory: from 90 to 110 % of a TPU the plan says that it is too
close, and --full_compile decides.

Exit status: 0 it fits; 1 it does not, or it is too close for the fast compile; 2 a mistake in the
command or the config; 3 the planner failed, with a traceback, and nothing is known.
"""

import logging
import os
import sys
import traceback

from vit_jax import command_line, launch
from vit_jax.arguments import at_least


def plan(arguments):
    from vit_jax.files.paths import write_json
    from vit_jax.plan.plan import make_plan
    from vit_jax.plan.report import plan_json, report_text
    from vit_jax.plan.topology import parse_topology

    topology = parse_topology(arguments.topology)
    if arguments.output:
        os.makedirs(arguments.output, exist_ok=True)
    result = make_plan(
        arguments.config,
        topology,
        full_compile=arguments.full_compile,
        num_examples=arguments.num_examples,
        num_classes=arguments.num_classes,
        hbm_gib=arguments.hbm_gib,
        try_remedies=not arguments.noremedies,
    )
    print(report_text(result))
    if arguments.output:
        write_json(f"{arguments.output}/plan.json", plan_json(result))
    return 0 if result.fits else 1


def main():
    parser = command_line.run_parser(__doc__, trains=False)
    add = parser.add_argument
    add("--topology", required=True, help="machine to plan for, such as v5e:8x8")
    add("--output", metavar="DIR", help="for plan.json")
    minutes = "optimize as for training; takes minutes"
    add("--full_compile", action="store_true", help=minutes)
    add("--noremedies", action="store_true", help="do not search for changes that make it fit")
    known = "of data that are not available and not known to recipes"
    add("--num_examples", type=at_least(1), metavar="N", help=known)
    add("--num_classes", type=at_least(1), metavar="N", help="likewise")
    add("--hbm_gib", type=at_least(1e-6), metavar="GIB", help="of a device, if not the chip's")
    with launch.one_line_errors():
        arguments = command_line.parse(parser)
        launch.start_logging(to_stderr=True)
        logging.getLogger("jax").setLevel(logging.ERROR)
        return plan(arguments)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # would exit with status 1, which means that it does not fit
        traceback.print_exc()
        status = 3
    sys.exit(status)
