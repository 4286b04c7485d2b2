"""Writes the tables of docs/plan_table.md: the models of the paper's table 3 on TPU slices.

    nice python scripts/plan_table.py --output=docs/plan_table.md --results=docs/plan_table.jsonl

Each row is a plan as made by scripts/plan.py; takes hours on two cores. With the same
--results an interrupted run resumes. The text above the first table of --output is kept.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax import ROOT, launch
from vit_jax.arguments import create_parser
from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.plan.cost import FAST_SHARE, utilization
from vit_jax.plan.plan import Changes, available_bytes, changed, flags, make_plan, remedies
from vit_jax.plan.topology import Topology, parse_topology

sys.path.insert(0, str(ROOT))  # for the recipes

from configs import pretrain

TOPOLOGIES = "v3-8,v4-8,v5e-16,v5e-256,v5p-16"


def make_tables(models: Sequence[str], topologies: Sequence[str], results: Path) -> str:
    """Plans every model for every topology; returns Markdown, a table per topology.

    Args:
      models: arguments of configs/pretrain.py, such as "B/16,jft".
      topologies: see `parse_topology`.
      results: file of JSON lines; rows in it are not computed again.

    Raises:
      UserError: a topology is invalid, or not an accelerator; see `make_plan`.
    """
    lines = results.read_text().splitlines() if results.exists() else []
    rows = {(row["model"], row["topology"]): row for row in map(json.loads, lines)}
    tables = []
    for text in topologies:
        topology = parse_topology(text)
        if topology.chip is None:
            raise UserError(f"--topologies: {topology.name} has no known speed; use accelerators.")
        for model in models:
            if (model, text) not in rows:
                row = {"model": model, "topology": text}
                row |= plan_row(topology, pretrain.get_config(model))
                logging.info("%s", row)
                rows[model, text] = row
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        tables.append(markdown(topology, [rows[model, text] for model in models]))
    return "\n\n".join(tables) + "\n"


def plan_row(topology: Topology, config: ConfigDict) -> dict[str, Any]:
    """The recipe with its state split over the slice, and other changes needed to fit.

    If arithmetic is then not the bottleneck, a copy of the state on every device is
    also planned.
    """
    split = changed(config, {"mesh.data": -1, "mesh.fsdp": 0})

    def planned(changes: Changes) -> Any:
        return make_plan(changed(split, changes), topology, try_remedies=False)

    changes: Changes = {}
    plan, tried = planned(changes), remedies(split, topology)
    while plan.filled > 1 and (more := next(tried, None)):
        plan, changes = planned(more), more
    if plan.filled <= 1 and plan.time.predicted > plan.time.compute:
        # It may fit without the changes that the split state needed.
        copies: tuple[Changes, ...] = ({"mesh.fsdp": 1}, {**changes, "mesh.fsdp": 1})
        for copied in copies:
            copy = planned(copied)
            if copy.filled <= 1:
                if copy.time.predicted < plan.time.predicted:
                    plan, changes = copy, copied
                break
    jax.clear_caches()  # hundreds of programs would fill this machine's memory
    if plan.filled > 1:
        return {"settings": flags(changes), "gib": None}
    return {
        "settings": flags(changes),
        "gib": plan.step.memory["total"] / 2**30,
        "step_seconds": plan.time.predicted,
        "images_per_second": plan.batch_size / plan.time.predicted,
        "chip_days": plan.recipe["chip_days"],
    }


def markdown(topology: Topology, rows: Sequence[dict[str, Any]]) -> str:
    available = (available_bytes(topology) or 0) / 2**30
    share, origin = utilization(topology.chip.name if topology.chip else "")
    sure = available * (FAST_SHARE if topology.kind == "tpu" else 1.0)
    lines = [
        f"## {topology}: {available:.2f} GiB per device",
        "",
        f"Compute at {share:.0%} of the peak: {origin}.",
        "",
        "| recipe | GiB per device | step | images/s | chip-days | beside the recipe |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        settings = row["settings"].replace("--config.", "") or "-"
        figures = "does not fit | | |"
        if row["gib"] is not None:
            close = " close" if row["gib"] > sure else ""
            figures = (
                f"{row['gib']:.2f}{close} | {row['step_seconds']:.2f} s | "
                f"{row['images_per_second']:,.0f} | {row['chip_days']:,.0f}"
            )
        lines.append(f"| {row['model']} | {figures} | {settings} |")
    return "\n".join(lines)


def main() -> None:
    parser = create_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="Markdown file")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines, one per row")
    parser.add_argument("--models", default=",".join(pretrain.JFT), help="default: all of table 3")
    parser.add_argument("--topologies", default=TOPOLOGIES, help=f"default: {TOPOLOGIES}")
    parser.add_argument("--dataset", default="jft", help="of configs/pretrain.py (default: jft)")
    arguments = parser.parse_args()
    launch.start_logging(to_stderr=True)
    with launch.one_line_errors():
        models = arguments.models.split(",")
        for model in models:
            check_known("--models", model, pretrain.JFT)
        recipes = [f"{model},{arguments.dataset}" for model in models]
        tables = make_tables(recipes, arguments.topologies.split(","), arguments.results)
        output = arguments.output
        introduction = (
            output.read_text(encoding="utf-8").partition("## ")[0] if output.exists() else ""
        )
        output.write_text(introduction + tables, encoding="utf-8")


if __name__ == "__main__":
    main()
