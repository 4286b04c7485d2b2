"""Hugging Face transformers' names of Vision Transformers.

Reads the names of files on the hub, which every version of transformers understands and
which we write, and those of transformers 5. A bare `ViTModel` has no `vit.` prefix.

| kind     | classes                                  | model here                             |
|----------|------------------------------------------|----------------------------------------|
| `vit`    | ViT, DeiT, ViTMAE, ViTMSN, IJepa         | `vit`, `deit`, `mae`                   |
|          | BEiT, Data2VecVision                     | `modern_vit`                           |
| `dinov2` | Dinov2, Dinov2WithRegisters              | `modern_vit`                           |
| `dinov3` | DINOv3ViT                                | `modern_vit`                           |
| `clip`   | CLIP's tower of images                   | `modern_vit`                           |
| `siglip` | that of SigLIP and of SigLIP 2           | `vit`                                  |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vit_jax.models.vit import ATTENTION, BLOCKS, POSITIONS
from vit_jax.pretrained.formats import rows
from vit_jax.pretrained.formats.mae import decoder_rows
from vit_jax.pretrained.formats.modern import extra_rows
from vit_jax.pretrained.formats.rows import Op, Row, layer, norm

BEIT = ("beit.", "data2vec_vision.")
TOWER = "vision_model."
_PREFIXES = ("", "vit.", "deit.", "ijepa.", "dinov2.", "dinov2_with_registers.", TOWER, *BEIT)
# Of models for sounds and videos.
_OTHERS = ("audio_spectrogram_transformer.", "videomae.", "vivit.")
# See `encoder_block`.
_SPLIT = "attention.attention.query attention.attention.key attention.attention.value"
_SPLIT += " attention.output.dense"
_JOINED = "attention.q_proj attention.k_proj attention.v_proj attention.o_proj"
_CLIP = "layer_norm1 self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj"
_CLIP += " layer_norm2 mlp.fc1 mlp.fc2"

_TOKEN = Op(lambda x, _: x.reshape(1, 1, -1), lambda x: x.reshape(-1))  # [D] <-> [1, 1, D]
_POSITIONS = Op(lambda x, _: x[None], lambda x: x[0])  # [N, D] <-> [1, N, D]


def _patches(x: np.ndarray, _: int) -> np.ndarray:
    """Of SigLIP 2 also as a layer of patches of 3 channels, [D, h*w*C] -> [h, w, C, D]."""
    if x.ndim == 2:
        side = math.isqrt(x.shape[1] // 3)
        x = x.reshape(len(x), side, side, 3).transpose(0, 3, 1, 2)  # [D, C, h, w]
    return rows.CONV.read(x, 1)


def find_kind(names: Collection[str]) -> tuple[str, str, str] | None:
    """The kind of the table above, the prefix of the names, and that of the patches' kernel.

    None if they are not of such a model.
    """
    for prefix in (*_PREFIXES, *_OTHERS):
        embeddings = f"{prefix}embeddings."
        if (name := f"{embeddings}patch_embeddings.projection.weight") in names:
            has_scale = any(".layer_scale1." in name for name in names)
            return ("dinov2" if has_scale else "vit"), prefix, name
        if (name := f"{embeddings}patch_embeddings.weight") in names:
            return "dinov3", prefix, name
        if (name := f"{embeddings}patch_embedding.weight") in names:
            return ("clip" if f"{embeddings}class_embedding" in names else "siglip"), prefix, name
    return None


def from_flax(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of transformers' Flax models in PyTorch's names and layouts; others as they are."""
    renamed = {}
    for name, array in arrays.items():
        *parents, last = name.removeprefix("params/").split("/")
        if last == "kernel":
            array = rows.CONV.write(array) if array.ndim == 4 else array.T
        last = "weight" if last in ("kernel", "scale", "embedding") else last
        renamed[".".join([*parents, last])] = array
    return renamed if find_kind(renamed) else arrays


