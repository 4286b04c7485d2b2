"""A plan as text and as JSON."""

import dataclasses
from typing import Any

from vit_jax.hardware.chips import GIB
from vit_jax.plan.cost import CompiledStep, StepTime, utilization
from vit_jax.plan.plan import Plan, flags, gpu_share
from vit_jax.plan.subject import Row
from vit_jax.plan.topology import Topology


def report_text(plan: Plan) -> str:
    """All sections; the verdict is last, where it is read first."""
    per_device = plan.batch_size / (plan.mesh["data"] * plan.mesh["fsdp"])
    sections = {
        "Plan": [
            f"devices  {plan.topology}",
            "mesh     " + ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items()),
            f"batch    {plan.batch_size} images, {per_device:g} per device",
            f"data     {plan.data}",
        ],
        "Parameters": _parameters(plan.rows),
        "FLOPs": _flops(plan),
        "Memory per device": _memory(plan),
    }
    if plan.step is not None:
        sections["Collectives per step, per device"] = _collectives(plan.step)
        sections["Time of a step"] = _time(plan.step, plan.time, plan.topology)
    sections |= {"The whole recipe": _recipe(plan.recipe), "Verdict": _verdict(plan)}
    return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items())


def plan_json(plan: Plan) -> dict[str, Any]:
    """Contents of `plan.json`: the fields of `Plan`, and its `fits` and `too_close`.

    A plan that is too close for the fast compile does not count as fitting.
    """
    verdict = {"fits": plan.fits, "too_close": plan.too_close}
    return {**dataclasses.asdict(plan), "topology": plan.topology.name, **verdict}


def _parameters(rows: list[Row]) -> list[str]:
    width = max(len(row.name) for row in rows)
    columns = f"{'shape':>18}{'layers':>8}{'scalars':>15}{'split over':>12}  by"
    lines = [f"{'parameter':{width}}{columns}"]
    for row in rows:
        shape = "x".join(map(str, row.shape)) or "scalar"
        by = f"({row.spec})" if row.split > 1 else "whole"
        cells = f"{shape:>18}{row.copies:>8}{row.size:>15,}{row.split:>12}  {by}"
        lines.append(f"{row.name:{width}}{cells}")
    return [*lines, f"all {sum(row.size for row in rows):,}"]


def _flops(plan: Plan) -> list[str]:
    per_image = plan.model_flops_per_image
    model, executed = per_image * plan.batch_size, plan.step.executed_flops if plan.step else 0.0
    lines = [
        f"model     {model / 1e12:,.4g} TFLOP per step, {per_image / 1e9:,.4g} G per image: "
        "products of every pass; the backward counts twice the forward",
        f"executed  {executed / 1e12:,.4g} TFLOP, {executed / model:.2f} x the model's: including "
        "remat, but not what XLA recomputes by itself if memory is short",
    ]
    return lines if plan.step else lines[:1]


def _memory(plan: Plan) -> list[str]:
    sizes = dict(plan.step.memory) if plan.step else {}
    if plan.available_bytes is not None:
        sizes["available"] = plan.available_bytes
    lines = [f"{name:12}{size / GIB:10.3f} GiB" for name, size in sizes.items()]
    if plan.topology.kind == "gpu":
        lines[-1] += f"  ({gpu_share():.0%} of the GPU; XLA_PYTHON_CLIENT_MEM_FRACTION sets it)"
        lines.append("without the workspace of cuDNN, which only a GPU can tell")
    return [*lines, f"the compiler: {plan.refusal}"] if plan.refusal else lines


def _collectives(step: CompiledStep) -> list[str]:
    lines = [f"{'':20}{'count':>7}{'arrays GiB':>13}{'sent GiB':>11}{'over the network':>19}"]
    for kind, traffic in sorted(step.traffic.items()):
        sizes = (traffic.num_bytes, traffic.sent_bytes, traffic.network_bytes)
        arrays, sent, network = (size / GIB for size in sizes)
        lines.append(f"{kind:20}{traffic.count:>7}{arrays:>13.3f}{sent:>11.3f}{network:>19.3f}")
    return lines if step.traffic else ["none"]


def _time(step: CompiledStep, time: StepTime | None, topology: Topology) -> list[str]:
    moved = f"{step.hbm_bytes / 1e9:.1f} GB of HBM read and written per device"
    if time is None or topology.chip is None:
        return [moved, "virtual devices: their speed is unknown"]
    share, origin = utilization(topology.chip.name)
    basis = {
        "compute": f"executed FLOPs at {share:.0%} of peak: {origin}",
        "memory": f"{moved}, at full bandwidth",
        "links": "collectives, at full bandwidth",
        "predicted": "the longest of these, assuming full overlap: a model, not a measurement",
    }
    return [f"{key:9}{1e3 * getattr(time, key):12,.2f} ms  {text}" for key, text in basis.items()]


def _recipe(recipe: dict[str, Any]) -> list[str]:
    exaflops = f"{recipe['exaflops']:,.4g} exaFLOPs"
    lines = [f"{recipe['steps']:,} steps, {recipe['images']:,} images, {exaflops}"]
    if recipe["days"] is not None:
        days = f"{recipe['days']:.3g} days, {recipe['chip_days']:,.1f} chip-days"
        lines.append(f"{days}, without evaluations, checkpoints and interruptions")
    v3 = f"{recipe['v3_core_days']:,.3g} TPUv3-core-days at its published share of the peak"
    return [*lines, v3]


def _verdict(plan: Plan) -> list[str]:
    total = plan.step.memory["total"] / GIB if plan.step else 0.0
    if plan.available_bytes is None:
        return [f"It compiles and needs {total:.3f} GiB per device; this machine may have less."]
    available = plan.available_bytes / GIB
    needs = f"{total:.3f} of the {available:.3f} GiB of a device ({plan.filled:.0%})"
    line = f"It fits: {needs}." if plan.fits else f"It does not fit: it needs {needs}."
    if plan.step is None:
        line = "It does not fit, according to the compiler."
    elif plan.too_close:
        verb = "It seems not to fit" if plan.filled > 1 else "It may fit"
        line = f"{verb}: {needs}, too close for the fast compile; use --full_compile."
    if plan.filled <= 1:
        return [line]
    if plan.remedy:
        return [line, f"This fits: {flags(plan.remedy)}"]
    known = "No change of remat, scan, fsdp, accumulation or moment is known to be enough"
    return [line, f"{known}; use more chips or a smaller dataset.batch_size."]
