"""Published figures that predictions are held against; nothing here is ours."""

from __future__ import annotations

import dataclasses
from typing import Any

from vit_jax.models.variants import VARIANTS

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
# By name of the chip. V100 to RTX: training throughputs of NVIDIA (g/14, NeMo) and timm.
UTILIZATION: dict[str, Utilization] = {
    "v2": _V3,
    "v3": _V3,
    "A100-40GB": Utilization(0.44, "NVIDIA's NeMo trains g/14 at 44 % on A100 80GB"),
    "A100-80GB": Utilization(0.44, "NVIDIA's NeMo trains g/14 at 44 % on A100 80GB"),
    "H100": Utilization(0.29, "NVIDIA's NeMo trains g/14 at 29 % on H100"),
    "H100-PCIe": Utilization(0.29, "NVIDIA's NeMo trains g/14 at 29 % on H100"),
    "H200": Utilization(0.29, "NVIDIA's NeMo trains g/14 at 29 % on H100; none for H200"),
    "RTX3090": Utilization(0.57, "timm trains B/16 and H/14 at 58 and 56 % with torch"),
}
OTHERS = Utilization(0.35, f"no published figure for this chip, so that of TPUv3: {_V3.origin}")


def utilization(chip: str) -> Utilization:
    """The share of the peak to expect on the chip of this name."""
    return UTILIZATION.get(chip, OTHERS)


def variant_of(model_config: dict[str, Any]) -> str | None:
    """The row of `VARIANTS` that a model's config spells out, or None."""

    def same(a: Any, b: Any) -> bool:
        return (tuple(a) if isinstance(a, list | tuple) else a) == b

    rows = [
        name
        for name, row in VARIANTS.items()
        if all(key in model_config and same(model_config[key], row[key]) for key in row)
    ]
    # A hybrid's row says more than that of the plain Transformer with its patch.
    return max(rows, key=lambda name: len(VARIANTS[name]), default=None)
