"""Hugging Face transformers' names of Vision Transformers.

Reads the names of files on the hub, which every version of transformers understands and
which we write, and those of transformers 5. A bare `ViTModel` has no `vit.` prefix.

| kind     | classes                                                        | model here          |
|----------|----------------------------------------------------------------|---------------------|
| `vit`    | ViT, DeiT, ViTMAE, ViTMSN, IJepa; BEiT, Data2VecVision          | `vit`, `deit`, `mae`; |
|          |                                                                | `modern_vit`        |
| `dinov2` | Dinov2, Dinov2WithRegisters                                    | `modern_vit`        |
| `dinov3` | DINOv3ViT                                                      | `modern_vit`        |
| `clip`   | CLIP's tower of images                                         | `modern_vit`        |
| `siglip` | that of SigLIP and of SigLIP 2                                 | `vit`               |
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError, list_names
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.vit import ATTENTION, BLOCKS, POSITIONS
from vit_jax.pretrained.formats import rows
from vit_jax.pretrained.formats.huggingface_config import of_images, read_settings, to_settings
from vit_jax.pretrained.formats.mae import check_square, decoder_rows
from vit_jax.pretrained.formats.modern import extra_rows, join_positions, read_relative_bias
from vit_jax.pretrained.formats.rows import Op, Row, layer, norm
from vit_jax.pretrained.formats.stored import ONE_TABLE, Holds, Stored

_BEIT = ("beit.", "data2vec_vision.")
_TOWER = "vision_model."
_PREFIXES = ("", "vit.", "deit.", "ijepa.", "dinov2.", "dinov2_with_registers.", _TOWER, *_BEIT)
# Models whose patches are not image patches.
_NOT_IMAGES = {"audio-spectrogram-transformer": "sounds", "videomae": "videos", "vivit": "videos"}
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


def find_kind(names: Collection[str]) -> tuple[str, str] | None:
    """The kind of the table above and the prefix of the names, or None if they are no such."""
    for prefix in (*_PREFIXES, *_OTHERS):
        embeddings = f"{prefix}embeddings."
        if f"{embeddings}patch_embeddings.projection.weight" in names:
            has_scale = any(".layer_scale1." in name for name in names)
            return ("dinov2" if has_scale else "vit"), prefix
        if f"{embeddings}patch_embeddings.weight" in names:
            return "dinov3", prefix
        if f"{embeddings}patch_embedding.weight" in names:
            return ("clip" if f"{embeddings}class_embedding" in names else "siglip"), prefix
    return None


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


_FOLDERS = {"vit": ("encoder.layer", "layers"), "dinov3": ("layer", "model.layer")}


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
    if kind in _FOLDERS:
        folder = _FOLDERS[kind][is_new]
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


def _decoder(
    names: Collection[str], settings: Mapping[str, Any], *, is_new: bool = False
) -> list[Row]:
    blocks = "decoder.decoder_encoder.layer"  # as transformers 5 saves it; it reads both
    if not any(name.startswith(blocks) for name in names):
        blocks = "decoder.decoder_layers"
    parts = _parts("vit", is_new=is_new, gated=False)
    return decoder_rows(names, blocks, parts, settings, "decoder_num_attention_heads")


def begin(
    arrays: dict[str, np.ndarray], settings: dict[str, Any], preprocessor: dict[str, Any]
) -> Stored:
    """What the files beside `arrays` say; removes from these what is not of the model of images.

    UserError for a part that our models lack, before anything is guessed.
    """
    found = find_kind(arrays)
    assert found is not None  # the format was detected by it
    kind, prefix = found
    name = next(n for n in arrays if re.fullmatch(rf"{prefix}embeddings\.patch_em.*weight", n))
    model_type = settings.get("model_type")
    ndim = arrays[name].ndim
    if model_type in _NOT_IMAGES or (ndim != 4 and (kind, ndim) != ("siglip", 2)):
        what = _NOT_IMAGES.get(str(model_type), "videos or volumes")
        raise UserError(f"a model for {what} ({model_type or name}); only image models are read.")
    stored = read_settings(of_images(settings), preprocessor, kind)
    for name in list(arrays):
        if prefix == _TOWER and not name.startswith((_TOWER, "visual_projection.", "classifier.")):
            del arrays[name]
            stored.dropped[name] = "not of the images' tower"
        elif re.match(rf"({prefix}embeddings\.mask_token$|lm_head\.|decoder\.0\.)", name):
            del arrays[name]
            stored.dropped[name] = "only used in its pre-training task"
    return stored


def read_huggingface(
    stored: Stored, arrays: dict[str, np.ndarray], num_heads: int, settings: dict[str, Any]
) -> None:
    """Moves `arrays` into `stored`; UserError if the model is not supported."""
    found = find_kind(arrays)
    assert found is not None
    kind, prefix = found
    settings = of_images(settings)
    for name in list(arrays):
        # ViTMSN omits the prefix after its embeddings, and BEiT for masked images before its norm.
        if prefix not in ("", _TOWER) and name.startswith(("encoder.", "layernorm.")):
            arrays.setdefault(f"{prefix}{name}", arrays.pop(name))
        if name.endswith((".in_proj_weight", ".in_proj_bias")):
            arrays[name.replace("in_proj_", "in_proj.")] = arrays.pop(name)
    is_new = any(re.match(rf"{prefix}(layers|model\.layer)\.", name) for name in arrays)
    is_new |= f"{prefix}encoder.layer.0.attention.q_proj.weight" in arrays
    gated = any(re.search(r"\.mlp\.(gate_proj|weights_in)\.", name) for name in arrays)
    folders = "|".join(folder for pair in _FOLDERS.values() for folder in pair)
    blocks = rows.numbers(rf"^{prefix}(?:encoder\.layers|{folders})\.(\d+)\.", arrays)
    biases = _take_relative_biases(arrays, prefix, blocks)
    names = table(kind, prefix, blocks, list(arrays), is_new=is_new, gated=gated)
    if kind == "vit":
        names += _decoder(arrays, settings, is_new=is_new)
    rows.read_rows(stored, arrays, names, num_heads=num_heads)
    is_beit = prefix in _BEIT or settings.get("model_type") in ("beit", "data2vec-vision")
    for i, bias in biases.items():
        read_relative_bias(stored, i, bias, _square(stored))
        is_beit = True
    is_beit |= f"{BLOCKS}_0/LayerScale_0/gamma" in stored.params and kind == "vit"
    _place_head(stored, kind, is_beit)
    if is_beit or _is_modern(stored):
        _make_modern(stored, kind, is_beit)


def _square(stored: Stored) -> tuple[int, int] | None:
    """Rows and columns of patches; UserError if they differ, None if unknown."""
    size, patch = stored.image_size, stored.params["embedding/kernel"].shape[:2]
    grid = (size[0] // patch[0], size[1] // patch[1]) if size else None
    if grid and grid[0] != grid[1]:
        raise UserError(
            f"relative positions of {grid[0]}x{grid[1]} patches are not supported: transformers "
            "takes rows for columns in these, unless the image is square."
        )
    return grid


def _take_relative_biases(
    arrays: dict[str, np.ndarray], prefix: str, blocks: list[tuple[int, ...]]
) -> dict[int, np.ndarray]:
    """BEiT's tables by block; one that all blocks share is added to each."""
    tables: dict[int, np.ndarray] = {}
    shared = []
    for name in list(arrays):
        if name.endswith("relative_position_bias_table"):
            block = re.match(rf"{prefix}(?:encoder\.layer|layers)\.(\d+)\.", name)
            if block:
                tables[int(block[1])] = arrays.pop(name)
            else:
                shared.append(arrays.pop(name))
    if shared:
        return {i: sum(shared, tables.get(i, np.float32(0))) for (i,) in blocks}
    return tables


