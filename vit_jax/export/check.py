"""Whether an exported model still computes what the model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vit_jax.data import preprocess
from vit_jax.errors import UserError
from vit_jax.export.settings import OUTPUTS, ExportSettings
from vit_jax.pretrained.formats.description import Description


def largest_difference(
    reopened: Callable[[np.ndarray], Any],
    module: Any,
    params: Any,
    description: Description,
    settings: ExportSettings,
) -> float:
    """Compares what was read again with the model itself on seeded images, on CPU.

    Args:
      reopened: images to outputs.
      module, params, description: of the model.
      settings: what `reopened` takes and gives.

    Returns:
      The largest difference in `settings.unit`; infinite where shapes or types differ.
    """
    apply = jax.jit(lambda p, x: module.apply({"params": p}, x, train=False))
    worst = 0.0
    # An accelerator would round products to fewer bits than either file.
    with jax.default_device(cpu_device()):
        # A free batch has to work for several sizes.
        for batch in (1, 3) if settings.batch is None else (settings.batch,):
            pixels = sample_images((batch, *description.image_shape))
            floats = scale_pixels(description, pixels)
            logits = apply(params, floats)
            expected = np.asarray(OUTPUTS[settings.output](logits))
            found = np.asarray(reopened(pixels if settings.input == "uint8" else floats))
            unit = float(np.std(logits)) if settings.output == "logits" else 1.0
            unit = unit or float(np.max(np.abs(logits))) or 1.0  # logits may be all the same
            same = found.shape == expected.shape and found.dtype == expected.dtype
            difference = float(np.max(np.abs(found - expected))) / unit if same else np.inf
            worst = float(np.maximum(worst, difference))  # unlike max, keeps NaN
    return worst


def cpu_device() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise UserError(
            "the file is checked on the CPU, which JAX_PLATFORMS excludes; add ',cpu' to it."
        ) from error


def sample_images(shape: tuple[int, int, int, int]) -> np.ndarray:
    """Coloured patches with a little noise, uint8: images that differ as photographs do."""
    rng = np.random.default_rng(0)
    batch, height, width, channels = shape
    coarse = rng.integers(0, 224, (batch, 4, 4, channels))
    rows, columns = np.arange(height) * 4 // height, np.arange(width) * 4 // width
    patches = coarse[:, rows][:, :, columns]  # [B, H, W, C]
    return (patches + rng.integers(0, 32, shape)).astype(np.uint8)


def pixel_scaling(description: Description) -> tuple[np.ndarray, np.ndarray]:
    """Factor and offset [1, 1, 1, C] that the model's preprocessing applies to pixels."""
    channels = description.image_shape[2]
    black, white = (
        scale_pixels(description, np.full((1, 1, 1, channels), value, np.uint8))
        for value in (0, 255)
    )
    return (white - black) / np.float32(255), black


def scale_pixels(description: Description, images: np.ndarray) -> np.ndarray:
    """uint8 [B, H, W, C] -> the floats that the model takes."""
    spec = description.eval_preprocess
    for op in preprocess.parse(spec).ops if spec else ():
        if isinstance(op, preprocess.ValueRange | preprocess.Normalize):
            rng = np.random.default_rng(0)  # they draw nothing
            return np.stack([op.apply(image, rng) for image in images])
    return images.astype(np.float32) / np.float32(127.5) - np.float32(1)
