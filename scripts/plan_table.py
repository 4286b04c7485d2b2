"""Writes the tables of docs/plan_table.md: the models of the paper's table 3 on TPU slices.

    nice python scripts/plan_table.py --output=docs/plan_table.md --results=docs/plan_table.jsonl

Each cell is a plan as scripts/plan.py makes it; hours on two cores. Given again with the same
--results an interrupted run resumes. What stands above the first table of --output is kept.
"""

import argparse
import sys
from pathlib import Path

from vit_jax import launch
from vit_jax.errors import check_known

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
        from vit_jax.plan.table import make_tables

        models = arguments.models.split(",") if arguments.models else list(pretrain.JFT)
        for model in models:
            check_known("--models", model, pretrain.JFT)
        tables = make_tables(
            [f"{model},{arguments.dataset}" for model in models],
            arguments.topologies.split(","),
            get_config=pretrain.get_config,
            results=arguments.results,
        )
        output = arguments.output
        introduction = output.read_text().partition("## ")[0] if output.exists() else ""
        output.write_text(introduction + tables)


if __name__ == "__main__":
    main()
