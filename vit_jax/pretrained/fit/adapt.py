"""Adapts loaded parameters to another model: heads, tokens, positions, patches and channels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.models.family import axis_of
from vit_jax.parameters.table import ParameterTable, table_of
from vit_jax.pretrained.fit.mismatch import Kinds, describe_mismatch
from vit_jax.pretrained.fit.resize import (
    CHANNEL_METHODS,
    METHODS,
    find_source_grid,
    interpolate_offset_grid,
    interpolate_offsets,
    interpolate_posembed,
    mix_channels,
    replace_prefix,
    resize_patch_kernel,
)
from vit_jax.pretrained.formats.stored import Grid
from vit_jax.pretrained.infer import position_tokens
from vit_jax.wording import counted, list_names


def adapt_params(
    loaded: Mapping[str, Any],
    like: Mapping[str, Any],
    *,
    kinds: Kinds,
    grid: Grid | None,
    source_grid: Grid | None = None,
    reset_head: bool = True,
    posemb: str = "bilinear",
    resize_patches: bool = False,
    channels: str = "",
    class_token: str = "",
    dropped: Mapping[str, str] | None = None,
    changed: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fits `loaded` to the names and shapes of `like` for fine-tuning (paper, section 3.2).

    `pre_logits` is kept if `like` has it, and dropped if not, unless a head that is kept
    depends on it. Arrays that need no change are not copied.

    Args:
      loaded, like: flat names to arrays, loop form; `like`, the new model, may be shapes only.
      kinds: of both models, names in `MODELS`.
      grid, source_grid: rows and columns of tokens of `like` and `loaded`; None: square.
      reset_head: take `head` and `head_dist` from `like`; if False they must fit.
      posemb: interpolation of position embeddings, a key of `resize.METHODS`.
      resize_patches: resize the patch embedding to the model's patch size (`resize_patch_kernel`).
      channels: how to change the input channels, one of `resize.CHANNEL_METHODS`, or "".
      class_token: "add" adds class and distillation tokens that `loaded` lacks, as zeros with
        zero positions; "drop" removes those that `like` lacks; "" requires the same tokens.
      dropped, changed: names that the reader left out, or did not read bit for bit -> why.

    Returns:
      (flat names to float32 arrays as in `like`, report). What is reset is taken from `like`; if
      that is a shape, the kernel of a head is zero. The
      report has every name of `like` in exactly one of `loaded` (unchanged), `adapted` (name ->
      how, such as "bilinear 14x14 -> 24x18") and `reset`; `dropped` (name -> why) has other names.

    Raises:
      UserError: arrays are missing, unexpected or have another shape (all are listed, with the
        config key that resolves each); an unknown option or grid.
    """
    check_known("pretrained.posemb", posemb, METHODS)
    check_known("pretrained.channels", channels, ("", *CHANNEL_METHODS))
    check_known("pretrained.class_token", class_token, ("", "add", "drop"))
    theirs, ours = map(table_of, kinds)
    fit = _Fit(dict(loaded), like, theirs, ours, dict(dropped or {}), dict(changed or {}))
    tokens = position_tokens(loaded, theirs)
    fit.tokens(class_token)
    reset = fit.heads(reset_head)
    if reset_head:
        reset += fit.last_norm()
    tokens = fit.token_positions(tokens)
    fit.all_positions(tokens, grid, source_grid, posemb)
    if resize_patches:
        fit.patches()
    if channels:
        fit.channels(channels)
    kept = {name: leaf for name, leaf in like.items() if name not in reset}
    if problem := describe_mismatch(fit.arrays, kept, {**fit.arrays, **loaded}, kinds):
        raise UserError(problem)
    report = {
        "loaded": [name for name in kept if name not in fit.adapted],
        "adapted": {name: how for name, how in fit.adapted.items() if name in kept},
        "reset": reset,
        "dropped": fit.dropped,
    }
    heads = ours.with_role("head", like)
    new = {name: _zero_kernel(name, like[name]) if name in heads else like[name] for name in reset}
    return {
        name: new[name] if name in new else np.asarray(fit.arrays[name], np.float32)
        for name in like
    }, report


def _interpolation(method: str, old: Grid, new: Grid) -> list[str]:
    return [] if old == new else [f"{method} {old[0]}x{old[1]} -> {new[0]}x{new[1]}"]


