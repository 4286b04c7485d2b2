"""Draws the results of `analysis.py` as figures of page width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

_WIDTH = 7.0  # inches, a page's
_DARKEST = 0.6  # of attention colours, over black pixels
_MAX_POSITIONS = 7  # per side, whose similarities are drawn


def sheet(
    rows: int, columns: int, height: float, title: str = "", width: float = _WIDTH
) -> tuple[Any, Any]:
    """A figure, in inches, and its bare axes [rows, columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10)
    bare: dict[str, Any] = {"xticks": [], "yticks": []}
    axes = figure.subplots(rows, columns, squeeze=False, subplot_kw=bare)
    for axis in axes.flat:
        axis.spines[:].set_visible(False)
    return figure, axes


def draw_filters(components: np.ndarray, shares: np.ndarray) -> Any:
    """Components [K, P, Q, C] and the variance they explain [K], each with its own colour range."""
    columns = min(7, len(components))
    rows = -(-len(components) // columns)
    title = f"Embedding filters, first {len(components)} principal components"
    figure, axes = sheet(rows, columns, rows * _WIDTH / columns + 0.8, title)
    for axis in axes.flat[len(components) :]:
        axis.remove()
    for axis, component, share in zip(axes.flat, components, shares, strict=False):
        shown = 0.5 + component / (2 * np.abs(component).max() or 1.0)
        shown = shown if shown.shape[-1] == 3 else shown.mean(axis=-1)
        axis.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="none")
        axis.set_xlabel(f"{100 * share:.1f} %", fontsize=8)
    return figure


def draw_positions(similarity: np.ndarray) -> Any:
    """Similarities [R, C, R, C]: for some positions, those with all others.

    The colours end at the highest similarity of two positions: each has 1 with itself.
    """
    rows, columns = (
        np.unique(np.linspace(0, size - 1, min(size, _MAX_POSITIONS)).round().astype(int))
        for size in similarity.shape[:2]
    )
    cell = (_WIDTH - 1) / len(columns) * similarity.shape[2] / similarity.shape[3]
    title = "Cosine similarity of the position embeddings"
    figure, axes = sheet(len(rows), len(columns), min(len(rows) * cell + 0.9, 10), title)
    count = similarity.shape[0] * similarity.shape[1]
    others = similarity.reshape(count, count)[~np.eye(count, dtype=bool)]
    ends = {"vmin": others.min(initial=1), "vmax": others.max(initial=-1), "cmap": "viridis"}
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            shown = axes[i, j].imshow(similarity[row, column], **ends, interpolation="none")
        axes[i, 0].set_ylabel(row + 1, fontsize=8)
    for j, column in enumerate(columns):
        axes[-1, j].set_xlabel(column + 1, fontsize=8)
    figure.supxlabel("column of the patch", fontsize=9)
    figure.supylabel("row of the patch", fontsize=9)
    figure.colorbar(shown, ax=axes, shrink=0.6, extend="max")
    return figure


