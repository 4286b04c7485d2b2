"""How long an update and the whole recipe take: a model of the hardware, not a measurement.

The published figures that it rests on, and is held against, stand here too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vit_jax.hardware.chips import CHIPS
from vit_jax.models.variants import VARIANTS
from vit_jax.plan.compiled import CompiledStep
from vit_jax.plan.topology import Topology

SECONDS_PER_DAY = 86_400

# 2010.11929, table 2: (variant, dataset, epochs) -> TPUv3-core-days. The epochs of L/16 on
# ImageNet-21k are those of the published checkpoint: table 3 has 30 and 90.
CORE_DAYS: dict[tuple[str, str, int], float] = {
    ("H/14", "jft", 14): 2500,
    ("L/16", "jft", 14): 680,
    ("L/16", "imagenet21k", 90): 230,
}

# 2010.11929, table 6, JFT-300M: (variant, epochs) -> exaFLOPs.
EXAFLOPS: dict[tuple[str, int], float] = {
    ("B/32", 7): 55,
    ("B/16", 7): 224,
    ("L/32", 7): 196,
    ("L/16", 7): 783,
    ("L/16", 14): 1567,
    ("H/14", 14): 4262,
    ("R50x1", 7): 50,
    ("R50x2", 7): 199,
    ("R101x1", 7): 96,
    ("R152x1", 7): 141,
    ("R152x2", 7): 563,
    ("R152x2", 14): 1126,
    ("R200x3", 14): 3306,
    ("R50+B/32", 7): 106,
    ("R50+B/16", 7): 274,
    ("R50+L/32", 7): 246,
    ("R50+L/16", 7): 859,
    ("R50+L/16", 14): 1668,
}


@dataclasses.dataclass(frozen=True)
class Utilization:
    """Share of the peak that training of ViTs reached, and where that was seen."""

    share: float
    origin: str


_V3 = Utilization(
    0.35,
    "published ViT trainings on TPUv3 reached 27 % (S/16, 2205.01580), 32 % (H/14), 37 and 43 % "
    "(L/16; 2010.11929, table 2)",
)
_A100 = Utilization(0.44, "NVIDIA's NeMo trains g/14 at 44 % on A100 80GB")
_H100 = Utilization(0.29, "NVIDIA's NeMo trains g/14 at 29 % on H100")
UTILIZATION: dict[str, Utilization] = {
    "v2": _V3,
    "v3": _V3,
    "A100-40GB": _A100,
    "A100-80GB": _A100,
    "H100": _H100,
    "H100-PCIe": _H100,
    "H200": Utilization(_H100.share, f"{_H100.origin}; none for H200"),
}
OTHERS = Utilization(0.35, f"no published figure for this chip, so that of TPUv3: {_V3.origin}")


def utilization(chip: str) -> Utilization:
    """The share of the peak to expect on the chip of this name."""
    return UTILIZATION.get(chip, OTHERS)


def variant_of(model_config: dict[str, Any]) -> str:
    """The row of `VARIANTS` that a model's config spells out, or ""."""

    def same(a: Any, b: Any) -> bool:
        return (tuple(a) if isinstance(a, list | tuple) else a) == b

    rows = [
        name
        for name, row in VARIANTS.items()
        if all(key in model_config and same(model_config[key], row[key]) for key in row)
    ]
    # A hybrid's row says more than that of the plain Transformer with its patch.
    return max(rows, key=lambda name: len(VARIANTS[name]), default="")


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one update on each device, as if each thing were all it did.

    Attributes:
      compute: executed products at the share of the peak that `assumed` names.
      bound: the model's products at the whole peak; no program is faster.
      memory: bytes of HBM at the full bandwidth.
      links: collectives at the full bandwidth of the interconnect and the network.
      predicted: the longest of the three, as if they overlapped perfectly. Neither a lower nor an
        upper bound: overlap is never perfect, but the share of the peak in `compute` is a middle
        that single trainings were above.
      assumed: share of the peak, and where it was seen.
    """

    compute: float
    bound: float
    memory: float
    links: float
    predicted: float
    assumed: Utilization


def step_time(step: CompiledStep, topology: Topology, model_flops: float) -> StepTime | None:
    """The time of one update; None for virtual devices, of which nothing is known.

    Args:
      step: from `compile_step`.
      topology: what it was compiled for.
      model_flops: of one update, without what remat repeats.
    """
    chip = topology.chip
    if chip is None:
        return None
    peak = topology.num_chips * chip.tflops * 1e12
    assumed = utilization(chip.name)
    sent = sum(traffic.sent_bytes for traffic in step.traffic.values())
    network = sum(traffic.network_bytes for traffic in step.traffic.values())
    links = sent * chip.devices / chip.link_gb_s / 1e9
    if network:
        links += network * chip.devices / chip.network_gb_s / 1e9
    compute = step.executed_flops / peak / assumed.share
    memory = step.hbm_bytes * chip.devices / chip.hbm_gb_s / 1e9
    return StepTime(
        compute=compute,
        bound=model_flops / peak,
        memory=memory,
        links=links,
        predicted=max(compute, memory, links),
        assumed=assumed,
    )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the whole training costs.

    Attributes:
      steps: updates.
      images: batch size x steps.
      exaflops: products, forward and backward, without what remat repeats.
      days: of wall time, without evaluations, checkpoints, compilation and interruptions; None,
        as those below, where nothing is known of the devices.
      chip_days: chips x days.
      core_days: cores x days.
      v3_core_days: of the same arithmetic on TPUv3 cores at their published share of the peak.
      paper_core_days: TPUv3-core-days in table 2; None where it has no such row.
      paper_exaflops: of table 6; None likewise.
    """

    steps: int
    images: int
    exaflops: float
    days: float | None
    chip_days: float | None
    core_days: float | None
    v3_core_days: float
    paper_core_days: float | None
    paper_exaflops: float | None


def whole_recipe(
    *,
    steps: int,
    batch_size: int,
    num_examples: int,
    flops_per_image: float,
    seconds: float | None,
    topology: Topology,
    variant: str,
    dataset: str,
) -> Recipe:
    """Adds it up; `seconds` per update, None where nothing is known of the devices."""
    images = steps * batch_size
    epochs = round(images / num_examples)
    days = None if seconds is None else seconds * steps / SECONDS_PER_DAY
    v3_rate = CHIPS["v3"].device_peak_flops * utilization("v3").share
    return Recipe(
        steps=steps,
        images=images,
        exaflops=images * flops_per_image / 1e18,
        days=days,
        chip_days=None if days is None else days * topology.num_chips,
        core_days=None if days is None else days * topology.num_cores,
        v3_core_days=images * flops_per_image / v3_rate / SECONDS_PER_DAY,
        paper_core_days=CORE_DAYS.get((variant, dataset, epochs)),
        paper_exaflops=EXAFLOPS.get((variant, epochs)) if dataset == "jft" else None,
    )
