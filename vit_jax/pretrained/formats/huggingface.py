"""Reads transformers' Vision Transformers, and writes those that `vit.py` computes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from vit_jax.errors import UserError, list_names
from vit_jax.models.description import Description, InputSettings
from vit_jax.models.vit import ATTENTION, BLOCKS, POSITIONS
from vit_jax.pretrained.formats import rows
from vit_jax.pretrained.formats.huggingface_config import of_images, read_settings, to_settings
from vit_jax.pretrained.formats.huggingface_names import (
    BEIT,
    FOLDERS,
    TOWER,
    decoder,
    find_kind,
    table,
)
from vit_jax.pretrained.formats.mae import check_square
from vit_jax.pretrained.formats.modern import join_positions, read_relative_bias
from vit_jax.pretrained.formats.stored import ONE_TABLE, Holds, Stored

# Models whose patches are not image patches.
_NOT_IMAGES = {"audio-spectrogram-transformer": "sounds", "videomae": "videos", "vivit": "videos"}


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
        if prefix == TOWER and not name.startswith((TOWER, "visual_projection.", "classifier.")):
            del arrays[name]
            stored.dropped[name] = "not of the images' tower"
        elif re.match(rf"({prefix}embeddings\.mask_token$|lm_head\.|decoder\.0\.)", name):
            del arrays[name]
            stored.dropped[name] = "only used in its pre-training task"
    return stored


def likely_heads(arrays: dict[str, np.ndarray]) -> int | None:
    """Those of CLIP, of width 64 in all sizes but those that are known; else None."""
    token = arrays.get(f"{TOWER}embeddings.class_embedding")
    return None if token is None else len(token) // 64


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
        if prefix not in ("", TOWER) and name.startswith(("encoder.", "layernorm.")):
            arrays.setdefault(f"{prefix}{name}", arrays.pop(name))
        if name.endswith((".in_proj_weight", ".in_proj_bias")):
            arrays[name.replace("in_proj_", "in_proj.")] = arrays.pop(name)
    is_new = any(re.match(rf"{prefix}(layers|model\.layer)\.", name) for name in arrays)
    is_new |= f"{prefix}encoder.layer.0.attention.q_proj.weight" in arrays
    gated = any(re.search(r"\.mlp\.(gate_proj|weights_in)\.", name) for name in arrays)
    folders = "|".join(folder for pair in FOLDERS.values() for folder in pair)
    blocks = rows.numbers(rf"^{prefix}(?:encoder\.layers|{folders})\.(\d+)\.", arrays)
    biases = _take_relative_biases(arrays, prefix, blocks)
    names = table(kind, prefix, blocks, list(arrays), is_new=is_new, gated=gated)
    if kind == "vit":
        names += decoder(arrays, settings, is_new=is_new)
    rows.read_rows(stored, arrays, names, num_heads=num_heads)
    is_beit = prefix in BEIT or settings.get("model_type") in ("beit", "data2vec-vision")
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
        return {i: sum(shared, tables.get(i, np.zeros(1, np.float32))) for (i,) in blocks}
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
    names = table("vit", prefix, rows.block_numbers(params)) + decoder(params, {})
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
