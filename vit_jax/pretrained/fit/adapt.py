"""Making loaded parameters fit another model: heads, tokens, positions, patches and channels."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vit_jax.errors import UserError, check_known, counted, list_names
from vit_jax.models.create import TOKENS, role_of
from vit_jax.pretrained.fit.resize import (
    CHANNEL_METHODS,
    METHODS,
    find_source_grid,
    interpolate_posembed,
    mix_channels,
    replace_prefix,
    resize_patch_kernel,
)
from vit_jax.pretrained.infer import (
    BIT_STEM_KERNEL,
    PATCH_KERNEL,
    POSEMB,
    Params,
    axis_of,
    image_kernel,
    model_sizes,
    patch_sides,
)

TOKEN_NAMES = {"cls": "class token", "dist": "distillation token"}


def adapt_params(
    loaded: Mapping[str, Any],
    like: Mapping[str, Any],
    *,
    grid: tuple[int, int] | None,
    source_grid: tuple[int, int] | None = None,
    reset_head: bool = True,
    posemb: str = "bilinear",
    resize_patches: bool = False,
    channels: str = "",
    class_token: str = "",
    dropped: Mapping[str, str] | None = None,
    changed: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fits `loaded` to the names and shapes of `like` for fine-tuning (paper, section 3.2).

    `pre_logits` is kept where `like` has it, and dropped where it has none and no head that is kept
    stands on it. Arrays that need no change are not copied.

    Args:
      loaded, like: flat names to arrays, loop form; of `like`, the new model, shapes will do.
      grid, source_grid: rows and columns of tokens of `like` and `loaded`; None: a square.
      reset_head: take `head` and `head_dist` from `like`; with False they must fit.
      posemb: how position embeddings are interpolated, a key of `resize.METHODS`.
      resize_patches: give the patch embedding the model's patch size (`resize_patch_kernel`).
      channels: how other input channels are made, one of `resize.CHANNEL_METHODS`, or "".
      class_token: "add" gives class and distillation tokens that `loaded` lacks, zero at a zero
        position; "drop" takes out those that `like` lacks; "" demands the same tokens.
      dropped, changed: names that the reader left out, or read otherwise than bit for bit -> why.

    Returns:
      (flat names to float32 arrays as in `like`, report). What is reset is the leaf of `like`. The
      report has every name of `like` in exactly one of `loaded` (as they are), `adapted` (name ->
      how, as "bilinear 14x14 -> 24x18") and `reset`; `dropped` (name -> why) has other names.

    Raises:
      UserError: arrays are missing, unexpected or of another shape (all are named, with the config
        key that would resolve each); an unknown option or grid.
    """
    check_known("pretrained.posemb", posemb, METHODS)
    check_known("pretrained.channels", channels, ("", *CHANNEL_METHODS))
    check_known("pretrained.class_token", class_token, ("", "add", "drop"))
    fit = _Fit(dict(loaded), like, dict(dropped or {}), dict(changed or {}))
    tokens = [token for token in TOKENS if token in loaded]
    fit.tokens(class_token)
    reset = fit.heads(reset_head)
    if POSEMB in fit.arrays and POSEMB in like:
        fit.positions(tokens, grid, source_grid, posemb)
    if resize_patches:
        fit.patches()
    if channels:
        fit.channels(channels)
    kept = {name: leaf for name, leaf in like.items() if name not in reset}
    if problem := describe_mismatch(fit.arrays, kept, {**fit.arrays, **loaded}):
        raise UserError(problem)
    report = {
        "loaded": [name for name in kept if name not in fit.adapted],
        "adapted": {name: how for name, how in fit.adapted.items() if name in kept},
        "reset": reset,
        "dropped": fit.dropped,
    }
    return {
        name: leaf if name in reset else np.asarray(fit.arrays[name], np.float32)
        for name, leaf in like.items()
    }, report


