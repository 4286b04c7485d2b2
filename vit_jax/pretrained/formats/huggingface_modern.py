"""Writes today's Vision Transformers as the class of transformers that computes the same."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.later import modern_vit
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.formats import rows
from vit_jax.pretrained.formats.huggingface_config import to_settings
from vit_jax.pretrained.formats.huggingface_names import TOWER, table
from vit_jax.pretrained.formats.modern import write_relative_bias
from vit_jax.pretrained.formats.stored import Holds

Params = dict[str, np.ndarray]


class _Class(NamedTuple):
    """Two classes of transformers, with a head and without; attributes instead of `_BASE`'s."""

    kind: str  # of their names, see `huggingface_names`
    model_type: str
    stem: str  # of the classes
    values: dict[str, tuple[Any, ...]]

    @property
    def prefix(self) -> str:
        return {"clip": TOWER, "dinov3": ""}.get(self.kind, f"{self.model_type}.")

    def name(self, num_classes: int) -> str:
        ends = ("Model", "ModelWithProjection" if self.kind == "clip" else "ForImageClassification")
        return self.stem + ends[bool(num_classes)]


_NUMBER = "a number"  # stands for all
_BASE: dict[str, tuple[Any, ...]] = {
    "num_registers": (None,),
    "position_embedding": ("learned",),
    "relative_bias": (False,),
    "rope": ("none",),
    "patch_bias": (True,),
    "pre_norm": (False,),
    "qkv_bias": ("qkv",),
    "dense_bias": (True,),
    "mlp": ("mlp",),
    "layer_scale_init": (None,),
    "classifier": ("token",),
    "final_norm": ("tokens",),
    "num_classes": (None, _NUMBER),
}
_DINOV2 = {
    "qkv_bias": ("qkv", "none"),
    "mlp": tuple(modern_vit.FAMILY.choices["mlp"]),
    "layer_scale_init": (_NUMBER,),
}
_BARE = _DINOV2 | {"num_classes": (None,)}
_HEAD = _DINOV2 | {"num_classes": (_NUMBER,), "classifier": ("token_gap",)}
_DINOV3 = _BARE | {
    "num_registers": (None, _NUMBER),
    "position_embedding": ("none",),
    "rope": ("centered",),
    "qkv_bias": ("qkv", "qv", "none"),
    "dense_bias": (True, False),
}
_BEIT = {
    "position_embedding": ("learned", "none"),
    "relative_bias": (False, True),
    "qkv_bias": ("qv",),
    "layer_scale_init": (None, _NUMBER),
}
_MEAN = _BEIT | {"classifier": ("gap",), "final_norm": ("pooled",)}
_REGISTERS = {"num_registers": (_NUMBER,)}
_CLASSES = (
    _Class("vit", "vit", "ViT", {"qkv_bias": ("qkv", "none")}),
    _Class(
        "clip", "clip_vision_model", "CLIPVision", {"patch_bias": (False,), "pre_norm": (True,)}
    ),
    *(_Class("dinov2", "dinov2", "Dinov2", values) for values in (_BARE, _HEAD)),
    *(
        _Class("dinov2", "dinov2_with_registers", "Dinov2WithRegisters", values | _REGISTERS)
        for values in (_BARE, _HEAD)
    ),
    _Class("dinov3", "dinov3_vit", "DINOv3ViT", _DINOV3),
    *(_Class("vit", "beit", "Beit", values) for values in (_BEIT, _MEAN)),
)


def _choose(model: dict[str, Any]) -> _Class:
    """The classes that have all attributes; UserError that names those which the nearest lack."""
    optional = ("num_registers", "layer_scale_init", "num_classes")
    found = model | {key: _NUMBER if model[key] else None for key in optional}

    def wrong(each: _Class) -> list[str]:
        return [key for key, known in (_BASE | each.values).items() if found[key] not in known]

    nearest = min(_CLASSES, key=lambda each: len(wrong(each)))
    if keys := wrong(nearest):
        values = ", ".join(f"model.{key}={model[key]!r}" for key in keys)
        raise UserError(
            f"--format=huggingface cannot store {values}: {nearest.stem}Model, the nearest class "
            "of transformers, has other values; use --format=npz or orbax."
        )
    return nearest


def _ratio(model: dict[str, Any]) -> int:
    """DINOv2's `mlp_ratio`, of which SwiGLU takes 2 / 3, rounded up to 8."""
    for ratio in range(1, 33):
        width = ratio * model["hidden_size"]
        width = (int(width * 2 / 3) + 7) // 8 * 8 if model["mlp"] == "swiglu" else width
        if width == model["mlp_dim"]:
            return ratio
    raise UserError(
        f"--format=huggingface cannot store model.mlp_dim={model['mlp_dim']}: DINOv2 there has "
        "whole ratios of MLP and width; use --format=npz or orbax."
    )


