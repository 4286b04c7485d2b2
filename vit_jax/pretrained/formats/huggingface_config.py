"""transformers' settings: of a model in `config.json`, of its images in `preprocessor_config.json`.

The settings of images are read part by part: one that is left out has the value of the processor's
class there; one that is not understood is replaced by that value, and named. Without the file, they
are those of the published checkpoints.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data.ops import IMAGENET_MEAN, IMAGENET_STD
from vit_jax.files.paths import reading
from vit_jax.kinds import check_known
from vit_jax.models.description import PILLOW_METHODS, Description, InputSettings
from vit_jax.pretrained.formats.stored import Grid, Stored, native_ops, pair, pillow_ops, positive
from vit_jax.pretrained.formats.vit_parts import renamed

GELUS = {
    "gelu": "exact",
    "gelu_python": "exact",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "quick_gelu": "quick",
}
WRITTEN_GELUS = ("gelu", "gelu_pytorch_tanh", "quick_gelu")
# How its pipelines turn logits into probabilities.
_PROBLEMS = {
    "softmax": "single_label_classification",
    "sigmoid": "multi_label_classification",
    "none": "regression",
}

# By kind, see `huggingface`: activation, epsilon and heads, where `config.json` leaves them
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
    model_type = model_type if model_type in PUBLISHED else kind
    with reading(PREPROCESSOR):
        stored.ops, stored.assumed = read_processor(preprocessor, model_type, stored.image_size)
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
        "hidden_act": next(act for act in WRITTEN_GELUS if GELUS[act] == model["gelu"]),
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


PREPROCESSOR = "preprocessor_config.json"
_RESCALE = 1 / 255
_IMAGENET = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
_DINOV2 = {**_IMAGENET, "size": {"shortest_edge": 256}}
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": PILLOW_METHODS["bicubic"],
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
}
# What a class takes where its file says nothing, by the start of its name (transformers 5.23).
_USUAL: dict[str, Any] = {
    "do_resize": True,
    "size": 224,
    "resample": PILLOW_METHODS["bilinear"],
    "do_center_crop": False,
    "do_rescale": True,
    "rescale_factor": _RESCALE,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_CLASSES: dict[str, dict[str, Any]] = {
    "ViT": {},
    "DeiT": {"size": 256, "do_center_crop": True, "resample": PILLOW_METHODS["bicubic"]},
    "Beit": {"resample": PILLOW_METHODS["bicubic"]},
    "CLIP": CLIP,
    "Bit": CLIP,
    "Siglip2": {},
    "Siglip": {"resample": PILLOW_METHODS["bicubic"]},
    "DINOv3": _IMAGENET,
}
# By `model_type`, or the kind in `huggingface`: class, and what published files say.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "deit": ("DeiT", _IMAGENET),
    **dict.fromkeys(("vit_mae", "vit_msn", "ijepa"), ("ViT", _IMAGENET)),
    **dict.fromkeys(("beit", "data2vec-vision"), ("Beit", {})),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), ("Bit", _DINOV2)),
    "dinov3": ("DINOv3", {}),
    "clip": ("CLIP", {}),
    "siglip": ("Siglip", {}),
    "siglip2": ("Siglip2", {}),
}
# Other steps of theirs that change no pixel, or no label of ours.
_HARMLESS = ("do_convert_rgb", "do_reduce_labels")


def read_processor(
    settings: Mapping[str, Any], model_type: str, image_size: Grid | None
) -> tuple[list[Any], list[str]]:
    """The ops of a processor, and what is assumed of them.

    Args:
      settings: `preprocessor_config.json`, or that part of `processor_config.json`; {} without one.
      model_type: of the model, a key of `PUBLISHED` or another.
      image_size: (height, width) of the images that its positions fit, if known.

    TypeError, ValueError or KeyError for a value of the wrong type.
    """
    usual_class, published = PUBLISHED.get(model_type, ("ViT", {}))
    name = str(settings.get("image_processor_type") or settings.get("feature_extractor_type") or "")
    own_class = next((start for start in _CLASSES if name.startswith(start)), "")
    processor = own_class or usual_class
    usual = {**_USUAL, **_CLASSES[processor], **({} if settings else published)}
    known = usual | {key: value for key, value in settings.items() if value is not None}
    resize, crop, assumed = _sizes(known, processor, image_size)
    if name and not own_class:
        assumed += [f"image_processor_type={name} as {usual_class}ImageProcessor"]
    methods = {number: method for method, number in PILLOW_METHODS.items()}
    if (method := methods.get(known["resample"], "")) == "":
        method = methods[usual["resample"]]
        assumed += [f"{method} for resample={known['resample']!r}"]
    others = [key for key, on in known.items() if key.startswith("do_") and on is True]
    if others := [key for key in others if key not in _USUAL and key not in _HARMLESS]:
        assumed += [f"{', '.join(others)} left out"]
    mean, std = np.array(known["image_mean"], float), np.array(known["image_std"], float)
    if not known["do_normalize"]:
        mean, std = np.zeros(3), np.ones(3)
    # (factor x - mean) / std, in terms of x / 255.
    factor = float(known["rescale_factor"] if known["do_rescale"] else 1.0) / _RESCALE
    if not known["do_rescale"]:
        assumed += ["pixels from 0 to 255, as do_rescale=False"]
    if not np.isclose(factor, 1.0, rtol=1e-3):
        mean, std = mean / factor, std / factor
    inputs = InputSettings(method, resize, crop, mean.tolist(), std.tolist(), rounding="down")
    return pillow_ops(inputs), assumed


def read_native(stored: Stored, grid: Grid, patch_size: int, processor: Mapping[str, Any]) -> None:
    """SigLIP 2's NaFlex: images in shapes of their own, positions of `grid` interpolated."""
    stored.conventions |= {"position_grid": grid, "position_resize": "bilinear"}
    most = positive(processor.get("max_num_patches") or 256)
    stored.ops = native_ops(stored.ops, most, patch_size)


