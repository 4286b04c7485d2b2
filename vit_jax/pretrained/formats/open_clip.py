"""OpenAI's and open_clip's checkpoints: their tower of images, in transformers' names or timm's."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.files.paths import reading

CONFIG = "open_clip_config.json"
_TRUNK = "visual.trunk."  # a model of timm
_RENAMED = {
    "conv1.": "embeddings.patch_embedding.",
    "class_embedding": "embeddings.class_embedding",
    "positional_embedding": "embeddings.position_embedding.weight",
    "ln_pre.": "pre_layrnorm.",
    "ln_post.": "post_layernorm.",
    "transformer.resblocks.": "encoder.layers.",
}
_PARTS = {
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".attn.": ".self_attn.",
    ".c_fc.": ".fc1.",
    ".c_proj.": ".fc2.",
}


def is_open_clip(names: Collection[str]) -> bool:
    is_vit = "visual.conv1.weight" in names and "visual.class_embedding" in names
    return is_vit or f"{_TRUNK}patch_embed.proj.weight" in names


def to_others(arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """(arrays in names of transformers or timm, what is left out and why); others as they are."""
    if not is_open_clip(arrays):
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
            renamed |= _rename(name.removeprefix("visual."), array)
    return renamed, dropped


def _rename(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """One array of `visual.*` in transformers' names; queries, keys and values as three."""
    start = next((start for start in _RENAMED if name.startswith(start)), "")
    name = "vision_model." + _RENAMED.get(start, "") + name.removeprefix(start)
    for theirs, new in _PARTS.items():
        name = name.replace(theirs, new)
    match = re.fullmatch(r"(.*)\.in_proj_(weight|bias)", name)
    if match and array.ndim and len(array) % 3 == 0:
        parts = np.split(array, 3)
        return {f"{match[1]}.{p}_proj.{match[2]}": x for p, x in zip("qkv", parts, strict=True)}
    return {name: array}


def settings_of(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`open_clip_config.json` as settings of transformers, and of their preprocessor; or timm's.

    UserError for a tower that transformers' CLIP is not.
    """
    with reading(CONFIG):
        model, images = content["model_cfg"], content.get("preprocess_cfg") or {}
        tower = model["vision_cfg"]
        size = tower.get("image_size", 224)
        scale = {key: images[key] for key in ("mean", "std") if key in images}
        if name := tower.get("timm_model_name"):
            is_squashed = images.get("resize_mode") == "squash"
            inputs = {"input_size": [3, size, size], "crop_pct": 1.0, **scale}
            inputs |= {"crop_mode": "squash" if is_squashed else "center"}
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
        processor = {f"image_{key}": value for key, value in scale.items()}
        processor |= {"size": {"shortest_edge": size}, "do_center_crop": True, "crop_size": size}
        return settings, {**processor, "resample": 3}


# What changes the function without an array that says so.
_PLAIN = {"pool_type": "tok", "global_average_pool": False, "final_ln_after_pool": False}
