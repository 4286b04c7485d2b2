"""Plans a training on machines that are not here: its memory, its time, and whether it fits.

    python scripts/plan.py --config=configs/pretrain.py:H/14,imagenet21k --topology=v5e:8x8
    python scripts/plan.py --config=configs/pretrain.py:B/16,imagenet2012 --topology=v3-8 \\
        --config.train_step.accumulation_steps=4 --output=/tmp/plan
    python scripts/plan.py --config=configs/quickstart.py --topology=cpu:8

The update itself is compiled for the topology; nothing is executed, and no accelerator is used.
TPUs need the extra [tpu] (the compiler, not a TPU), GPUs the wheels named in the error. TOPOLOGY
is a shape in chips (v5e:16x16, v4:4x4x4), a product name (v5e-256, v3-8, v5p-16), several slices
(2xv5e:16x16), GPUs of one node (H100:8) or of several (H100:4x8), or cpu:N, N virtual devices.

  --output=DIR         folder for plan.json
  --full_compile       optimize as for training; minutes. Memory of the fast compile is up to 10 %
                       off: from 90 to 110 % of a TPU the plan says that it is too close; this
                       flag decides. It also gives the time by the final code
  --noremedies         do not search for changes that make it fit
  --num_examples=, --num_classes=   of data that are not available and not known to recipes
  --hbm_gib=           memory of a device, if not the chip's

Exit status: 0 it fits; 1 it does not, or it is too close for the fast compile; 2 a mistake in the
command or the config; 3 the planner failed, with a traceback, and nothing is known.
"""

import logging
import os
import sys
import traceback

from absl import flags

from vit_jax import command_line, launch
from vit_jax.errors import UserError
from vit_jax.plan.topology import parse_topology


def plan(config):
    given = flags.FLAGS
    topology = parse_topology(given.topology)
    from vit_jax.files.paths import write_json
    from vit_jax.plan.plan import make_plan
    from vit_jax.plan.report import plan_json, report_text

    if given.output:
        os.makedirs(given.output, exist_ok=True)
    result = make_plan(
        config,
        topology,
        full_compile=given.full_compile,
        num_examples=given.num_examples,
        num_classes=given.num_classes,
        hbm_gib=given.hbm_gib,
        try_remedies=given.remedies,
    )
    print(report_text(result))
    if given.output:
        write_json(f"{given.output}/plan.json", plan_json(result))
    return 0 if result.fits else 1


def main():
    flags.DEFINE_string("topology", None, "Machine to plan for, such as v5e:8x8.")
    flags.DEFINE_string("output", None, "Folder for plan.json.")
    flags.DEFINE_bool("full_compile", False, "Optimize as for training; takes minutes.")
    flags.DEFINE_bool("remedies", True, "If it does not fit, search for changes that make it fit.")
    flags.DEFINE_integer("num_examples", None, "Of data that are not available.", lower_bound=1)
    flags.DEFINE_integer("num_classes", None, "Likewise.", lower_bound=1)
    flags.DEFINE_float("hbm_gib", None, "Of a device, if not the chip's.", lower_bound=1e-6)
    command_line.define_flags()
    with launch.one_line_errors():
        if command_line.help_requested():
            # A plan accepts the flags of training, but ignores them.
            ignored = tuple(f"  --{flag.name}: " for flag in command_line.own_flags())
            lines = command_line.help_text(__doc__).splitlines()
            print("\n".join(line for line in lines if not line.startswith(ignored)))
            return 0
        command_line.parse_flags()
        launch.start_logging(to_stderr=True)
        logging.getLogger("jax").setLevel(logging.ERROR)
        for name in ("config", "topology"):
            if getattr(flags.FLAGS, name) is None:
                raise UserError(f"--{name} is missing; see --help.")
        return plan(flags.FLAGS.config)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # would exit with status 1, which means that it does not fit
        traceback.print_exc()
        status = 3
    sys.exit(status)
