"""Other projects' names of models that timm or transformers have, too, in the names of these.

OpenAI's and open_clip's checkpoints (their tower of images), Facebook's DINOv2, and transformers'
models for Flax. Facebook's DINO and MAE have timm's names, see `timm.py`.
"""

import re
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.files.paths import reading
from vit_jax.models.description import PILLOW_METHODS
from vit_jax.pretrained.formats.huggingface import find_kind
from vit_jax.pretrained.formats.huggingface_config import CLIP
from vit_jax.pretrained.formats.names import CONV
from vit_jax.pretrained.formats.stored import Arrays

# Arrays, and what was left out and why.
Translated = tuple[Arrays, dict[str, str]]


def from_flax(arrays: Arrays) -> Translated:
    """Arrays of transformers' Flax models in PyTorch's names and layouts."""
    if find_kind(arrays):
        return arrays, {}
    renamed = {}
    for name, array in arrays.items():
        *parents, last = name.removeprefix("params/").split("/")
        if last == "kernel":
            array = CONV.write(array) if array.ndim == 4 else array.T
        last = "weight" if last in ("kernel", "scale", "embedding") else last
        renamed[".".join([*parents, last])] = array
    return (renamed if find_kind(renamed) else arrays), {}


# DINOv2's for timm's; a training checkpoint numbers its blocks within chunks, too.
_DINOV2 = {
    r"^register_tokens$": "reg_token",
    r"\.mlp\.w12\.": ".mlp.fc1.",
    r"\.mlp\.w3\.": ".mlp.fc2.",
    r"^blocks\.\d+\.(\d+)\.": r"blocks.\1.",
}


def from_dinov2(arrays: Arrays) -> Translated:
    if arrays.get("mask_token", np.zeros(0)).ndim != 2 or "patch_embed.proj.weight" not in arrays:
        return arrays, {}
    renamed = {_renamed(name, _DINOV2): array for name, array in arrays.items()}
    del renamed["mask_token"]
    registers, posemb = (renamed.get(name) for name in ("reg_token", "pos_embed"))
    # Of the class token alone; timm's are of all tokens.
    if registers is not None and posemb is not None and registers.ndim == posemb.ndim == 3:
        zeros = np.zeros((1, registers.shape[1], posemb.shape[2]), posemb.dtype)
        renamed["pos_embed"] = np.concatenate([posemb[:1, :1], zeros, posemb[:1, 1:]], axis=1)
    return renamed, {"mask_token": "only used in its pre-training task"}


_TRUNK = "visual.trunk."  # a model of timm
# OpenAI's for transformers'.
_CLIP = {
    r"^conv1\.": "embeddings.patch_embedding.",
    r"^class_embedding$": "embeddings.class_embedding",
    r"^positional_embedding$": "embeddings.position_embedding.weight",
    r"^ln_pre\.": "pre_layrnorm.",
    r"^ln_post\.": "post_layernorm.",
    r"^transformer\.resblocks\.": "encoder.layers.",
    r"\.ln_([12])\.": r".layer_norm\1.",
    r"\.attn\.": ".self_attn.",
    r"\.c_fc\.": ".fc1.",
    r"\.c_proj\.": ".fc2.",
}


def from_open_clip(arrays: Arrays) -> Translated:
    is_vit = "visual.conv1.weight" in arrays and "visual.class_embedding" in arrays
    if not is_vit and f"{_TRUNK}patch_embed.proj.weight" not in arrays:
        return arrays, {}
    renamed, dropped = {}, {}
    for name, array in arrays.items():
        if not name.startswith("visual."):
            dropped[name] = "not of the images' tower"
        elif name.startswith(_TRUNK):
            renamed[name.removeprefix(_TRUNK)] = array
        elif name == "visual.proj":
            renamed["visual_projection.weight"] = array.T
        else:
            new = _renamed(name.removeprefix("visual."), _CLIP)
            match = re.fullmatch(r"(.*)\.in_proj_(weight|bias)", new)
            if match and array.ndim and len(array) % 3 == 0:
                for part, rows in zip("qkv", np.split(array, 3), strict=True):
                    renamed[f"vision_model.{match[1]}.{part}_proj.{match[2]}"] = rows
            else:
                renamed[f"vision_model.{new}"] = array
    return renamed, dropped


def _renamed(name: str, patterns: dict[str, str]) -> str:
    for pattern, replacement in patterns.items():
        name = re.sub(pattern, replacement, name)
    return name


# In this order; each returns others' arrays as they are. And how that code resizes positions.
TRANSLATORS = {from_flax: "transformers", from_dinov2: "dinov2", from_open_clip: "bicubic"}

OPEN_CLIP_CONFIG = "open_clip_config.json"
# What changes the function without an array that says so.
_PLAIN = {"pool_type": "tok", "global_average_pool": False, "final_ln_after_pool": False}


def open_clip_settings(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`open_clip_config.json` as settings of transformers' CLIP and its preprocessor, or timm."""
    with reading(OPEN_CLIP_CONFIG):
        model, images = content["model_cfg"], content.get("preprocess_cfg") or {}
        tower = model["vision_cfg"]
        size = tower.get("image_size", 224)
        method = "bilinear" if images.get("interpolation") == "bilinear" else "bicubic"
        mode = images.get("resize_mode", "shortest")
        if name := tower.get("timm_model_name"):
            scale = {key: images.get(key, CLIP[f"image_{key}"]) for key in ("mean", "std")}
            crop = {"crop_mode": {"shortest": "center"}.get(mode, mode), "crop_pct": 1.0}
            inputs = {"input_size": [3, size, size], "interpolation": method, **crop, **scale}
            return {"architecture": name, "pretrained_cfg": inputs}, {}
        for key, value in _PLAIN.items():
            if tower.get(key, value) != value:
                raise UserError(f"vision_cfg.{key}={tower[key]!r} is not supported.")
        settings = {
            "model_type": "clip_vision_model",
            "hidden_act": "quick_gelu" if model.get("quick_gelu") else "gelu",
            "num_hidden_layers": tower["layers"],
            "num_attention_heads": tower["width"] // tower.get("head_width", 64),
            "image_size": size,
            "patch_size": tower["patch_size"],
        }
        sizes = {"shortest": {"shortest_edge": size}, "squash": {"height": size, "width": size}}
        processor = {
            "image_processor_type": "CLIPImageProcessor",
            "resample": PILLOW_METHODS[method],
            "size": sizes.get(mode, {mode: size}),
            "crop_size": size,
            **{f"image_{key}": images[key] for key in ("mean", "std") if key in images},
        }
        return settings, processor
