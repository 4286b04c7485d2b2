"""Preprocessing that has a name, as rows of the ops in preprocess.py.

Photographs are turned upright by their EXIF orientation unless `exif=False`, which gives exactly
the pixels that published accuracies were measured on.
"""

from __future__ import annotations

from collections.abc import Callable

Size = int | tuple[int, int]
Channels = float | tuple[float, float, float]

# Per channel, of the pixels of ImageNet's training images divided by 255.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def _official_train(size: Size, exif: bool = True) -> str:
    """The official code's training pipeline."""
    return f"decode(exif={exif})|inception_crop({size})|flip_lr"


def _official_eval(size: Size, exif: bool = True) -> str:
    """The official code's evaluation: the whole image scaled to `size`, no crop (its issue #39)."""
    height, width = size if isinstance(size, tuple) else (size, size)
    return f"decode(exif={exif})|resize({height}, {width})"


def _big_vision_eval(size: int, resize: int, exif: bool = True) -> str:
    """Short side to `resize` (256 for 224), then the central `size` x `size`."""
    return f"decode(exif={exif})|resize_small({resize})|central_crop({size})"


def _timm_eval(
    size: int,
    crop_pct: float = 0.9,
    method: str = "bicubic",
    mean: Channels = 0.5,
    std: Channels = 0.5,
    exif: bool = True,
) -> str:
    """timm's evaluation (torchvision's ops on Pillow images): crop_pct 0.9 at 224, 1.0 at 384."""
    if not 0 < crop_pct <= 1:
        raise ValueError(f"crop_pct={crop_pct!r} must be in (0, 1]")
    return (
        f"decode(exif={exif})|resize_small({int(size / crop_pct)}, 'pillow_{method}', 'down')"
        f"|central_crop({size}, rounding='nearest'){_scaling(mean, std)}"
    )


def _deit_eval(size: int, crop_pct: float = 0.875, exif: bool = True) -> str:
    """DeiT's evaluation: short side to 256 for 224 (438 for 384); crop_pct is 1.0 for DeiT III."""
    return _timm_eval(size, crop_pct, "bicubic", IMAGENET_MEAN, IMAGENET_STD, exif)


def _huggingface_eval(
    size: Size,
    method: str = "bilinear",
    mean: Channels = 0.5,
    std: Channels = 0.5,
    exif: bool = True,
) -> str:
    """Hugging Face's ViT image processor: the whole image scaled to `size`, with antialiasing."""
    height, width = size if isinstance(size, tuple) else (size, size)
    return f"decode(exif={exif})|resize({height}, {width}, 'pillow_{method}'){_scaling(mean, std)}"


def _scaling(mean: Channels, std: Channels) -> str:
    """Nothing for the range [-1, 1], which the models give uint8 images by themselves."""
    half = (0.5, (0.5, 0.5, 0.5))
    return "" if mean in half and std in half else f"|normalize({mean}, {std})"


PIPELINES: dict[str, Callable[..., str]] = {
    "official_train": _official_train,
    "official_eval": _official_eval,
    "big_vision_eval": _big_vision_eval,
    "timm_eval": _timm_eval,
    "deit_eval": _deit_eval,
    "huggingface_eval": _huggingface_eval,
}