def draw_distances(distances: np.ndarray, uniform: float) -> Any:
    """Mean attention distances [L, H], a point per head, and that of uniform attention; pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 3.4), layout="constrained")
    axis = figure.subplots()
    layers = np.repeat(np.arange(1, len(distances) + 1), distances.shape[1])
    axis.scatter(layers, distances.ravel(), s=20, color="#0072b2", linewidths=0)
    axis.axhline(uniform, color="0.5", ls="--", lw=1, label="uniform attention")
    axis.legend(loc="lower right", fontsize=8, frameon=False)
    axis.set_xlabel("block")
    axis.set_ylabel("mean attention distance (pixels)")
    axis.set_ylim(0, 1.08 * max(uniform, distances.max()))
    axis.locator_params(axis="x", integer=True)
    axis.grid(color="0.5", alpha=0.2)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def draw_rollout(images: np.ndarray, maps: np.ndarray, names: Sequence[str]) -> Any:
    """Images [B, H, W, C] in [0, 1], each next to its overlay with a map [B, rows, columns]."""
    pairs = 1 if len(images) == 1 else 2
    rows = -(-len(images) // pairs)
    aspect = images.shape[1] / images.shape[2]
    captions = [_wrap(name, pairs * 2) for name in names]
    lines = max(caption.count("\n") + 1 for caption in captions)
    height = rows * (0.85 * _WIDTH / (2 * pairs) * aspect + 0.15 * lines + 0.1) + 0.5
    figure, axes = sheet(rows, 2 * pairs, height, "Attention rollout: what the output attends to")
    cells, ends = axes.reshape(-1, 2), color_range(maps)
    for cell in cells[len(images) :].flat:
        cell.remove()
    for (plain, masked), image, weights, text in zip(cells, images, maps, captions, strict=False):
        _show(plain, image)
        plain.set_xlabel(text, fontsize=8, parse_math=False)
        masked.imshow(overlay(image, weights, ends))
    _add_scale(figure, axes, ends, "times the mean of the image")
    return figure


def draw_heads(images: np.ndarray, maps: np.ndarray, names: Sequence[str]) -> Any:
    """Images [B, H, W, C] in [0, 1], each with overlays of its heads [B, heads, rows, columns]."""
    shown = min(maps.shape[1], 12)
    columns = min(shown, 6) + 1
    lines = -(-shown // (columns - 1))
    aspect = images.shape[1] / images.shape[2]
    captions = [_wrap(name, columns) for name in names]
    room = 0.15 * (1 if lines > 1 else max(caption.count("\n") + 2 for caption in captions))
    height = len(images) * lines * (0.85 * _WIDTH / columns * aspect + room) + 0.5
    of = f"{shown} of {maps.shape[1]} heads" if shown < maps.shape[1] else f"{shown} heads"
    title = f"Attention in the last block, {of}"
    figure, axes = sheet(len(images) * lines, columns, height, title)
    ends = color_range(maps[:, :shown])
    for number, (image, heads) in enumerate(zip(images, maps, strict=True)):
        block = axes[number * lines : (number + 1) * lines]
        _show(block[0, 0], image)
        place: Any = {"ha": "center", "va": "top", "transform": block[0, 0].transAxes}
        text = block[0, 0].text(0.5, -0.04, captions[number], **place, fontsize=8, parse_math=False)
        text.set_in_layout(lines == 1)  # otherwise the cell below has room for it
        for cell in (*block[1:, 0], *block[:, 1:].flat[shown:]):
            cell.remove()
        for head, (cell, weights) in enumerate(zip(block[:, 1:].flat, heads[:shown], strict=False)):
            cell.imshow(overlay(image, weights, ends))
            cell.set_title(f"head {head + 1}", fontsize=8, pad=2)
    _add_scale(figure, axes, ends, "times uniform attention")
    return figure


def color_range(maps: np.ndarray) -> tuple[float, float]:
    """Map values of the darkest and the brightest overlay colours; 1 % may be brighter."""
    low, high = np.percentile(maps, (0, 99))
    return float(low), float(max(high, low + 1e-6))


def overlay(image: np.ndarray, weights: np.ndarray, ends: tuple[float, float]) -> np.ndarray:
    """A grey image [H, W, C] tinted by its map [rows, columns]: [H, W, 3]; all in [0, 1].

    The map is linear between token centres. `ends`: see `color_range`.
    """
    import cv2

    size = image.shape[1::-1]
    smooth = cv2.resize(weights.astype(np.float32), size, interpolation=cv2.INTER_LINEAR)
    colors = _scale(ends).to_rgba(smooth)[..., :3]
    return np.asarray(colors * (_DARKEST + (1 - _DARKEST) * image.mean(axis=-1, keepdims=True)))


def _scale(ends: tuple[float, float]) -> Any:
    """Square roots, so that one peak does not darken everything else."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    return ScalarMappable(PowerNorm(0.5, *ends, clip=True), "inferno")


def _add_scale(figure: Any, axes: Any, ends: tuple[float, float], label: str) -> None:
    shown = [axis for axis in axes.flat if axis.figure]
    bar = figure.colorbar(_scale(ends), ax=shown, shrink=0.6, extend="max", aspect=30)
    ticks = ends[0] + (ends[1] - ends[0]) * np.linspace(0, 1, 5) ** 2  # evenly far apart
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.set_label(f"attention, {label}", fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _wrap(name: str, columns: int) -> str:
    """A name wrapped to fit below one of so many pictures."""
    return textwrap.fill(name, int(0.85 * _WIDTH / columns / 0.08))


def draw_cka(matrix: np.ndarray, names: tuple[str, str]) -> Any:
    """CKA [L, M] of the blocks of two models."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 4), layout="constrained")
    axis = figure.subplots()
    edges = (0.5, matrix.shape[1] + 0.5, 0.5, matrix.shape[0] + 0.5)
    shown = axis.imshow(matrix, origin="lower", vmax=1, cmap="viridis", extent=edges)
    vertical, horizontal = (textwrap.fill(f"block of {name}", 40) for name in names)
    axis.set_xlabel(horizontal, parse_math=False)
    axis.set_ylabel(vertical, parse_math=False)
    axis.locator_params(integer=True)
    figure.colorbar(shown, label="linear CKA, unbiased", shrink=0.8)
    return figure


def _show(axis: Any, image: np.ndarray) -> None:
    axis.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1)
