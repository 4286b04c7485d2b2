"""Adapts loaded parameters to another model: heads, tokens, positions, patches and channels."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.models.family import axis_of
from vit_jax.parameters.table import ParameterTable, table_of
from vit_jax.pretrained.fit import resize
from vit_jax.pretrained.fit.mismatch import Kinds, describe_mismatch
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
    posemb: str = "auto",
    source_posemb: str = "",
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
      posemb: interpolation of positions, a key of `resize.METHODS`; `auto`: `source_posemb`, that
        of the library whose file it is, or if that is "" the official code's.
      resize_patches: resize the patch embedding to the model's patch size.
      channels: how to change the input channels, one of `resize.CHANNEL_METHODS`, or "".
      class_token: "add" adds class and distillation tokens that `loaded` lacks, as zeros with
        zero positions; "drop" removes those that `like` lacks; "" requires the same tokens.
      dropped, changed: names that the reader left out, or did not read bit for bit -> why.

    Returns:
      (flat names to float32 arrays as in `like`, report). The report has every name of `like` in
      exactly one of `loaded` (unchanged), `adapted` (name -> how, such as "bilinear 14x14 ->
      24x18") and `reset` (taken from `like`); `dropped` (name -> why) has other names.

    Raises:
      UserError: arrays are missing, unexpected or have another shape (all are listed, with the
        config key that resolves each); an unknown option or grid.
    """
    check_known("pretrained.posemb", posemb, ("auto", *resize.METHODS))
    check_known("pretrained.channels", channels, ("", *resize.CHANNEL_METHODS))
    check_known("pretrained.class_token", class_token, ("", "add", "drop"))
    theirs, ours = map(table_of, kinds)
    fit = _Fit(dict(loaded), like, theirs, ours, dict(dropped or {}), dict(changed or {}))
    tokens = position_tokens(loaded, theirs)
    fit.tokens(class_token)
    reset = fit.heads(reset_head)
    if reset_head:
        reset += fit.last_norm()
    tokens = fit.token_positions(tokens)
    method = (source_posemb or "bilinear") if posemb == "auto" else posemb
    fit.shapes_of_like(tokens, (grid, source_grid), method, resize_patches)
    if channels:
        fit.channels(channels)
    to_load = {name: leaf for name, leaf in like.items() if name not in reset}
    if problem := describe_mismatch(fit.arrays, to_load, {**fit.arrays, **loaded}, kinds):
        raise UserError(problem)
    report = {
        "loaded": [name for name in to_load if name not in fit.adapted],
        "adapted": {name: how for name, how in fit.adapted.items() if name in to_load},
        "reset": reset,
        "dropped": fit.dropped,
    }
    params = {}
    for name, leaf in like.items():
        if name in to_load:
            params[name] = np.asarray(fit.arrays[name], np.float32)
        elif isinstance(leaf, jax.ShapeDtypeStruct) and name.endswith("/kernel"):
            params[name] = np.zeros(leaf.shape, np.float32)  # a head's (section 3.2)
        else:
            params[name] = leaf
    return params, report


def _resized(method: str, old: tuple[int, ...], new: tuple[int, ...]) -> str:
    return f"{method} {old[0]}x{old[1]} -> {new[0]}x{new[1]}"


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


Grids = tuple[Grid | None, Grid | None]  # of the model, and of the file; None: square


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
        return (self.ours if self.ours.has(token) else self.theirs).find(token).row.title

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
        """Drops what is not kept, and returns the names of `like` that are reset, or new.

        A [mask] embedding is of a training task, which the file's need not have been.
        """
        roles = {name: self.ours.role_of(name) for name in self.like}
        new = [n for n, role in roles.items() if role == "training" and n not in self.arrays]
        heads = [name for name, role in roles.items() if role == "head"]
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
        return [*new, *(heads if reset_head else [])]

    def last_norm(self) -> list[str]:
        """Drops the file's last norm for another of the model's, which is reset (2111.06377)."""
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

    def shapes_of_like(self, tokens: list[str], grids: Grids, method: str, patches: bool) -> None:
        """Adapts positions, `tokens` of the file among them, and patches if allowed."""
        for name in [name for name in self.like if name in self.arrays]:
            before, after = np.asarray(self.arrays[name]), self.like[name].shape
            match self.ours.role_of(name):
                case "positions" | "offsets":
                    self.positions(name, tokens, grids, method)
                case "axis_positions" if before.ndim == 2 and 0 < len(before) != after[0]:
                    matrix = resize.METHODS[method].positions(len(before), after[0])
                    array = (matrix @ before.astype(np.float64)).astype(before.dtype)
                    self._replace(name, array, f"{method} {len(before)} -> {after[0]}")
                case "offset_grid" if before.ndim == 3 and before.shape[:2] != after[:2]:
                    grid = tuple((n + 1) // 2 for n in after[:2])
                    old = tuple((n + 1) // 2 for n in before.shape[:2])
                    along = resize.METHODS[method].offsets
                    array = resize.interpolate_grid(before, after[:2], along)
                    self._replace(name, array, _resized(method, old, grid))
                case "patches" if patches and before.ndim == 4 and before.shape[:2] != after[:2]:
                    how = _resized("pseudo-inverse resize", before.shape, after)
                    self._replace(name, resize.resize_patch_kernel(before, after[:2]), how)

    def positions(self, name: str, tokens: list[str], grids: Grids, method: str) -> None:
        """Adapts positions [1, N, D] or offsets [2 N - 1, d] to the model's grid and tokens."""
        new, before = position_tokens(self.like, self.ours), np.asarray(self.arrays[name])
        shapes = [self.like[name].shape, before.shape]
        is_offsets = self.ours.role_of(name) == "offsets"
        if is_offsets:
            if before.ndim != 2:
                return  # reported as a mismatch
            shapes = [(1, (shape[0] + 1) // 2, 1) for shape in shapes]
        grid = grids[0] or resize.find_source_grid(shapes[0], (1, 1), len(new))
        source_grid = resize.find_source_grid(shapes[1], grid, len(tokens), grids[1])
        how = [] if source_grid == grid else [_resized(method, source_grid, grid)]
        dropped = [self._title(token) for token in tokens if token not in new]
        added = [self._title(token) for token in new if token not in tokens]
        what = "offsets" if is_offsets else "position"
        how += [f"{what} of the {title} dropped" for title in dropped]
        how += [f"zero {what} of the {title} added" for title in added]
        if is_offsets:
            array = resize.interpolate_offsets(before, grid, source_grid, method)
            padded = np.pad(array, ((len(added), len(added)), (0, 0)))
            array = padded[len(dropped) : len(padded) - len(dropped)]
        else:
            array = resize.interpolate_posembed(before, grid, len(tokens), source_grid, method)
            zero = np.zeros_like(array[:, :1])  # [1, 1, D]
            rows = [array[:, [tokens.index(t)]] if t in tokens else zero for t in new]
            array = np.concatenate([*rows, array[:, len(tokens) :]], axis=1)  # [1, P' + N, D]
        if how:
            self._replace(name, array, ", ".join(how))

    def channels(self, method: str) -> None:
        name = self.ours.image_kernel(self.like)
        before, after = (axis_of(params, name, 4, 2) for params in (self.arrays, self.like))
        if before and after and before != after:
            how = f"{method} {before} -> {after} channels"
            kernel = np.asarray(self.arrays[name])
            self._replace(name, resize.mix_channels(kernel, after, method), how)
