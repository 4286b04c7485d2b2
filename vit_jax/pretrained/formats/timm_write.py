"""Writes Vision Transformers, hybrids, DeiTs and masked autoencoders as models of timm.

Today's are of three classes: `Beit` has relative biases, `Eva` rotary positions and biases of
queries and values alone, `VisionTransformer` the rest. An architecture gives what `model_args`
cannot: the epsilon and the kind of MLP.
"""

import functools
import math
from typing import Any, NoReturn

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.variants import SIZES, VIT
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.formats import timm, vit_parts
from vit_jax.pretrained.formats.names import write_table
from vit_jax.pretrained.formats.stored import NUMBER, ONE_TABLE, Arrays, Holds, Written
from vit_jax.pretrained.formats.timm_config import (
    ASSUMED,
    GELUS,
    POOL,
    POSITION_RESIZES,
    ROPES,
    ratio,
    to_config,
)
from vit_jax.pretrained.formats.vit_parts import renamed

_ACTIVATIONS = {exact: act for act, exact in GELUS.items()}
# timm's architectures, without the resolution; `model_args` has the rest.
_SIZES = {"Ti": "tiny", "S": "small", "M": "medium", "B": "base", "L": "large", "H": "huge"}
_NAMES = "tiny_patch16 small_patch16 small_patch32 base_patch8 base_patch16 base_patch32 "
_NAMES += "large_patch14 large_patch16 large_patch32 huge_patch14"
_HYBRIDS = {
    "R+Ti/16": "vit_tiny_r_s16_p8",
    "R26+S/32": "vit_small_r26_s32",
    "R26+B/32": "vit_base_r26_s32",
    "R50+B/16": "vit_base_r50_s16",
    "R50+L/32": "vit_large_r50_s32",
}


def _architecture(model: dict[str, Any]) -> str:
    """timm's name of the closest model; UserError for a hybrid that timm lacks."""
    if model["name"] == "deit":
        return "deit_base_distilled_patch16_224"
    if model.get("resnet_layers") is None:
        sizes = tuple(model[key] for key in ("hidden_size", "num_layers", "mlp_dim", "num_heads"))
        size = next((theirs for ours, theirs in _SIZES.items() if SIZES[ours] == sizes), "")
        name = f"{size}_patch{model['patch_size']}"
        return f"vit_{name if name in _NAMES.split() else 'base_patch16'}_224"
    model = {**model, "resnet_layers": tuple(model["resnet_layers"])}
    for name, architecture in _HYBRIDS.items():
        if {**model, **VIT[name], "resnet_width_factor": 1} == model:
            return f"{architecture}_224"
    raise UserError(f"timm has no such hybrid; --format=timm can write {', '.join(_HYBRIDS)}.")


def _common_args(description: Description, mlp_dim: int) -> dict[str, Any]:
    model = description.model
    height, width, channels = description.image_shape
    return {
        "img_size": [height, width],
        "in_chans": channels,
        "mlp_ratio": ratio(mlp_dim, model["hidden_size"]),
        **renamed(model, "embed_dim=hidden_size depth=num_layers num_heads"),
    }


def write_vit(params: Arrays, description: Description, inputs: InputSettings) -> Written:
    """Arrays and `config.json` for `timm.create_model("local-dir:FOLDER", pretrained=True)`."""
    model = description.model
    if "pre_logits/kernel" in params:
        raise UserError("--format=timm has no pre_logits layer before a head; use --drop_head.")
    pooling = POOL[model["classifier"]]
    args = _common_args(description, model["mlp_dim"])
    args["act_layer"] = _ACTIVATIONS[model["gelu"]]
    if model.get("resnet_layers") is None:
        args["patch_size"] = model["patch_size"]
    if model["name"] != "deit":
        args |= {"global_pool": pooling, "fc_norm": False, "class_token": "cls" in params}
    config = to_config(description, inputs, _architecture(model), args, pooling)
    stem = "stem." if "block1/unit1/conv1/kernel" in params else ""
    return write_table(timm.vit_table(stem=stem), params, "timm"), {"config.json": config}