def report_text(report: Mapping[str, Any]) -> str:
    """The report of `adapt_params`, a line per kind; empty kinds are left out but for the first."""
    lines = [f"loaded: {counted(len(report['loaded']), 'array')} as they are"]
    for kind in ("adapted", "reset", "dropped"):
        names: dict[str, list[str]] = {}
        for name in report[kind]:
            reason = "" if kind == "reset" else f" ({report[kind][name]})"
            names.setdefault(reason, []).append(name)
        if names:
            groups = (f"{list_names(group)}{reason}" for reason, group in names.items())
            lines.append(f"{kind}: {'; '.join(groups)}")
    return "\n".join(lines)


@dataclasses.dataclass
class _Fit:
    """Arrays on their way into another model, and what was done to them on it."""

    arrays: dict[str, Any]
    like: Mapping[str, Any]
    dropped: dict[str, str]
    adapted: dict[str, str]

    def _replace(self, name: str, array: np.ndarray, how: str) -> None:
        self.arrays[name] = array
        self.adapted[name] = f"{self.adapted[name]}, {how}" if name in self.adapted else how

    def _drop(self, name: str, why: str) -> None:
        del self.arrays[name]
        self.dropped[name] = why

    def tokens(self, class_token: str) -> None:
        """Class and distillation token; `positions` does their positions."""
        for token in TOKENS:
            if class_token == "drop" and token in self.arrays and token not in self.like:
                self._drop(token, f"{TOKEN_NAMES[token]}, dropped")
            elif class_token == "add" and token in self.like and token not in self.arrays:
                zero = np.zeros(self.like[token].shape, np.float32)  # [1, 1, D]
                self._replace(token, zero, f"{TOKEN_NAMES[token]} added, zero")

    def heads(self, reset_head: bool) -> list[str]:
        """Takes out what is not to be kept, and returns the names of `like` that are reset."""
        heads = [name for name in self.like if role_of(name) == "head"]
        for name in list(self.arrays):
            role = role_of(name)
            if role == "training" and name not in self.like:
                self._drop(name, "only used by the task it was trained for")
            elif role == "head" and reset_head:
                self._drop(name, "pre-training head, reset")
            elif role == "head" and not heads:
                self._drop(name, "the model has no head")
            elif name.startswith("head_dist/") and "dist" in self.dropped:
                self._drop(name, "head of the dropped distillation token")
        # A head that is kept was trained on pre_logits, and without them sees other features.
        keeps_head = any(role_of(name) == "head" for name in self.arrays)
        if not keeps_head and not has_group(self.like, "pre_logits/"):
            for name in [name for name in self.arrays if role_of(name) == "pre_logits"]:
                self._drop(name, "the model has none")
        return heads if reset_head else []

    def positions(
        self,
        tokens: list[str],
        grid: tuple[int, int] | None,
        source_grid: tuple[int, int] | None,
        method: str,
    ) -> None:
        """The model's grid, and a row for each of its tokens; `tokens` are those of the file."""
        new = [token for token in TOKENS if token in self.like]
        grid = grid or find_source_grid(self.like[POSEMB].shape, (1, 1), len(new))
        before = np.asarray(self.arrays[POSEMB])
        source_grid = find_source_grid(before.shape, grid, len(tokens), source_grid)
        posemb = interpolate_posembed(before, grid, len(tokens), source_grid, method)
        how = []
        if posemb is not before:
            how.append(f"{method} {source_grid[0]}x{source_grid[1]} -> {grid[0]}x{grid[1]}")
        how += [f"{TOKEN_NAMES[t]} and its position dropped" for t in tokens if t not in new]
        how += [f"zero position of the {TOKEN_NAMES[t]} added" for t in new if t not in tokens]
        if how:
            self._replace(POSEMB, replace_prefix(posemb, tokens, new), ", ".join(how))

    def patches(self) -> None:
        before, after = patch_sides(self.arrays), patch_sides(self.like)
        if None not in before + after and before != after:
            how = f"pseudo-inverse resize {before[0]}x{before[1]} -> {after[0]}x{after[1]}"
            kernel = np.asarray(self.arrays[PATCH_KERNEL])
            self._replace(PATCH_KERNEL, resize_patch_kernel(kernel, after), how)

    def channels(self, method: str) -> None:
        name = image_kernel(self.like)
        before, after = (axis_of(params, name, 4, 2) for params in (self.arrays, self.like))
        if before and after and before != after:
            how = f"{method} {before} -> {after} channels"
            kernel = np.asarray(self.arrays[name])
            self._replace(name, mix_channels(kernel, after, method), how)


