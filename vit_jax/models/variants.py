"""Model sizes as one table, without importing JAX.

Sizes Ti to L and H are those of the paper (table 1) and of "How to train your ViT" (2106.10270,
table 1); mu, M, So400m, g, G, g-opt, G-opt and e are those of big_vision and "Scaling Vision
Transformers" (2106.04560). Hybrids follow section 4.1 of the paper and the official code; the
ResNets are those of BiT (1912.11370), the paper's baselines (tables 3 and 6).
"""

from typing import Any

DEITS = ("Ti", "S", "B")
KEYS = ("hidden_size", "num_layers", "mlp_dim", "num_heads")
SIZES: dict[str, tuple[int, int, int, int]] = {
    "mu": (32, 1, 128, 2),  # for tests
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "g-opt": (1536, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "G-opt": (1536, 48, 8192, 16),
    "e": (1792, 56, 15360, 16),
}
ROWS = {name: dict(zip(KEYS, numbers, strict=True)) for name, numbers in SIZES.items()}

# Side of a square patch in pixels. 8 to 32 are published; the others are those of FlexiViT
# (2212.08013) and small ones for 32-pixel images.
PATCH_SIZES = (2, 4, 6, 7, 8, 10, 12, 14, 15, 16, 20, 24, 28, 30, 32, 40, 48)

# name: (size, units per ResNet stage, patch size on the feature map).
# The number after the slash is the ResNet's down-sampling. R+Ti/16 keeps its published name,
# although its stem (4x) and its 8x8 patches give 7x7 tokens at 224 pixels, as a /32 would.
HYBRIDS: dict[str, tuple[str, tuple[int, ...], int]] = {
    "R+Ti/16": ("Ti", (), 8),
    "R26+S/32": ("S", (2, 2, 2, 2), 1),
    "R26+B/32": ("B", (2, 2, 2, 2), 1),
    "R50+B/16": ("B", (3, 4, 9), 1),
    "R50+B/32": ("B", (3, 4, 6, 3), 1),
    "R50+L/16": ("L", (3, 4, 9), 1),
    "R50+L/32": ("L", (3, 4, 6, 3), 1),
}

# Module attributes by variant name: `create_model("B/16", num_classes=1000)`.
VIT: dict[str, dict[str, Any]] = {
    **{
        f"{size}/{patch}": {"patch_size": patch, **row}
        for size, row in ROWS.items()
        for patch in PATCH_SIZES
    },
    **{
        name: {"patch_size": patch, **ROWS[size], "resnet_layers": layers}
        for name, (size, layers, patch) in HYBRIDS.items()
    },
    # DeiT (2012.12877), trained with the exact GELU; its distilled form is below.
    **{f"DeiT-{size}/16": {"patch_size": 16, **ROWS[size], "gelu": "exact"} for size in DEITS},
}
# Appendix D.6.
AXIAL = {f"Axial-{name}": VIT[name] for name in ("B/32", "B/16")}
AXIAL_RESNET = {"Axial-R50x1": {"resnet_layers": (3, 4, 6, 3), "resnet_width_factor": 1}}

# BiT (1912.11370): units per stage, and width factors.
RESNETS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "R26": ((2, 2, 2, 2), (1,)),
    "R50": ((3, 4, 6, 3), (1, 2, 3)),
    "R101": ((3, 4, 23, 3), (1, 3)),
    "R152": ((3, 8, 36, 3), (1, 2, 4)),
    "R200": ((3, 24, 36, 3), (3,)),
}
BIT = {
    f"{name}x{width}": {"resnet_layers": units, "resnet_width_factor": width}
    for name, (units, widths) in RESNETS.items()
    for width in widths
}