def _sizes(
    known: Mapping[str, Any], processor: str, image_size: Grid | None
) -> tuple[int | Grid | None, Grid | None, list[str]]:
    """How an image is resized and cropped, and what is assumed of it."""
    crop = pair(known.get("crop_size", 224)) if known["do_center_crop"] else None
    size, resizes = known["size"], known["do_resize"]
    if isinstance(size, int) and _CLASSES[processor] is CLIP:
        size = {"shortest_edge": size}
    match size if resizes else None:
        case None if crop:
            return None, crop, []
        case {"shortest_edge": short} if len(size) == 1:
            short = positive(short)
            notes = [] if crop else [f"a central crop, as size={size} has none"]
            return short, crop or (short, short), notes
        case int() | {"height": _, "width": _} | [_, _]:
            return pair(size), crop, []
    height, width = crop or image_size or pair(_USUAL["size"])
    why = f" for size={size}" if resizes else ", if it is of another size (do_resize=False)"
    return (height, width), None, [f"the whole image resized to {height}x{width}{why}"]


def to_preprocessor(inputs: InputSettings) -> dict[str, Any]:
    """The `preprocessor_config.json`."""
    native: dict[str, Any] = {}
    if op := inputs.patchify:
        kind, size = "Siglip2ImageProcessor", None
        native = {"patch_size": op.patch_size, "max_num_patches": op.lengths[0]}
    elif isinstance(inputs.resize, int):  # only CLIP's processor has this, not ViT's
        kind, size = "CLIPImageProcessor", {"shortest_edge": inputs.resize}
    else:
        kind = "ViTImageProcessor" if inputs.crop is None else "DeiTImageProcessor"
        size = _sides(inputs.resize)
    return {
        **_USUAL,
        "image_processor_type": kind,
        "size": size,
        "resample": PILLOW_METHODS[inputs.method],
        "image_mean": list(inputs.mean),
        "image_std": list(inputs.std),
        **({"do_center_crop": True, "crop_size": _sides(inputs.crop)} if inputs.crop else {}),
        **native,
    }


def _sides(size: Any) -> dict[str, int]:
    return dict(zip(("height", "width"), size, strict=True))
