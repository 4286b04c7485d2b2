"""timm's Vision Transformers, hybrids and DeiTs: their names.

facebookresearch/mae has the same names, and its own for a decoder.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import modern_vit
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.variants import HYBRIDS, SIZES
from vit_jax.models.vit import BLOCKS, POSITIONS
from vit_jax.pretrained.formats import rows
from vit_jax.pretrained.formats.mae import check_square, decoder_rows
from vit_jax.pretrained.formats.rows import Row, layer, norm, numbers
from vit_jax.pretrained.formats.stored import ONE_TABLE, Holds, Stored
from vit_jax.pretrained.formats.timm_config import ASSUMED, GELUS, POOL, ratio, to_config
from vit_jax.pretrained.infer import grid_of_images, num_prefix_tokens

# timm's architectures, without the resolution; `model_args` has the rest.
_SIZES = {"Ti": "tiny", "S": "small", "M": "medium", "B": "base", "L": "large", "H": "huge"}
_PLAIN = "tiny_16 small_16 small_32 base_8 base_16 base_32 large_14 large_16 large_32 huge_14"
_DEIT3 = "small_16 medium_16 base_16 large_16 huge_14"
_HYBRIDS = {
    "R+Ti/16": "vit_tiny_r_s16_p8",
    "R26+S/32": "vit_small_r26_s32",
    "R26+B/32": "vit_base_r26_s32",
    "R50+B/16": "vit_base_r50_s16",
    "R50+L/32": "vit_large_r50_s32",
}
_BLOCK = "norm1 attn.qkv attn.proj norm2 mlp.fc1 mlp.fc2"
# Parts of some timm models that ours do not have.
_UNSUPPORTED = {
    r"blocks\.\d+\.attn\.[qk]_norm\..*": "normalised queries and keys",
    r"reg_token": "register tokens",
    r"fc_norm\..*": "a norm after pooling instead of before",
    r"norm_pre\..*": "a norm before the blocks",
    r"blocks\.\d+\.attn\.rel_pos.*": "relative positions",
    r"blocks\.\d+\.mlp\.(w\d+|fc1_[gx])\..*": "gated MLPs (SwiGLU)",
    r"blocks\.\d+\.attn\.([qv]_bias|[qkv]_proj\..*)": "separate queries, keys and values (as EVA)",
}
# Layers whose biases some timm models omit.
_WITHOUT_BIAS = {
    r"blocks\.\d+\.attn\.qkv": "queries, keys and values without biases",
    r"blocks\.\d+\.norm1": "norms without biases (RMSNorm)",
    r"blocks\.\d+\.mlp\.fc1": "MLPs without biases",
    r"patch_embed\.proj": "a patch embedding without bias",
}


def _table(blocks: list[tuple[int, ...]], units: list[tuple[int, ...]]) -> list[Row]:
    """The table for these blocks, and these (stage, unit) of a ResNet, numbered from 1."""
    heads = (rows.HEADS_IN, rows.HEADS_BIAS)
    # Without stages (R+Ti/16) the stem is timm's whole backbone.
    stem = "patch_embed.backbone.stem" if units else "patch_embed.backbone"
    pooling = "MAPHead_0/MultiHeadDotProductAttention_0"
    table = [
        Row(("cls",), "cls_token"),
        Row(("dist",), "dist_token"),
        Row((POSITIONS,), "pos_embed"),  # also when reading the next, see `_place_positions`
        Row((modern_vit.POSITIONS,), "pos_embed"),
        *layer("embedding", "patch_embed.proj", rows.CONV),
        *norm("Transformer/encoder_norm", "norm"),
        *layer("pre_logits", "pre_logits.fc"),  # only in files of timm before 0.6
        *layer("head", "head"),
        *layer("head_dist", "head_dist"),
        Row(("MAPHead_0/probe",), "attn_pool.latent"),
        *layer(f"{pooling}/query", "attn_pool.q", *heads),
        *layer([f"{pooling}/key", f"{pooling}/value"], "attn_pool.kv", *heads),
        *layer(f"{pooling}/out", "attn_pool.proj", rows.HEADS_OUT),
        *norm("MAPHead_0/LayerNorm_0", "attn_pool.norm"),
        *layer("MAPHead_0/MlpBlock_0/Dense_0", "attn_pool.mlp.fc1"),
        *layer("MAPHead_0/MlpBlock_0/Dense_1", "attn_pool.mlp.fc2"),
        Row(("conv_root/kernel",), f"{stem}.conv.weight", rows.CONV),
        *norm("gn_root", f"{stem}.norm"),
    ]
    for (i,) in blocks:
        table += rows.encoder_block(i, f"blocks.{i}", _BLOCK)
        for k in (1, 2):
            table += [Row((f"{BLOCKS}_{i}/LayerScale_{k - 1}/gamma",), f"blocks.{i}.ls{k}.gamma")]
    for stage, unit in units:
        ours = f"block{stage}/unit{unit}"
        theirs = f"patch_embed.backbone.stages.{stage - 1}.blocks.{unit - 1}"
        for part, form in {"1": "{}1", "2": "{}2", "3": "{}3", "_proj": "downsample.{}"}.items():
            kernel = f"{theirs}.{form.format('conv')}.weight"
            table += [Row((f"{ours}/conv{part}/kernel",), kernel, rows.CONV)]
            table += norm(f"{ours}/gn{part}", f"{theirs}.{form.format('norm')}")
    return table


def _decoder(names: Collection[str], model_args: Mapping[str, Any]) -> list[Row]:
    return decoder_rows(names, "decoder_blocks", _BLOCK, model_args, "decoder_num_heads")


def is_timm(names: Collection[str]) -> bool:
    return {"patch_embed.proj.weight", "blocks.0.attn.qkv.weight"} <= set(names)


def check_names(arrays: Mapping[str, np.ndarray]) -> None:
    """UserError for a part that our models lack, before anything is guessed."""
    parts = list(_UNSUPPORTED.items())
    for each, part in _WITHOUT_BIAS.items():
        if not any(re.fullmatch(rf"{each}\.bias", name) for name in arrays):
            parts.append((rf"{each}\.weight", part))
    for name, array in arrays.items():
        for pattern, part in parts:
            if re.fullmatch(pattern, name):
                raise UserError(f"this model has {part} ({name}), which is not supported.")
        if name == "patch_embed.proj.weight" and array.ndim != 4:
            raise UserError(f"{name} of {array.ndim} axes is for videos or volumes, not images.")


def read_timm(
    stored: Stored,
    arrays: dict[str, np.ndarray],
    num_heads: int,
    settings: dict[str, Any],
    grid: tuple[int, int] | None,
) -> None:
    """Moves `arrays` into `stored`; UserError for a part that our models lack."""
    for name in [name for name in arrays if re.search(r"\.gamma_[12]$", name)]:  # DeiT III's own
        arrays[re.sub(r"gamma_([12])$", r"ls\1.gamma", name)] = arrays.pop(name)
    units = numbers(r"\.stages\.(\d+)\.blocks\.(\d+)\.", arrays)
    blocks = numbers(r"^blocks\.(\d+)\.", arrays)
    args = settings.get("model_args") or {}
    table = _table(blocks, [(stage + 1, unit + 1) for stage, unit in units])
    table += _decoder(arrays, args)
    rows.read_rows(stored, arrays, table, num_heads=num_heads)
    _place_positions(stored, args.get("no_embed_class") is True, grid)
    pooling = args.get("global_pool") or settings.get("global_pool")
    if "cls" in stored.params and pooling not in (None, "", "token"):
        raise UserError(
            f"this model has a class token and global_pool={pooling!r}, which is not supported."
        )


def _place_positions(stored: Stored, no_embed_class: bool, grid: tuple[int, int] | None) -> None:
    """Adds zeros as positions of class tokens where timm's model has none, as in FlexiViT.

    With LayerScale, the class token has no position: one in the file is added to the token. If
    `no_embed_class` is not set, whether there is one follows from the number of positions: that of
    the tokens of `grid`, else of the images, else a square.
    """
    tokens, posemb = num_prefix_tokens(stored.params), stored.params.get(POSITIONS)
    if posemb is None or posemb.ndim != 3:
        return
    count = posemb.shape[1]
    grid = grid or grid_of_images(stored.params, stored.image_size)
    alone = count == math.prod(grid) if grid else math.isqrt(count) ** 2 == count
    alone = alone or no_embed_class or not tokens
    if any("/LayerScale_" in name for name in stored.params):
        if not alone:
            stored.params["cls"] = stored.params["cls"] + posemb[:, :1]
            stored.changed["cls"] = "its position added"
        del stored.params[POSITIONS]
        stored.params[modern_vit.POSITIONS] = posemb if alone else posemb[:, tokens:]
        if how := stored.changed.pop(POSITIONS, ""):
            stored.changed[modern_vit.POSITIONS] = how
    elif tokens and alone:
        logging.info("The class token has no position embedding: using zeros.")
        stored.params[POSITIONS] = np.pad(posemb, ((0, 0), (tokens, 0), (0, 0)))


def _architecture(model: dict[str, Any]) -> str:
    """timm's name of the closest model; UserError for a hybrid that timm lacks."""
    if model["name"] == "deit":
        return "deit_base_distilled_patch16_224"
    sizes = tuple(model[key] for key in ("hidden_size", "num_layers", "mlp_dim", "num_heads"))
    size = next((name for name, row in SIZES.items() if row == sizes), "")
    if model.get("resnet_layers") is None:
        kind, known = ("deit3", _DEIT3) if model["name"] == "modern_vit" else ("vit", _PLAIN)
        name = f"{_SIZES.get(size)}_{model['patch_size']}"
        name = name if name in known.split() else "base_16"  # the closest
        return f"{kind}_{name.replace('_', '_patch')}_224"
    row = (size, tuple(model["resnet_layers"]), model["patch_size"])
    hybrids = {HYBRIDS[name]: known for name, known in _HYBRIDS.items()}
    if row not in hybrids or model["resnet_width_factor"] != 1:
        known = ", ".join(_HYBRIDS)
        raise UserError(f"timm has no such hybrid; --format=timm can write {known}.")
    return f"{hybrids[row]}_224"


