"""Other projects' names of models that timm or transformers have, too, in the names of these.

OpenAI's and open_clip's checkpoints, Facebook's DINOv2, and transformers' models for Flax.
Facebook's DINO and MAE have timm's names, see `timm.py`.
"""

import re
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.files.paths import reading
from vit_jax.kinds import check_known
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
# OpenAI's for transformers', of a block and of both towers.
_CLIP_BLOCK = {
    r"^transformer\.resblocks\.": "encoder.layers.",
    r"\.ln_([12])\.": r".layer_norm\1.",
    r"\.attn\.": ".self_attn.",
    r"\.c_fc\.": ".fc1.",
    r"\.c_proj\.": ".fc2.",
}
_CLIP_IMAGES = {
    r"^conv1\.": "embeddings.patch_embedding.",
    r"^class_embedding$": "embeddings.class_embedding",
    r"^positional_embedding$": "embeddings.position_embedding.weight",
    r"^ln_pre\.": "pre_layrnorm.",
    r"^ln_post\.": "post_layernorm.",
    **_CLIP_BLOCK,
}
_CLIP_TEXTS = {
    r"^token_embedding\.": "embeddings.token_embedding.",
    r"^positional_embedding$": "embeddings.position_embedding.weight",
    r"^ln_final\.": "final_layer_norm.",
    **_CLIP_BLOCK,
}
_TEXT = re.compile(r"text\.|token_embedding\.|positional_embedding$|transformer\.|ln_final\.")


def from_open_clip(arrays: Arrays) -> Translated:
    """Both towers, see `text_towers.choose_tower`; the images' if it is a ViT, or timm's."""
    is_vit = "visual.conv1.weight" in arrays and "visual.class_embedding" in arrays
    has_texts = not {"token_embedding.weight", "text.token_embedding.weight"}.isdisjoint(arrays)
    if not is_vit and not has_texts and f"{_TRUNK}patch_embed.proj.weight" not in arrays:
        return arrays, {}
    renamed, dropped = dict[str, np.ndarray](), {}
    for name, array in arrays.items():
        own = name.removeprefix("text.")
        if name.startswith(_TRUNK):
            renamed[name.removeprefix(_TRUNK)] = array
        elif own.startswith("text_projection"):
            is_layer = "." in own
            renamed[own if is_layer else f"{own}.weight"] = array if is_layer else array.T
        elif _TEXT.match(name):
            renamed |= _parts(f"text_model.{_renamed(own, _CLIP_TEXTS)}", array)
        elif not name.startswith("visual."):
            dropped[name] = "not of a tower"
        elif name == "visual.proj":
            renamed["visual_projection.weight"] = array.T
        elif is_vit:
            own = _renamed(name.removeprefix("visual."), _CLIP_IMAGES)
            renamed |= _parts(f"vision_model.{own}", array)
        else:
            renamed[name] = array
    return renamed, dropped


def _parts(name: str, array: np.ndarray) -> Arrays:
    """An array; or three, of queries, keys and values."""
    match = re.fullmatch(r"(.*)\.in_proj_(weight|bias)", name)
    if not match or not array.ndim or len(array) % 3:
        return {name: array}
    rows = zip("qkv", np.split(array, 3), strict=True)
    return {f"{match[1]}.{part}_proj.{match[2]}": x for part, x in rows}


def _renamed(name: str, patterns: dict[str, str]) -> str:
    for pattern, replacement in patterns.items():
        name = re.sub(pattern, replacement, name)
    return name


# In this order; each returns others' arrays as they are. And how that code resizes positions.
TRANSLATORS = {from_flax: "transformers", from_dinov2: "dinov2", from_open_clip: "bicubic"}

OPEN_CLIP_CONFIG = "open_clip_config.json"
# What changes the function without an array that says so.
_PLAIN = {"global_average_pool": False, "attentional_pool": False, "ls_init_value": None}
_POOLS = ("tok", "avg")