def _settings(model: dict[str, Any], each: _Class) -> dict[str, Any]:
    """The settings of this class alone."""
    if each.kind == "clip":
        return {"projection_dim": model["num_classes"] or model["hidden_size"]}
    gated, init = model["mlp"] == "swiglu", model["layer_scale_init"]
    if each.kind == "dinov2":
        return {
            "mlp_ratio": _ratio(model),
            "qkv_bias": model["qkv_bias"] == "qkv",
            "use_swiglu_ffn": gated,
            "layerscale_value": init,
            "num_register_tokens": model["num_registers"] or 0,
            "use_mask_token": False,
        }
    if each.kind == "dinov3":
        return {
            **({"hidden_act": "silu"} if gated else {}),
            "use_gated_mlp": gated,
            "layerscale_value": init,
            "num_register_tokens": model["num_registers"] or 0,
            "rope_theta": model["rope_base"],
            "pos_embed_rescale": model["rope_jitter"],
            "query_bias": "q" in model["qkv_bias"],
            "key_bias": "k" in model["qkv_bias"],
            "value_bias": "v" in model["qkv_bias"],
            "proj_bias": model["dense_bias"],
            "mlp_bias": model["dense_bias"],
        }
    if each.model_type == "vit":
        return {"qkv_bias": model["qkv_bias"] == "qkv"}
    return {
        "use_mean_pooling": model["classifier"] == "gap",
        "use_relative_position_bias": model["relative_bias"],
        "use_absolute_position_embeddings": model["position_embedding"] == "learned",
        "layer_scale_init_value": init or 0.0,
    }


def to_huggingface_modern(
    params: Params, description: Description, inputs: InputSettings
) -> tuple[Params, dict[str, Any]]:
    """Arrays in the classic naming, and the files beside them; UserError if not representable."""
    model, params = description.model, dict(params)
    each, width = _choose(model), model["hidden_size"]
    name = each.name(model["num_classes"])
    height, columns = description.grid
    if each.model_type not in ("vit", "dinov3_vit") and (
        height != columns or not isinstance(model["patch_size"], int)
    ):
        raise UserError(
            f"--format=huggingface cannot store {height}x{columns} patches of "
            f"{model['patch_size']} pixels: {name} has square images and patches; use "
            "--format=npz or orbax."
        )
    if modern_vit.POSITIONS in params:  # a row for the class token is part of that token here
        positions = params.pop(modern_vit.POSITIONS)
        params[POSITIONS] = np.pad(positions, ((0, 0), (1, 0), (0, 0)))  # [1, 1 + h*w, D]
    folder = f"{each.prefix}encoder.layer.{{}}.attention.attention.relative_position_bias"
    arrays = write_relative_bias(params, (folder + ".relative_position_bias_table").format)
    if each.kind == "clip" and np.any(params.pop("head/bias", np.zeros(1))):
        raise UserError(
            f"--format=huggingface cannot store a head with a bias: {name} has a projection; "
            "write the model without its head (--drop_head)."
        )
    if each.kind == "dinov3":
        params.setdefault("registers", np.zeros((1, 0, width), np.float32))
        arrays["embeddings.mask_token"] = np.zeros((1, 1, width), np.float32)
    if model["num_registers"] and each.kind == "dinov2":
        arrays[f"{each.prefix}embeddings.mask_token"] = np.zeros((1, width), np.float32)
    gated = model["mlp"] == "swiglu"
    names = table(each.kind, each.prefix, rows.block_numbers(params), gated=gated)
    arrays |= rows.write_rows(names, params, "huggingface")
    if not model["num_classes"] and each.kind != "clip":
        arrays = {theirs.removeprefix(each.prefix): array for theirs, array in arrays.items()}
    more = _settings(model, each)
    return arrays, to_settings(description, inputs, each.model_type, name, **more)


# What all these classes have.
_VALUES: dict[str, tuple[Any, ...]] = {
    "class_token": (True,),
    "norm_kind": ("layer",),
    "norm_after": (False,),
    "patch_norm": (False,),
    "qk_norm": (False,),
    "attention_norm": (False,),
    "mlp_norm": (False,),
    "pool_prefix": (False,),
}
MODERN = {"modern_vit": Holds(to_huggingface_modern, _VALUES)}
