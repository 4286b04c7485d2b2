"""Making loaded parameters fit another model: heads, tokens, positions, patches and channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError, check_known
from vit_jax.models.create import TOKENS, role_of
from vit_jax.pretrained.fit.mismatch import (
    PATCH_KERNEL,
    describe_mismatch,
    has_group,
    image_kernel,
)
from vit_jax.pretrained.fit.patches import CHANNEL_METHODS, mix_channels, resize_patch_kernel
from vit_jax.pretrained.fit.posemb import (
    METHODS,
    POSEMB,
    find_source_grid,
    interpolate_posembed,
    replace_prefix,
)
from vit_jax.pretrained.fit.report import LoadReport

TOKEN_NAMES = {"cls": "class token", "dist": "distillation token"}


def adapt_params(
    loaded: Mapping[str, Any],
    like: Mapping[str, Any],
    *,
    grid: tuple[int, int],
    source_grid: tuple[int, int] | None = None,
    reset_head: bool = True,
    posemb: str = "bilinear",
    resize_patches: bool = False,
    channels: str = "",
    class_token: str = "",
    dropped: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], LoadReport]:
    """Fits `loaded` to the names and shapes of `like` for fine-tuning (paper, section 3.2).

    Heads (`head`, and `head_dist` of a distilled model) are those of `like` (zeros, in a new model)
    unless `reset_head` is False. `pre_logits` is kept where `like` has it, and dropped where it has
    none and no head that is kept stands on it. Position embeddings are interpolated. Arrays that
    need no change are passed on and not copied.

    Args:
      loaded: flat names to arrays, loop form of the blocks.
      like: flat names to arrays, or shapes, of a freshly initialised model, loop form.
      grid: rows and columns of tokens of the new model.
      source_grid: those of `loaded`, where it is not a square.
      reset_head: take the heads from `like`; with False they must fit.
      posemb: how position embeddings are interpolated, a key of `posemb.METHODS`.
      resize_patches: give the patch embedding the model's patch size (`resize_patch_kernel`).
      channels: how the convolution that reads the image is given other input channels, one of
        `patches.CHANNEL_METHODS`; "" demands equal channels.
      class_token: "add" gives class and distillation tokens that `loaded` lacks, zero at a zero
        position; "drop" takes out those that `like` lacks, with their positions; "" demands the
        same tokens.
      dropped: names that the reader of the file left out -> why; they become part of the report.

    Returns:
      (flat names to float32 arrays, report). Every name of `like` is in the result, in its order
      and with its shape; what is reset is the leaf of `like` itself, which may be a mere shape.

    Raises:
      UserError: an array is missing, unexpected or of another shape. All kinds are named, with the
        config key that would resolve each. Also for unknown options and unknown grids.
    """
    check_known("pretrained.posemb", posemb, METHODS)
    check_known("pretrained.channels", channels, ("", *CHANNEL_METHODS))
    check_known("pretrained.class_token", class_token, ("", "add", "drop"))
    arrays = dict(loaded)
    adapted: dict[str, str] = {}
    left_out = dict(dropped or {})

    tokens = tuple(token for token in TOKENS if token in arrays)
    _fit_tokens(arrays, like, class_token, adapted, left_out)
    reset = _fit_heads(arrays, like, reset_head, left_out)
    if POSEMB in arrays and POSEMB in like:
        _fit_posemb(arrays, like, tokens, grid, source_grid, posemb, adapted)
    if resize_patches:
        _fit_patches(arrays, like, adapted)
    if channels:
        _fit_channels(arrays, like, channels, adapted)

    kept = {name: leaf for name, leaf in like.items() if name not in reset}
    if problem := describe_mismatch(arrays, kept, {**arrays, **loaded}):
        raise UserError(problem)
    report = LoadReport(
        loaded=tuple(name for name in kept if name not in adapted),
        adapted=adapted,
        reset=tuple(reset),
        dropped=left_out,
    )
    return {
        name: leaf if name in reset else np.asarray(arrays[name], np.float32)
        for name, leaf in like.items()
    }, report


def _fit_tokens(
    arrays: dict[str, Any],
    like: Mapping[str, Any],
    class_token: str,
    adapted: dict[str, str],
    left_out: dict[str, str],
) -> None:
    """Class and distillation token; their positions are `_fit_posemb`'s."""
    for token in TOKENS:
        if class_token == "drop" and token in arrays and token not in like:
            del arrays[token]
            left_out[token] = f"{TOKEN_NAMES[token]}, dropped"
        elif class_token == "add" and token in like and token not in arrays:
            arrays[token] = np.zeros(like[token].shape, np.float32)  # [1, 1, D]
            adapted[token] = f"{TOKEN_NAMES[token]} added, zero"