def write_native(params: Arrays, description: Description, inputs: InputSettings) -> Written:
    """As `write_vit`, for `NaFlexVit`, which takes images in shapes of their own."""
    model, grid = description.model, description.model["position_grid"]
    is_plain = model["name"] == "vit"
    if inputs.patchify is None:
        raise UserError("NaFlexVit takes images in patches; --preprocess='decode|patchify(256)'.")
    if is_plain and "cls" in params:  # whose position is a part of it there
        first, rest = np.split(params[POSITIONS], [1], axis=1)
        params = {**params, "cls": params["cls"] + first, POSITIONS: rest}
    mode, antialias, square = POSITION_RESIZES[model["position_resize"] or "bilinear"]
    args = {
        **_common_args(description, model["mlp_dim"]),
        **renamed(model, "patch_size"),
        "act_layer": _ACTIVATIONS[model["gelu"]],
        "class_token": "cls" in params,
        "global_pool": POOL[model["classifier"]],
        "pos_embed_grid_size": list(grid),
        "pos_embed_interp_mode": mode,
        "pos_embed_antialias": antialias,
        "pos_embed_ar_preserving": square,
        "fc_norm": not is_plain and model["final_norm"] == "pooled",
        "reg_tokens": 0 if is_plain else model["num_registers"] or 0,
        "init_values": None if is_plain else model["layer_scale_init"],
        "qkv_bias": is_plain or model["qkv_bias"] != "none",
        "qk_norm": not is_plain and model["qk_norm"],
    }
    config = to_config(
        description, inputs, "naflexvit_base_patch16_gap", args, POOL[model["classifier"]]
    )
    side = math.isqrt(inputs.patchify.lengths[0]) * model["patch_size"]
    config["pretrained_cfg"]["input_size"] = [3, side, side]
    arrays = write_table(timm.vit_table(), params, "timm")
    kernel = arrays["patch_embed.proj.weight"]
    arrays["patch_embed.proj.weight"] = kernel.transpose(0, 2, 3, 1).reshape(len(kernel), -1)
    arrays["pos_embed"] = arrays["pos_embed"].reshape(1, *grid, -1)
    parts = {"patch_embed.": "embeds.", "pos_embed": "embeds.pos_embed"}
    parts |= {"cls_token": "embeds.cls_token", "reg_token": "embeds.reg_token"}
    for start, theirs in parts.items():
        for name in [name for name in arrays if name.startswith(start)]:
            arrays[theirs + name.removeprefix(start)] = arrays.pop(name)
    return arrays, {"config.json": config}


def write_mae(params: Arrays, description: Description, inputs: InputSettings) -> Written:
    """Arrays for facebookresearch/mae, and a `config.json` with the arguments of its model."""
    model = description.model
    vit_parts.check_square("timm", description)
    args = _common_args(description, model["mlp_dim"]) | {"img_size": description.image_shape[0]}
    args |= renamed(model, "decoder_embed_dim=decoder_hidden_size decoder_depth=decoder_num_layers")
    args |= renamed(model, "decoder_num_heads patch_size")
    if int(args["decoder_embed_dim"] * args["mlp_ratio"]) != model["decoder_mlp_dim"]:
        text = f"--format=timm cannot store model.decoder_mlp_dim={model['decoder_mlp_dim']}"
        raise UserError(f"{text}, another ratio than the encoder's; use --format=huggingface.")
    config = to_config(description, inputs, "mae_vit", args, "token")
    return write_table(timm.vit_table(), params, "timm"), {"config.json": config}


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


