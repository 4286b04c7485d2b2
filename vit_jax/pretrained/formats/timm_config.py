"""timm's `config.json`: what it says of a model and of its images."""

from __future__ import annotations

import math
from typing import Any

from vit_jax.errors import check_known
from vit_jax.files.paths import reading
from vit_jax.models.description import HALF, Description, InputSettings
from vit_jax.pretrained.formats.stored import Stored, numbers_of, pair, positive
from vit_jax.pretrained.formats.timm_architectures import arguments_of

POOL = {"token": "token", "gap": "avg", "map": "map"}
GELUS = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}
ASSUMED = {"layer_norm_epsilon": 1e-6}
ROPES = {"cat": "grid", "dinov3": "centered", "mixed": "mixed"}


def read_settings(settings: dict[str, Any]) -> Stored:
    """Reads timm's `config.json`; UserError if the model is not supported."""
    with reading("config.json"):
        args = arguments_of(settings)
        inputs = settings.get("pretrained_cfg") or settings  # timm < 0.8 wrote them as one
        activation = args.get("act_layer") or "gelu"
        check_known("config.json: act_layer", activation, GELUS)
        block = args.get("block_fn") or "Block"
        check_known("config.json: block_fn", block, ["Block", "ResPostBlock"])
        pooling = args.get("global_pool") or settings.get("global_pool") or "token"
        check_known("config.json: global_pool", pooling, POOL.values())
        # The class Eva, which has these arguments, pools all tokens by attention.
        pools_all = pooling == "map" and "num_reg_tokens" in args
        conventions = {
            "layer_norm_epsilon": float(args.get("epsilon", ASSUMED["layer_norm_epsilon"])),
            "gelu": GELUS[activation],
            "position_embedding": "learned",
            "classifier": next(ours for ours, theirs in POOL.items() if theirs == pooling),
            "pool_prefix": pools_all or args.get("pool_include_prefix") is True,
            "norm_after": args.get("use_post_norm") is True or block == "ResPostBlock",
            **_rope(args),
        }
        size = args.get("img_size") or (inputs.get("input_size") or [None])[1:]
        image_size = pair(size) if size else None
        names = settings.get("label_names") or inputs.get("label_names") or inputs.get("labels")
        heads = args.get("num_heads")
        return Stored(
            "timm",
            conventions=conventions,
            num_heads=positive(heads) if heads else None,
            image_size=image_size,
            class_names=tuple(map(str, names or ())),
            eval_preprocess=_preprocess(inputs, image_size),
        )


def _rope(args: dict[str, Any]) -> dict[str, Any]:
    """Our attributes of timm's rotary positions; see `models/later/rotary.py`."""
    if not args.get("use_rot_pos_emb"):
        return {"rope": "none"}
    check_known("config.json: rope_type", args.get("rope_type", "cat"), ROPES)
    grid = args.get("ref_feat_shape")
    return {
        "rope": ROPES[args.get("rope_type", "cat")],
        "rope_base": float(args.get("rope_temperature", 10_000.0)),
        "rope_grid": pair(grid) if grid else None,
        "rope_offset": float(args.get("rope_grid_offset", 0.0)),
    }


def _preprocess(inputs: dict[str, Any], size: tuple[int, int] | None) -> str:
    """Ops for a `pretrained_cfg`; "" if it is incomplete, or has unsupported steps."""
    if size is None or "crop_pct" not in inputs:
        return ""
    method, crop_pct = inputs.get("interpolation", "bicubic"), float(inputs["crop_pct"])
    if method not in ("bilinear", "bicubic") or not 0.0 < crop_pct <= 1.0:
        return ""
    mean, std = (numbers_of(inputs.get(key) or HALF) for key in ("mean", "std"))
    if inputs.get("crop_mode") == "squash":
        height, width = (math.floor(side / crop_pct) for side in size)
        normalize = "" if mean == std == HALF else f"|normalize({mean}, {std})"
        crop = f"|central_crop({size[0]}, {size[1]})" if crop_pct < 1.0 else ""
        return f"decode|resize({height}, {width}, 'pillow_{method}'){crop}{normalize}"
    if size[0] != size[1]:
        return ""
    return f"timm_eval({size[0]}, {crop_pct}, '{method}', {mean}, {std})"


def to_config(
    description: Description,
    inputs: InputSettings,
    architecture: str,
    model_args: dict[str, Any],
    pooling: str,
) -> dict[str, Any]:
    """The `config.json`; `model_args` are those of one kind of model."""
    height, width, channels = description.image_shape
    model, num_classes = description.model, description.model["num_classes"]
    if isinstance(inputs.resize, tuple):
        share, mode = crop_pct(height, inputs.resize[0]), "squash"
    else:
        share, mode = crop_pct(min(height, width), inputs.resize), "center"
    return {
        "architecture": architecture,
        "num_classes": num_classes,
        **({"num_features": model["hidden_size"]} if "hidden_size" in model else {}),
        "global_pool": pooling,
        "model_args": model_args,
        **({"label_names": list(description.class_names)} if description.class_names else {}),
        "pretrained_cfg": {
            "input_size": [channels, height, width],
            "fixed_input_size": True,
            "interpolation": inputs.method,
            "crop_pct": share,
            "crop_mode": mode,
            "mean": list(inputs.mean),
            "std": list(inputs.std),
            "num_classes": num_classes,
            "pool_size": None,
        },
    }


def crop_pct(size: int, resized: int) -> float:
    """The ratio for which timm, which divides and rounds down, gets exactly `resized`."""
    share = size / resized
    return share if math.floor(size / share) == resized else size / (resized + 0.5)


def ratio(width: int, hidden_size: int) -> float:
    """The ratio for which timm, which multiplies and truncates, gets exactly `width`."""
    ratio = width / hidden_size
    return ratio if int(hidden_size * ratio) == width else (width + 0.5) / hidden_size
