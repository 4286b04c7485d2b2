"""How long an update and the whole recipe take: a model of the hardware, not a measurement.

The published figures that it rests on, and is held against, stand here too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vit_jax.hardware.chips import CHIPS
from vit_jax.models.variants import VARIANTS
from vit_jax.plan.compiled import CompiledStep
from vit_jax.plan.topology import Topology
from vit_jax.run import Run

SECONDS_PER_DAY = 86_400

# 2010.11929, table 2: (variant, dataset, epochs) -> TPUv3-core-days. The epochs of L/16 on
# ImageNet-21k are those of the published checkpoint: table 3 has 30 and 90.
CORE_DAYS: dict[tuple[str, str, int], float] = {
    ("H/14", "jft", 14): 2500,
    ("L/16", "jft", 14): 680,
    ("L/16", "imagenet21k", 90): 230,
}

# Share of the peak that training of ViTs reached, and where that was seen.
V3_SHARE = 0.35
_V3 = (
    "published ViT trainings on TPUv3 reached 27 % (S/16, 2205.01580), 32 % (H/14), 37 and 43 % "
    "(L/16; 2010.11929, table 2)"
)
_A100 = (0.44, "NVIDIA's NeMo trains g/14 at 44 % on A100 80GB")
_H100 = (0.29, "NVIDIA's NeMo trains g/14 at 29 % on H100")
UTILIZATION: dict[str, tuple[float, str]] = {
    "v3": (V3_SHARE, _V3),
    "A100-40GB": _A100,
    "A100-80GB": _A100,
    "H100": _H100,
    "H100-PCIe": _H100,
    "H200": _H100,
}


def utilization(chip: str) -> tuple[float, str]:
    """The share of the peak to expect on the chip of this name, and its origin."""
    other = (V3_SHARE, f"no published figure for this chip, so that of TPUv3: {_V3}")
    return UTILIZATION.get(chip, other)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one update on each device, as if each thing were all it did.

    Attributes:
      compute: executed products at the share of the peak that `utilization` names.
      memory, links: bytes at the full bandwidth.
      predicted: the longest of these, as if they overlapped perfectly. Neither a lower nor an upper
        bound: they never do, but the share of the peak is a middle that some trainings were above.
      bound: the model's products at the whole peak; no program is faster.
    """

    compute: float
    memory: float
    links: float
    predicted: float
    bound: float


def step_time(step: CompiledStep, topology: Topology, model_flops: float) -> StepTime | None:
    """The time of one update; None for virtual devices, of which nothing is known.

    `model_flops`: of one update, without what remat repeats.
    """
    chip = topology.chip
    if chip is None:
        return None
    peak = topology.num_chips * chip.tflops * 1e12
    sent = sum(traffic.sent_bytes for traffic in step.traffic.values())
    network = sum(traffic.network_bytes for traffic in step.traffic.values())
    links = sent * chip.devices / chip.link_gb_s / 1e9
    if network:
        links += network * chip.devices / chip.network_gb_s / 1e9
    compute = step.executed_flops / peak / utilization(chip.name)[0]
    memory = step.hbm_bytes * chip.devices / chip.hbm_gb_s / 1e9
    return StepTime(compute, memory, links, max(compute, memory, links), model_flops / peak)


def whole_recipe(
    run: Run, flops_per_image: float, time: StepTime | None, topology: Topology
) -> dict[str, float | None]:
    """What the whole training costs, without evaluations, checkpoints and interruptions.

    `days` and `chip_days` are None where nothing is known of the devices, `paper_core_days` where
    the paper has no such training. Products are forward and backward, without what remat repeats.
    """
    images = run.total_steps * run.batch_size
    days = None if time is None else time.predicted * run.total_steps / SECONDS_PER_DAY
    epochs = round(images / run.dataset.num_examples)
    return {
        "steps": run.total_steps,
        "images": images,
        "exaflops": images * flops_per_image / 1e18,
        "days": days,
        "chip_days": days and days * topology.num_chips,
        "v3_core_days": v3_core_days(images * flops_per_image),
        "paper_core_days": paper_core_days(dict(run.config.model), run.config.dataset.name, epochs),
    }


def v3_core_days(flops: float) -> float:
    """Days of that arithmetic on a TPUv3 core at its published share of the peak."""
    return flops / CHIPS["v3"].device_peak_flops / V3_SHARE / SECONDS_PER_DAY


def paper_core_days(model: Mapping[str, Any], dataset: str, epochs: int) -> float | None:
    """Table 2 for a model's config; None where it has no such row."""
    for (variant, name, length), days in CORE_DAYS.items():
        sizes = {"resnet_layers": None, **VARIANTS[variant]}
        if (name, length) == (dataset, epochs) and sizes.items() <= model.items():
            return days
    return None
