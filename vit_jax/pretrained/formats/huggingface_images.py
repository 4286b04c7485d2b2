"""transformers' image processors: the settings in `preprocessor_config.json`, read part by part.

A part that is left out has the value of the processor's class there; one that is not understood is
replaced by that value, and named. Without the file, it is that of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.data.ops import IMAGENET_MEAN, IMAGENET_STD
from vit_jax.models.description import PILLOW_METHODS, InputSettings
from vit_jax.pretrained.formats.stored import Grid, pair, pillow_ops, positive

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
    "Siglip": {"resample": PILLOW_METHODS["bicubic"]},
    "DINOv3": _IMAGENET,
}
# By `model_type`, or the kind in `huggingface_names`: class, and what published files say.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "deit": ("DeiT", _IMAGENET),
    **dict.fromkeys(("vit_mae", "vit_msn", "ijepa"), ("ViT", _IMAGENET)),
    **dict.fromkeys(("beit", "data2vec-vision"), ("Beit", {})),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), ("Bit", _DINOV2)),
    "dinov3": ("DINOv3", {}),
    "clip": ("CLIP", {}),
    "siglip": ("Siglip", {}),
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
    if isinstance(inputs.resize, int):  # only CLIP's processor has this, not ViT's
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
    }


def _sides(size: Any) -> dict[str, int]:
    return dict(zip(("height", "width"), size, strict=True))
