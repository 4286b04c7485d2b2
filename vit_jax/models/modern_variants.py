"""Which attributes of `modern_vit.py` are on in which published model."""

from __future__ import annotations

from typing import Any

from vit_jax.models.variants import ROWS

_KEYS = ("hidden_size", "num_layers", "mlp_dim", "num_heads")
_EXACT: dict[str, Any] = {"gelu": "exact"}
# "DeiT III: Revenge of the ViT" (2204.07118); `models_v2.py`, *_LS.
DEIT3 = _EXACT | {"layer_scale_init": 1e-4}
# "Learning Transferable Visual Models" (2103.00020); OpenCLIP has the exact GELU.
CLIP = {"gelu": "quick", "layer_norm_epsilon": 1e-5, "pre_norm": True, "patch_bias": False}
# "DINOv2" (2304.07193, table 17 for the sizes).
DINOV2 = _EXACT | {"layer_scale_init": 1e-5}
# "DINOv3" (2508.10104).
DINOV3 = DINOV2 | {
    "layer_norm_epsilon": 1e-5,
    "num_registers": 4,
    "position_embedding": "none",
    "qkv_bias": "qv",
    "rope": "centered",
    "rope_base": 100.0,
    "rope_jitter": 2.0,
}
_POOLED = _EXACT | {"classifier": "gap", "final_norm": "pooled", "qkv_bias": "qv"}
# "BEiT" (2106.08254).
BEIT = _POOLED | {"layer_scale_init": 0.1, "position_embedding": "none", "relative_bias": True}
# "EVA-02" (2303.11331).
EVA02 = _POOLED | {"mlp": "swiglu", "rope": "grid", "rope_base": 10_000.0, "rope_grid": (16, 16)}


def _size(*numbers: int) -> dict[str, int]:
    return dict(zip(_KEYS, numbers, strict=True))


_TABLE: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    **{f"DeiT3-{s}/16": (16, ROWS[s], DEIT3) for s in "SMBL"},
    "DeiT3-H/14": (14, ROWS["H"], DEIT3),
    **{f"CLIP-{s}/{p}": (p, ROWS[s], CLIP) for s, p in (("B", 32), ("B", 16), ("L", 14))},
    **{f"DINOv2-{s}/14": (14, ROWS[s], DINOV2) for s in "SBL"},
    "DINOv2-g/14": (14, _size(1536, 40, 4096, 24), DINOV2 | {"mlp": "swiglu"}),
    **{f"DINOv3-{s}/16": (16, ROWS[s], DINOV3) for s in "SBL"},
    "DINOv3-H+/16": (16, _size(1280, 32, 5120, 20), DINOV3 | {"mlp": "swiglu"}),
    "DINOv3-7B/16": (16, _size(4096, 40, 8192, 32), DINOV3 | {"mlp": "swiglu", "qkv_bias": "none"}),
    "BEiT-B/16": (16, ROWS["B"], BEIT),
    "BEiT-L/16": (16, ROWS["L"], BEIT | {"layer_scale_init": 1e-5}),
    "EVA02-Ti/14": (14, _size(192, 12, 512, 3), EVA02),
    "EVA02-S/14": (14, _size(384, 12, 1024, 6), EVA02),
    "EVA02-B/14": (14, _size(768, 12, 2048, 12), EVA02 | {"mlp_norm": True}),
    "EVA02-L/14": (14, _size(1024, 24, 2730, 16), EVA02 | {"mlp_norm": True}),
}
SIZES: dict[str, dict[str, Any]] = {
    name: {"patch_size": patch, **size, **attributes}
    for name, (patch, size, attributes) in _TABLE.items()
}
