"""Hugging Face transformers' names of Vision Transformers, and what reads them.

Names of files on the hub, which every version of transformers understands and which we write, and
those of transformers 5. A bare `ViTModel` has no `vit.` prefix. Kinds of names: `vit` (ViT, DeiT,
ViTMAE, ViTMSN, IJepa, BEiT, Data2VecVision), `dinov2`, `dinov3`, `clip`, `siglip`.
"""

import math
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.vit import ATTENTION, BLOCKS, POSITIONS
from vit_jax.pretrained.formats import vit_parts
from vit_jax.pretrained.formats.huggingface_config import of_images, read_native, read_settings
from vit_jax.pretrained.formats.names import CONV, Names, Op, Part, block, numbers, read_table
from vit_jax.pretrained.formats.stored import Arrays, Beside, Stored
from vit_jax.wording import list_names

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
FIRST_AXIS = Op(lambda x, _: x[None], lambda x: x[0])  # [N, D] <-> [1, N, D]
_CLIP: Names = {
    "cls": (  # [D] <-> [1, 1, D]
        "embeddings.class_embedding",
        Op(lambda x, _: x.reshape(1, 1, -1), lambda x: x.reshape(-1)),
    ),
    POSITIONS: ("embeddings.position_embedding.weight", FIRST_AXIS),
    "embedding/": ("embeddings.patch_embedding.", Op(_patches, CONV.write)),
    "Transformer/pre_norm/": "pre_layrnorm.",
    "Transformer/encoder_norm/": "post_layernorm.",
}
_MLP = block(mlp="mlp.fc1. mlp.fc2.")
_MAP_HEAD = block(qkv="attention.in_proj_weight attention.in_proj_bias", out="attention.out_proj.")
_MAP_HEAD |= {**_MLP, "probe": "probe", "LayerNorm_0/": "layernorm."}
_TOPS = {"vit": _VIT, "dinov2": _VIT, "dinov3": _DINOV3, "clip": _CLIP, "siglip": _CLIP}

_CLASSIC = "attention.attention.query. attention.attention.key. attention.attention.value. "
_CLASSIC += "attention.output.dense."
_NEW = "attention.q_proj. attention.k_proj. attention.v_proj. attention.o_proj."
_SWIGLU = "mlp.gate_proj. mlp.up_proj. mlp.down_proj."
_DINO = block(norms="norm1. norm2.", scales="layer_scale1.lambda1 layer_scale2.lambda1")
_CLIP_ATTENTION = "self_attn.q_proj. self_attn.k_proj. self_attn.v_proj. self_attn.out_proj."
CLIP_BLOCK = block(norms="layer_norm1. layer_norm2.", attention=_CLIP_ATTENTION) | _MLP
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
        block(attention=_NEW) | _MLP,
    ),
    "dinov2": (
        _DINO | block(attention=_CLASSIC) | _MLP,
        PACKED,
        block(attention=_NEW, swiglu=_SWIGLU),
    ),
    "dinov3": (_DINO | block(attention=_NEW, swiglu=_SWIGLU),),
    "clip": (CLIP_BLOCK,),
    "siglip": (CLIP_BLOCK,),
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
        table += [Part({"Transformer/pre_norm/": "pre_layernorm."}, theirs=prefix)]  # OWL-ViT
        table += [Part(_MAP_HEAD, "MAPHead_0/", f"{prefix}head.")]
    for folder in FOLDERS[kind]:
        for names in (*forms, *_BLOCKS[kind]):
            table += [Part(names, f"{BLOCKS}_{{}}/", prefix + folder)]
    if kind == "vit":
        key = "decoder_num_attention_heads"
        table += vit_parts.decoder(_DECODER_FOLDERS, _BLOCKS[kind], settings or {}, key)
    return table


# Models whose patches are not image patches.
_NOT_IMAGES = {"audio-spectrogram-transformer": "sounds", "videomae": "videos", "vivit": "videos"}


def detect(arrays: Arrays, _: str) -> bool:
    return find_kind(arrays) is not None


