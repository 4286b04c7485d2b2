"""Sizes of the models that came after the paper, without importing JAX.

And which attributes of `modern_vit.py` are on in which published model.
"""

from typing import Any

from vit_jax.models.variants import DEITS, KEYS, ROWS, VIT

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
    return dict(zip(KEYS, numbers, strict=True))


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
MODERN: dict[str, dict[str, Any]] = {
    name: {"patch_size": patch, **size, **attributes}
    for name, (patch, size, attributes) in _TABLE.items()
}

# DeiT with a distillation token (2012.12877).
DEIT = {f"DeiT-distilled-{size}/16": VIT[f"DeiT-{size}/16"] for size in DEITS}
# MAE (2111.06377): the decoder is the same for all encoders.
_DECODER = {f"decoder_{key}": n for key, n in zip(KEYS, (512, 8, 2048, 16), strict=True)}
MAE: dict[str, dict[str, Any]] = {
    f"MAE-{size}/{patch}": {"patch_size": patch, **ROWS[size], "gelu": "exact", **_DECODER}
    for size, patch in (("B", 16), ("L", 16), ("H", 14))
}

# MLP-Mixer (2105.01601, table 1): blocks, hidden size, width of the channel MLP and of the token
# MLP, and patches. S/8 is GSAM's (2203.08065).
_MIXERS = {
    "S": ((8, 512, 2048, 256), (32, 16, 8)),
    "B": ((12, 768, 3072, 384), (32, 16)),
    "L": ((24, 1024, 4096, 512), (32, 16)),
    "H": ((32, 1280, 5120, 640), (14,)),
}
_MIXER_KEYS = ("num_layers", "hidden_size", "channels_mlp_dim", "tokens_mlp_dim")
# ResMLP (2105.03404): blocks, hidden size and initial factor of LayerScale
# (facebookresearch/deit, resmlp_models.py).
RESMLPS = {
    "S12/16": (12, 384, 0.1),
    "S24/16": (24, 384, 1e-5),
    "S36/16": (36, 384, 1e-6),
    "B24/8": (24, 768, 1e-6),
}
MIXER: dict[str, dict[str, Any]] = {
    **{
        f"Mixer-{size}/{patch}": dict(zip(_MIXER_KEYS, row, strict=True), patch_size=patch)
        for size, (row, patches) in _MIXERS.items()
        for patch in patches
    },
    **{
        f"ResMLP-{name}": {
            "num_layers": depth,
            "hidden_size": width,
            "channels_mlp_dim": 4 * width,
            "patch_size": int(name.partition("/")[2]),
            "norm": "affine",
            "layer_scale_init": init,
        }
        for name, (depth, width, init) in RESMLPS.items()
    },
    **{
        f"gMixer-{depth}/16": dict(
            zip(_MIXER_KEYS, (depth, 384, 1536, 384), strict=True), patch_size=16, gated=True
        )
        for depth in (12, 24)
    },
}

# RegNetY (2003.13678): blocks and channels of each stage, and channels per group; the paper's names
# are FLOPs.
REGNET = {
    f"RegNetY-{name}": {"stage_layers": layers, "stage_widths": widths, "group_width": group}
    for name, (layers, widths, group) in {
        "400MF": ((1, 3, 6, 6), (48, 104, 208, 440), 8),
        "4GF": ((2, 6, 12, 2), (128, 192, 512, 1088), 64),
        "16GF": ((2, 4, 11, 1), (224, 448, 1232, 3024), 112),
    }.items()
}

# Text towers: big_vision's, and BERT (1810.04805).
TEXT = {
    f"text-{size}": {"vocab_size": 32_000, **ROWS[size]}
    for size in ("mu", "Ti", "S", "B", "L", "So400m")
}
BERT = {
    f"BERT-{size}": {
        "vocab_size": 30_522,
        **{key: ROWS[row][key] for key in ("hidden_size", "num_layers", "mlp_dim")},
    }
    for size, row in (("base", "B"), ("large", "L"))
}