def _place_head(stored: Stored, kind: str, is_beit: bool) -> None:
    """Says what the head's input is; drops what is no input of it."""
    params = stored.params

    def drop(pattern: str, why: str) -> None:
        for name in [name for name in params if re.match(pattern, name)]:
            del params[name]
            stored.dropped[name] = why

    if "registers" in params and not params["registers"].size:
        drop("registers", "there are none")
    if "head_dist/kernel" not in params and {"dist", "head/kernel"} <= params.keys():
        params["registers"] = params.pop("dist")  # of DeiT with one head
    if {"head/kernel", "dist"} & params.keys() or _is_modern(stored):
        drop("pre_logits/", "the pooler, which is not an input of the head")
    if is_beit and "Transformer/encoder_norm/scale" not in params:
        stored.conventions["classifier"] = "gap"
    if "head/kernel" not in params:
        return
    if "head/bias" not in params and kind == "clip":  # a projection
        stored.probabilities_by = "none"
        stored.add("head/bias", np.zeros(params["head/kernel"].shape[1], np.float32))
        stored.changed["head/bias"] = "zeros, as there is none"
    elif kind == "dinov2":
        stored.conventions["classifier"] = "token_gap"
    elif kind == "clip":
        stored.conventions["classifier"] = "gap"
        drop("Transformer/encoder_norm/", "not an input of the head")
    elif kind == "siglip":
        drop("MAPHead_0/", "not an input of the head")


