"""timm's names for Vision Transformers, from the paper's to today's, in both directions."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vit_jax.models.later import modern_vit
from vit_jax.models.vit import ATTENTION, BLOCKS, POSITIONS
from vit_jax.pretrained.formats import modern, rows
from vit_jax.pretrained.formats.rows import Row, layer, norm, numbers
from vit_jax.pretrained.formats.stored import Stored
from vit_jax.pretrained.infer import grid_of_images, num_prefix_tokens

BLOCK = "norm1 attn.qkv attn.proj norm2 mlp.fc1 mlp.fc2"
_EXTRA = {
    "query_norm": "attn.q_norm",
    "key_norm": "attn.k_norm",
    "norm": "attn.norm",
    "mlp_norm": "mlp.norm",
    "gate": "mlp.fc1_g",
    "scale_0": "ls1.gamma",
    "scale_1": "ls2.gamma",
}
FREQUENCIES = f"{BLOCKS}_{{}}/{ATTENTION}/rope/frequencies"


def table(
    blocks: list[tuple[int, ...]],
    units: list[tuple[int, ...]],
    names: Collection[str],
    pool_heads: int | None = None,
) -> list[Row]:
    """The table for these blocks, and these (stage, unit) of a ResNet, numbered from 1.

    `names`, theirs, show the form of each block; `pool_heads` are those of the attention pooling,
    if they differ from the blocks'.
    """
    ops = [op.of_heads(pool_heads) for op in (rows.HEADS_IN, rows.HEADS_BIAS, rows.HEADS_OUT)]
    # Without stages (R+Ti/16) the stem is timm's whole backbone.
    stem = "patch_embed.backbone.stem" if units else "patch_embed.backbone"
    pooling = "MAPHead_0/MultiHeadDotProductAttention_0"
    found = [
        Row(("cls",), "cls_token"),
        Row(("registers",), "reg_token"),
        Row(("dist",), "dist_token"),
        Row((POSITIONS,), "pos_embed"),  # also when reading the next, see `_place_positions`
        Row((modern_vit.POSITIONS,), "pos_embed"),
        *layer("embedding", "patch_embed.proj", rows.CONV),
        *norm("patch_norm", "patch_embed.norm"),
        *norm("Transformer/pre_norm", "norm_pre"),
        *norm("Transformer/encoder_norm", "norm"),
        *norm("pooled_norm", "fc_norm"),
        *layer("pre_logits", "pre_logits.fc"),  # only in files of timm before 0.6
        *layer("head", "head"),
        *layer("head_dist", "head_dist"),
        Row(("MAPHead_0/probe",), "attn_pool.latent"),
        *layer(f"{pooling}/query", "attn_pool.q", ops[0], ops[1]),
        *layer([f"{pooling}/key", f"{pooling}/value"], "attn_pool.kv", ops[0], ops[1]),
        *layer(f"{pooling}/out", "attn_pool.proj", ops[2]),
        *norm("MAPHead_0/LayerNorm_0", "attn_pool.norm"),
        *layer("MAPHead_0/MlpBlock_0/Dense_0", "attn_pool.mlp.fc1"),
        *layer("MAPHead_0/MlpBlock_0/Dense_1", "attn_pool.mlp.fc2"),
        Row(("conv_root/kernel",), f"{stem}.conv.weight", rows.CONV),
        *norm("gn_root", f"{stem}.norm"),
    ]
    for (i,) in blocks:
        found += _block_rows(i, names)
    for stage, unit in units:
        ours = f"block{stage}/unit{unit}"
        theirs = f"patch_embed.backbone.stages.{stage - 1}.blocks.{unit - 1}"
        for part, form in {"1": "{}1", "2": "{}2", "3": "{}3", "_proj": "downsample.{}"}.items():
            kernel = f"{theirs}.{form.format('conv')}.weight"
            found += [Row((f"{ours}/conv{part}/kernel",), kernel, rows.CONV)]
            found += norm(f"{ours}/gn{part}", f"{theirs}.{form.format('norm')}")
    return found


# Stands for names of a form: SwiGLU whose two layers are one.
PACKED = "packed"


def _block_rows(number: int, names: Collection[str]) -> list[Row]:
    """With one layer for queries, keys and values or three, and with all of today's parts."""
    folder, ours = f"blocks.{number}", f"{BLOCKS}_{number}"
    parts = BLOCK
    if f"{folder}.attn.q_proj.weight" in names:
        parts = parts.replace("attn.qkv", "attn.q_proj attn.k_proj attn.v_proj")
    if f"{folder}.mlp.fc1_x.weight" in names:
        parts = parts.replace("mlp.fc1", "mlp.fc1_x")
    found = rows.encoder_block(number, folder, parts) + modern.extra_rows(number, folder, _EXTRA)
    if PACKED in names:
        halves = [f"{ours}/MlpBlock_0/{name}" for name in ("gate", "Dense_0")]
        found = [row for row in found if not row.theirs.startswith(f"{folder}.mlp.fc1")]
        found += layer(halves, f"{folder}.mlp.fc1")
    if f"{folder}.attn.q_bias" in names:  # BEiT's and EVA's, of which keys have none
        biases = [f"{ours}/{ATTENTION}/{name}/bias" for name in ("query", "value")]
        found = [row for row in found if row.theirs != f"{folder}.attn.qkv.bias"]
        for name in biases:
            bias = f"{folder}.attn.{name.split('/')[-2][0]}_bias"
            found.append(Row((name,), bias, rows.HEADS_BIAS))
    return found


