"""Facebook's own files of DINO and DINOv2, whose names are timm's but for a few."""

from __future__ import annotations

import re

import numpy as np

# DINOv2's; a training checkpoint numbers its blocks within chunks, too.
_RENAMED = {
    r"^register_tokens$": "reg_token",
    r"\.mlp\.w12\.": ".mlp.fc1.",
    r"\.mlp\.w3\.": ".mlp.fc2.",
    r"^blocks\.\d+\.(\d+)\.": r"blocks.\1.",
}


def to_timm(arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(arrays in timm's names, what is left out and why), if they are of DINOv2; else as is."""
    if arrays.get("mask_token", np.zeros(0)).ndim != 2 or "patch_embed.proj.weight" not in arrays:
        return arrays, {}
    renamed = {}
    for name, array in arrays.items():
        for pattern, replacement in _RENAMED.items():
            name = re.sub(pattern, replacement, name)
        renamed[name] = array
    del renamed["mask_token"]
    registers, posemb = (renamed.get(name) for name in ("reg_token", "pos_embed"))
    # Of the class token alone; timm's are of all tokens.
    if registers is not None and posemb is not None and registers.ndim == posemb.ndim == 3:
        zeros = np.zeros((1, registers.shape[1], posemb.shape[2]), posemb.dtype)
        renamed["pos_embed"] = np.concatenate([posemb[:1, :1], zeros, posemb[:1, 1:]], axis=1)
    return renamed, {"mask_token": "only used in its pre-training task"}
