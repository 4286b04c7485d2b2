"""The paper's visualisations of a model of any format: figures 6 and 7, and later ones."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError, import_extra
from vit_jax.files.paths import to_path
from vit_jax.inference import analysis, pictures
from vit_jax.inference.images import at_image_size, find_images, input_range
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.kinds import check_known
from vit_jax.models.features import available_features
from vit_jax.models.look import can_show
from vit_jax.models.resnet import weight_standardize
from vit_jax.parameters.table import table_of
from vit_jax.trees import flatten_names

MOST_IMAGES = 128  # as in appendix D.7
DRAWN = 8  # images of a picture
OF_PARAMETERS = ("filters", "positions")
OF_IMAGES = ("attention_distance", "rollout", "heads", "pca", "similarity", "cka")


def visualize(
    source: str,
    images: Sequence[str] = (),
    *,
    what: Sequence[str] = (),
    output: str = "pictures",
    against: str = "",
    patch: tuple[int, int] | None = None,
    batch_size: int = 8,
    **model_options: Any,
) -> list[Path]:
    """Loads a model and draws its internals; what it does not have is skipped with a message.

    Args:
      source: of the model, see `load_model`, which takes `model_options`.
      images: files, and folders whose images are used: `MOST_IMAGES`, evenly spaced, of which
        `DRAWN` appear in a picture. Without images, only those of parameters are drawn.
      what: some of `OF_PARAMETERS` and `OF_IMAGES`; () means all.
      output: folder for `WHAT.png`.
      against: another model, for `cka`.
      patch: row and column from 1 of that of the first image, for `similarity`; None: the middle.
      batch_size: images at a time.

    Returns the files written; UserError if nothing can be drawn, or a file cannot be read.
    """
    for name in what:
        check_known("--what", name, (*OF_PARAMETERS, *OF_IMAGES))
    import_extra("scripts/visualize.py", "matplotlib", "embedded")
    found = find_images(images) if len(images) else []
    paths = spread(found, MOST_IMAGES)
    if unseen := [name for name in what if name in OF_IMAGES and not paths]:
        raise UserError(f"--what={','.join(unseen)} needs images: MODEL IMAGES.")
    if "cka" in what and not against:
        raise UserError("--what=cka needs --against=ANOTHER_MODEL.")
    model = load_model(source, **model_options)
    if model.is_text:
        raise UserError(f"{source} is a text model; scripts/visualize.py draws image models.")
    drawings = of_parameters(model)
    if paths:
        names = [Path(path).name for path in paths]
        drawings |= of_images(model, paths, names, batch_size)
        drawings |= of_patches(model, spread(paths, DRAWN), spread(names, DRAWN), batch_size, patch)
        if against:
            other = load_model(against, **model_options)
            drawings["cka"] = lambda: _cka(model, other, paths, batch_size)
    else:
        logging.info("Without images, only %s are drawn.", " and ".join(OF_PARAMETERS))
    written = []
    to_path(output).mkdir(parents=True, exist_ok=True)
    for name in [name for name in drawings if not what or name in what]:
        figure = drawings[name]()
        if isinstance(figure, str):
            logging.info("No %s.png: %s.", name, figure)
            continue
        written.append(to_path(output) / f"{name}.png")
        figure.savefig(written[-1], dpi=150)
        most = MOST_IMAGES if name in ("attention_distance", "cka") else DRAWN
        is_part = name in OF_IMAGES and len(found) > most
        part = f": {most} of {len(found):,} images, evenly spaced" if is_part else ""
        logging.info("Wrote %s%s.", written[-1], part)
    if not written:
        raise UserError(f"{source}: nothing to draw for {', '.join(what) or 'this model'}.")
    return written


# Each draws a figure, or returns a string with why it cannot.
Drawing = Callable[[], Any]


def of_parameters(model: Model) -> dict[str, Drawing]:
    """The drawings of `OF_PARAMETERS`."""
    flat, table = flatten_names(model.params), table_of(model.module)

    def filters() -> Any:
        name = table.image_kernel(flat)
        if not name:
            return "the model has no convolution on the image"
        kernel = flat[name]
        if table.role_of(name) == "image":  # a ResNet convolves with standardised weights
            kernel = weight_standardize(kernel)
        return pictures.draw_filters(*analysis.principal_filters(np.asarray(kernel)))

    def positions() -> Any:
        names = table.with_role("positions", flat)
        if not names:
            return "the model has no learned position embedding of each token"
        similarity = analysis.position_similarity(
            flat[names[0]][0], model.description.position_grid
        )
        return pictures.draw_positions(similarity)

    return {"filters": filters, "positions": positions}


def of_images(
    model: Model,
    images: Sequence[Any],
    names: Sequence[str],
    batch_size: int,
    draw_rollout: Callable[..., Any] = pictures.draw_rollout,
) -> dict[str, Drawing]:
    """The drawings of `OF_IMAGES` that need one model, for images as `Model` takes them."""
    if "attention" not in can_show(model.module):
        missing = "the model has no attention"
        return dict.fromkeys(("attention_distance", "rollout", "heads"), lambda: missing)
    prefix_tokens = model.module.prefix_tokens
    has_token = "cls" in prefix_tokens

    few, few_names = spread(images, DRAWN), spread(names, DRAWN)

    def maps_of(function: Callable[..., np.ndarray]) -> list[np.ndarray]:
        """[..., rows, columns] of each image."""
        weights = attention_of_each(model, few, batch_size)
        return [function(x, grid, class_token=has_token)[0] for x, grid in weights]

    def flow() -> Any:
        maps = [x / x.mean() for x in maps_of(analysis.rollout)]
        return draw_rollout(photos(model, few), maps, few_names)

    def heads() -> Any:
        maps = maps_of(analysis.class_token_attention)
        maps = [(len(prefix_tokens) + x[0].size) * x for x in maps]
        return pictures.draw_heads(photos(model, few), maps, few_names)

    def distances() -> Any:
        return pictures.draw_distances(*head_distances(model, images, batch_size))

    return {"attention_distance": distances, "rollout": flow, "heads": heads}


def of_patches(
    model: Model,
    images: Sequence[Any],
    names: Sequence[str],
    batch_size: int,
    place: tuple[int, int] | None,
) -> dict[str, Drawing]:
    """The drawings of the patches' features after the last norm; for `place` see `visualize`."""
    if "patches" not in available_features(model.module):
        return dict.fromkeys(("pca", "similarity"), lambda: "the model has no patches")
    grids = grids_of(model, images)
    grid = grids[0]
    place = (grid[0] // 2, grid[1] // 2) if place is None else (place[0] - 1, place[1] - 1)
    if not all(0 <= i < size for i, size in zip(place, grid, strict=True)):
        raise UserError(f"--patch={place[0] + 1},{place[1] + 1} is not in {grid[0]}x{grid[1]}.")

    @functools.cache
    def patches() -> list[np.ndarray]:
        rows = model.features(images, "patches", batch_size=batch_size)
        return [x[: r * c] for x, (r, c) in zip(rows, grids, strict=True)]

    def pca() -> Any:
        colors, _ = analysis.principal_colors(patches(), grids)
        return pictures.draw_colors(photos(model, images), colors, names)

    def similarity() -> Any:
        cosines = analysis.patch_similarity(patches(), grids, place)
        return pictures.draw_similarity(photos(model, images), cosines, names, place)

    return {"pca": pca, "similarity": similarity}


def head_distances(
    model: Model, images: Sequence[Any], batch_size: int
) -> tuple[np.ndarray, float]:
    """Attention distance of each head, [L, H] pixels, and that of uniform attention."""
    pixels = model.module.pixels_per_token
    distances, uniform = zip(
        *(
            (analysis.mean_distance(x, grid, pixels), analysis.uniform_distance(grid, pixels))
            for x, grid in attention_of_each(model, images, batch_size)
        ),
        strict=True,
    )
    return np.mean(distances, axis=0), float(np.mean(uniform))


def grids_of(model: Model, images: Sequence[Any]) -> list[tuple[int, int]]:
    """Rows and columns of tokens of each image."""
    if not parse(model.description.eval_preprocess).patchify:
        return [model.description.grid] * len(images)
    return [(int(rows), int(columns)) for rows, columns in model.preprocess(list(images)).grid]


def attention_of_each(
    model: Model, images: Sequence[Any], batch_size: int
) -> Iterator[tuple[np.ndarray, tuple[int, int]]]:
    """The weights of an image, [L, 1, H, N, N], and its grid.

    In batches, as the weights of all would fill the memory.
    """
    prefix = len(model.module.prefix_tokens)
    for part in _parts(images, batch_size):
        weights = model.attention(part, batch_size=batch_size)
        for i, grid in enumerate(grids_of(model, part)):
            count = prefix + grid[0] * grid[1]
            yield weights[:, i : i + 1, :, :count, :count], grid


def photos(model: Model, images: Sequence[Any]) -> Sequence[np.ndarray]:
    """The images as the model sees them, [H, W, C] in [0, 1], finer if its input is small."""
    height, width, channels = model.description.image_shape
    black, white = input_range(model.description)
    if op := parse(model.description.eval_preprocess).patchify:
        shown, size = [], op.patch_size
        inputs = model.preprocess(list(images))
        for pixels, (rows, columns) in zip(inputs.pixels, inputs.grid, strict=True):
            x = pixels[: rows * columns].reshape(rows, columns, size, size, channels)
            x = x.swapaxes(1, 2).reshape(rows * size, columns * size, channels)
            shown.append(np.clip((x - black) / (white - black), 0, 1))
        return shown
    scale = max(1, round(256 / max(height, width)))  # about 256 pixels on the longer side
    try:
        large = at_image_size(model.description, (scale * height, scale * width))
        inputs = dataclasses.replace(model, description=large).preprocess(images)
    except UserError:  # its preprocessing has a fixed size
        inputs = model.preprocess(images)
    return np.clip((inputs - black) / (white - black), 0, 1)


def _cka(model: Model, other: Model, paths: list[str], batch_size: int) -> Any:
    if not all("tokens" in can_show(m.module) for m in (model, other)):
        return "one of the models has no blocks"
    if len(paths) < 4:
        return "CKA needs at least four images"
    layers = [_layers(m, paths, batch_size) for m in (model, other)]
    return pictures.draw_cka(analysis.cka_of_layers(*layers), (model.source, other.source))


def _layers(model: Model, paths: list[str], batch_size: int) -> list[np.ndarray]:
    """The mean over tokens after each block: L times [B, D]."""
    parts = [
        model.look(part, "tokens", batch_size=batch_size)["tokens"].mean(axis=2)
        for part in _parts(paths, batch_size)
    ]
    return list(np.concatenate(parts, axis=1))


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` items, evenly spaced: a folder is sorted by class."""
    step = max(len(items) / count, 1.0)
    return [items[int(i * step)] for i in range(min(len(items), count))]


def _parts(items: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]
