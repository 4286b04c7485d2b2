"""Hugging Face transformers' names for ViT and DeiT, and its `config.json`.

Both namings are read: the classic one of the files on the hub (`vit.encoder.layer.0.attention.
attention.query`), which every version of transformers understands and which we write, and that of
transformers 5 (`vit.layers.0.attention.q_proj`). A bare `ViTModel` has no `vit.` in front.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from vit_jax.errors import UserError
from vit_jax.pretrained.formats.json_values import pair, positive, reading, triple
from vit_jax.pretrained.formats.pytorch import Settings
from vit_jax.pretrained.formats.rows import (
    CONV,
    HEADS_BIAS,
    HEADS_IN,
    HEADS_OUT,
    SAME,
    Row,
    layer,
    norm,
)
from vit_jax.workdir.description import HALF, Description, InputSettings

_BLOCK = "Transformer/encoderblock_{i}"
_ATTENTION = f"{_BLOCK}/MultiHeadDotProductAttention_0"

GELUS = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
}
RESAMPLE = {2: "bilinear", 3: "bicubic"}  # PIL's numbers


_CLASSIC = (
    ("query", "attention.attention.query"),
    ("key", "attention.attention.key"),
    ("value", "attention.attention.value"),
    ("out", "attention.output.dense"),
    ("MlpBlock_0/Dense_0", "intermediate.dense"),
    ("MlpBlock_0/Dense_1", "output.dense"),
)
_REFACTORED = (
    ("query", "attention.q_proj"),
    ("key", "attention.k_proj"),
    ("value", "attention.v_proj"),
    ("out", "attention.o_proj"),
    ("MlpBlock_0/Dense_0", "mlp.fc1"),
    ("MlpBlock_0/Dense_1", "mlp.fc2"),
)


def _block(folder: str, layers: tuple[tuple[str, str], ...]) -> tuple[Row, ...]:
    rows: list[Row] = []
    for ours, theirs in layers:
        if ours == "out":
            rows += layer(f"{_ATTENTION}/out", f"{folder}.{theirs}", HEADS_OUT)
        elif "/" in ours:
            rows += layer(f"{_BLOCK}/{ours}", f"{folder}.{theirs}")
        else:
            rows += layer(f"{_ATTENTION}/{ours}", f"{folder}.{theirs}", HEADS_IN, HEADS_BIAS)
    rows += norm(f"{_BLOCK}/LayerNorm_0", f"{folder}.layernorm_before")
    rows += norm(f"{_BLOCK}/LayerNorm_1", f"{folder}.layernorm_after")
    return tuple(rows)


def rows(*, prefix: str, refactored: bool) -> tuple[Row, ...]:
    """The table for names that start with `prefix` (`vit.`, `deit.` or nothing)."""
    patches = f"{prefix}embeddings.patch_embeddings"
    folder = f"{prefix}layers.{{i}}" if refactored else f"{prefix}encoder.layer.{{i}}"
    return (
        Row(("cls",), (f"{prefix}embeddings.cls_token",), SAME),
        Row(("dist",), (f"{prefix}embeddings.distillation_token",), SAME),
        Row(
            ("Transformer/posembed_input/pos_embedding",),
            (f"{prefix}embeddings.position_embeddings",),
            SAME,
        ),
        *layer("embedding", f"{patches}.projection", CONV),
        *_block(folder, _REFACTORED if refactored else _CLASSIC),
        *norm("Transformer/encoder_norm", f"{prefix}layernorm"),
        *layer("pre_logits", f"{prefix}pooler.dense"),
        *(
            layer("head", "classifier")
            if prefix != "deit."
            else layer("head", "cls_classifier") + layer("head_dist", "distillation_classifier")
        ),
    )


def find_prefix(names: Any) -> str | None:
    """`vit.`, `deit.` or "", or None where these are not the names of a ViT of transformers."""
    for prefix in ("vit.", "deit.", ""):
        if f"{prefix}embeddings.patch_embeddings.projection.weight" in names:
            return prefix
    return None


def read_settings(stated: dict[str, Any], preprocessor: dict[str, Any]) -> Settings:
    """What `config.json` and `preprocessor_config.json` say; their defaults where silent.

    Raises:
      UserError: a value of a wrong kind, or an activation that is not ours.
    """
    with reading("config.json"):
        activation = stated.get("hidden_act", "gelu")
        if not isinstance(activation, str) or activation not in GELUS:
            raise UserError(
                f"config.json: hidden_act={activation!r} is none of {', '.join(GELUS)}; this model "
                "computes something else than a Vision Transformer of ours."
            )
        heads, size = stated.get("num_attention_heads"), stated.get("image_size")
        settings = Settings(
            num_heads=None if heads is None else positive(heads),
            conventions={
                "gelu": GELUS[activation],
                "layer_norm_epsilon": float(stated.get("layer_norm_eps", 1e-12)),
            },
            image_size=None if size is None else pair(size),
            class_names=_class_names(stated),
            eval_preprocess="",
        )
    with reading("preprocessor_config.json"):
        return dataclasses.replace(settings, eval_preprocess=_preprocess(preprocessor))


def _class_names(settings: dict[str, Any]) -> tuple[str, ...]:
    """Names of `id2label`; () where they are only numbered."""
    labels = settings.get("id2label") or {}
    names = tuple(str(labels[key]) for key in sorted(labels, key=int))
    return () if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def _preprocess(settings: dict[str, Any]) -> str:
    """Ops for a `preprocessor_config.json`; "" where it says too little, or what we have not."""
    size, resample = settings.get("size"), settings.get("resample", 2)
    if size is None or not settings.get("do_resize", True):
        return ""
    if resample not in RESAMPLE:
        logging.warning("preprocessor_config.json: resample=%r is not known here.", resample)
        return ""
    method = f"'pillow_{RESAMPLE[resample]}'"
    if isinstance(size, dict) and "shortest_edge" in size:
        shape = f"resize_small({positive(size['shortest_edge'])}, {method}, 'down')"
    else:
        height, width = pair([size["height"], size["width"]] if isinstance(size, dict) else size)
        shape = f"resize({height}, {width}, {method})"
    if settings.get("do_center_crop", False):
        crop = settings["crop_size"]
        height, width = pair([crop["height"], crop["width"]] if isinstance(crop, dict) else crop)
        shape += f"|central_crop({height}, {width}, rounding='nearest')"
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF
    if not settings.get("do_normalize", True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    else:
        mean, std = (triple(settings.get(key) or HALF) for key in ("image_mean", "image_std"))
    return f"decode|{shape}" + ("" if mean == std == HALF else f"|normalize({mean}, {std})")


def to_preprocessor(inputs: InputSettings) -> dict[str, Any]:
    """The `preprocessor_config.json`."""
    if isinstance(inputs.resize, int):  # what ViT's own processor has not, CLIP's has
        kind, size = "CLIPImageProcessor", {"shortest_edge": inputs.resize}
    else:
        kind = "ViTImageProcessor" if inputs.crop is None else "DeiTImageProcessor"
        size = dict(zip(("height", "width"), inputs.resize, strict=True))
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
        crop = dict(zip(("height", "width"), inputs.crop, strict=True))
        settings |= {"do_center_crop": True, "crop_size": crop}
    return settings


# Of a kind of ours: with heads, and without.
ARCHITECTURES = {
    "vit": ("ViTForImageClassification", "ViTModel"),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTModel"),
}


def to_config(description: Description) -> dict[str, Any]:
    """The `config.json` with which transformers computes what our model computes.

    Raises:
      UserError: the model is none that transformers' ViT or DeiT can be.
    """
    model = description.model
    if model["classifier"] != "token" or model["resnet_layers"] is not None:
        part = "ResNet" if model["resnet_layers"] is not None else model["classifier"] + " head"
        raise UserError(
            f"Hugging Face's ViT classifies by its class token and cuts patches from the image: it "
            f"has no {part}. --format=timm may have it."
        )
    height, width, channels = description.image_shape
    patch = model["patch_size"]
    names = description.class_names or tuple(f"LABEL_{i}" for i in range(model["num_classes"]))
    head, bare = ARCHITECTURES[model["name"]]
    return {
        "architectures": [head if model["num_classes"] else bare],
        "model_type": model["name"],
        "hidden_size": model["hidden_size"],
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_heads"],
        "intermediate_size": model["mlp_dim"],
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
    }
