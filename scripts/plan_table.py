"""Writes docs/plan_table.md: the models of the paper's table 3 on several TPU slices.

    nice python scripts/plan_table.py --output=docs/plan_table.md --results=docs/plan_table.jsonl

Each cell is a plan as scripts/plan.py makes it; hours on two cores. Given again with the same
--results it goes on where it was.
"""

import argparse
import sys
from pathlib import Path

from vit_jax import launch
from vit_jax.errors import UserError, check_known

TOPOLOGIES = "v3-8,v4-8,v5e-16,v5e-256,v5p-16"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="Markdown file")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines, one per cell")
    parser.add_argument("--models", default="", help="comma-separated (default: all of table 3)")
    parser.add_argument("--topologies", default=TOPOLOGIES, help=f"default: {TOPOLOGIES}")
    parser.add_argument("--dataset", default="jft", help="of configs/pretrain.py (default: jft)")
    arguments = parser.parse_args()
    launch.start_logging(to_stderr=True)
    with launch.one_line_errors():
        sys.path.append(str(launch.ROOT))  # for the recipes
        from configs import pretrain
        from vit_jax.plan.table import make_table

        for flag, path in (("output", arguments.output), ("results", arguments.results)):
            if not path.resolve().parent.is_dir():
                raise UserError(f"--{flag}={path}: there is no folder {path.parent}.")
        models = arguments.models.split(",") if arguments.models else list(pretrain.JFT)
        for model in models:
            check_known("--models", model, pretrain.JFT)
        arguments.output.write_text(
            make_table(
                [f"{model},{arguments.dataset}" for model in models],
                arguments.topologies.split(","),
                get_config=pretrain.get_config,
                results=arguments.results,
            )
        )


if __name__ == "__main__":
    main()
