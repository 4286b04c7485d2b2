"""timm's `config.json`, and what its files need that their names do not tell."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.variants import HYBRIDS, SIZES
from vit_jax.pretrained.fit.posemb import POSEMB
from vit_jax.pretrained.formats.json_values import pair, positive, reading, triple
from vit_jax.pretrained.formats.pytorch import Settings
from vit_jax.pretrained.formats.stored import Stored
from vit_jax.workdir.description import HALF, Description, InputSettings

_WORDS = {"Ti": "tiny", "S": "small", "B": "base", "L": "large", "H": "huge"}
# Architectures of timm by our variant, at 224 pixels; `model_args` says the rest.
ARCHITECTURES = {
    **{f"{size}/16": f"vit_{_WORDS[size]}_patch16_224" for size in ("Ti", "S", "B", "L")},
    **{f"{size}/32": f"vit_{_WORDS[size]}_patch32_224" for size in ("S", "B", "L")},
    "B/8": "vit_base_patch8_224",
    "L/14": "vit_large_patch14_224",
    "H/14": "vit_huge_patch14_224",
    "R+Ti/16": "vit_tiny_r_s16_p8_224",
    "R26+S/32": "vit_small_r26_s32_224",
    "R26+B/32": "vit_base_r26_s32_224",
    "R50+B/16": "vit_base_r50_s16_224",
    "R50+L/32": "vit_large_r50_s32_224",
}
_ANY_VIT = "vit_base_patch16_224"
_ANY = {"deit": "deit_base_distilled_patch16_224"}  # kinds that have one architecture
_POOL = {"token": "token", "gap": "avg", "map": "map"}
_GELUS = {"gelu": "exact", "gelu_tanh": "tanh"}
# What some of timm's models have and ours do not.
_FOREIGN = {
    r"blocks\.\d+\.ls[12]\.gamma": "LayerScale",
    r"blocks\.\d+\.attn\.[qk]_norm\..*": "normalised queries and keys",
    r"reg_token": "register tokens",
    r"fc_norm\..*": "a norm after pooling instead of before",
    r"norm_pre\..*": "a norm before the blocks",
    r"blocks\.\d+\.attn\.rel_pos.*": "relative positions",
}


def is_timm(names: Iterable[str]) -> bool:
    names = set(names)
    return "patch_embed.proj.weight" in names and "blocks.0.attn.qkv.weight" in names


def read_settings(stated: dict[str, Any]) -> Settings:
    """What timm's `config.json` says.

    Raises:
      UserError: a value of a wrong kind, or an activation that is not ours.
    """
    with reading("config.json"):
        args, inputs = stated.get("model_args") or {}, stated.get("pretrained_cfg") or {}
        activation = args.get("act_layer") or "gelu"
        if activation not in _GELUS:
            raise UserError(
                f"config.json: act_layer={activation!r} is none of {', '.join(_GELUS)}; this model "
                "computes something else than a Vision Transformer of ours."
            )
        size = args.get("img_size") or (inputs.get("input_size") or [None])[1:]
        image_size = pair(size) if size else None
        labels = stated.get("label_names") or inputs.get("label_names") or []
        return Settings(
            num_heads=positive(args["num_heads"]) if args.get("num_heads") else None,
            conventions={"gelu": _GELUS[activation], "layer_norm_epsilon": 1e-6},
            image_size=image_size,
            class_names=tuple(str(label) for label in labels),
            eval_preprocess=_preprocess(inputs, image_size),
            pooling=str(args.get("global_pool") or stated.get("global_pool") or ""),
        )


def _preprocess(inputs: dict[str, Any], size: tuple[int, int] | None) -> str:
    """Ops for a `pretrained_cfg`; "" where it says too little, or what we have no ops for."""
    if size is None or "crop_pct" not in inputs:
        return ""
    method, crop_pct = inputs.get("interpolation", "bicubic"), float(inputs["crop_pct"])
    if method not in ("bilinear", "bicubic") or not 0.0 < crop_pct <= 1.0:
        return ""
    mean, std = (triple(inputs.get(key) or HALF) for key in ("mean", "std"))
    if inputs.get("crop_mode") == "squash":
        height, width = (math.floor(side / crop_pct) for side in size)
        normalize = "" if mean == std == HALF else f"|normalize({mean}, {std})"
        crop = f"|central_crop({size[0]}, {size[1]})" if crop_pct < 1.0 else ""
        return f"decode|resize({height}, {width}, 'pillow_{method}'){crop}{normalize}"
    if size[0] != size[1]:
        return ""
    return f"timm_eval({size[0]}, {crop_pct}, '{method}', {mean}, {std})"


def check_supported(stored: Stored, pooling: str) -> None:
    """Raises UserError where names or settings show a part that our models do not have."""
    for name in stored.unexpected:
        for pattern, part in _FOREIGN.items():
            if re.fullmatch(pattern, name):
                raise UserError(f"this model has {part} ({name}), which no model here has.")
    if "cls" in stored.params and pooling not in ("", "token"):
        raise UserError(
            f"this model has a class token and global_pool={pooling!r}, which no model here has."
        )


def architecture(description: Description) -> tuple[str, bool]:
    """timm's name for the nearest model, and whether it is a hybrid.

    Raises:
      UserError: a hybrid that timm does not have.
    """
    model = description.model
    sizes = tuple(model[key] for key in ("hidden_size", "num_layers", "mlp_dim", "num_heads"))
    size = next((name for name, row in SIZES.items() if row == sizes), "")
    if model["resnet_layers"] is None:
        if model["name"] in _ANY:
            return _ANY[model["name"]], False
        return ARCHITECTURES.get(f"{size}/{model['patch_size']}", _ANY_VIT), False
    for name, row in HYBRIDS.items():
        same = row == (size, tuple(model["resnet_layers"]), model["patch_size"])
        if same and name in ARCHITECTURES and model["resnet_width_factor"] == 1:
            return ARCHITECTURES[name], True
    known = ", ".join(name for name in HYBRIDS if name in ARCHITECTURES)
    raise UserError(f"timm has no such hybrid; those that --format=timm can write are {known}.")


def to_config(
    params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> dict[str, Any]:
    """The `config.json` with which `timm.create_model("local-dir:FOLDER")` computes what we do.

    Raises:
      UserError: timm has no such model.
    """
    model = description.model
    if model["classifier"] not in _POOL:
        raise UserError(
            f"--format=timm has no model.classifier={model['classifier']!r}; it has those of "
            f"{', '.join(_POOL)}."
        )
    name, is_hybrid = architecture(description)
    if "pre_logits/kernel" in params:
        raise UserError(
            "--format=timm has no pre_logits layer, and without it the head means nothing; give "
            "--drop_head to write the model without pre_logits and head."
        )
    if model["position_embedding"] == "learned" and POSEMB not in params:
        raise UserError("a model without Transformer cannot be written for timm.")
    height, width, channels = description.image_shape
    hidden_size, mlp_dim = model["hidden_size"], model["mlp_dim"]
    ratio = mlp_dim / hidden_size
    if int(hidden_size * ratio) != mlp_dim:  # timm multiplies and truncates
        ratio = (mlp_dim + 0.5) / hidden_size
    args: dict[str, Any] = {
        "img_size": [height, width],
        "in_chans": channels,
        "embed_dim": hidden_size,
        "depth": model["num_layers"],
        "num_heads": model["num_heads"],
        "mlp_ratio": ratio,
        "act_layer": {exact: act for act, exact in _GELUS.items()}[model["gelu"]],
    }
    whole = isinstance(inputs.resize, tuple)
    resized = inputs.resize[0] if isinstance(inputs.resize, tuple) else inputs.resize
    crop_pct = _crop_pct(height if whole else min(height, width), resized)
    if not is_hybrid:
        args["patch_size"] = model["patch_size"]
    if model["name"] != "deit":
        args |= {"global_pool": _POOL[model["classifier"]], "fc_norm": False}
        args["class_token"] = "cls" in params
    return {
        "architecture": name,
        "num_classes": model["num_classes"],
        "num_features": hidden_size,
        "global_pool": _POOL[model["classifier"]],
        "model_args": args,
        **({"label_names": list(description.class_names)} if description.class_names else {}),
        "pretrained_cfg": {
            "input_size": [channels, height, width],
            "fixed_input_size": True,
            "interpolation": inputs.method,
            "crop_pct": crop_pct,
            "crop_mode": "squash" if whole else "center",
            "mean": list(inputs.mean),
            "std": list(inputs.std),
            "num_classes": model["num_classes"],
            "pool_size": None,
        },
    }


def _crop_pct(size: int, resized: int) -> float:
    """The share with which timm, which divides and rounds down, comes to `resized`."""
    share = size / resized
    return share if math.floor(size / share) == resized else size / (resized + 0.5)
