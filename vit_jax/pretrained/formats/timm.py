"""timm's names of Vision Transformers, hybrids and DeiTs, from the paper's to today's; reads them.

facebookresearch/mae has the same names, and its own for a decoder.
"""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.family import axis_of
from vit_jax.models.later import modern_vit
from vit_jax.models.vit import ANY_SHAPE, ATTENTION, BLOCKS, POSITIONS
from vit_jax.pretrained.formats import timm_config, vit_parts
from vit_jax.pretrained.formats.names import Names, Part, block, numbers, read_table
from vit_jax.pretrained.formats.stored import Arrays, Beside, Grid, Stored
from vit_jax.pretrained.infer import grid_of_images, num_prefix_tokens

_TOP: Names = {
    "cls": "cls_token",
    "registers": "reg_token",
    "dist": "dist_token",
    POSITIONS: "pos_embed",  # also when reading the next, see `_place_positions`
    modern_vit.POSITIONS: "pos_embed",
    "embedding/": "patch_embed.proj.",
    "patch_norm/": "patch_embed.norm.",
    "Transformer/pre_norm/": "norm_pre.",
    "Transformer/encoder_norm/": "norm.",
    "pooled_norm/": "fc_norm.",
    "pre_logits/": "pre_logits.fc.",  # only in files of timm before 0.6
    "head/": "head.",
    "head_dist/": "head_dist.",
}
_MAP_HEAD = block(q_kv="q. kv.", out="proj.", mlp="mlp.fc1. mlp.fc2.")
_MAP_HEAD |= {"probe": "latent", "LayerNorm_0/": "norm."}
_STEM: Names = {"conv_root/kernel": "conv.weight", "gn_root/": "norm."}
_BLOCK = block(norms="norm1. norm2.", qkv="attn.qkv.weight attn.qkv.bias")
_BLOCK |= block(out="attn.proj.", mlp="mlp.fc1. mlp.fc2.")
_TODAYS: Names = {
    **_BLOCK,
    **block(qv_biases="attn.q_bias attn.v_bias"),  # of BEiT and EVA, whose keys have none
    **block(attention="attn.q_proj. attn.k_proj. attn.v_proj. attn.proj."),
    f"{ATTENTION}/query_norm/": "attn.q_norm.",
    f"{ATTENTION}/key_norm/": "attn.k_norm.",
    f"{ATTENTION}/norm/": "attn.norm.",
    "MlpBlock_0/norm/": "mlp.norm.",
    **block(scales="ls1.gamma ls2.gamma"),
}
# Other names of parts of a block; two layers of SwiGLU may be one.
PACKED = block(packed_swiglu="mlp.fc1. mlp.fc2.")
SPLIT = block(swiglu="mlp.fc1_g. mlp.fc1_x. mlp.fc2.")
GAMMAS = block(scales="gamma_1 gamma_2")
# Of a pre-activation ResNet.
UNIT: Names = {
    "conv_proj/kernel": "downsample.conv.weight",
    "gn_proj/": "downsample.norm.",
    **{f"conv{n}/kernel": f"conv{n}.weight" for n in "123"},
    **{f"gn{n}/": f"norm{n}." for n in "123"},
}
FREQUENCIES = f"{BLOCKS}_{{}}/{ATTENTION}/rope/frequencies"
RELATIVE_BIAS = "blocks.{}.attn"  # the layer of BEiT's table
# Parts of some timm models that ours do not have.
_UNSUPPORTED = {
    r"blocks\.\d+\.(attn\.)?lambda_.*": "differential attention",
    r"blocks\.\d+\.(in_proj|attns|ffns)\..*": "attention and MLP in parallel",
    r"blocks\.\d+\.attn\.gate\..*": "gated attention",
    r"blocks\.\d+\.mlp_\w+\.gate\..*": "spatial gating units, gMLP",
    r"patch_embed\.backbone\.\d+\..*": "a stem of convolutions and batch norms (MobileCLIP)",
    r"stem\.conv1\.weight": "a stem of three convolutions",
    r"stages\..*\.running_mean": "batch normalisation",
}


def vit_table(*forms: Names, args: Mapping[str, Any] | None = None, stem: str = "") -> list[Part]:
    """All names for timm's arguments; `forms` before the usual ones of a block."""
    args, folder = args or {}, "patch_embed.backbone."
    return [
        Part(_TOP),
        Part(_MAP_HEAD, "MAPHead_0/", "attn_pool.", num_heads=args.get("attn_pool_num_heads")),
        Part(_STEM, "", folder + stem),
        *(Part(names, f"{BLOCKS}_{{}}/", "blocks.{}.") for names in (*forms, _TODAYS)),
        Part(UNIT, "block{}/unit{}/", f"{folder}stages.{{}}.blocks.{{}}.", shift=1),
        *vit_parts.decoder(["decoder_blocks.{}."], [_BLOCK], args, "decoder_num_heads"),
    ]


