"""Images in shapes of their own, as batches: NaFlex of SigLIP 2 (2502.14786), after NaViT.

Each image is a row of N patches of p x p pixels, line by line; after its own, a row has padding,
which no token attends to. B: batch, N: patches of a row, C: channels.
"""

import jax
import jax.numpy as jnp
from flax import struct


class Layout(struct.PyTreeNode):
    """Where the patches of rows are, and which are padding."""

    grid: jax.Array  # int32 [B, 2], rows and columns of each image
    num_patches: int = struct.field(pytree_node=False)  # N
    is_padded: bool = struct.field(pytree_node=False, default=True)

    def lengths(self, num_tokens: int) -> jax.Array | None:
        """How many of `num_tokens` are real, int32 [B]; None: all.

        The last N of them are the patches.
        """
        if not self.is_padded:
            return None
        return num_tokens - self.num_patches + self.grid[:, 0] * self.grid[:, 1]

    def mask(self, num_tokens: int) -> jax.Array | None:
        """Which tokens are real, bool [B, num_tokens]; None: all."""
        lengths = self.lengths(num_tokens)
        return None if lengths is None else jnp.arange(num_tokens)[None] < lengths[:, None]

    def cells(self) -> tuple[jax.Array, jax.Array]:
        """Row and column of each patch, twice [B, N]; of padding any in the image."""
        rows, columns = self.grid[:, :1], self.grid[:, 1:]
        index = jnp.arange(self.num_patches)[None]
        return jnp.minimum(index // columns, rows - 1), index % columns


class Patches(struct.PyTreeNode):
    """The input of a model for images of any shape, in place of [B, H, W, C]."""

    pixels: jax.Array  # [B, N, p * p * C]
    grid: jax.Array  # int32 [B, 2], rows and columns of each image

    @property
    def layout(self) -> Layout:
        return Layout(self.grid, self.pixels.shape[1])

    def __len__(self) -> int:
        return len(self.pixels)


def layout_of(images: jax.Array | Patches) -> Layout | None:
    """None for images [B, H, W, C]."""
    return images.layout if isinstance(images, Patches) else None
