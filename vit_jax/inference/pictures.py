"""Draws the results of `analysis.py` as figures of page width."""

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.wording import counted, escaped

_WIDTH = 7.0  # inches, a page's
_GAP = 0.08  # inches, between two pictures
_MARGINS = 0.8  # inches, for title and colour scale
_DARKEST = 0.6  # of attention colours, over black pixels
CLIPPED = 2  # percent of the patches that have the brightest colour
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


Arrays = Sequence[np.ndarray]  # of images, which may differ in shape


def draw_rollout(images: Arrays, maps: Arrays, names: Sequence[str]) -> Any:
    """Images [H, W, C] in [0, 1], each next to its overlay with a map [rows, columns]."""
    title, label = "Attention rollout: what the output attends to", "attention, times the mean"
    return _overlays(images, maps, names, title, f"{label} of the image")[0]


def draw_colors(images: Arrays, colors: Arrays, names: Sequence[str]) -> Any:
    """Images [H, W, C] in [0, 1], each next to its patches' colours [rows, columns, 3]."""
    figure, _, cells = _beside(images, names, "Principal components of the patches", margins=0.2)
    for cell, image, color in zip(cells, images, colors, strict=True):
        height, width = image.shape[:2]
        cell.imshow(color, interpolation="none", extent=(0, width, height, 0))
    return figure


def draw_similarity(
    images: Arrays, maps: Arrays, names: Sequence[str], place: tuple[int, int]
) -> Any:
    """Images, each next to its overlay with cosines; a mark on the patch of the first image."""
    title = f"Similarity to the patch in row {place[0] + 1}, column {place[1] + 1} of the first"
    figure, axes = _overlays(images, maps, names, title, "cosine")
    sizes = zip(place, images[0].shape[:2], maps[0].shape, strict=True)
    y, x = ((i + 0.5) * pixels / cells for i, pixels, cells in sizes)
    for axis in axes.flat[:2]:
        axis.plot(x, y, "o", markersize=7, markerfacecolor="none", color="#00d0ff")
    return figure


def _overlays(
    images: Arrays, maps: Arrays, names: Sequence[str], title: str, label: str
) -> tuple[Any, Any]:
    """The figure and its axes."""
    figure, axes, cells = _beside(images, names, title)
    ends = color_range(maps)
    for cell, image, weights in zip(cells, images, maps, strict=True):
        cell.imshow(overlay(image, weights, ends))
    _add_scale(figure, axes, ends, label)
    return figure, axes


