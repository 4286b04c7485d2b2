"""The first convolution for another size of patch, or for images with other channels.

`M` below is a mixing matrix [C, C']: the new kernel's channels are the old one's times M, so the
new convolution of an image x' with C' channels is the old convolution of M x', which has C.

* `sum`: M = 1 / C'. A grey image (all channels equal) keeps its tokens.
* `mean`: M = 1 / C. Every new channel weighs as much as one of the old ones did: grey images are
  seen C' / C times as bright.
* `tile`: M[k, c] = C / C' where c mod C = k, else 0. Where C' is a multiple of C, an image repeated
  along its channels keeps its tokens. With C' < C the last C - C' channels are lost.

A hybrid reads the image by `conv_root`, whose kernel is standardised at every call: each output
channel is given mean 0 and deviation 1. `tile` to a multiple of C is then still the old model, but
for the epsilons of two norms. `sum` and `mean` are one model, whose output channels for grey images
are the old ones times a positive factor each, which the group norm cannot take out: features are
similar, not equal. For `tile` to anything else nothing is promised.
"""

from __future__ import annotations

import numpy as np

from vit_jax.pretrained.fit.resample import apply_along_rows_and_columns, half_pixel_linear

CHANNEL_METHODS = ("sum", "mean", "tile")


def resize_patch_kernel(kernel: np.ndarray, patch: tuple[int, int]) -> np.ndarray:
    """Kernel of a patch embedding for patches of another size ("FlexiViT", 2212.08013).

    With B the matrix of the bilinear resize of a patch (pixel centres, not antialiased) the new
    kernel is w' = pinv(B^T) w: of all kernels the one for which the token <B x, w'> of the resized
    patch is closest to <x, w>, in the mean square over patches x of white noise. For larger patches
    the two are equal for every x. B is a product of one matrix for rows and one for columns, hence
    so is pinv(B^T).

    A constant image keeps its token down to half the size. Below that B leaves pixels out, and the
    token of a smooth image shrinks (to 1/4 for 16 -> 4): fine for weights trained this way, as
    FlexiViT's, and a poor start for others.

    Args:
      kernel: [h, w, C, D].
      patch: height and width wanted.

    Returns:
      [*patch, C, D], of the type of `kernel`; the same array where the size is unchanged.
    """
    if tuple(patch) == kernel.shape[:2]:
        return kernel
    rows, columns = (
        np.linalg.pinv(half_pixel_linear(old, new).T)  # [new, old]
        for old, new in zip(kernel.shape[:2], patch, strict=True)
    )
    return apply_along_rows_and_columns(kernel, rows, columns).astype(kernel.dtype)


def mixing_matrix(channels: int, new_channels: int, method: str) -> np.ndarray:
    """`M` [channels, new_channels] of this module's docstring."""
    if method == "tile":
        repeated = np.arange(new_channels)[None, :] % channels == np.arange(channels)[:, None]
        return repeated * (channels / new_channels)
    total = new_channels if method == "sum" else channels
    return np.full((channels, new_channels), 1.0 / total)


def mix_channels(kernel: np.ndarray, new_channels: int, method: str) -> np.ndarray:
    """A kernel for images of `new_channels` channels: [h, w, C, D] -> [h, w, C', D].

    As many channels as there are give back the same array.
    """
    mixing = mixing_matrix(kernel.shape[2], new_channels, method)  # [C, C']
    if kernel.shape[2] == new_channels:
        return kernel
    return (mixing.T @ kernel.astype(np.float64)).astype(kernel.dtype)  # [h, w, C', D]
