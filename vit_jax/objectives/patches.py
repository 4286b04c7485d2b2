"""Patches of images as targets, and what is drawn for an image."""

import jax
import jax.numpy as jnp


def split_patches(images: jax.Array, patch: tuple[int, int]) -> jax.Array:
    """[B, H, W, C] -> [B, P, h, w, C], in the order of tokens; incomplete patches are dropped."""
    (height, width), (batch_size, *sides, channels) = patch, images.shape
    rows, columns = sides[0] // height, sides[1] // width
    x = images[:, : rows * height, : columns * width]
    x = jnp.reshape(x, (batch_size, rows, height, columns, width, channels))
    x = jnp.swapaxes(x, 2, 3)  # [B, rows, columns, h, w, C]
    return jnp.reshape(x, (batch_size, rows * columns, height, width, channels))


def pixel_seeds(images: jax.Array) -> jax.Array:
    """uint32 [B], a function of each image's pixels: equal in every batch and at every step."""
    pixels = jnp.asarray(jnp.round((images + 1.0) * 127.5), jnp.int32)  # negative if normalised
    return jnp.sum(pixels.astype(jnp.uint32), axis=(1, 2, 3), dtype=jnp.uint32)
