"""From the pixels that the host sends to the numbers that the models take."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def scale_images(images: jax.Array) -> jax.Array:
    """uint8 [B, H, W, C] -> float32 in [-1, 1], the range of the published models.

    Floats come back as they are: the preprocessing has scaled them (`value_range`).
    """
    if images.dtype == jnp.uint8:
        return jnp.asarray(images, jnp.float32) / 127.5 - 1.0
    return images
