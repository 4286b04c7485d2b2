"""Hugging Face transformers' names for ViT, DeiT and ViTMAE, and its `config.json`.

Reads the names of files on the hub, which every version of transformers understands and
which we write, and those of transformers 5. A bare `ViTModel` has no `vit.` prefix.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError, check_known, list_names
from vit_jax.files.paths import reading
from vit_jax.models.description import HALF, Description, InputSettings
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.formats import rows
from vit_jax.pretrained.formats.mae import check_square, decoder_rows
from vit_jax.pretrained.formats.rows import Row, layer, norm
from vit_jax.pretrained.formats.stored import ONE_TABLE, Holds, Stored, numbers_of, pair, positive

GELUS = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # PIL's numbers

# See `encoder_block`.
_CLASSIC = "layernorm_before attention.attention.query attention.attention.key"
_CLASSIC += " attention.attention.value attention.output.dense layernorm_after"
_CLASSIC += " intermediate.dense output.dense"
_REFACTORED = "layernorm_before attention.q_proj attention.k_proj attention.v_proj"
_REFACTORED += " attention.o_proj layernorm_after mlp.fc1 mlp.fc2"
# How its pipelines turn logits into probabilities.
_PROBLEMS = {
    "softmax": "single_label_classification",
    "sigmoid": "multi_label_classification",
    "none": "regression",
}


def _table(prefix: str, blocks: list[tuple[int, ...]], *, refactored: bool = False) -> list[Row]:
    """The table for names with the prefix `prefix` (`vit.`, `deit.` or none)."""
    embeddings = f"{prefix}embeddings"
    head = "cls_classifier" if prefix == "deit." else "classifier"
    table = [
        Row(("cls",), f"{embeddings}.cls_token"),
        Row(("dist",), f"{embeddings}.distillation_token"),
        Row((POSITIONS,), f"{embeddings}.position_embeddings"),
        *layer("embedding", f"{embeddings}.patch_embeddings.projection", rows.CONV),
        *norm("Transformer/encoder_norm", f"{prefix}layernorm"),
        *layer("pre_logits", f"{prefix}pooler.dense"),
        *layer("head", head),
        *layer("head_dist", "distillation_classifier"),
    ]
    folder, names = ("layers", _REFACTORED) if refactored else ("encoder.layer", _CLASSIC)
    for (i,) in blocks:
        table += rows.encoder_block(i, f"{prefix}{folder}.{i}", names)
    return table


def _decoder(
    names: Collection[str], settings: Mapping[str, Any], *, refactored: bool = False
) -> list[Row]:
    blocks = "decoder.decoder_encoder.layer"  # as transformers 5 saves it; it reads both
    if not any(name.startswith(blocks) for name in names):
        blocks = "decoder.decoder_layers"
    parts = _REFACTORED if refactored else _CLASSIC
    return decoder_rows(names, blocks, parts, settings, "decoder_num_attention_heads")


def find_prefix(names: Collection[str]) -> str | None:
    """`vit.`, `deit.` or "", or None if the names are not those of a transformers ViT."""
    for prefix in ("vit.", "deit.", ""):
        if f"{prefix}embeddings.patch_embeddings.projection.weight" in names:
            return prefix
    return None


# Models whose patches are not image patches.
_NOT_IMAGES = {"audio-spectrogram-transformer": "sounds", "videomae": "videos", "vivit": "videos"}


def check_names(arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> None:
    """UserError for a part that our models lack, before anything is guessed."""
    name = f"{find_prefix(arrays)}embeddings.patch_embeddings.projection.weight"
    kind = settings.get("model_type")
    if kind in _NOT_IMAGES or arrays[name].ndim != 4:
        found = _NOT_IMAGES.get(str(kind), "videos or volumes")
        raise UserError(f"a model for {found} ({kind or name}); only image models are supported.")
    queries = re.compile(r".*\.(query|q_proj)\.(weight|bias)")
    ends = {match[2] for match in map(queries.fullmatch, arrays) if match}
    if ends == {"weight"}:
        raise UserError(
            "this model has queries, keys and values without biases (qkv_bias=False), which is "
            "not supported."
        )


def read_settings(settings: dict[str, Any], preprocessor: dict[str, Any]) -> Stored:
    """Reads `config.json` and `preprocessor_config.json`; UserError for an unsupported model."""
    with reading("config.json"):
        check_known("config.json: pooler_act", settings.get("pooler_act", "tanh"), ["tanh"])
        activation = settings.get("hidden_act", "gelu")
        check_known("config.json: hidden_act", activation, GELUS)
        epsilon = float(settings.get("layer_norm_eps", 1e-12))
        heads, size = settings.get("num_attention_heads"), settings.get("image_size")
        stored = Stored(
            "huggingface",
            conventions={
                "gelu": GELUS[activation],
                "layer_norm_epsilon": epsilon,
                "position_embedding": "learned",
            },
            num_heads=None if heads is None else positive(heads),
            image_size=None if size is None else pair(size),
            class_names=_class_names(settings),
        )
        problems = {problem: by for by, problem in _PROBLEMS.items()}
        stored.probabilities_by = problems.get(str(settings.get("problem_type")), "softmax")
    with reading("preprocessor_config.json"):
        stored.eval_preprocess = _preprocess(preprocessor)
    return stored


def read_huggingface(
    stored: Stored, arrays: dict[str, np.ndarray], num_heads: int, settings: dict[str, Any]
) -> None:
    """Moves `arrays` into `stored`; UserError if the model is not supported."""
    prefix = find_prefix(arrays)
    assert prefix is not None  # the format was detected by it
    if prefix:  # which ViTMSN omits after its embeddings
        for name in [name for name in arrays if name.startswith(("encoder.", "layernorm."))]:
            arrays[f"{prefix}{name}"] = arrays.pop(name)
    if prefix == "deit." and "classifier.weight" in arrays:
        raise UserError(
            "a DeiTForImageClassification, whose only head is on the class token next to a "
            "distillation token, is not supported; DeiTForImageClassificationWithTeacher is."
        )
    refactored = any(name.startswith(f"{prefix}layers.") for name in arrays)
    blocks = rows.numbers(rf"^{prefix}(?:encoder\.layer|layers)\.(\d+)\.", arrays)
    table = _table(prefix, blocks, refactored=refactored)
    table += _decoder(arrays, settings, refactored=refactored)
    rows.read_rows(stored, arrays, table, num_heads=num_heads)
    if {"head/kernel", "dist"} & stored.params.keys():
        for name in ("pre_logits/kernel", "pre_logits/bias"):
            if stored.params.pop(name, None) is not None:
                stored.dropped[name] = "the pooler, which is not an input of the head"


def _class_names(settings: dict[str, Any]) -> tuple[str, ...]:
    """Names of `id2label`; () if they are only numbers, or do not match the outputs."""
    labels = settings.get("id2label") or {}
    keys = sorted(labels, key=int)
    if [int(key) for key in keys] != list(range(len(keys))):
        logging.warning(
            f"config.json: id2label has the keys {list_names(keys, 9)}, not 0 to {len(keys) - 1}: "
            "its names are ignored."
        )
        return ()
    names = tuple(str(labels[key]) for key in keys)
    return () if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def _preprocess(settings: dict[str, Any]) -> str:
    """Ops for a `preprocessor_config.json`; "" if it is incomplete, or has unsupported steps."""
    size, resample = settings.get("size"), settings.get("resample", 2)
    factor = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1
    if not math.isclose(factor, 1 / 255, rel_tol=1e-3):
        raise UserError(
            f"preprocessor_config.json: do_rescale and rescale_factor multiply pixels by {factor}; "
            "only 1/255 is supported. Remove the file to load the weights without it."
        )
    if size is None or not settings.get("do_resize", True):
        return ""
    if resample not in RESAMPLE:
        logging.warning("preprocessor_config.json: resample=%r is not supported.", resample)
        return ""
    method = f"'pillow_{RESAMPLE[resample]}'"
    if isinstance(size, dict) and "shortest_edge" in size:
        ops = f"decode|resize_small({positive(size['shortest_edge'])}, {method}, 'down')"
    else:
        height, width = pair(size)
        ops = f"decode|resize({height}, {width}, {method})"
    if settings.get("do_center_crop", False):
        height, width = pair(settings["crop_size"])
        ops += f"|central_crop({height}, {width}, rounding='nearest')"
    if not settings.get("do_normalize", True):
        return f"{ops}|normalize((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))"
    mean, std = (numbers_of(settings.get(key) or HALF) for key in ("image_mean", "image_std"))
    return ops if mean == std == HALF else f"{ops}|normalize({mean}, {std})"


def _sides(size: tuple[int, int]) -> dict[str, int]:
    return {"height": size[0], "width": size[1]}


def _to_preprocessor(inputs: InputSettings) -> dict[str, Any]:
    """The `preprocessor_config.json`."""
    if isinstance(inputs.resize, int):  # only CLIP's processor has this, not ViT's
        kind, size = "CLIPImageProcessor", {"shortest_edge": inputs.resize}
    else:
        kind = "ViTImageProcessor" if inputs.crop is None else "DeiTImageProcessor"
        size = _sides(inputs.resize)
    settings: dict[str, Any] = {
        "image_processor_type": kind,
        "do_resize": True,
        "size": size,
        "resample": {method: number for number, method in RESAMPLE.items()}[inputs.method],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(inputs.mean),
        "image_std": list(inputs.std),
    }
    if inputs.crop is not None:
        settings |= {"do_center_crop": True, "crop_size": _sides(inputs.crop)}
    return settings


# By kind of model: its type there, and the architectures with heads, and without.
_ARCHITECTURES = {
    "vit": ("vit", "ViTForImageClassification", "ViTModel"),
    "deit": ("deit", "DeiTForImageClassificationWithTeacher", "DeiTModel"),
    "mae": ("vit_mae", "", "ViTMAEForPreTraining"),
}
# Their names of sizes; those of a decoder have the same prefix as ours.
_SIZES = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_dim",
}


def _to_config(description: Description) -> dict[str, Any]:
    """The `config.json` with which transformers computes the same as our model."""
    model = description.model
    height, width, channels = description.image_shape
    patch = model["patch_size"]
    names = description.class_names or tuple(f"LABEL_{i}" for i in range(model["num_classes"]))
    model_type, head, bare = _ARCHITECTURES[model["name"]]
    return {
        "architectures": [head if model["num_classes"] else bare],
        "model_type": model_type,
        **{
            f"{prefix}{key}": model[f"{prefix}{ours}"]
            for prefix in ("", *(["decoder_"] if "decoder_num_layers" in model else []))
            for key, ours in _SIZES.items()
        },
        "hidden_act": "gelu" if model["gelu"] == "exact" else "gelu_pytorch_tanh",
        "layer_norm_eps": model["layer_norm_epsilon"],
        "image_size": height if height == width else [height, width],
        "patch_size": patch if isinstance(patch, int) else list(patch),
        "num_channels": channels,
        "qkv_bias": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "torch_dtype": "float32",
        "problem_type": _PROBLEMS[description.probabilities_by],
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
    prefix = "vit." if is_mae else f"{model['name']}."  # same names as in transformers
    table = _table(prefix, rows.block_numbers(params)) + _decoder(params, {})
    arrays = rows.write_rows(table, params, "huggingface")
    if not model["num_classes"] and not is_mae:  # the bare model
        arrays = {name.removeprefix(prefix): array for name, array in arrays.items()}
    settings = {
        "config.json": _to_config(description),
        "preprocessor_config.json": _to_preprocessor(inputs),
    }
    return arrays, settings


# ViT and DeiT there classify from their tokens and patchify the image directly.
_VALUES: dict[str, tuple[Any, ...]] = {
    "classifier": ("token",),
    "resnet_layers": (None,),
    **ONE_TABLE,
}
HUGGINGFACE = {name: Holds(to_huggingface, _VALUES) for name in _ARCHITECTURES}
HUGGINGFACE["mae"] = Holds(to_huggingface, {**_VALUES, "num_classes": (0,)})
