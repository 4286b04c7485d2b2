"""One real batch as a picture, to see what the model will see."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from vit_jax.data.pipeline import train_batches
from vit_jax.errors import UserError
from vit_jax.run import Run

MAX_IMAGES = 32


def save_batch_picture(run: Run, path: Path) -> int:
    """Writes the first images of the first batch, with their classes; returns how many.

    They are read, augmented and ordered as in training, before mixing.

    Raises:
      UserError: an image cannot be read, or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("The picture needs matplotlib: pip install 'vit_jax[embedded]'.") from None
    count = min(MAX_IMAGES, run.batch_size)
    rows = np.arange(count)
    with train_batches(
        run.dataset,
        batch_size=run.batch_size,
        repeated_augmentation=run.config.dataset.repeated_augmentation,
        seed=run.config.seed,
        total_steps=1,
        rows=rows,
    ) as batches:
        batch = next(iter(batches))
    columns = math.ceil(math.sqrt(2 * count))
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(1.6 * columns, 1.8 * lines))
    for number, (image, label) in enumerate(zip(batch["image"], batch["label"], strict=True)):
        axes = figure.add_subplot(lines, columns, number + 1)
        axes.imshow(as_uint8(image), cmap="gray" if image.shape[-1] == 1 else None)
        axes.set_title(run.dataset.class_names[label][:18], fontsize=7)
        axes.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    return count


def as_uint8(image: np.ndarray) -> np.ndarray:
    """Pixels [H, W, C] as they are shown; floats are stretched from their own range."""
    if image.dtype == np.uint8:
        return image
    low, high = float(image.min()), float(image.max())
    return np.asarray((image - low) / max(high - low, 1e-6) * 255, np.uint8)