def read(arrays: Arrays, beside: Beside) -> Stored:
    """UserError if the model is not supported, or has a part that ours lack."""
    kind, prefix, name = find_kind(arrays) or ("", "", "")
    model_type, ndim = beside.settings.get("model_type"), arrays[name].ndim
    if model_type in _NOT_IMAGES or (ndim != 4 and (kind, ndim) != ("siglip", 2)):
        what = _NOT_IMAGES.get(str(model_type), "videos or volumes")
        raise UserError(f"a model for {what} ({model_type or name}); only image models are read.")
    settings, width = of_images(beside.settings), len(arrays[name])
    stored = read_settings(settings, beside.preprocessor, kind)
    if kind == "dinov3":  # heads of other models of these sizes differ
        stored.num_heads = stored.num_heads or beside.num_heads
        stored.num_heads = stored.num_heads or (32 if width == 4096 else width // 64)
    if kind == "dinov2" and f"{prefix}embeddings.register_tokens" in arrays:
        stored.posemb = "bicubic"  # antialiased there alone
    elif arrays[name].ndim == 2:
        stored.posemb = "siglip2"
        side = math.isqrt(len(arrays[f"{prefix}embeddings.position_embedding.weight"]))
        patch_size = math.isqrt(arrays[name].shape[1] // 3)
        read_native(stored, (side, side), patch_size, beside.preprocessor)
    _drop_others(stored, arrays, prefix)
    token = arrays.get(f"{TOWER}embeddings.class_embedding")
    # CLIP's heads are of width 64 in all sizes but those that are known.
    likely = None if token is None else token.size // 64
    stored.num_heads = beside.heads_of(arrays, stored.num_heads, likely)
    is_projection = "visual_projection.weight" in arrays
    # ViTMSN omits the prefix after its embeddings, and BEiT for masked images before its norm.
    if prefix not in ("", TOWER):
        for name in [n for n in arrays if n.startswith(("encoder.", "layernorm."))]:
            arrays.setdefault(prefix + name, arrays.pop(name))
    blocks = {i for folder in FOLDERS[kind] for (i,) in numbers(prefix + folder, arrays)}
    biases = _take_relative_biases(arrays, sorted(blocks), settings)
    read_table(stored, arrays, names_table(kind, prefix, settings=settings), stored.num_heads)
    for i, bias in biases.items():
        vit_parts.read_relative_bias(stored, i, bias, beside.grid)
    is_beit = any(text.startswith(("beit", "data2vec")) for text in (prefix, str(model_type)))
    is_beit = is_beit or bool(biases) or any("/LayerScale_0/" in name for name in stored.params)
    kind = "beit" if kind == "vit" and is_beit else kind
    if settings.get("pool_type") == "avg":  # open_clip's CLIPA
        stored.conventions["classifier"] = "gap"
    if settings.get("final_ln_after_pool"):
        for part in ("scale", "bias"):
            stored.rename(f"Transformer/encoder_norm/{part}", f"pooled_norm/{part}")
    _place_head(stored, kind, is_projection)
    if kind == "beit" or _is_modern(stored):
        _make_modern(stored, kind, settings)
    return stored


def _drop_others(stored: Stored, arrays: Arrays, prefix: str) -> None:
    """Drops what is not of the model of images."""
    for name in list(arrays):
        if prefix == TOWER and not name.startswith((TOWER, "visual_projection.", "classifier.")):
            del arrays[name]
            stored.dropped[name] = "not of the images' tower"
        elif re.match(rf"({prefix}embeddings\.mask_token$|lm_head\.|decoder\.0\.)", name):
            del arrays[name]
            stored.dropped[name] = "only used in its pre-training task"


def _take_relative_biases(
    arrays: Arrays, blocks: list[int], settings: dict[str, Any]
) -> dict[int, np.ndarray]:
    """BEiT's tables by block; one that all blocks share is added to each. UserError: some lack."""
    names = [name for name in arrays if name.endswith("relative_position_bias_table")]
    tables = {name: arrays.pop(name) for name in names}
    numbered = {name: match for name in names if (match := re.search(r"\.(\d+)\.", name))}
    own = {int(match[1]): tables[name] for name, match in numbered.items()}
    shared = [tables[name] for name in names if name not in numbered]
    for key, present, count in (("", own, len(blocks)), ("shared_", shared, 1)):
        expected = count if settings.get(f"use_{key}relative_position_bias", present) else 0
        if len(present) != expected:
            raise UserError(f"{len(present)} tables of {key}relative positions; are all there?")
    return {i: sum(shared, own[i]) for i in own} or {i: x for x in shared for i in blocks}


def _place_head(stored: Stored, kind: str, is_projection: bool) -> None:
    """Says what the head's input is; drops what is no input of it."""
    params, other = stored.params, "not an input of the head"
    if "registers" in params and not params["registers"].size:
        stored.drop("registers", "there are none")
    if "head_dist/kernel" not in params and {"dist", "head/kernel"} <= params.keys():
        params["registers"] = params.pop("dist")  # of DeiT with one head
    if {"head/kernel", "dist"} & params.keys() or _is_modern(stored):
        stored.drop("pre_logits/", "the pooler, which is not an input of the head")
    if kind == "beit" and "Transformer/encoder_norm/scale" not in params:
        stored.conventions["classifier"] = "gap"
    if is_projection and params["head/kernel"].ndim == 2:
        stored.probabilities_by = "none"
        stored.add("head/bias", np.zeros(params["head/kernel"].shape[-1], np.float32))
        stored.changed["head/bias"] = "zeros, as there is none"
    elif "head/kernel" in params and kind in ("dinov2", "clip"):
        stored.conventions["classifier"] = "token_gap" if kind == "dinov2" else "gap"
        if kind == "clip":
            stored.drop("Transformer/encoder_norm/", other)
    elif "head/kernel" in params and kind == "siglip":
        stored.drop("MAPHead_0/", other)


def _is_modern(stored: Stored) -> bool:
    """Whether `vit.py` lacks a part of it; a damaged file of a plain model is not modern."""
    block = f"{BLOCKS}_0/{ATTENTION}"
    return (
        vit_parts.has_modern_part(stored.params)
        or stored.conventions["gelu"] == "quick"
        or stored.conventions.get("classifier") is not None
        or "rope" in stored.conventions
        or not any(f"{block}/{part}/bias" in stored.params for part in ("query", "key", "value"))
    )


def _make_modern(stored: Stored, kind: str, settings: dict[str, Any]) -> None:
    """Parameters of `modern_vit.py`, of `vit.py`'s; UserError if an array is missing."""
    params, block = stored.params, f"{BLOCKS}_0/{ATTENTION}"
    is_mean = stored.conventions.get("classifier") == "gap"
    needed = [] if kind == "clip" else ["embedding/bias"]
    needed += ["cls"] if kind in ("dinov2", "dinov3", "clip", "beit") else []
    norms = ["Transformer/pre_norm"] if kind == "clip" and not settings.get("no_ln_pre") else []
    if not is_mean or settings.get("use_mean_pooling") is False:
        norms += ["Transformer/encoder_norm"]
    elif kind == "beit" and "head/kernel" in params:
        norms += ["pooled_norm"]
    needed += [f"{name}/{part}" for name in norms for part in ("scale", "bias")]
    if kind not in ("beit", "dinov3") or settings.get("use_absolute_position_embeddings"):
        needed += [POSITIONS]
    if kind in ("vit", "dinov2") and "model_type" in settings and settings.get("qkv_bias", True):
        needed += [f"{block}/{name}/bias" for name in ("query", "key", "value")]
    usual = 4 * (settings.get("model_type") == "dinov2_with_registers")
    needed += ["registers"] if settings.get("num_register_tokens", usual) else []
    if missing := [name for name in needed if name not in params]:
        raise UserError(f"{list_names(missing)} missing; make sure that the file is whole.")
    stored.conventions.pop("position_embedding")
    if POSITIONS in params:
        distilled = kind == "vit" and "registers" in params
        vit_parts.join_positions(stored, ("cls" in params) + distilled)
