"""Writes the tables of docs/plan_table.md: the models of the paper's table 3 on TPU slices.

    nice python scripts/plan_table.py --output=docs/plan_table.md --results=docs/plan_table.jsonl

Each cell is a plan as scripts/plan.py makes it; hours on two cores. Given again with the same
--results an interrupted run resumes. What stands above the first table of --output is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict

from vit_jax import launch
from vit_jax.errors import UserError, check_known
from vit_jax.hardware.chips import GIB, Chip
from vit_jax.plan.cost import FAST_SHARE, utilization
from vit_jax.plan.plan import (
    Changes,
    Plan,
    available_bytes,
    changed,
    flags,
    make_plan,
    remedies,
)
from vit_jax.plan.topology import Topology, parse_topology

sys.path.append(str(launch.ROOT))  # for the recipes

from configs import pretrain

TOPOLOGIES = "v3-8,v4-8,v5e-16,v5e-256,v5p-16"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One model on one topology, a line of the results; no figures where nothing tried fits."""

    model: str
    topology: str
    settings: str = ""  # beside the recipe's own
    gib: float | None = None  # per device in all
    step_seconds: float | None = None
    images_per_second: float | None = None
    chip_days: float | None = None


def make_tables(models: Sequence[str], topologies: Sequence[str], results: Path) -> str:
    """Plans every model for every topology; returns Markdown, a table per topology.

    Args:
      models: arguments of configs/pretrain.py, such as "B/16,jft".
      topologies: see `parse_topology`.
      results: file of JSON lines; what it holds is not computed again.

    Raises:
      UserError: a topology cannot be read, or is no accelerator; see `make_plan`.
    """
    lines = results.read_text().splitlines() if results.exists() else []
    cells = {(cell.model, cell.topology): cell for cell in (Cell(**json.loads(s)) for s in lines)}
    tables = []
    for text in topologies:
        topology = parse_topology(text)
        if topology.chip is None:
            raise UserError(f"--topologies: {topology.name} has no speed; name accelerators.")
        for model in models:
            if (model, text) not in cells:
                cell = plan_cell(model, text, topology, pretrain.get_config(model))
                logging.info("%s", cell)
                cells[model, text] = cell
                with results.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(cell)) + "\n")
        tables.append(markdown(topology, topology.chip, [cells[model, text] for model in models]))
    return "\n\n".join(tables) + "\n"


def plan_cell(model: str, text: str, topology: Topology, config: ConfigDict) -> Cell:
    """The recipe with its state split over the slice, and whatever else it takes to fit.

    Where something else than arithmetic then takes longest, a copy of the state on every device is
    planned too.
    """
    split = changed(config, {"mesh.data": -1, "mesh.fsdp": 0})

    def planned(changes: Changes) -> Plan:
        return make_plan(changed(split, changes), topology, try_remedies=False)

    best: Changes = {}
    plan = planned(best)
    tried = remedies(split, topology)
    while plan.filled > 1 and (remedy := next(tried, None)):
        best = remedy[0]
        plan = planned(best)
    time = plan.time
    if time and plan.filled <= 1 and time.predicted > time.compute and split.mesh.tensor == 1:
        # It may fit without what the split state needed.
        copied: list[Changes] = [{"mesh.fsdp": 1}, {**best, "mesh.fsdp": 1}]
        for changes in copied:
            copy = planned(changes)
            if copy.time and copy.filled <= 1:
                if copy.time.predicted < time.predicted:
                    plan, best, time = copy, changes, copy.time
                break
    jax.clear_caches()  # hundreds of programs would fill the memory of this machine
    cell = Cell(model, text, settings=flags(best))
    if plan.step is None or time is None or plan.filled > 1:
        return cell
    return dataclasses.replace(
        cell,
        gib=plan.step.memory["total"] / GIB,
        step_seconds=time.predicted,
        images_per_second=plan.batch_size / time.predicted,
        chip_days=plan.recipe["chip_days"],
    )


def markdown(topology: Topology, chip: Chip, cells: list[Cell]) -> str:
    available = (available_bytes(topology) or 0) / GIB
    share, origin = utilization(chip.name)
    sure = available * (FAST_SHARE if topology.kind == "tpu" else 1.0)
    lines = [
        f"## {topology}: {available:.2f} GiB per device",
        "",
        f"Compute at {share:.0%} of the peak: {origin}.",
        "",
        "| recipe | GiB per device | step | images/s | chip-days | beside the recipe |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        settings = cell.settings.replace("--config.", "") or "-"
        figures = "does not fit | | |"
        if cell.gib is not None:
            close = " close" if cell.gib > sure else ""
            figures = (
                f"{cell.gib:.2f}{close} | {cell.step_seconds:.2f} s | "
                f"{cell.images_per_second:,.0f} | {cell.chip_days:,.0f}"
            )
        lines.append(f"| {cell.model} | {figures} | {settings} |")
    return "\n".join(lines)


def main() -> None:
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
        models = arguments.models.split(",") if arguments.models else list(pretrain.JFT)
        for model in models:
            check_known("--models", model, pretrain.JFT)
        recipes = [f"{model},{arguments.dataset}" for model in models]
        tables = make_tables(recipes, arguments.topologies.split(","), arguments.results)
        output = arguments.output
        introduction = output.read_text().partition("## ")[0] if output.exists() else ""
        output.write_text(introduction + tables)


if __name__ == "__main__":
    main()
