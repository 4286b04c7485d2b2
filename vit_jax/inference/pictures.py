"""What `analysis.py` computes, as pictures for a page's width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_WIDTH = 7.0  # inches, a page's
_MOST_PLACES = 7  # per side, of which similarities are drawn


def _sheet(rows: int, columns: int, height: float, title: str = "") -> tuple[Any, Any]:
    """A figure `height` inches high and its bare axes [rows, columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10)
    bare: dict[str, Any] = {"xticks": [], "yticks": []}
    return figure, figure.subplots(rows, columns, squeeze=False, subplot_kw=bare)


def draw_filters(components: np.ndarray, shares: np.ndarray) -> Any:
    """Components [K, P, Q, C] and the variance they explain [K], each in its own range."""
    columns = min(7, len(components))
    rows = -(-len(components) // columns)
    title = f"Embedding filters, first {len(components)} principal components"
    figure, axes = _sheet(rows, columns, rows * _WIDTH / columns + 0.8, title)
    for axis in axes.flat[len(components) :]:
        axis.remove()
    for axis, component, share in zip(axes.flat, components, shares, strict=False):
        shown = 0.5 + component / (2 * np.abs(component).max() or 1.0)
        grey = shown.shape[-1] != 3
        axis.imshow(shown.mean(axis=-1) if grey else shown, cmap="gray", vmin=0, vmax=1)
        axis.set_xlabel(f"{share:.1%}", fontsize=8)
    return figure


def draw_positions(similarity: np.ndarray) -> Any:
    """Similarities [R, C, R, C]: for some of the places, those with all others."""
    rows, columns = (
        np.unique(np.linspace(0, size - 1, min(size, _MOST_PLACES)).round().astype(int))
        for size in similarity.shape[:2]
    )
    cell = (_WIDTH - 1) / len(columns) * similarity.shape[2] / similarity.shape[3]
    title = "Cosine similarity of position embeddings, by row and column"
    figure, axes = _sheet(len(rows), len(columns), min(len(rows) * cell + 0.8, 10), title)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            shown = axes[i, j].imshow(similarity[row, column], vmin=-1, vmax=1, cmap="viridis")
        axes[i, 0].set_ylabel(row + 1, fontsize=8)
    for j, column in enumerate(columns):
        axes[-1, j].set_xlabel(column + 1, fontsize=8)
    figure.colorbar(shown, ax=axes, shrink=0.6)
    return figure


def draw_distances(distances: np.ndarray, uniform: float) -> Any:
    """Mean attention distances [L, H] in pixels, a point for each head.

    `uniform` is that of a head that looks everywhere alike.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 3.4), layout="constrained")
    axis = figure.subplots()
    layers = np.repeat(np.arange(1, len(distances) + 1), distances.shape[1])
    axis.scatter(layers, distances.ravel(), s=16, color="#0072b2", alpha=0.7, linewidths=0)
    axis.axhline(uniform, color="0.4", ls="--", lw=1, label="looks everywhere alike")
    axis.legend(loc="lower right", fontsize=8, frameon=False)
    axis.set_xlabel("block")
    axis.set_ylabel("mean attention distance (pixels)")
    axis.set_ylim(0, 1.08 * max(uniform, distances.max()))
    axis.locator_params(axis="x", integer=True)
    axis.grid(alpha=0.3)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return figure


def draw_rollout(images: np.ndarray, maps: np.ndarray, names: Sequence[str]) -> Any:
    """Images [B, H, W, C] in [0, 1], each beside itself below its map [B, rows, columns]."""
    pairs = 1 if len(images) == 1 else 2
    rows = -(-len(images) // pairs)
    aspect = images.shape[1] / images.shape[2]
    title = "Attention from the output to the image (rollout)"
    height = rows * (_WIDTH / (2 * pairs) * aspect + 0.3) + 0.5
    figure, axes = _sheet(rows, 2 * pairs, height, title)
    cells = axes.reshape(-1, 2)
    for cell in cells[len(images) :].flat:
        cell.remove()
    for (plain, masked), image, weights, name in zip(cells, images, maps, names, strict=False):
        _show(plain, image)
        plain.set_xlabel(name[-28:], fontsize=8, parse_math=False)
        _show(masked, image)
        masked.imshow(_smooth(weights, image.shape[:2]), cmap="inferno", alpha=0.65)
    return figure


def draw_heads(images: np.ndarray, maps: np.ndarray) -> Any:
    """Images [B, H, W, C] in [0, 1], each with the maps of its heads [B, heads, rows, columns]."""
    shown = min(maps.shape[1], 12)
    columns = min(shown, 6) + 1
    lines = -(-shown // (columns - 1))
    aspect = images.shape[1] / images.shape[2]
    title = f"Attention of the class token in the last block, {shown} heads"
    height = len(images) * lines * (_WIDTH / columns * aspect + 0.1) + 0.5
    figure, axes = _sheet(len(images) * lines, columns, height, title)
    for number, (image, heads) in enumerate(zip(images, maps, strict=True)):
        block = axes[number * lines : (number + 1) * lines]
        _show(block[0, 0], image)
        for cell in block[1:, 0]:
            cell.remove()
        for cell, weights in zip(block[:, 1:].flat, heads[:shown], strict=False):
            cell.imshow(weights, cmap="viridis", vmin=0)
        for cell in block[:, 1:].flat[shown:]:
            cell.remove()
    return figure


def draw_cka(matrix: np.ndarray, names: tuple[str, str]) -> Any:
    """Alignment [L, M] of the blocks of two models."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 4), layout="constrained")
    axis = figure.subplots()
    edges = (0.5, matrix.shape[1] + 0.5, 0.5, matrix.shape[0] + 0.5)
    shown = axis.imshow(matrix, origin="lower", vmin=0, vmax=1, cmap="viridis", extent=edges)
    axis.set_xlabel(f"block of {names[1][-36:]}", parse_math=False)
    axis.set_ylabel(f"block of {names[0][-36:]}", parse_math=False)
    axis.locator_params(integer=True)
    figure.colorbar(shown, label="linear CKA, unbiased", shrink=0.8)
    return figure


def _show(axis: Any, image: np.ndarray) -> None:
    axis.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1)


def _smooth(weights: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A map [rows, columns] at the size of the image, between the centres of tokens linear."""
    import cv2

    enlarged = cv2.resize(weights.astype(np.float32), size[::-1], interpolation=cv2.INTER_LINEAR)
    return np.asarray(enlarged)