def _beside(
    images: Arrays, names: Sequence[str], title: str, margins: float = _MARGINS
) -> tuple[Any, Any, Any]:
    """A figure of images, its axes, and of these the empty ones next to the images."""
    pairs = 1 if len(images) == 1 else 2
    rows = -(-len(images) // pairs)
    height = rows * ((_WIDTH / (2 * pairs) - _GAP) * _tallest(images) + 0.24) + margins
    figure, axes = sheet(rows, 2 * pairs, height, title)
    cells = axes.reshape(-1, 2)[: len(images)]
    for (plain, _), image, name in zip(cells, images, names, strict=True):
        _show(plain, image)
        _add_name(plain, name, _WIDTH / pairs)
    return figure, axes, cells[:, 1]


def _tallest(images: Arrays) -> float:
    """The largest height / width, which a picture has room for."""
    return max(image.shape[0] / image.shape[1] for image in images)


def draw_heads(images: Arrays, maps: Arrays, names: Sequence[str]) -> Any:
    """Images [H, W, C] in [0, 1], each with overlays of its heads [heads, rows, columns]."""
    count = len(maps[0])
    lines = -(-count // 8)
    columns = max(-(-count // lines), 4) + 1
    cell_height = (_WIDTH / columns - _GAP) * _tallest(images) + 0.2
    height = len(images) * (lines * cell_height + 0.16) + _MARGINS
    title = f"Attention in the last block, {counted(count, 'head')}"
    figure, axes = sheet(len(images) * lines, columns, height, title)
    ends, blocks = color_range(maps), np.split(axes, len(images))
    for image, heads, name, block in zip(images, maps, names, blocks, strict=True):
        _show(block[-1, 0], image)
        _add_name(block[-1, 0], name, _WIDTH)
        for head, (cell, weights) in enumerate(zip(block[:, 1:].flat, heads, strict=False)):
            cell.imshow(overlay(image, weights, ends))
            cell.set_title(f"head {head + 1}", fontsize=8, pad=2)
    _add_scale(figure, axes, ends, "attention, times uniform attention")
    return figure


def _add_name(axis: Any, name: str, inches: float) -> None:
    """Below a picture, from its left edge on; in the layout only its height counts."""
    axis.set_xlabel(" ", fontsize=8)
    below: Any = {"xycoords": "axes fraction", "xytext": (0, -4), "textcoords": "offset points"}
    text = fitted(name, inches - 0.2, 8)
    axis.annotate(text, (0, 0), va="top", **below, **name_style(8)).set_in_layout(False)


def name_style(size: float) -> dict[str, Any]:
    """Of names of files and classes: in any script for which there is a font, `$` is no formula."""
    from matplotlib import font_manager, rcParams

    noto = (font for font in font_manager.get_font_names() if font.startswith("Noto Sans"))
    family = [*rcParams["font.family"], *sorted(noto)]
    return {"family": family, "size": size, "parse_math": False}


def fitted(name: str, inches: float, size: float) -> str:
    """A name in one line of `name_style`, shortened in the middle to fit.

    Characters that no font has, and bytes of file names that are not UTF-8, are escaped.
    """
    from matplotlib import font_manager
    from matplotlib.textpath import text_to_path

    family = name_style(size)["family"]
    paths = (font_manager.findfont(font_manager.FontProperties(family=[font])) for font in family)
    fonts = list(map(font_manager.get_font, paths))
    shown = [c if any(f.get_char_index(ord(c)) for f in fonts) else ascii(c)[1:-1] for c in name]
    text, prop = escaped("".join(shown)), font_manager.FontProperties(family=family, size=size)

    def ends(count: int) -> str:
        return f"{text[: (count + 1) // 2]}…{text[len(text) - count // 2 :]}"

    def width(text: str) -> float:
        return text_to_path.get_text_width_height_descent(text, prop, ismath=False)[0] / 72

    if width(text) <= inches:
        return text
    return ends(bisect.bisect(range(len(text)), inches, key=lambda n: width(ends(n))) - 1)


def color_range(maps: Arrays) -> tuple[float, float]:
    """Map values of the darkest and the brightest overlay colours; `CLIPPED` % are brighter."""
    low, high = np.percentile(np.concatenate([x.ravel() for x in maps]), (0, 100 - CLIPPED))
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
    bar = figure.colorbar(
        _scale(ends), ax=axes, location="bottom", shrink=0.6, extend="max", aspect=40, pad=0.02
    )
    ticks = ends[0] + (ends[1] - ends[0]) * np.linspace(0, 1, 5) ** 2  # evenly far apart
    bar.set_ticks(ticks, labels=[f"{round(tick, 3):.2g}" for tick in ticks])
    bar.set_label(f"{label} (top {CLIPPED} % clipped)", fontsize=8)
    bar.ax.tick_params(labelsize=8)


def draw_cka(matrix: np.ndarray, names: tuple[str, str]) -> Any:
    """CKA [L, M] of the blocks of two models."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 4), layout="constrained")
    axis = figure.subplots()
    edges = (0.5, matrix.shape[1] + 0.5, 0.5, matrix.shape[0] + 0.5)
    shown = axis.imshow(matrix, origin="lower", vmax=1, cmap="viridis", extent=edges)
    vertical, horizontal = (fitted(f"block of {name}", 3, 10) for name in names)
    axis.set_xlabel(horizontal, **name_style(10))
    axis.set_ylabel(vertical, **name_style(10))
    axis.locator_params(integer=True)
    figure.colorbar(shown, label="linear CKA, unbiased", shrink=0.8)
    return figure


def _show(axis: Any, image: np.ndarray) -> None:
    axis.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=1)