def _check(model: dict[str, Any], name: str) -> str:
    """The architecture; UserError for attributes that the class does not have together."""

    def refuse(*keys: str) -> NoReturn:
        values = ", ".join(f"model.{key}={model[key]!r}" for key in keys)
        raise UserError(f"timm has no {name} with {values}; use --format=npz or orbax.")

    if model["patch_bias"] == model["pre_norm"]:
        refuse("pre_norm", "patch_bias")
    if model["mlp"] == "swiglu" and model["gelu"] != "exact":
        refuse("mlp", "gelu")
    prefix = model["class_token"] or model["num_registers"]
    if name == "Eva" and prefix and model["pool_prefix"] != (model["classifier"] == "map"):
        refuse("classifier", "pool_prefix")
    keys = ("norm_kind", "layer_norm_epsilon", "mlp")
    wanted = (name, *(model[key] for key in keys))
    return _ARCHITECTURES.get(wanted) or _ARCHITECTURES.get(wanted[:3]) or refuse(*keys)


def write_modern(
    name: str, params: Arrays, description: Description, inputs: InputSettings
) -> Written:
    """As `write_vit`, for this class of timm."""
    model = description.model
    architecture = _check(model, name)
    pooling, mlp_dim = POOL[model["classifier"]], model["mlp_dim"]
    if name == "VisionTransformer" and (model["mlp"], model["norm_kind"]) == ("swiglu", "layer"):
        mlp_dim *= 2  # of both layers as one
    args = {
        **_common_args(description, mlp_dim),
        **renamed(model, "patch_size init_values=layer_scale_init"),
        "qkv_bias": model["qkv_bias"] != "none",
        "global_pool": pooling,
        **{"Beit": _beit, "Eva": _eva}.get(name, _plain)(model),
    }
    config = to_config(description, inputs, architecture, args, pooling)
    params = {key.replace("/RMSNorm_", "/LayerNorm_"): array for key, array in params.items()}
    if model["rope"] != "none":
        order = timm.pair_order(model["hidden_size"] // model["num_heads"], args)
        timm.reorder(params, np.argsort(order))
    others = vit_parts.write_relative_biases(params, timm.RELATIVE_BIAS)
    if model["rope"] == "mixed":
        names = [timm.FREQUENCIES.format(i) for i in range(model["num_layers"])]
        others["rope.freqs"] = np.stack([params.pop(name) for name in names], axis=1)
    # Two layers where a norm follows, and in AIMv2 and BEiT; else one.
    is_aim = (name, model["norm_kind"]) == ("VisionTransformer", "rms")
    swiglu = timm.SPLIT if model["mlp_norm"] or name == "Beit" or is_aim else timm.PACKED
    forms = [swiglu] if model["mlp"] == "swiglu" else []
    forms += [timm.GAMMAS] if name != "VisionTransformer" else []
    return write_table(timm.vit_table(*forms), params, "timm") | others, {"config.json": config}


def _plain(model: dict[str, Any]) -> dict[str, Any]:
    args = {
        "reg_tokens": model["num_registers"] or 0,
        "pos_embed": "learn" if model["position_embedding"] == "learned" else "none",
        "no_embed_class": True,
        "final_norm": model["final_norm"] != "none",
        "fc_norm": model["final_norm"] == "pooled",
        **renamed(model, "class_token pre_norm qk_norm proj_bias=dense_bias"),
        **renamed(model, "scale_attn_norm=attention_norm scale_mlp_norm=mlp_norm"),
        **renamed(model, "pool_include_prefix=pool_prefix"),
    }
    if not model["patch_norm"]:
        args["embed_norm_layer"] = None
    if model["mlp"] == "mlp":
        args["act_layer"] = _ACTIVATIONS[model["gelu"]]
    return args


def _eva(model: dict[str, Any]) -> dict[str, Any]:
    rope = {ours: theirs for theirs, ours in ROPES.items()}.get(model["rope"])
    pool_mlp_dim = model["map_mlp_dim"] or model["mlp_dim"]
    return {
        "num_reg_tokens": model["num_registers"] or 0,
        "use_abs_pos_emb": model["position_embedding"] == "learned",
        "no_embed_class": True,
        "use_post_transformer_norm": model["final_norm"] == "tokens",
        "use_fc_norm": model["final_norm"] == "pooled",
        **renamed(model, "class_token use_pre_transformer_norm=pre_norm use_post_norm=norm_after"),
        "attn_type": "rope" if model["qkv_bias"] == "qkv" else "eva",
        "qkv_fused": True,
        "num_kv_heads": None,
        **renamed(model, "qk_norm scale_attn_inner=attention_norm scale_mlp=mlp_norm"),
        "swiglu_mlp": model["mlp"] == "swiglu",
        "swiglu_align_to": 0,
        "attn_only_layer_scale": False,
        "attn_pool_num_heads": model["map_num_heads"],
        "attn_pool_mlp_ratio": ratio(pool_mlp_dim, model["hidden_size"]),
        "use_rot_pos_emb": rope is not None,
        "rope_type": rope,
        "ref_feat_shape": model["rope_grid"] and list(model["rope_grid"]),
        "rope_grid_indexing": "xy" if rope == "mixed" else "ij",
        "rope_rotate_half": rope != "mixed",
        **renamed(model, "rope_temperature=rope_base rope_grid_offset=rope_offset"),
        **renamed(model, "rope_rescale_coords=rope_jitter"),
    }


def _beit(model: dict[str, Any]) -> dict[str, Any]:
    return {"swiglu_mlp": model["mlp"] == "swiglu", "scale_mlp": model["mlp_norm"]}


_POOLED = {"classifier": tuple(POOL)}
_PLAIN = {**_POOLED, **ONE_TABLE, "position_grid": (None,)}
_ONE_SHAPE = {"position_grid": (None,)}
_NATIVE = {"position_grid": (NUMBER,), "position_embedding": ("learned",), **_POOLED}
_OF_NATIVE = {
    **vit_parts.defaults("relative_bias rope patch_bias patch_norm pre_norm norm_kind norm_after"),
    **vit_parts.defaults("dense_bias attention_norm mlp_norm mlp pool_prefix map_num_heads"),
    **vit_parts.defaults("map_mlp_dim"),
    **_NATIVE,
    "final_norm": ("tokens", "pooled"),
    "qkv_bias": ("qkv", "none"),
}
_OF_VIT = {
    **vit_parts.defaults("relative_bias rope norm_after map_num_heads map_mlp_dim"),
    "qkv_bias": ("qkv", "none"),
}
_OF_EVA = {**vit_parts.defaults("relative_bias dense_bias patch_norm"), "gelu": ("exact",)}
_OF_BEIT = {
    **vit_parts.defaults("class_token num_registers rope dense_bias qk_norm attention_norm"),
    **vit_parts.defaults("patch_norm pre_norm norm_after pool_prefix"),
    "relative_bias": (True,),
    "position_embedding": ("none",),
    "qkv_bias": ("qv", "none"),
    "gelu": ("exact",),
}


def _todays(name: str, values: dict[str, tuple[Any, ...]]) -> Holds:
    values = _POOLED | _ONE_SHAPE | values
    return Holds("modern_vit", functools.partial(write_modern, name), values, name=name)


TIMM = (
    Holds("vit", write_vit, {**_PLAIN, "resnet_batch_norm": (False,)}, ASSUMED),
    Holds("vit", write_native, {**_NATIVE, "resnet_layers": (None,)}, ASSUMED),
    Holds("modern_vit", write_native, _OF_NATIVE, ASSUMED, name="NaFlexVit"),
    Holds("deit", write_vit, _PLAIN, ASSUMED),
    _todays("VisionTransformer", _OF_VIT),
    _todays("Eva", _OF_EVA),
    _todays("Beit", _OF_BEIT | {"classifier": ("token",), "final_norm": ("tokens",)}),
    _todays("Beit", _OF_BEIT | {"classifier": ("gap",), "final_norm": ("pooled",)}),
    Holds("mae", write_mae, {"num_classes": (0,)}, {**ASSUMED, "gelu": "exact"}),
)