def to_timm(
    params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and `config.json` for `timm.create_model("local-dir:FOLDER", pretrained=True)`."""
    model = description.model
    architecture = _architecture(model)
    if "pre_logits/kernel" in params:
        raise UserError(
            "--format=timm has no pre_logits layer, without which the head is meaningless; use "
            "--drop_head to write the model without pre_logits and head."
        )
    pooling = POOL[model["classifier"]]
    height, width, channels = description.image_shape
    args: dict[str, Any] = {
        "img_size": [height, width],
        "in_chans": channels,
        "embed_dim": model["hidden_size"],
        "depth": model["num_layers"],
        "num_heads": model["num_heads"],
        "mlp_ratio": ratio(model["mlp_dim"], model["hidden_size"]),
        "act_layer": {exact: act for act, exact in GELUS.items()}[model["gelu"]],
    }
    if model.get("resnet_layers") is None:
        args["patch_size"] = model["patch_size"]
    if model["name"] == "modern_vit":
        args |= {"init_values": model["layer_scale_init"], "no_embed_class": True}
    if model["name"] != "deit":
        args |= {"global_pool": pooling, "fc_norm": False}
        args["class_token"] = "cls" in params
    config = to_config(description, inputs, architecture, args, pooling)
    return write(params), {"config.json": config}


def to_mae(
    params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays for facebookresearch/mae, and a `config.json` with the arguments of its model."""
    model = description.model
    check_square("timm", description)
    keys = {"embed_dim": "hidden_size", "depth": "num_layers", "num_heads": "num_heads"}
    args = {f"{p}{key}": model[f"{p}{keys[key]}"] for p in ("", "decoder_") for key in keys}
    args |= {"patch_size": model["patch_size"], "in_chans": description.image_shape[2]}
    args |= {"img_size": description.image_shape[0]}
    args["mlp_ratio"] = ratio(model["mlp_dim"], model["hidden_size"])
    if int(args["decoder_embed_dim"] * args["mlp_ratio"]) != model["decoder_mlp_dim"]:
        raise UserError(
            f"--format=timm cannot store model.decoder_mlp_dim={model['decoder_mlp_dim']}: encoder "
            "and decoder there have the same ratio of MLP and width; use --format=huggingface."
        )
    config = to_config(description, inputs, "mae_vit", args, "token")
    return write(params), {"config.json": config}


def write(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our flat names -> timm's; UserError for a parameter without a timm name."""
    table = _table(rows.block_numbers(params), numbers(r"block(\d+)/unit(\d+)/", params))
    return rows.write_rows([*table, *_decoder(params, {})], params, "timm")


_VALUES = {"classifier": tuple(POOL)}
TIMM = {
    **{name: Holds(to_timm, {**_VALUES, **ONE_TABLE}, ASSUMED) for name in ("vit", "deit")},
    "modern_vit": Holds(to_timm, _VALUES, ASSUMED),
    "mae": Holds(to_mae, {"num_classes": (0,)}, {**ASSUMED, "gelu": "exact"}),
}