def describe_mismatch(arrays: Params, like: Params, original: Params) -> str:
    """One line that names what does not fit, and the way out; "" where all fits.

    `original` has the shapes from before adapting; what was left out or reset is in none of them.
    """
    different = [
        f"{name} is {tuple(original[name].shape)} and must be {tuple(like[name].shape)}"
        for name in like
        if name in arrays and tuple(arrays[name].shape) != tuple(like[name].shape)
    ]
    kinds = {
        "missing": [name for name in like if name not in arrays],
        "unexpected": [name for name in arrays if name not in like],
        "of another shape": different,
    }
    parts = [f"{len(names)} {kind} ({list_names(names)})" for kind, names in kinds.items() if names]
    if not parts:
        return ""
    hints = _option_hints(arrays, like) + _size_hints(arrays, like)
    hints = hints or ["make sure that the file is whole and of this model (model.*)"]
    return (
        f"the pre-trained parameters do not fit the model: {', '.join(parts)}. "
        f"Way out: {'; '.join(hints)}."
    )


def _option_hints(arrays: Params, like: Params) -> list[str]:
    """For what `pretrained.*` can adapt."""
    hints = []
    before, after = patch_sides(arrays), patch_sides(like)
    if None not in before + after and before != after:
        size = before[0] if before[0] == before[1] else before
        hints.append(f"pretrained.resize_patches=True or model.patch_size={size}")
    old, new = (axis_of(params, image_kernel(like), 4, 2) for params in (arrays, like))
    if None not in (old, new) and old != new:
        hints.append(
            f"pretrained.channels=sum, mean or tile, or images of {old} "
            f"{'channel' if old == 1 else 'channels'} (now {new})"
        )
    other = {
        "cls": ("model.classifier", "token", "gap or map"),
        "dist": ("model.name", "deit", "vit"),
    }
    for token, (key, having, lacking) in other.items():
        if token in arrays and token not in like:
            hints.append(f"pretrained.class_token=drop or {key}={having} (the file has {token!r})")
        elif token in like and token not in arrays:
            hints.append(
                f"pretrained.class_token=add or {key}={lacking} (the file has no {token!r})"
            )
    for name in like:
        if role_of(name) != "head" or not name.endswith("/kernel"):
            continue
        head = name.removesuffix("/kernel")
        old, new = (axis_of(params, name, 2, 1) for params in (arrays, like))
        if not has_group(arrays, f"{head}/"):
            hints.append(f"pretrained.reset_head=True (the file has no {head})")
        elif None not in (old, new) and old != new:
            hints.append(f"pretrained.reset_head=True ({head} has {old} classes, the model {new})")
    return hints


def _size_hints(arrays: Params, like: Params) -> list[str]:
    """For what only another model can resolve."""
    if (BIT_STEM_KERNEL in arrays) != (BIT_STEM_KERNEL in like):
        name = "bit" if BIT_STEM_KERNEL in arrays else "vit or deit"
        return [f"model.name={name}, which the file is of, and its sizes"]
    before, after = model_sizes(arrays), model_sizes(like)
    hints = [
        f"model.{key}={before[key]} (now {after[key]})"
        for key in before
        if before[key] != after[key]
        and (before[key] is not None or key in ("resnet_layers", "representation_size"))
    ]
    if has_group(arrays, "pre_logits/") and not has_group(like, "pre_logits/"):
        hints.append("pretrained.reset_head=True (the head kept stands on pre_logits)")
    has_map = has_group(arrays, "MAPHead_0/")
    if has_map != has_group(like, "MAPHead_0/"):
        hints.append(f"model.classifier={'map' if has_map else 'token or gap'}")
    has_blocks = before["num_layers"] is not None and after["num_layers"] is not None
    if has_blocks and (POSEMB in arrays) != (POSEMB in like):
        kind = "learned" if POSEMB in arrays else "sincos2d"
        hints.append(f"model.position_embedding={kind}")
    return hints


def has_group(names: Collection[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)