def open_clip_settings(content: dict[str, Any], part: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """`open_clip_config.json` as settings of transformers' CLIP and its preprocessor, or timm."""
    with reading(OPEN_CLIP_CONFIG):
        model, images = content["model_cfg"], content.get("preprocess_cfg") or {}
        if part == "txt":
            return _text_settings(model), {}
        tower = model["vision_cfg"]
        size = tower.get("image_size", 224)
        method = "bilinear" if images.get("interpolation") == "bilinear" else "bicubic"
        mode = images.get("resize_mode", "shortest")
        if name := tower.get("timm_model_name"):
            scale = {key: images.get(key, CLIP[f"image_{key}"]) for key in ("mean", "std")}
            crop = {"crop_mode": {"shortest": "center"}.get(mode, mode), "crop_pct": 1.0}
            inputs = {"input_size": [3, size, size], "interpolation": method, **crop, **scale}
            return {"architecture": name, "pretrained_cfg": inputs}, {}
        _check_plain("vision_cfg", tower, _PLAIN)
        settings = {
            "model_type": "clip_vision_model",
            "hidden_act": "quick_gelu" if model.get("quick_gelu") else "gelu",
            "num_hidden_layers": tower["layers"],
            "num_attention_heads": tower["width"] // tower.get("head_width", 64),
            "image_size": size,
            "patch_size": tower["patch_size"],
            "pool_type": tower.get("pool_type", "tok"),
            "no_ln_pre": tower.get("no_ln_pre", False),
            "final_ln_after_pool": tower.get("final_ln_after_pool", False),
        }
        check_known(f"{OPEN_CLIP_CONFIG}: vision_cfg.pool_type", settings["pool_type"], _POOLS)
        sizes = {"shortest": {"shortest_edge": size}, "squash": {"height": size, "width": size}}
        processor = {
            "image_processor_type": "CLIPImageProcessor",
            "resample": PILLOW_METHODS[method],
            "size": sizes.get(mode, {mode: size}),
            "crop_size": size,
            **{f"image_{key}": images[key] for key in ("mean", "std") if key in images},
        }
        return settings, processor


# Of texts: what has no array that says so.
_PLAIN_TEXTS = {"embed_cls": False, "use_pad_mask": False, "ls_init_value": None}
_POOLINGS = {"argmax": "end", "eos": "end", "first": "first", "last": "last"}


def _text_settings(model: dict[str, Any]) -> dict[str, Any]:
    """`model_cfg` as settings of transformers' text tower, and `is_causal` and `pooling`."""
    tower = model["text_cfg"]
    _check_plain("text_cfg", tower, _PLAIN_TEXTS)
    pooling = tower.get("pool_type", "argmax")
    check_known(f"{OPEN_CLIP_CONFIG}: text_cfg.pool_type", pooling, _POOLINGS)
    is_tanh = (tower.get("act_kwargs") or {}).get("approximate") == "tanh"
    exact = "gelu_pytorch_tanh" if is_tanh else "gelu"
    return {
        "model_type": "open_clip",
        "hidden_act": "quick_gelu" if model.get("quick_gelu") else exact,
        "layer_norm_eps": (tower.get("norm_kwargs") or {}).get("eps", 1e-5),
        "num_hidden_layers": tower.get("layers", 12),
        "num_attention_heads": tower.get("heads", 8),
        "is_causal": not tower.get("no_causal_mask", False),
        "pooling": _POOLINGS[pooling],
        "eos_token_id": tower.get("eos_id", 2) if pooling == "eos" else None,
        "clean": _clean_of(tower),
    }


def _clean_of(tower: dict[str, Any]) -> str:
    """What open_clip does with a text before its tokenizer, see `data.text.CLEAN`."""
    options = tower.get("tokenizer_kwargs") or {}
    if options.get("strip_sep_token"):
        return "unknown"  # CLIPA's
    return str(options.get("clean", "whitespace" if "hf_tokenizer_name" in tower else "lower"))


def _check_plain(where: str, tower: dict[str, Any], plain: dict[str, Any]) -> None:
    for key, value in plain.items():
        if tower.get(key, value) != value:
            raise UserError(f"{where}.{key}={tower[key]!r} is not supported.")