def _zero_kernel(name: str, leaf: Any) -> Any:
    """Of a shape alone: a new head's kernel is zero (section 3.2), whatever a new model's is."""
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct) and name.endswith("/kernel")
    return np.zeros(leaf.shape, np.float32) if is_shape else leaf


def report_text(report: Mapping[str, Any]) -> str:
    """The report of `adapt_params`, one line per kind; empty kinds are omitted except the first."""
    lines = [f"loaded: {counted(len(report['loaded']), 'array')} unchanged"]
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
    """Arrays being adapted to another model, and the changes made so far."""

    arrays: dict[str, Any]
    like: Mapping[str, Any]
    theirs: ParameterTable  # of the file's model
    ours: ParameterTable  # of the model to fill
    dropped: dict[str, str]
    adapted: dict[str, str]

    def _replace(self, name: str, array: np.ndarray, how: str) -> None:
        self.arrays[name] = array
        self.adapted[name] = f"{self.adapted[name]}, {how}" if name in self.adapted else how

    def _drop(self, name: str, why: str) -> None:
        del self.arrays[name]
        self.dropped[name] = why

    def _role(self, name: str) -> str:
        return self.ours.role_of(name) or self.theirs.role_of(name)

    def _title(self, token: str) -> str:
        table = self.ours if self.ours.has(token) else self.theirs
        return table.find(token).row.title

    def tokens(self, class_token: str) -> None:
        """Adds or drops class and distillation tokens; `positions` handles their positions."""
        ours = self.ours.with_role("token", self.like)
        theirs = self.theirs.with_role("token", self.arrays)
        for token in dict.fromkeys([*ours, *theirs]):
            if class_token == "drop" and token not in self.like:
                self._drop(token, f"{self._title(token)}, dropped")
            elif class_token == "add" and token not in self.arrays:
                zero = np.zeros(self.like[token].shape, np.float32)  # [1, 1, D]
                self._replace(token, zero, f"{self._title(token)} added, zero")

    def heads(self, reset_head: bool) -> list[str]:
        """Drops what is not kept, and returns the names of `like` that are reset."""
        heads = [name for name in self.like if self.ours.role_of(name) == "head"]
        dropped_token = self.theirs.with_role("token", self.dropped)
        for name in list(self.arrays):
            role = self._role(name)
            if role == "training" and name not in self.like:
                self._drop(name, "only used in its pre-training task")
            elif role == "head" and reset_head:
                self._drop(name, "pre-training head, reset")
            elif role == "head" and not heads:
                self._drop(name, "the model has no head")
            elif role == "head" and name not in self.like and dropped_token:
                self._drop(name, f"head of the dropped {self._title(dropped_token[-1])}")
        # A kept head was trained on top of pre_logits, and would see other features without them.
        keeps_head = any(self._role(name) == "head" for name in self.arrays)
        if not keeps_head and not self.ours.with_role("pre_logits", self.like):
            for name in self.theirs.with_role("pre_logits", self.arrays):
                self._drop(name, "the model has no pre_logits")
        return heads if reset_head else []

    def last_norm(self) -> list[str]:
        """Drops the file's norm before the head for another of the model's, which is reset.

        So MAE is fine-tuned (2111.06377; `main_finetune.py`): with the norm after pooling.
        """
        ours = set(self.ours.last_norms(self.like))
        theirs = set(self.theirs.last_norms(self.arrays))
        if ours <= theirs or theirs <= ours:
            return []
        for name in [n for n in self.arrays if n.rpartition("/")[0] in theirs - ours]:
            self._drop(name, "the model's last norm is another")
        return [n for n in self.like if n.rpartition("/")[0] in ours - theirs]

    def token_positions(self, tokens: list[str]) -> list[str]:
        """Adds positions of tokens to these where the model's positions are the patches' alone.

        Returns the tokens whose positions are still in the array.
        """
        ours = self.ours.with_role("positions", self.like)
        theirs = self.theirs.with_role("positions", self.arrays)
        if len(ours) != 1 or len(theirs) != 1 or ours == theirs:
            return tokens
        if self.ours.find(ours[0]).row.of_tokens:
            return tokens
        positions = np.asarray(self.arrays.pop(theirs[0]))  # [1, P + h*w, D]
        for i, token in enumerate(tokens):
            array = np.asarray(self.arrays[token]) + positions[:, i : i + 1]
            self._replace(token, array, "its position added")
        self._replace(ours[0], positions[:, len(tokens) :], "those of patches")
        return []

    def all_positions(
        self, tokens: list[str], grid: Grid | None, source_grid: Grid | None, method: str
    ) -> None:
        """Interpolates positions of every kind; `tokens` of the file have rows among them."""
        both = self.like.keys() & self.arrays.keys()
        for name in self.ours.with_role("positions", both):
            self.positions(name, tokens, grid, source_grid, method)
        for name in self.ours.with_role("axis_positions", both):
            self.axis_positions(name, method)
        for name in self.ours.with_role("offsets", both):
            self.offsets(name, tokens, grid, source_grid, method)
        for name in self.ours.with_role("offset_grid", both):
            self.offset_grid(name, method)

    def positions(
        self, name: str, tokens: list[str], grid: Grid | None, source_grid: Grid | None, method: str
    ) -> None:
        """Adapts positions to the model's grid and tokens; `tokens` are those of the file's."""
        new, before = position_tokens(self.like, self.ours), np.asarray(self.arrays[name])
        grid = grid or find_source_grid(self.like[name].shape, (1, 1), len(new))
        source_grid = find_source_grid(before.shape, grid, len(tokens), source_grid)
        how = _interpolation(method, source_grid, grid)
        how += [f"{self._title(t)} and its position dropped" for t in tokens if t not in new]
        how += [f"zero position of the {self._title(t)} added" for t in new if t not in tokens]
        if how:
            posemb = interpolate_posembed(before, grid, len(tokens), source_grid, method)
            self._replace(name, replace_prefix(posemb, tokens, new), ", ".join(how))

    def axis_positions(self, name: str, method: str) -> None:
        """Adapts positions, or offsets, along an axis of the grid to another length."""
        before, after = np.asarray(self.arrays[name]), self.like[name].shape[0]
        if before.ndim == 2 and before.size and len(before) != after:
            matrix = METHODS[method](len(before), after)
            array = (matrix @ before.astype(np.float64)).astype(before.dtype)
            self._replace(name, array, f"{method} {len(before)} -> {after}")

    def offsets(
        self, name: str, tokens: list[str], grid: Grid | None, source_grid: Grid | None, method: str
    ) -> None:
        """Adapts relative positions, [2 * N - 1, d], to the model's grid and tokens."""
        new, before = position_tokens(self.like, self.ours), np.asarray(self.arrays[name])
        if before.ndim != 2:
            return  # reported as a mismatch
        new_shape, old_shape = ((1, (x.shape[0] + 1) // 2, 1) for x in (self.like[name], before))
        grid = grid or find_source_grid(new_shape, (1, 1), len(new))
        source_grid = find_source_grid(old_shape, grid, len(tokens), source_grid)
        how = _interpolation(method, source_grid, grid)
        if how:
            before = interpolate_offsets(before, grid, source_grid, method)
        how += [f"offsets of the {self._title(t)} dropped" for t in tokens if t not in new]
        how += [f"zero offsets of the {self._title(t)} added" for t in new if t not in tokens]
        if (added := len(new) - len(tokens)) > 0:
            before = np.pad(before, ((added, added), (0, 0)))
        elif added:
            before = before[-added:added]
        if how:
            self._replace(name, before, ", ".join(how))

    def offset_grid(self, name: str, method: str) -> None:
        """Adapts relative positions by row and column, [2 h - 1, 2 w - 1, d], to another grid."""
        before, after = np.asarray(self.arrays[name]), self.like[name].shape
        if before.ndim == 3 and before.shape[:2] != after[:2]:
            old, new = ("x".join(str((n + 1) // 2) for n in s[:2]) for s in (before.shape, after))
            array = interpolate_offset_grid(before, after[:2], method)
            self._replace(name, array, f"{method} {old} -> {new}")

    def patches(self) -> None:
        for name in self.ours.with_role("patches", self.like.keys() & self.arrays.keys()):
            before, after = (params[name].shape[:2] for params in (self.arrays, self.like))
            if before != after and self.arrays[name].ndim == 4:
                how = f"pseudo-inverse resize {before[0]}x{before[1]} -> {after[0]}x{after[1]}"
                kernel = np.asarray(self.arrays[name])
                self._replace(name, resize_patch_kernel(kernel, after), how)

    def channels(self, method: str) -> None:
        name = self.ours.image_kernel(self.like)
        before, after = (axis_of(params, name, 4, 2) for params in (self.arrays, self.like))
        if before and after and before != after:
            how = f"{method} {before} -> {after} channels"
            kernel = np.asarray(self.arrays[name])
            self._replace(name, mix_channels(kernel, after, method), how)
