"""A plan as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from vit_jax.hardware.chips import GIB
from vit_jax.plan.advice import flags
from vit_jax.plan.collectives import KINDS
from vit_jax.plan.compiled import CompiledStep
from vit_jax.plan.estimate import Recipe, StepTime
from vit_jax.plan.parameters import parameter_table
from vit_jax.plan.plan import Plan, gpu_share


def report_text(plan: Plan) -> str:
    """Everything, section by section; the verdict comes last, where it is read first."""
    sections = {
        "Plan": _subject(plan),
        "Parameters": parameter_table(plan.rows, plan.mesh),
        "FLOPs": _flops(plan),
        "Memory per device": _memory(plan),
    }
    if plan.step is not None:
        sections["Collectives per step, per device"] = _collectives(plan.step)
        sections["Time of a step"] = _time(plan.step, plan.time)
    sections |= {"The whole recipe": _recipe(plan.recipe), "Verdict": _verdict(plan)}
    return "\n\n".join(
        title + "\n" + "\n".join("  " + line for line in lines) for title, lines in sections.items()
    )


def plan_json(plan: Plan) -> dict[str, Any]:
    """What `plan.json` holds: the fields of `Plan`, and the verdict.

    `fits` and `too_close` are those of `Plan`: a plan that is too close for the fast compile does
    not count as fitting.
    """
    verdict = {"fits": plan.fits, "too_close": plan.too_close}
    return {**dataclasses.asdict(plan), "topology": plan.topology.name, **verdict}


def _subject(plan: Plan) -> list[str]:
    mesh = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    per_device = plan.batch_size / (plan.mesh["data"] * plan.mesh["fsdp"])
    parts = plan.accumulation_steps
    in_parts = f", in {parts} parts of {per_device / parts:g}" if parts > 1 else ""
    size = "x".join(map(str, plan.image_shape))
    data = f"{plan.num_examples:,} images of {size} in {plan.num_classes:,} classes"
    return [
        f"devices  {plan.topology}",
        f"mesh     {mesh}",
        f"batch    {plan.batch_size} images, {per_device:g} per device{in_parts}",
        f"data     {data}: {plan.data_note or 'here'}",
    ]


def _flops(plan: Plan) -> list[str]:
    model = plan.model_flops_per_image * plan.batch_size
    lines = [
        f"model     {_si(model)}FLOP per step, {_si(plan.model_flops_per_image)} per image: "
        "products, forward and twice that backward"
    ]
    if plan.step is not None:
        executed = plan.step.executed_flops
        lines.append(
            f"executed  {_si(executed)}FLOP: products in this update, {executed / model:.2f} x the "
            "model's (what remat repeats counts; gradients that nobody needs do not, nor what XLA "
            "computes again by itself where memory is short)"
        )
    return lines


def _memory(plan: Plan) -> list[str]:
    available = plan.available_bytes
    lines = [f"state and batch  {_gib(plan.argument_bytes)}  (by the shardings)"]
    if plan.step is None:
        lines.append(f"the compiler     {plan.refusal}")
    else:
        memory = plan.step.memory
        lines += [
            f"arguments        {_gib(memory.arguments)}",
            f"outputs          {_gib(memory.outputs)}",
            f"aliased          {_gib(memory.aliased)}  (outputs in the place of arguments)",
            f"temporaries      {_gib(memory.temporaries)}",
            f"peak             {_gib(memory.peak)}  (most that is alive at a time)",
            f"total            {_gib(memory.total)}  (arguments + outputs - aliased + temporaries)",
        ]
    if available is not None:
        share = f"  ({gpu_share():.0%} of the GPU; XLA_PYTHON_CLIENT_MEM_FRACTION sets it)"
        note = share if plan.topology.kind == "gpu" else ""
        lines.append(f"available        {_gib(available)}{note}")
    return lines


def _collectives(step: CompiledStep) -> list[str]:
    lines = [f"{'':20}{'count':>7}{'arrays GiB':>13}{'sent GiB':>11}{'over the network':>19}"]
    for kind in KINDS:
        if traffic := step.traffic.get(kind):
            sizes = (traffic.num_bytes, traffic.sent_bytes, traffic.network_bytes)
            arrays, sent, network = (size / GIB for size in sizes)
            lines.append(f"{kind:20}{traffic.count:>7}{arrays:>13.3f}{sent:>11.3f}{network:>19.3f}")
    return lines if len(lines) > 1 else ["none"]


def _time(step: CompiledStep, time: StepTime | None) -> list[str]:
    moved = f"{step.hbm_bytes / 1e9:.1f} GB of HBM read and written per device"
    if time is None:
        return [moved, "virtual devices: nothing is known of their speed"]
    return [
        f"compute    {_seconds(time.compute)}  executed FLOPs at {time.assumed.share:.0%} of peak",
        f"           {time.assumed.origin}",
        f"memory     {_seconds(time.memory)}  {moved}, at full bandwidth",
        f"links      {_seconds(time.links)}  collectives, at full bandwidth",
        f"predicted  {_seconds(time.predicted)}  the longest of these, as if they overlapped: a "
        "model, never measured on this chip",
        f"bound      {_seconds(time.bound)}  the model's FLOPs at the whole peak: no program is "
        "faster",
    ]


def _recipe(recipe: Recipe) -> list[str]:
    lines = [f"{recipe.steps:,} steps, {recipe.images:,} images, {recipe.exaflops:,.4g} exaFLOPs"]
    if recipe.paper_exaflops is not None:
        lines[0] += f" (paper, table 6: {recipe.paper_exaflops:g})"
    if recipe.days is not None:
        cores = (
            f", {recipe.core_days:,.1f} core-days" if recipe.core_days != recipe.chip_days else ""
        )
        lines.append(
            f"{recipe.days:.3g} days: {recipe.chip_days:,.1f} chip-days{cores}, without "
            "evaluations, checkpoints and interruptions"
        )
    paper = "no figure in the paper"
    if recipe.paper_core_days is not None:
        paper = f"paper, table 2: {recipe.paper_core_days:,.0f}"
    lines.append(
        f"{recipe.v3_core_days:,.3g} TPUv3-core-days at the published share of its peak ({paper})"
    )
    return lines


def _verdict(plan: Plan) -> list[str]:
    chip = plan.topology.chip
    device = "a core" if chip is not None and chip.devices > 1 else "a device"
    needed = "more" if plan.needed_bytes is None else _gib(plan.needed_bytes).strip()
    if plan.available_bytes is None:
        return [f"It compiles and needs {needed} per device; what there is depends on the machine."]
    has = f"{_gib(plan.available_bytes).strip()} of {device}"
    if plan.needed_bytes is not None:
        has += f" ({plan.needed_bytes / plan.available_bytes:.0%})"
    if plan.fits:
        return [f"It fits: {needed} of the {has}."]
    close = "too close for the fast compile; --full_compile tells"
    if plan.too_close and not plan.too_large:
        return [f"It may fit: {needed} of the {has}: {close}."]
    lines = [f"It does not fit: it needs {needed} of the {has}."]
    if plan.too_close:
        lines = [f"It seems not to fit: it needs {needed} of the {has}: {close}."]
    if plan.remedy is not None:
        changes, price = plan.remedy
        lines.append(f"This fits: {flags(changes)}  ({price})")
    else:
        lines.append(
            "Remat, scan, fsdp, accumulation and a bfloat16 moment are not enough or were not "
            "tried; take more chips or a smaller dataset.batch_size."
        )
    return lines


def _gib(size: float) -> str:
    return f"{size / GIB:9.3f} GiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:8.3f} s" if seconds >= 0.1 else f"{1e3 * seconds:7.2f} ms"


def _si(value: float) -> str:
    power = min(max(int(math.log10(max(value, 1)) // 3), 0), 6)
    return f"{value / 1e3**power:.4g} {['', 'k', 'M', 'G', 'T', 'P', 'E'][power]}"