def read_vit(
    stored: Stored,
    arrays: dict[str, np.ndarray],
    num_heads: int,
    args: Mapping[str, Any],
    grid: tuple[int, int] | None,
    decoder: list[Row],
) -> None:
    """Moves `arrays` into `stored`; `args` are timm's arguments of the model.

    UserError: an array does not fit, or rotary positions that no array shows may be missing.
    """
    _prepare(arrays, num_heads)
    units = numbers(r"\.stages\.(\d+)\.blocks\.(\d+)\.", arrays)
    blocks = numbers(r"^blocks\.(\d+)\.", arrays)
    has_bias = "blocks.0.norm1.bias" in arrays
    before, after = (arrays.get(f"blocks.0.mlp.fc{k}.weight") for k in (1, 2))
    packed = before is not None and after is not None and len(before) == 2 * after.shape[-1]
    frequencies = arrays.pop("rope.freqs", None)  # [2, L, H, d / 2]
    name = "blocks.{}.attn.relative_position_bias_table".format
    biases = {i: arrays.pop(name(i)) for (i,) in blocks if name(i) in arrays}
    found = table(
        blocks,
        [(stage + 1, unit + 1) for stage, unit in units],
        {*arrays, *([PACKED] if packed else [])},
        args.get("attn_pool_num_heads"),
    )
    rows.read_rows(stored, arrays, found + decoder, num_heads=num_heads)
    for i, bias in biases.items():
        known = grid or grid_of_images(stored.params, stored.kind, stored.image_size)
        modern.read_relative_bias(stored, i, bias, known)
    if frequencies is not None:
        for (i,) in blocks:
            stored.add(FREQUENCIES.format(i), frequencies[:, i])
    if not has_bias:
        modern.name_rms_norms(stored)
    if not _is_modern(stored):
        for key in set(stored.conventions) - {"gelu", "layer_norm_epsilon", "position_embedding"}:
            del stored.conventions[key]
        _place_positions(stored, args, grid)
        return
    del stored.conventions["position_embedding"]
    _place_positions(stored, args, grid)
    if stored.conventions["rope"] != "none":
        width = stored.params[f"{BLOCKS}_0/{ATTENTION}/query/kernel"].shape[-1]
        modern.reorder(stored.params, pair_order(width, args))


def pair_order(head_dim: int, args: Mapping[str, Any]) -> np.ndarray:
    """See `modern.pair_order`. Mixed frequencies have no first axis."""
    x_first = args.get("rope_grid_indexing") == "xy" and args.get("rope_type") != "mixed"
    neighbours = not args.get("rope_rotate_half")
    return modern.pair_order(head_dim, neighbours=neighbours, x_first=x_first)


def _prepare(arrays: dict[str, np.ndarray], num_heads: int) -> None:
    """Brings the variants of some names and shapes to one form."""
    for name in [name for name in arrays if re.search(r"\.gamma_[12]$", name)]:  # DeiT III, EVA
        arrays[re.sub(r"gamma_([12])$", r"ls\1.gamma", name)] = arrays.pop(name)
    for name in [name for name in arrays if name.endswith(".ls1.gamma")]:
        second = name.replace("ls1", "ls2")
        if second not in arrays:  # Sapiens2 scales its attention alone
            arrays[second] = np.ones_like(arrays[name])
    for name, query in list(arrays.items()):  # shared by several heads
        if not name.endswith("attn.q_proj.weight"):
            continue
        for part in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"):
            shared = arrays.get(key := name.replace("q_proj.weight", part))
            if shared is not None and 0 < len(shared) < len(query):
                heads = shared.reshape(-1, len(query) // num_heads, *shared.shape[1:])
                repeated = np.repeat(heads, len(query) // len(shared), axis=0)
                arrays[key] = repeated.reshape(len(query), *shared.shape[1:])
                logging.info("%s: a copy for each head, of those that share it.", key)


def _is_modern(stored: Stored) -> bool:
    """Whether it has a part that the paper's model lacks, or lacks one that it has."""
    params, known = stored.params, stored.conventions
    layers = (f"{BLOCKS}_0/{ATTENTION}/{name}/bias" for name in ("query", "key", "out"))
    needed = {"Transformer/encoder_norm/scale", "embedding/bias", *layers}
    return (
        modern.has_modern_part(params)
        or not needed <= params.keys()
        or known["rope"] != "none"
        or known["norm_after"]
        or known["gelu"] == "quick"
        or ("cls" in params and known["classifier"] != "token")
    )


def _place_positions(stored: Stored, args: Mapping[str, Any], grid: tuple[int, int] | None) -> None:
    """Puts positions of tokens before the patches where our models have them.

    The paper's model has one for its class token: zero where timm has none, as in FlexiViT. Today's
    has none: theirs are added to the tokens. Without `no_embed_class`, whether there are some
    follows from their number: that of the tokens of `grid`, else of the images, else a square.
    """
    is_modern = "position_embedding" not in stored.conventions
    tokens, posemb = num_prefix_tokens(stored.params, stored.kind), stored.params.get(POSITIONS)
    if is_modern:
        tokens = sum(stored.params[n].shape[1] for n in ("cls", "registers") if n in stored.params)
    if posemb is None or posemb.ndim != 3:
        return
    count = posemb.shape[1]
    grid = grid or grid_of_images(stored.params, stored.kind, stored.image_size)
    alone = count == math.prod(grid) if grid else math.isqrt(count) ** 2 == count
    alone = alone or args.get("no_embed_class") is True or not tokens
    if is_modern:
        modern.join_positions(stored, 0 if alone else tokens)
    elif tokens and alone:
        logging.info("The class token has no position embedding: using zeros.")
        stored.params[POSITIONS] = np.pad(posemb, ((0, 0), (tokens, 0), (0, 0)))
