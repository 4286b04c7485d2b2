"""Hugging Face transformers' names of Vision Transformers.

Those of files on the hub, which every version of transformers understands and which we write, and
those of transformers 5. A bare `ViTModel` has no `vit.` prefix. Kinds of names: `vit` (ViT, DeiT,
ViTMAE, ViTMSN, IJepa, BEiT, Data2VecVision), `dinov2`, `dinov3`, `clip`, `siglip`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np

from vit_jax.models.vit import BLOCKS, POSITIONS
from vit_jax.pretrained.formats import vit_parts
from vit_jax.pretrained.formats.names import CONV, Names, Op, Part, block

TOWER = "vision_model."
_MODELS = "vit deit ijepa dinov2 dinov2_with_registers beit data2vec_vision vision_model "
_MODELS += "audio_spectrogram_transformer videomae vivit"  # the last for sounds and videos
_PREFIXES = ("", *(f"{name}." for name in _MODELS.split()))


def _patches(x: np.ndarray, _: int) -> np.ndarray:
    """Of SigLIP 2 also as a layer of patches of 3 channels, [D, h*w*C] -> [h, w, C, D]."""
    if x.ndim == 2:
        side = math.isqrt(x.shape[1] // 3)
        x = x.reshape(len(x), side, side, 3).transpose(0, 3, 1, 2)  # [D, C, h, w]
    return CONV.read(x, 1)


_TOKENS: Names = {
    "cls": "embeddings.cls_token",
    "registers": "embeddings.register_tokens",
    "dist": "embeddings.distillation_token",
}
_VIT: Names = {
    **_TOKENS,
    POSITIONS: "embeddings.position_embeddings",
    "embedding/": "embeddings.patch_embeddings.projection.",
    "Transformer/encoder_norm/": "layernorm.",
    "pooled_norm/": "pooler.layernorm.",
    "pre_logits/": "pooler.dense.",
}
_DINOV3: Names = {
    **_TOKENS,
    "embedding/": "embeddings.patch_embeddings.",
    "Transformer/encoder_norm/": "norm.",
}
_CLIP: Names = {
    "cls": (  # [D] <-> [1, 1, D]
        "embeddings.class_embedding",
        Op(lambda x, _: x.reshape(1, 1, -1), lambda x: x.reshape(-1)),
    ),
    POSITIONS: (  # [N, D] <-> [1, N, D]
        "embeddings.position_embedding.weight",
        Op(lambda x, _: x[None], lambda x: x[0]),
    ),
    "embedding/": ("embeddings.patch_embedding.", Op(_patches, CONV.write)),
    "Transformer/pre_norm/": "pre_layrnorm.",
    "Transformer/encoder_norm/": "post_layernorm.",
}
_MAP_HEAD = block(
    qkv="attention.in_proj_weight attention.in_proj_bias",
    out="attention.out_proj.",
    mlp="mlp.fc1. mlp.fc2.",
)
_MAP_HEAD |= {"probe": "probe", "LayerNorm_0/": "layernorm."}
_TOPS = {"vit": _VIT, "dinov2": _VIT, "dinov3": _DINOV3, "clip": _CLIP, "siglip": _CLIP}

_CLASSIC = "attention.attention.query. attention.attention.key. attention.attention.value. "
_CLASSIC += "attention.output.dense."
_NEW = "attention.q_proj. attention.k_proj. attention.v_proj. attention.o_proj."
_SWIGLU = "mlp.gate_proj. mlp.up_proj. mlp.down_proj."
_DINO = block(norms="norm1. norm2.", scales="layer_scale1.lambda1 layer_scale2.lambda1")
_CLIP_BLOCK = block(
    norms="layer_norm1. layer_norm2.",
    attention="self_attn.q_proj. self_attn.k_proj. self_attn.v_proj. self_attn.out_proj.",
    mlp="mlp.fc1. mlp.fc2.",
)
# Of DINOv2, both layers as one.
PACKED = block(packed_swiglu="mlp.weights_in. mlp.weights_out.")
# By kind: the names in a block, those to write first.
_BLOCKS: dict[str, tuple[Names, ...]] = {
    "vit": (
        block(
            norms="layernorm_before. layernorm_after.",
            attention=_CLASSIC,
            mlp="intermediate.dense. output.dense.",
            scales="lambda_1 lambda_2",
        ),
        block(attention=_NEW, mlp="mlp.fc1. mlp.fc2."),
    ),
    "dinov2": (
        _DINO | block(attention=_CLASSIC, mlp="mlp.fc1. mlp.fc2."),
        PACKED,
        block(attention=_NEW, swiglu=_SWIGLU),
    ),
    "dinov3": (_DINO | block(attention=_NEW, swiglu=_SWIGLU),),
    "clip": (_CLIP_BLOCK,),
    "siglip": (_CLIP_BLOCK,),
}
# Of blocks, that to write first; of a decoder as transformers 4 and 5 save it, which read both.
FOLDERS = {
    "vit": ("encoder.layer.{}.", "layers.{}."),
    "dinov2": ("encoder.layer.{}.",),
    "dinov3": ("layer.{}.", "model.layer.{}."),
    "clip": ("encoder.layers.{}.",),
    "siglip": ("encoder.layers.{}.",),
}
_DECODER_FOLDERS = ("decoder.decoder_layers.{}.", "decoder.decoder_encoder.layer.{}.")


def find_kind(names: Collection[str]) -> tuple[str, str, str] | None:
    """The kind of the names, their prefix, and the patches' kernel; None: no such model."""
    for prefix in _PREFIXES:
        embeddings = f"{prefix}embeddings."
        if (name := f"{embeddings}patch_embeddings.projection.weight") in names:
            has_scale = any(".layer_scale1." in name for name in names)
            return ("dinov2" if has_scale else "vit"), prefix, name
        if (name := f"{embeddings}patch_embeddings.weight") in names:
            return "dinov3", prefix, name
        if (name := f"{embeddings}patch_embedding.weight") in names:
            return ("clip" if f"{embeddings}class_embedding" in names else "siglip"), prefix, name
    return None


def names_table(
    kind: str, prefix: str, *forms: Names, head: str = "classifier.", settings: Any = None
) -> list[Part]:
    """All names of a kind; `forms` before the usual ones of a block, `head` before other heads."""
    table = [Part(_TOPS[kind], theirs=prefix), Part({"head_dist/": "distillation_classifier."})]
    heads = (head, "classifier.", "cls_classifier.", "visual_projection.")
    table += [Part({"head/": name}) for name in heads]
    if _TOPS[kind] is _CLIP:
        table += [Part(_MAP_HEAD, "MAPHead_0/", f"{prefix}head.")]
    for folder in FOLDERS[kind]:
        for names in (*forms, *_BLOCKS[kind]):
            table += [Part(names, f"{BLOCKS}_{{}}/", prefix + folder)]
    if kind == "vit":
        key = "decoder_num_attention_heads"
        table += vit_parts.decoder(_DECODER_FOLDERS, _BLOCKS[kind], settings or {}, key)
    return table