def is_vit(arrays: Arrays, _: str) -> bool:
    has_blocks = any(name.startswith("blocks.0.") for name in arrays)
    patches = ("patch_embed.", "embeds.proj.")
    return has_blocks and any(name.startswith(patches) for name in arrays)


def _take_native(arrays: Arrays) -> dict[str, Any]:
    """Renames what NaFlexVit calls otherwise; its grid, size of patches and kind of positions."""
    if "embeds.proj.weight" not in arrays:
        return {}
    kernel = arrays["embeds.proj.weight"]
    patch, by_axis = math.isqrt(kernel.shape[1] // 3), "embeds.pos_embed_y" in arrays
    for name in [name for name in arrays if name.startswith("embeds.")]:
        inner = name.removeprefix("embeds.")
        arrays[f"patch_embed.{inner}" if inner.startswith("proj.") else inner] = arrays.pop(name)
    if kernel.ndim == 2:
        pixels = kernel.reshape(len(kernel), patch, patch, 3)
        arrays["patch_embed.proj.weight"] = pixels.transpose(0, 3, 1, 2)
    if by_axis:
        rows, columns = arrays.pop("pos_embed_y"), arrays.pop("pos_embed_x")  # [1, n, D]
        arrays["pos_embed"] = rows[:, :, None] + columns[:, None]
    positions = arrays["pos_embed"]  # [1, h, w, D]
    arrays["pos_embed"] = positions.reshape(1, -1, positions.shape[-1])
    return {"grid": positions.shape[1:3], "patch": patch, "by_axis": by_axis}


def read_vit(arrays: Arrays, beside: Beside) -> Stored:
    """UserError for a part that our models lack, or one that no array shows and may be there."""
    native = _take_native(arrays)
    check_names(arrays)
    stored = timm_config.read_settings(beside.settings)
    args = timm_config.arguments_of(beside.settings)
    if native:
        timm_config.read_native(stored, args, **native)
    out, before, after = (
        arrays.get(f"blocks.0.{name}.weight") for name in ("attn.proj", "mlp.fc1", "mlp.fc2")
    )
    stated = stored.num_heads or beside.num_heads
    has_name = timm_config.architecture_of(beside.settings) != ""
    if has_name and not stated and out is not None and after is not None:
        stated = timm_config.usual_heads(args, len(out), after.shape[-1])
    stored.num_heads = beside.heads_of(arrays, stated)
    if not beside.settings:
        _guess(stored, arrays)
    _prepare(arrays, stored.num_heads)
    blocks = sorted(i for (i,) in numbers("blocks.{}.", arrays))
    has_bias = "blocks.0.norm1.bias" in arrays
    packed = before is not None and after is not None and len(before) == 2 * after.shape[-1]
    frequencies = arrays.pop("rope.freqs", None)  # [2, L, H, d / 2]
    bias = f"{RELATIVE_BIAS}.relative_position_bias_table".format
    biases = {i: arrays.pop(bias(i)) for i in blocks if bias(i) in arrays}
    # Without stages (R+Ti/16) the stem is timm's whole backbone.
    stem = "" if "patch_embed.backbone.conv.weight" in arrays else "stem."
    table = vit_table(PACKED if packed else SPLIT, GAMMAS, args=args, stem=stem)
    read_table(stored, arrays, table, stored.num_heads)
    for i, table_of_block in biases.items():
        vit_parts.read_relative_bias(stored, i, table_of_block, _grid(stored, beside))
    if frequencies is not None:
        for i in blocks:
            stored.add(FREQUENCIES.format(i), frequencies[:, i])
    if not has_bias:  # norms of blocks and of pooling were read as layer norms
        for name in [name for name in stored.params if "/LayerNorm_" in name]:
            stored.rename(name, name.replace("/LayerNorm_", "/RMSNorm_"))
    is_modern = _is_modern(stored)
    plain = {"gelu", "layer_norm_epsilon", "position_embedding", *ANY_SHAPE}
    for key in {"position_embedding"} if is_modern else set(stored.conventions) - plain:
        del stored.conventions[key]
    _place_positions(stored, args, beside, is_modern=is_modern)
    if stored.conventions.get("rope", "none") != "none":
        width = stored.params[f"{BLOCKS}_0/{ATTENTION}/query/kernel"].shape[-1]
        reorder(stored.params, pair_order(width, args))
    return stored


def check_names(arrays: Arrays) -> None:
    """UserError for a part that our models lack."""
    for name, array in arrays.items():
        for pattern, part in _UNSUPPORTED.items():
            if re.fullmatch(pattern, name):
                raise UserError(f"this model has {part} ({name}), which is not supported.")
        if name == "patch_embed.proj.weight" and array.ndim != 4:
            raise UserError(f"{name} of {array.ndim} axes is for videos or volumes, not images.")


def _guess(stored: Stored, arrays: Arrays) -> None:
    """What a file without a `config.json` most likely is; UserError if that would be a gamble."""
    if "norm_pre.weight" in arrays:  # CLIP
        stored.conventions["layer_norm_epsilon"] = 1e-5
    if "fc_norm.weight" in arrays or "cls_token" not in arrays:
        stored.conventions["classifier"] = "gap"
    if "attn_pool.latent" in arrays:
        stored.conventions["classifier"] = "map"
    if "blocks.0.attn.relative_position_bias_table" in arrays:
        return  # BEiT
    eva = any(f"blocks.0.attn.{name}" in arrays for name in ("q_proj.weight", "q_bias"))
    if eva or "pos_embed" not in arrays:
        raise UserError("it may have rotary positions (EVA, DINOv3): its config.json is needed.")


def _prepare(arrays: Arrays, num_heads: int) -> None:
    """Brings the variants of some names and shapes to one form."""
    for name in [name for name in arrays if name.endswith((".ls1.gamma", ".gamma_1"))]:
        second = name.replace("ls1", "ls2").replace("gamma_1", "gamma_2")
        arrays.setdefault(second, np.ones_like(arrays[name]))  # Sapiens2 scales its attention alone
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


def _grid(stored: Stored, beside: Beside) -> Grid | None:
    return beside.grid or grid_of_images(stored.params, stored.kind, stored.image_size)


def _is_modern(stored: Stored) -> bool:
    """Whether it has a part that the paper's model lacks, or lacks one that it has."""
    params, known = stored.params, stored.conventions
    layers = (f"{BLOCKS}_0/{ATTENTION}/{name}/bias" for name in ("query", "key", "out"))
    needed = {"Transformer/encoder_norm/scale", "embedding/bias", *layers}
    return (
        vit_parts.has_modern_part(params)
        or not needed <= params.keys()
        or known["rope"] != "none"
        or known["norm_after"]
        or known["gelu"] == "quick"
        or ("cls" in params and known["classifier"] != "token")
    )


def pair_order(head_dim: int, args: Mapping[str, Any]) -> np.ndarray:
    """The place in their heads of each of our features, [d]; see `models/later/rotary.py`.

    Their pairs may be features 2 k and 2 k + 1, and the first half of them may turn with x.
    """
    pairs = np.arange(head_dim // 2)
    if args.get("rope_grid_indexing") == "xy" and args.get("rope_type") != "mixed":
        pairs = np.roll(pairs, head_dim // 4)
    if args.get("rope_rotate_half"):
        return np.concatenate([pairs, pairs + head_dim // 2])
    return np.concatenate([2 * pairs, 2 * pairs + 1])


def reorder(params: Arrays, order: np.ndarray) -> None:
    """Permutes the features of queries and keys, and of their norms, in place."""
    turned = re.compile(rf"{BLOCKS}_\d+/{ATTENTION}/(?:query|key)(?:_norm)?/.*")
    for name in filter(turned.fullmatch, list(params)):
        params[name] = params[name][..., order]


def _place_positions(
    stored: Stored, args: Mapping[str, Any], beside: Beside, *, is_modern: bool
) -> None:
    """Puts positions of tokens before the patches where our models have them.

    The paper's model has one for its class token: zero where timm has none, as in FlexiViT. Today's
    has none: theirs are added to the tokens. Their number tells whether there are some, if
    `no_embed_class` does not.
    """
    tokens, posemb = num_prefix_tokens(stored.params, stored.kind), stored.params.get(POSITIONS)
    if is_modern:
        tokens = sum(axis_of(stored.params, name, 3, 1) or 0 for name in ("cls", "registers"))
    if posemb is None or posemb.ndim != 3:
        return
    count, grid = posemb.shape[1], _grid(stored, beside)
    alone = count == math.prod(grid) if grid else math.isqrt(count) ** 2 == count
    alone = alone or args.get("no_embed_class") is True or not tokens
    if is_modern:
        vit_parts.join_positions(stored, 0 if alone else tokens)
    elif tokens and alone:
        logging.info("The class token has no position embedding: using zeros.")
        stored.params[POSITIONS] = np.pad(posemb, ((0, 0), (tokens, 0), (0, 0)))