def _fit_heads(
    arrays: dict[str, Any], like: Mapping[str, Any], reset_head: bool, left_out: dict[str, str]
) -> list[str]:
    """Takes out what is not to be kept, and returns the names of `like` that are reset."""
    has_head = any(role_of(name) == "head" for name in like)
    for name in list(arrays):
        role = role_of(name)
        if role == "training" and name not in like:
            why = "only used by the task it was trained for"
        elif role != "head":
            continue
        elif reset_head:
            why = "pre-training head, reset"
        elif not has_head:
            why = "the model has no head"
        elif name.startswith("head_dist/") and "dist" in left_out:
            why = "head of the dropped distillation token"
        else:
            continue  # kept: it has to fit
        left_out[name] = why
        del arrays[name]
    # A head that is kept was trained on pre_logits; without them it would be given other features.
    if not has_group(like, "pre_logits/") and not any(role_of(name) == "head" for name in arrays):
        for name in [name for name in arrays if role_of(name) == "pre_logits"]:
            left_out[name] = "the model has none"
            del arrays[name]
    return [name for name in like if role_of(name) == "head"] if reset_head else []


def _fit_posemb(
    arrays: dict[str, Any],
    like: Mapping[str, Any],
    tokens: tuple[str, ...],
    grid: tuple[int, int],
    source_grid: tuple[int, int] | None,
    method: str,
    adapted: dict[str, str],
) -> None:
    """The model's grid, and a row for each of its tokens; `tokens` are those of the file."""
    before = np.asarray(arrays[POSEMB])
    source_grid = find_source_grid(before.shape, grid, len(tokens), source_grid)
    posemb = interpolate_posembed(before, grid, len(tokens), source_grid, method)
    how = []
    if posemb is not before:
        how.append(f"{method} {source_grid[0]}x{source_grid[1]} -> {grid[0]}x{grid[1]}")
    new_tokens = tuple(token for token in TOKENS if token in like)
    if new_tokens != tokens:
        posemb = replace_prefix(posemb, tokens, new_tokens)
        how += [f"{TOKEN_NAMES[t]} and its position dropped" for t in tokens if t not in new_tokens]
        how += [
            f"zero position of the {TOKEN_NAMES[t]} added" for t in new_tokens if t not in tokens
        ]
    if how:
        arrays[POSEMB] = posemb
        adapted[POSEMB] = ", ".join(how)


def _fit_patches(arrays: dict[str, Any], like: Mapping[str, Any], adapted: dict[str, str]) -> None:
    if not _differs_along(arrays, like, PATCH_KERNEL, slice(0, 2)):
        return
    kernel, patch = np.asarray(arrays[PATCH_KERNEL]), tuple(like[PATCH_KERNEL].shape[:2])
    arrays[PATCH_KERNEL] = resize_patch_kernel(kernel, patch)
    height, width = kernel.shape[:2]
    _note(adapted, PATCH_KERNEL, f"pseudo-inverse resize {height}x{width} -> {patch[0]}x{patch[1]}")


def _fit_channels(
    arrays: dict[str, Any], like: Mapping[str, Any], method: str, adapted: dict[str, str]
) -> None:
    name = image_kernel(like)
    if not _differs_along(arrays, like, name, slice(2, 3)):
        return
    kernel, new = np.asarray(arrays[name]), like[name].shape[2]
    arrays[name] = mix_channels(kernel, new, method)
    old = kernel.shape[2]
    how = {
        "sum": f"summed over {old} channels" + (f", spread over {new}" if new > 1 else ""),
        "mean": f"mean of {old} channels" + (f", for each of {new}" if new > 1 else ""),
        "tile": f"{old} channels tiled to {new}, times {old / new:.4g}",
    }
    _note(adapted, name, how[method])


def _differs_along(
    arrays: Mapping[str, Any], like: Mapping[str, Any], name: str, axes: slice
) -> bool:
    """Whether both have the kernel `name` [h, w, C, D], not empty, and `axes` differ."""
    if name not in arrays or name not in like:
        return False
    before, after = tuple(arrays[name].shape), tuple(like[name].shape)
    if len(before) != 4 or len(after) != 4 or not min(before):
        return False  # damaged: named as a mismatch
    return before[axes] != after[axes]


def _note(adapted: dict[str, str], name: str, how: str) -> None:
    adapted[name] = f"{adapted[name]}, {how}" if name in adapted else how
