"""The table of docs/plan_table.md: what fits where, how long it takes, with which settings."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.hardware.chips import GIB
from vit_jax.plan.advice import Changes, changed, flags, remedies
from vit_jax.plan.compiled import FAST_SHARE
from vit_jax.plan.estimate import utilization
from vit_jax.plan.plan import Plan, available_bytes, make_plan
from vit_jax.plan.topology import Topology, parse_topology

INTRODUCTION = """# What fits where, and how long it takes

Written by `scripts/plan_table.py` on a machine without a TPU: the update of `configs/pretrain.py`
was compiled for each machine (fast, see `scripts/plan.py`), nothing was run. Batch {batch}. The
state is split over all devices of a slice or node (`mesh.data=-1 mesh.fsdp=0`), or copied
(`mesh.fsdp=1`) where that fits and is predicted to be faster. The last column is what it took to
fit beside the recipe's own settings, found in the order remat and scan (ViTs), accumulation, remat
(ResNets), bfloat16 first moment.

GiB is what the compiler reserves per JAX device (a chip; a core of v3). XLA computes again by
itself what would not fit otherwise: the same batch takes more on a device that has more, and what
it computes again is not in the step's time. The figure is up to 10 % off for a TPU: `close` marks
what fills more than 90 %, for which `--full_compile` tells. The step is predicted, not measured:
the longest of executed FLOPs at the share of the peak that stands above each table, bytes at the
full bandwidth of the memory, and collectives at that of the links. A real step may take more, as
nothing overlaps perfectly, or less: the share is assumed, and trainings of ViTs were published on
both sides of it. Chip-days are for the whole recipe, without evaluations."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One model on one topology.

    Attributes:
      settings: beside the recipe's own; "" for none.
      gib: per device in all; None where nothing that was tried fits.
      step_seconds, images_per_second, chip_days: predicted; None likewise.
      problem: why there is no plan; "" where there is one.
    """

    model: str
    topology: str
    settings: str = ""
    gib: float | None = None
    step_seconds: float | None = None
    images_per_second: float | None = None
    chip_days: float | None = None
    problem: str = ""


def make_table(
    models: Sequence[str],
    topologies: Sequence[str],
    *,
    get_config: Callable[[str], ConfigDict],
    results: Path,
) -> str:
    """Plans every model for every topology; returns Markdown.

    Args:
      models: arguments of the recipe, such as "B/16,jft".
      topologies: see `parse_topology`.
      get_config: of the recipe.
      results: file of JSON lines; what it holds is not computed again. Cells with a problem are
        left out, so that they are tried again.

    Raises:
      UserError: a topology cannot be read, or is no accelerator.
    """
    parsed = {text: parse_topology(text) for text in topologies}
    for topology in parsed.values():
        if topology.chip is None:
            raise UserError(f"--topologies: {topology.name} has no speed; name accelerators.")
    lines = results.read_text().splitlines() if results.exists() else []
    names = [field.name for field in dataclasses.fields(Cell)]
    rows = [{name: row[name] for name in names if name in row} for row in map(json.loads, lines)]
    cells = {(row["model"], row["topology"]): Cell(**row) for row in rows}
    for text, topology in parsed.items():
        for model in models:
            if (model, text) in cells:
                continue
            try:
                cell = plan_cell(model, text, topology, get_config(model))
            except UserError as error:
                logging.warning("%s on %s: %s", model, text, error)
                cells[model, text] = Cell(model, text, problem=str(error))
                continue
            logging.info("%s", cell)
            cells[model, text] = cell
            with results.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(cell)) + "\n")
    tables = [
        _markdown(topology, [cells[model, text] for model in models])
        for text, topology in parsed.items()
    ]
    introduction = INTRODUCTION.format(batch=_batch_sizes(list(cells.values())))
    return "\n\n".join([introduction, *tables]) + "\n"


def plan_cell(model: str, text: str, topology: Topology, config: ConfigDict) -> Cell:
    """The recipe with its state split over the slice, and whatever else it takes to fit.

    Where not the arithmetic takes longest then, a copy of the state on every device is planned as
    well: XLA pays for split parameters by reading activations again for each part.
    """
    split = changed(config, {"mesh.data": -1, "mesh.fsdp": 0})

    def planned(changes: Changes) -> Plan:
        return make_plan(changed(split, changes), topology, try_remedies=False)

    tried: list[Changes] = [{}, *(changes for changes, _ in remedies(split, topology))]
    for changes in tried:
        plan = planned(changes)
        if not plan.too_large:
            break
    if not plan.too_large and _waits_for_data(plan) and split.mesh.tensor == 1:
        # It may fit without what the split state needed.
        alone: Changes = {"mesh.fsdp": 1}
        for copies in (alone, {**changes, **alone}):
            copied = planned(copies)
            if not copied.too_large:
                if _seconds(copied) < _seconds(plan):
                    plan, changes = copied, copies
                break
    jax.clear_caches()  # hundreds of programs would fill the memory of this machine
    cell = Cell(model, text, settings=flags(changes))
    if plan.step is None or plan.too_large:
        return cell
    return dataclasses.replace(
        cell,
        gib=plan.step.memory.total / GIB,
        step_seconds=_seconds(plan),
        images_per_second=plan.batch_size / _seconds(plan),
        chip_days=plan.recipe.chip_days,
    )


def _seconds(plan: Plan) -> float:
    assert plan.time is not None  # it compiled, for an accelerator
    return plan.time.predicted


def _waits_for_data(plan: Plan) -> bool:
    assert plan.time is not None
    return plan.time.predicted > plan.time.compute


def _batch_sizes(cells: list[Cell]) -> str:
    known = {
        round(cell.step_seconds * cell.images_per_second)
        for cell in cells
        if cell.step_seconds is not None and cell.images_per_second is not None
    }
    return " or ".join(map(str, sorted(known))) or "as in the recipe"


def _markdown(topology: Topology, cells: list[Cell]) -> str:
    available = available_bytes(topology)
    assert topology.chip is not None
    assert available is not None
    assumed = utilization(topology.chip.name)
    sure = (FAST_SHARE if topology.kind == "tpu" else 1.0) * available / GIB
    lines = [
        f"## {topology}: {available / GIB:.2f} GiB per device",
        "",
        f"Compute at {assumed.share:.0%} of the peak: {assumed.origin}.",
        "",
        "| recipe | GiB per device | step | images/s | chip-days | beside the recipe |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        settings = cell.settings.replace("--config.", "") or "-"
        if cell.problem:
            lines.append(f"| {cell.model} | no plan | | | | {cell.problem.replace('|', '/')} |")
        elif cell.gib is None:
            lines.append(f"| {cell.model} | does not fit | | | | {settings} |")
        else:
            close = " close" if cell.gib > sure else ""
            lines.append(
                f"| {cell.model} | {cell.gib:.2f}{close} | {cell.step_seconds:.2f} s | "
                f"{cell.images_per_second:,.0f} | {cell.chip_days:,.0f} | {settings} |"
            )
    return "\n".join(lines)
