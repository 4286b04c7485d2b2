"""Writes today's Vision Transformers as one of timm's three classes that compute the same.

`Beit` has relative biases, `Eva` rotary positions and biases of queries and values alone,
`VisionTransformer` the rest. An architecture gives what a `config.json` cannot: the epsilon and
the kind of MLP; `model_args` give all the rest.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.vit import ATTENTION, BLOCKS
from vit_jax.pretrained.formats import modern, rows
from vit_jax.pretrained.formats.timm_config import GELUS, POOL, ratio, to_config
from vit_jax.pretrained.formats.timm_vit import FREQUENCIES, PACKED, pair_order, table

Params = dict[str, np.ndarray]

# By the class, the kind of norms and their epsilon; and by the MLP, where this is no argument.
_ARCHITECTURES = {
    ("VisionTransformer", "layer", 1e-6, "mlp"): "vit_base_patch16_224",
    ("VisionTransformer", "layer", 1e-5, "mlp"): "vit_base_patch16_clip_224",
    ("VisionTransformer", "layer", 1e-6, "swiglu"): "vit_giant_patch14_dinov2",
    ("VisionTransformer", "rms", 1e-6, "mlp"): "test_vit4",
    ("VisionTransformer", "rms", 1e-5, "swiglu"): "aimv2_large_patch14_224",
    ("Eva", "layer", 1e-6): "eva02_base_patch14_224",
    ("Eva", "layer", 1e-5): "vit_base_patch16_dinov3",
    ("Eva", "rms", 1e-6): "vit_base_patch16_sapiens2",
    ("Beit", "layer", 1e-6): "beit_base_patch16_224",
}
_ROPES = {"grid": "cat", "centered": "dinov3", "mixed": "mixed"}
# What each class cannot do otherwise.
_VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "VisionTransformer": {"norm_after": (False,), "map_num_heads": (None,), "map_mlp_dim": (None,)},
    "Eva": {"dense_bias": (True,), "patch_norm": (False,), "gelu": ("exact",)},
    "Beit": {
        "class_token": (True,),
        "num_registers": (None,),
        "position_embedding": ("none",),
        "rope": ("none",),
        "qkv_bias": ("qv", "none"),
        "dense_bias": (True,),
        "qk_norm": (False,),
        "attention_norm": (False,),
        "patch_norm": (False,),
        "pre_norm": (False,),
        "norm_after": (False,),
        "gelu": ("exact",),
        "classifier": ("token", "gap"),
        "pool_prefix": (False,),
    },
}


def _kind(model: dict[str, Any]) -> str:
    if model["relative_bias"]:
        return "Beit"
    is_eva = model["rope"] != "none" or model["qkv_bias"] == "qv" or model["norm_after"]
    return "Eva" if is_eva else "VisionTransformer"


def _check(model: dict[str, Any], kind: str) -> str:
    """The architecture; UserError for an attribute that the class does not have."""

    def refuse(*keys: str) -> NoReturn:
        values = ", ".join(f"model.{key}={model[key]!r}" for key in keys)
        raise UserError(f"timm has no {kind} with {values}; use --format=npz or orbax.")

    for key, values in _VALUES[kind].items():
        if model[key] not in values:
            refuse(key)
    if model["patch_bias"] == model["pre_norm"]:
        refuse("pre_norm", "patch_bias")
    if model["mlp"] == "swiglu" and model["gelu"] != "exact":
        refuse("mlp", "gelu")
    if kind == "Beit" and model["final_norm"] != (
        "pooled" if model["classifier"] == "gap" else "tokens"
    ):
        refuse("classifier", "final_norm")
    prefix = model["class_token"] or model["num_registers"]
    if kind == "Eva" and prefix and model["pool_prefix"] != (model["classifier"] == "map"):
        refuse("classifier", "pool_prefix")
    keys = ("norm_kind", "layer_norm_epsilon", "mlp")
    wanted = (kind, *(model[key] for key in keys))
    return _ARCHITECTURES.get(wanted) or _ARCHITECTURES.get(wanted[:3]) or refuse(*keys)


def to_timm_modern(
    params: Params, description: Description, inputs: InputSettings
) -> tuple[Params, dict[str, Any]]:
    """Arrays and `config.json` for `timm.create_model("local-dir:FOLDER", pretrained=True)`."""
    model = description.model
    kind = _kind(model)
    architecture = _check(model, kind)
    height, width, channels = description.image_shape
    pooling, mlp_dim = POOL[model["classifier"]], model["mlp_dim"]
    if kind == "VisionTransformer" and (model["mlp"], model["norm_kind"]) == ("swiglu", "layer"):
        mlp_dim *= 2  # of both layers as one
    args = {
        "img_size": [height, width],
        "in_chans": channels,
        "patch_size": model["patch_size"],
        "embed_dim": model["hidden_size"],
        "depth": model["num_layers"],
        "num_heads": model["num_heads"],
        "mlp_ratio": ratio(mlp_dim, model["hidden_size"]),
        "init_values": model["layer_scale_init"],
        "qkv_bias": model["qkv_bias"] != "none",
        "global_pool": pooling,
        **{"Beit": _beit, "Eva": _eva}.get(kind, _plain)(model),
    }
    config = to_config(description, inputs, architecture, args, pooling)
    return _arrays(params, model, kind, args), {"config.json": config}


def _plain(model: dict[str, Any]) -> dict[str, Any]:
    args = {
        "class_token": model["class_token"],
        "reg_tokens": model["num_registers"] or 0,
        "pos_embed": "learn" if model["position_embedding"] == "learned" else "none",
        "no_embed_class": True,
        "pre_norm": model["pre_norm"],
        "final_norm": model["final_norm"] != "none",
        "fc_norm": model["final_norm"] == "pooled",
        "proj_bias": model["dense_bias"],
        "qk_norm": model["qk_norm"],
        "scale_attn_norm": model["attention_norm"],
        "scale_mlp_norm": model["mlp_norm"],
        "pool_include_prefix": model["pool_prefix"],
    }
    if not model["patch_norm"]:
        args["embed_norm_layer"] = None
    if model["mlp"] == "mlp":
        args["act_layer"] = {ours: theirs for theirs, ours in GELUS.items()}[model["gelu"]]
    return args


def _eva(model: dict[str, Any]) -> dict[str, Any]:
    rope = _ROPES.get(model["rope"])
    return {
        "class_token": model["class_token"],
        "num_reg_tokens": model["num_registers"] or 0,
        "use_abs_pos_emb": model["position_embedding"] == "learned",
        "no_embed_class": True,
        "use_pre_transformer_norm": model["pre_norm"],
        "use_post_transformer_norm": model["final_norm"] == "tokens",
        "use_fc_norm": model["final_norm"] == "pooled",
        "use_post_norm": model["norm_after"],
        "attn_type": "rope" if model["qkv_bias"] == "qkv" else "eva",
        "qkv_fused": True,
        "num_kv_heads": None,
        "qk_norm": model["qk_norm"],
        "scale_attn_inner": model["attention_norm"],
        "swiglu_mlp": model["mlp"] == "swiglu",
        "swiglu_align_to": 0,
        "scale_mlp": model["mlp_norm"],
        "attn_only_layer_scale": False,
        "attn_pool_num_heads": model["map_num_heads"],
        "attn_pool_mlp_ratio": ratio(
            model["map_mlp_dim"] or model["mlp_dim"], model["hidden_size"]
        ),
        "use_rot_pos_emb": rope is not None,
        "rope_type": rope,
        "rope_temperature": model["rope_base"],
        "rope_grid_offset": model["rope_offset"],
        "ref_feat_shape": model["rope_grid"] and list(model["rope_grid"]),
        "rope_grid_indexing": "xy" if rope == "mixed" else "ij",
        "rope_rotate_half": rope != "mixed",
        "rope_rescale_coords": model["rope_jitter"],
    }


def _beit(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "use_rel_pos_bias": True,
        "use_abs_pos_emb": False,
        "swiglu_mlp": model["mlp"] == "swiglu",
        "scale_mlp": model["mlp_norm"],
    }


def _arrays(params: Params, model: dict[str, Any], kind: str, args: dict[str, Any]) -> Params:
    params = {name.replace("/RMSNorm_", "/LayerNorm_"): array for name, array in params.items()}
    if model["rope"] != "none":
        order = pair_order(model["hidden_size"] // model["num_heads"], args)
        modern.reorder(params, np.argsort(order))
    table_of = "blocks.{}.attn.relative_position_bias_table".format
    others = modern.write_relative_bias(params, table_of)
    if model["rope"] == "mixed":
        names = [FREQUENCIES.format(i) for i in range(model["num_layers"])]
        others["rope.freqs"] = np.stack([params.pop(name) for name in names], axis=1)
    is_swiglu = model["mlp"] == "swiglu"
    # Two layers where a norm follows, and in AIMv2 and BEiT; else one.
    split = is_swiglu and (
        model["mlp_norm"]
        or kind == "Beit"
        or (kind, model["norm_kind"]) == ("VisionTransformer", "rms")
    )
    forms = {PACKED} if is_swiglu and not split else set()
    for i in range(model["num_layers"]):
        if f"{BLOCKS}_{i}/{ATTENTION}/key/bias" not in params:
            forms.add(f"blocks.{i}.attn.q_bias")
        if split:
            forms.add(f"blocks.{i}.mlp.fc1_x.weight")
    found = table(rows.block_numbers(params), [], forms)
    arrays = rows.write_rows(found, params, "timm") | others
    if kind == "VisionTransformer":
        return arrays
    gammas = {f"ls{k}.gamma": f"gamma_{k}" for k in (1, 2)}
    for name in [name for name in arrays if name.endswith(tuple(gammas))]:
        folder, _, end = name.rpartition(".ls")
        arrays[f"{folder}.{gammas[f'ls{end}']}"] = arrays.pop(name)
    return arrays
