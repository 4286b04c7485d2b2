"""The table of docs/plan_table.md: what fits where, how long it takes, with which settings."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.hardware.chips import GIB
from vit_jax.plan.advice import Changes, changed, flags, remedies
from vit_jax.plan.compiled import CompiledStep, TooLargeError, compile_step
from vit_jax.plan.estimate import StepTime, step_time, whole_recipe
from vit_jax.plan.plan import available_bytes, build_subject, usable_share
from vit_jax.plan.published import utilization, variant_of
from vit_jax.plan.subject import Subject
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


NOTHING_FITS = dict.fromkeys(("gib", "step_seconds", "images_per_second", "chip_days"))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One model on one topology.

    Attributes:
      settings: beside the recipe's own; "" for none.
      gib: per device in all; None where nothing that was tried fits.
      available_gib: of the device.
      step_seconds, images_per_second, chip_days: predicted; None likewise.
      compile_seconds: what finding this out has taken here.
      problem: why there is no plan; "" where there is one.
    """

    model: str
    topology: str
    settings: str
    gib: float | None
    available_gib: float
    step_seconds: float | None
    images_per_second: float | None
    chip_days: float | None
    compile_seconds: float
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
    cells = [Cell(**json.loads(line)) for line in lines]
    done = {(cell.model, cell.topology) for cell in cells}
    for text, topology in parsed.items():
        for model in models:
            if (model, text) in done:
                continue
            try:
                cell = plan_cell(model, text, topology, get_config(model))
            except UserError as error:
                logging.warning("%s on %s: %s", model, text, error)
                cells.append(_without_plan(model, text, topology, str(error)))
                continue
            logging.info("%s", cell)
            cells.append(cell)
            with results.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(cell)) + "\n")
    introduction = INTRODUCTION.format(batch=_batch_sizes(cells))
    tables = [_markdown(text, topology, models, cells) for text, topology in parsed.items()]
    return "\n\n".join([introduction, *tables]) + "\n"


def plan_cell(model: str, text: str, topology: Topology, config: ConfigDict) -> Cell:
    """The recipe with its state split over the slice, and whatever else it takes to fit.

    Where not the arithmetic takes longest then, a copy of the state on every device is planned as
    well: XLA pays for split parameters by reading activations again for each part.
    """
    start = time.monotonic()
    available = available_bytes(topology, None)
    assert available is not None
    row: dict[str, Any] = {}
    split = changed(config, {"mesh.data": -1, "mesh.fsdp": 0})
    for changes in [{}, *(each for each, _ in remedies(split, topology))]:
        row = {"settings": flags(changes), **NOTHING_FITS}
        found = _compiled(changed(split, changes), topology)
        if found is None or found[1].memory.total > available:
            continue
        seconds = _step_time(*found, topology)
        row |= _figures(*found, seconds, config, topology)
        if seconds.predicted > seconds.compute and split.mesh.tensor == 1:
            row = _with_copies(row, changes, split, config, topology, available)
        break
    jax.clear_caches()  # hundreds of programs would fill the memory of this machine
    row |= {"model": model, "topology": text, "available_gib": available / GIB}
    return Cell(**row, compile_seconds=time.monotonic() - start)


def _with_copies(
    row: dict[str, Any],
    changes: Changes,
    split: ConfigDict,
    config: ConfigDict,
    topology: Topology,
    available: float,
) -> dict[str, Any]:
    """The row of a plan with the state copied, if it fits and is faster than that of `row`."""
    # It may fit without what the split state needed.
    copied: Changes = {"mesh.fsdp": 1}
    for copies in (copied, {**changes, **copied}):
        found = _compiled(changed(split, copies), topology)
        if found is None or found[1].memory.total > available:
            continue
        seconds = _step_time(*found, topology)
        if seconds.predicted < row["step_seconds"]:
            return {"settings": flags(copies), **_figures(*found, seconds, config, topology)}
        break
    return row


def _without_plan(model: str, text: str, topology: Topology, problem: str) -> Cell:
    available = available_bytes(topology, None)
    assert available is not None
    return Cell(model, text, "", None, available / GIB, None, None, None, 0.0, problem)


def _compiled(config: ConfigDict, topology: Topology) -> tuple[Subject, CompiledStep] | None:
    try:
        subject = build_subject(config, topology, num_examples=None, num_classes=None)
        return subject, compile_step(subject, full=False)
    except TooLargeError:
        return None


def _step_time(subject: Subject, step: CompiledStep, topology: Topology) -> StepTime:
    model_flops = _flops_per_image(subject) * subject.run.batch_size
    seconds = step_time(step, topology, model_flops=model_flops, full_compile=False)
    if seconds is None:
        raise UserError("the table is for accelerators; virtual devices have no speed.")
    return seconds


def _flops_per_image(subject: Subject) -> float:
    run = subject.run
    return run.train_flops_per_image()


def _figures(
    subject: Subject,
    step: CompiledStep,
    seconds: StepTime,
    config: ConfigDict,
    topology: Topology,
) -> dict[str, float | None]:
    run = subject.run
    recipe = whole_recipe(
        steps=run.total_steps,
        batch_size=run.batch_size,
        flops_per_image=_flops_per_image(subject),
        seconds=seconds.predicted,
        topology=topology,
        variant=variant_of(dict(config.model)),
        dataset=config.dataset.name,
        epochs=run.total_steps * run.batch_size / run.dataset.num_examples,
    )
    return {
        "gib": step.memory.total / GIB,
        "step_seconds": seconds.predicted,
        "images_per_second": run.batch_size / seconds.predicted,
        "chip_days": recipe.chip_days,
    }


def _batch_sizes(cells: list[Cell]) -> str:
    known = {
        round(cell.step_seconds * cell.images_per_second)
        for cell in cells
        if cell.step_seconds is not None and cell.images_per_second is not None
    }
    return " or ".join(map(str, sorted(known))) or "as in the recipe"


def _markdown(text: str, topology: Topology, models: Sequence[str], cells: list[Cell]) -> str:
    chosen = {cell.model: cell for cell in cells if cell.topology == text}
    available = next(iter(chosen.values())).available_gib
    assert topology.chip is not None
    assumed = utilization(topology.chip.name)
    limit = usable_share(topology, full_compile=False) * available
    lines = [
        f"## {topology}: {available:.2f} GiB per device",
        "",
        f"Compute at {assumed.share:.0%} of the peak: {assumed.origin}.",
        "",
        "| recipe | GiB per device | step | images/s | chip-days | beside the recipe |",
        "|---|---|---|---|---|---|",
    ]
    for model in models:
        cell = chosen[model]
        if cell.problem:
            lines.append(f"| {model} | no plan | | | | {cell.problem.replace('|', '/')} |")
            continue
        settings = cell.settings.replace("--config.", "") or "-"
        if cell.gib is None or cell.step_seconds is None:
            lines.append(f"| {model} | does not fit | | | | {settings} |")
            continue
        close = " close" if cell.gib > limit else ""
        lines.append(
            f"| {model} | {cell.gib:.2f}{close} | {cell.step_seconds:.2f} s | "
            f"{cell.images_per_second:,.0f} | {cell.chip_days:,.0f} | {settings} |"
        )
    return "\n".join(lines)
