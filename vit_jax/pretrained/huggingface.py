"""Hugging Face transformers' names for ViT and DeiT, and its `config.json`.

Both namings are read: the classic one of the files on the hub (`vit.encoder.layer.0.attention.
attention.query`), which every version of transformers understands and which we write, and that of
transformers 5 (`vit.layers.0.attention.q_proj`). A bare `ViTModel` has no `vit.` in front.
"""

from __future__ import annotations

from typing import Any

from vit_jax.errors import UserError
from vit_jax.pretrained.description import HALF, Description, InputSettings
from vit_jax.pretrained.mapping import CONV, DENSE, HEADS_BIAS, HEADS_IN, HEADS_OUT, SAME, Op, Row

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


def _layer(ours: str, theirs: str, op: Op = DENSE, bias: Op = SAME) -> tuple[Row, Row]:
    return (
        Row((f"{ours}/kernel",), (f"{theirs}.weight",), op),
        Row((f"{ours}/bias",), (f"{theirs}.bias",), bias),
    )


def _norm(ours: str, theirs: str) -> tuple[Row, Row]:
    return (
        Row((f"{ours}/scale",), (f"{theirs}.weight",), SAME),
        Row((f"{ours}/bias",), (f"{theirs}.bias",), SAME),
    )


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
            rows += _layer(f"{_ATTENTION}/out", f"{folder}.{theirs}", HEADS_OUT)
        elif "/" in ours:
            rows += _layer(f"{_BLOCK}/{ours}", f"{folder}.{theirs}")
        else:
            rows += _layer(f"{_ATTENTION}/{ours}", f"{folder}.{theirs}", HEADS_IN, HEADS_BIAS)
    rows += _norm(f"{_BLOCK}/LayerNorm_0", f"{folder}.layernorm_before")
    rows += _norm(f"{_BLOCK}/LayerNorm_1", f"{folder}.layernorm_after")
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
        *_layer("embedding", f"{patches}.projection", CONV),
        *_block(folder, _REFACTORED if refactored else _CLASSIC),
        *_norm("Transformer/encoder_norm", f"{prefix}layernorm"),
        *_layer("pre_logits", f"{prefix}pooler.dense"),
        *(
            _layer("head", "classifier")
            if prefix != "deit."
            else _layer("head", "cls_classifier") + _layer("head_dist", "distillation_classifier")
        ),
    )


def find_prefix(names: Any) -> str | None:
    """`vit.`, `deit.` or "", or None where these are not the names of a ViT of transformers."""
    for prefix in ("vit.", "deit.", ""):
        if f"{prefix}embeddings.patch_embeddings.projection.weight" in names:
            return prefix
    return None


def conventions(settings: dict[str, Any]) -> dict[str, Any]:
    """`gelu` and `layer_norm_epsilon` of a `config.json`; its defaults where it is silent.

    Raises:
      UserError: an activation that our model does not have.
    """
    activation = settings.get("hidden_act", "gelu")
    if activation not in GELUS:
        raise UserError(
            f"config.json: hidden_act={activation!r} is none of {', '.join(GELUS)}; this model "
            "computes something else than a Vision Transformer of ours."
        )
    return {
        "gelu": GELUS[activation],
        "layer_norm_epsilon": float(settings.get("layer_norm_eps", 1e-12)),
    }


def class_names(settings: dict[str, Any]) -> tuple[str, ...]:
    """Names of `id2label`; () where they are only numbered."""
    labels = settings.get("id2label") or {}
    names = tuple(str(labels[key]) for key in sorted(labels, key=int))
    return () if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def preprocess(settings: dict[str, Any]) -> str:
    """Ops for a `preprocessor_config.json`; "" where it says too little."""
    size = settings.get("size")
    if isinstance(size, dict):
        size = size.get("height", size.get("shortest_edge"))
    if not isinstance(size, int) or not settings.get("do_resize", True):
        return ""
    method = RESAMPLE.get(settings.get("resample", 2), "bilinear")
    crop = settings.get("crop_size")
    if isinstance(crop, dict):
        crop = crop.get("height")
    mean, std = (tuple(settings.get(key, HALF)) for key in ("image_mean", "image_std"))
    if settings.get("do_center_crop", False) and isinstance(crop, int):
        normalize = "" if mean == std == HALF else f"|normalize({mean}, {std})"
        return f"decode|resize({size}, {size}, 'pillow_{method}')|central_crop({crop}){normalize}"
    return f"huggingface_eval({size}, '{method}', {mean}, {std})"


def to_preprocessor(inputs: InputSettings) -> dict[str, Any] | None:
    """The `preprocessor_config.json`, or None where transformers has no such preprocessing."""
    if isinstance(inputs.resize, int):
        return None  # its ViT processor scales images to a square, whatever their shape
    settings: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": dict(zip(("height", "width"), inputs.resize, strict=True)),
        "resample": {method: number for number, method in RESAMPLE.items()}[inputs.method],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(inputs.mean),
        "image_std": list(inputs.std),
    }
    if inputs.crop is not None:
        crop = dict(zip(("height", "width"), inputs.crop, strict=True))
        settings |= {"image_processor_type": "DeiTImageProcessor", "do_center_crop": True}
        settings["crop_size"] = crop
    return settings


def to_config(description: Description) -> dict[str, Any]:
    """The `config.json` with which transformers computes what our model computes.

    Raises:
      UserError: the model is none that transformers' ViT or DeiT can be.
    """
    model = description.model
    deit = model["name"] == "deit"
    if model["classifier"] != "token" or model["resnet_layers"] is not None:
        part = "ResNet" if model["resnet_layers"] is not None else model["classifier"] + " head"
        raise UserError(
            f"Hugging Face's ViT classifies by its class token and cuts patches from the image: it "
            f"has no {part}. --format=timm may have it."
        )
    height, width, channels = description.image_shape
    patch = model["patch_size"]
    if height != width or not isinstance(patch, int):
        raise UserError(
            f"Hugging Face's ViT takes square images and patches, not {height}x{width} in patches "
            f"of {patch}; choose another --format, or another resolution (--image_size)."
        )
    names = description.class_names or tuple(f"LABEL_{i}" for i in range(model["num_classes"]))
    head = "DeiTForImageClassificationWithTeacher" if deit else "ViTForImageClassification"
    bare = "DeiTModel" if deit else "ViTModel"
    return {
        "architectures": [head if model["num_classes"] else bare],
        "model_type": "deit" if deit else "vit",
        "hidden_size": model["hidden_size"],
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_heads"],
        "intermediate_size": model["mlp_dim"],
        "hidden_act": "gelu" if model["gelu"] == "exact" else "gelu_pytorch_tanh",
        "layer_norm_eps": model["layer_norm_epsilon"],
        "image_size": height,
        "patch_size": patch,
        "num_channels": channels,
        "qkv_bias": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "torch_dtype": "float32",
    }