_MODERN = re.compile(
    r"registers|pooled_norm/.*|Transformer/pre_norm/.*|.*/(LayerScale_\d|relative_bias|gate)/.*"
)


def _is_modern(stored: Stored) -> bool:
    """Whether `vit.py` lacks a part of it; a damaged file of a plain model is not modern."""
    block = f"{BLOCKS}_0/{ATTENTION}"
    return (
        any(map(_MODERN.fullmatch, stored.params))
        or stored.conventions["gelu"] == "quick"
        or stored.conventions.get("classifier") is not None
        or "rope" in stored.conventions
        or not any(f"{block}/{part}/bias" in stored.params for part in ("query", "key", "value"))
    )


def _make_modern(stored: Stored, kind: str, is_beit: bool) -> None:
    """Parameters of `vit.py` -> those of `modern_vit.py`; UserError: an array is missing."""
    params, encoder_norm = stored.params, "Transformer/encoder_norm"
    norms = [encoder_norm] if encoder_norm + "/scale" in params or not is_beit else []
    norms += ["Transformer/pre_norm"] if kind == "clip" else []
    norms += ["pooled_norm"] if "head/kernel" in params and not norms else []
    if stored.conventions.get("classifier") == "gap" and kind == "clip":
        norms = ["Transformer/pre_norm"]
    needed = [f"{name}/{part}" for name in norms for part in ("scale", "bias")]
    needed += [] if kind == "clip" else ["embedding/bias"]
    needed += [] if kind == "dinov3" or is_beit else [POSITIONS]
    needed += ["cls"] if kind in ("dinov2", "dinov3", "clip") or is_beit else []
    if missing := [name for name in needed if name not in params]:
        raise UserError(f"{list_names(missing)} missing; make sure that the file is whole.")
    stored.conventions.pop("position_embedding")
    if POSITIONS in params:
        distilled = kind == "vit" and "registers" in params
        join_positions(stored, ("cls" in params) + distilled)


# By kind of model: its type there, and the architectures with heads, and without.
_ARCHITECTURES = {
    "vit": ("vit", "ViTForImageClassification", "ViTModel"),
    "deit": ("deit", "DeiTForImageClassificationWithTeacher", "DeiTModel"),
    "mae": ("vit_mae", "", "ViTMAEForPreTraining"),
}


def to_huggingface(
    params: dict[str, np.ndarray], description: Description, inputs: InputSettings
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays in the classic naming, and the files beside them; UserError if not representable."""
    model = description.model
    if "pre_logits/kernel" in params and "head/kernel" in params:
        raise UserError(
            "--format=huggingface has no layer between pooling and head: a model with pre_logits "
            "can be written without its head (--drop_head), as the pooler of a ViTModel."
        )
    is_mae = model["name"] == "mae"
    if is_mae:
        check_square("huggingface", description)
    model_type, head, bare = _ARCHITECTURES[model["name"]]
    prefix = "vit." if is_mae else f"{model['name']}."  # same names as in transformers
    names = table("vit", prefix, rows.block_numbers(params)) + _decoder(params, {})
    arrays = rows.write_rows(names, params, "huggingface")
    if not model["num_classes"] and not is_mae:  # the bare model
        arrays = {name.removeprefix(prefix): array for name, array in arrays.items()}
    architecture = head if model["num_classes"] else bare
    return arrays, to_settings(description, inputs, model_type, architecture)


# ViT and DeiT there classify from their tokens and patchify the image directly.
_VALUES: dict[str, tuple[Any, ...]] = {
    "classifier": ("token",),
    "resnet_layers": (None,),
    **ONE_TABLE,
}
HUGGINGFACE = {name: Holds(to_huggingface, _VALUES) for name in _ARCHITECTURES}
HUGGINGFACE["mae"] = Holds(to_huggingface, {**_VALUES, "num_classes": (0,)})
