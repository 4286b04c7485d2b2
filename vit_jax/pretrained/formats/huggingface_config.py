"""What transformers' `config.json` says of a model; its images: `huggingface_images.py`."""

from __future__ import annotations

import logging
from typing import Any

from vit_jax.files.paths import reading
from vit_jax.kinds import check_known
from vit_jax.models.description import Description, InputSettings
from vit_jax.pretrained.formats.huggingface_images import (
    PREPROCESSOR,
    PUBLISHED,
    read_processor,
    to_preprocessor,
)
from vit_jax.pretrained.formats.stored import Stored, pair, positive
from vit_jax.pretrained.formats.vit_parts import renamed

GELUS = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "quick_gelu": "quick",
}
_WRITTEN = ("gelu", "gelu_pytorch_tanh", "quick_gelu")
# How its pipelines turn logits into probabilities.
_PROBLEMS = {
    "softmax": "single_label_classification",
    "sigmoid": "multi_label_classification",
    "none": "regression",
}

# By kind, see `huggingface_names`: activation, epsilon and heads, where `config.json` leaves them
# out: it has only what differs.
_DEFAULTS = {
    "vit": ("gelu", 1e-12, None),
    "msn": ("gelu", 1e-6, None),
    "dinov2": ("gelu", 1e-6, 12),
    "dinov3": ("gelu", 1e-5, 6),
    "clip": ("quick_gelu", 1e-5, 12),
    "siglip": ("gelu_pytorch_tanh", 1e-6, 12),
}


def of_images(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of several towers -> those of the one for images, and of its head."""
    own = {key: settings[key] for key in ("id2label", "problem_type") if key in settings}
    return {**settings, **(settings.get("vision_config") or {}), **own}


def read_settings(settings: dict[str, Any], preprocessor: dict[str, Any], kind: str) -> Stored:
    """Reads `config.json` and `preprocessor_config.json`; UserError for an unsupported model."""
    is_msn = settings.get("model_type") == "vit_msn"
    activation, epsilon, usual_heads = _DEFAULTS["msn" if is_msn else kind]
    with reading("config.json"):
        check_known("config.json: pooler_act", settings.get("pooler_act", "tanh"), ["tanh"])
        activation = settings.get("hidden_act", activation)
        if kind == "dinov3" and settings.get("use_gated_mlp"):
            check_known("config.json: hidden_act of gated MLPs", activation, ["silu"])
            activation = "gelu"  # not used
        check_known("config.json: hidden_act", activation, GELUS)
        heads, size = settings.get("num_attention_heads"), settings.get("image_size")
        if "model_type" in settings and kind != "vit":
            heads = heads or usual_heads
            size = size or (None if kind == "siglip" else 224)
        conventions = {
            "gelu": GELUS[activation],
            "layer_norm_epsilon": float(settings.get("layer_norm_eps", epsilon)),
            "position_embedding": "learned",
        }
        if kind == "dinov3":
            base = float(settings.get("rope_theta", 100.0))
            conventions |= {"rope": "centered", "rope_base": base}
        problems = {problem: by for by, problem in _PROBLEMS.items()}
        stored = Stored(
            "huggingface",
            posemb="transformers",
            conventions=conventions,
            num_heads=None if heads is None else positive(heads),
            image_size=None if size is None else pair(size),
            class_names=_class_names(settings),
            probabilities_by=problems.get(str(settings.get("problem_type")), "softmax"),
        )
    model_type = str(settings.get("model_type"))
    with reading(PREPROCESSOR):
        stored.ops, stored.assumed = read_processor(
            preprocessor, model_type if model_type in PUBLISHED else kind, stored.image_size
        )
    return stored


def _class_names(settings: dict[str, Any]) -> tuple[str, ...]:
    """Names of `id2label`; () if they are only numbers, or do not match the outputs."""
    labels = settings.get("id2label") or {}
    keys = sorted(labels, key=int)
    if [int(key) for key in keys] != list(range(len(keys))):
        logging.warning("config.json: id2label does not count from 0; its names are ignored.")
        return ()
    names = tuple(str(labels[key]) for key in keys)
    return () if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


# Their names of sizes; those of a decoder have the same prefix as ours.
_SIZES = "{0}hidden_size {0}num_hidden_layers={0}num_layers {0}num_attention_heads={0}num_heads "
_SIZES += "{0}intermediate_size={0}mlp_dim"


def to_settings(
    description: Description, inputs: InputSettings, model_type: str, architecture: str, **more: Any
) -> dict[str, dict[str, Any]]:
    """The JSON files with which transformers computes the same as our model, by name."""
    model = description.model
    height, width, channels = description.image_shape
    patch = model["patch_size"]
    names = description.class_names or tuple(f"LABEL_{i}" for i in range(model["num_classes"]))
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        **renamed(model, _SIZES.format("")),
        **(renamed(model, _SIZES.format("decoder_")) if "decoder_num_layers" in model else {}),
        "hidden_act": next(act for act in _WRITTEN if GELUS[act] == model["gelu"]),
        "layer_norm_eps": model["layer_norm_epsilon"],
        "image_size": height if height == width else [height, width],
        "patch_size": patch if isinstance(patch, int) else list(patch),
        "num_channels": channels,
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "torch_dtype": "float32",
        "problem_type": _PROBLEMS[description.probabilities_by],
        **more,
    }
    return {"config.json": config, PREPROCESSOR: to_preprocessor(inputs)}