def _top(kind: str, prefix: str, names: Collection[str]) -> list[Row]:
    """The table of everything but blocks, for these names of theirs."""
    embeddings, norm_name = f"{prefix}embeddings", "Transformer/encoder_norm"
    if kind in ("clip", "siglip"):
        pooling, head = f"MAPHead_0/{ATTENTION}", f"{prefix}head"
        inputs = [f"{pooling}/{name}" for name in ("query", "key", "value")]
        return [
            Row(("cls",), f"{embeddings}.class_embedding", _TOKEN),
            Row((POSITIONS,), f"{embeddings}.position_embedding.weight", _POSITIONS),
            *layer("embedding", f"{embeddings}.patch_embedding", Op(_patches, rows.CONV.write)),
            *norm("Transformer/pre_norm", f"{prefix}pre_layrnorm"),
            *norm(norm_name, f"{prefix}post_layernorm"),
            Row(("MAPHead_0/probe",), f"{head}.probe"),
            *layer(inputs, f"{head}.attention.in_proj", rows.HEADS_IN, rows.HEADS_BIAS),
            *layer(f"{pooling}/out", f"{head}.attention.out_proj", rows.HEADS_OUT),
            *norm("MAPHead_0/LayerNorm_0", f"{head}.layernorm"),
            *layer("MAPHead_0/MlpBlock_0/Dense_0", f"{head}.mlp.fc1"),
            *layer("MAPHead_0/MlpBlock_0/Dense_1", f"{head}.mlp.fc2"),
            *layer("head", "classifier" if "classifier.weight" in names else "visual_projection"),
        ]
    tokens = [
        Row(("cls",), f"{embeddings}.cls_token"),
        Row(("registers",), f"{embeddings}.register_tokens"),
    ]
    if kind == "dinov3":
        patches = layer("embedding", f"{embeddings}.patch_embeddings", rows.CONV)
        return [*tokens, *patches, *norm(norm_name, f"{prefix}norm")]
    of_two = prefix == "deit." and "classifier.weight" not in names
    return [
        *tokens,
        Row(("dist",), f"{embeddings}.distillation_token"),
        Row((POSITIONS,), f"{embeddings}.position_embeddings"),
        *layer("embedding", f"{embeddings}.patch_embeddings.projection", rows.CONV),
        *norm(norm_name, f"{prefix}layernorm"),
        *norm("pooled_norm", f"{prefix}pooler.layernorm"),
        *layer("pre_logits", f"{prefix}pooler.dense"),
        *layer("head", "cls_classifier" if of_two else "classifier"),
        *layer("head_dist", "distillation_classifier"),
    ]


def _parts(kind: str, *, is_new: bool, gated: bool) -> str:
    """Their names of a block's parts; `is_new`: those of transformers 5."""
    qkv = _JOINED if is_new or kind == "dinov3" else _SPLIT
    if kind == "vit":
        mlp = "mlp.fc1 mlp.fc2" if is_new else "intermediate.dense output.dense"
        return f"layernorm_before {qkv} layernorm_after {mlp}"
    if gated and not is_new and kind == "dinov2":
        return f"norm1 {qkv} norm2 mlp.weights_in mlp.weights_out"
    up_down = gated or kind == "dinov3"
    return f"norm1 {qkv} norm2 {'mlp.up_proj mlp.down_proj' if up_down else 'mlp.fc1 mlp.fc2'}"


FOLDERS = {"vit": ("encoder.layer", "layers"), "dinov3": ("layer", "model.layer")}


def table(
    kind: str,
    prefix: str,
    blocks: list[tuple[int, ...]],
    names: Collection[str] = (),
    *,
    is_new: bool = False,
    gated: bool = False,
) -> list[Row]:
    """The table of these blocks and all else, for `names` of theirs, see `_top` and `_parts`."""
    found = _top(kind, prefix, names)
    parts = _CLIP if kind in ("clip", "siglip") else _parts(kind, is_new=is_new, gated=gated)
    folder = "encoder.layers" if parts == _CLIP else "encoder.layer"
    if kind in FOLDERS:
        folder = FOLDERS[kind][is_new]
    scale = "lambda_{}" if kind == "vit" else "layer_scale{}.lambda1"
    for (i,) in blocks:
        theirs, ours = f"{prefix}{folder}.{i}", f"{BLOCKS}_{i}/MlpBlock_0"
        more = {f"scale_{k}": scale.format(k + 1) for k in (0, 1)}
        block = rows.encoder_block(i, theirs, parts)
        if "weights_in" in parts:  # one layer for both products
            both = layer([f"{ours}/gate", f"{ours}/Dense_0"], f"{theirs}.mlp.weights_in")
            block = [row for row in block if row.theirs not in (both[0].theirs, both[1].theirs)]
            block += both
        else:
            more["gate"] = "mlp.gate_proj"
        found += block + extra_rows(i, theirs, more)
    return found


def decoder(
    names: Collection[str], settings: Mapping[str, Any], *, is_new: bool = False
) -> list[Row]:
    blocks = "decoder.decoder_encoder.layer"  # as transformers 5 saves it; it reads both
    if not any(name.startswith(blocks) for name in names):
        blocks = "decoder.decoder_layers"
    parts = _parts("vit", is_new=is_new, gated=False)
    return decoder_rows(names, blocks, parts, settings, "decoder_num_attention_heads")
