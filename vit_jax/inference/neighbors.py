"""The nearest neighbours of images in a folder, by a feature; with an index on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.decode import decode_image
from vit_jax.errors import UserError, import_extra
from vit_jax.files.paths import read_file, reading, to_path, write_arrays
from vit_jax.inference.images import find_images
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.inference.pictures import fitted, name_style, sheet
from vit_jax.trees import fingerprint


def find_neighbors(
    source: str,
    folder: str,
    queries: Sequence[str],
    *,
    feature: str = "pre_logits",
    index: str = "",
    count: int = 8,
    batch_size: int = 32,
    **model_options: Any,
) -> list[tuple[str, list[tuple[str, float]]]]:
    """Of each query the images of a folder with the greatest cosines: [(path, [(path, cosine)])].

    Args:
      source: of the model, see `load_model`, which takes `model_options`.
      folder: of images; a query that is among them is not its own neighbour.
      queries: files, and folders whose images are all used.
      feature: one vector per image, see `models/features.py`.
      index: `.npz` file of the features of the folder: new and changed images are added to it, and
        those that are gone left out. "": none.
      count: neighbours of each.

    UserError for an index of another model, or an image that cannot be read.
    """
    model = load_model(source, **model_options)
    paths, asked = find_images([folder]), find_images(queries)
    features = _indexed(model, paths, feature, index, batch_size)
    found = []
    for query, vector in zip(asked, _unit(model, asked, feature, batch_size), strict=True):
        cosines = features @ vector
        order = [i for i in np.argsort(-cosines, kind="stable") if not _same(paths[i], query)]
        found.append((query, [(paths[i], float(cosines[i])) for i in order[:count]]))
    return found


def _same(path: str, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def _unit(model: Model, paths: Sequence[str], feature: str, batch_size: int) -> np.ndarray:
    """Unit vectors [n, D]."""
    x = model.features(list(paths), feature, batch_size=batch_size)
    if x.ndim != 2:
        raise UserError(f"--feature={feature!r} is {x.shape[1:]} per image; choose a vector.")
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12), np.float32)


def _indexed(
    model: Model, paths: Sequence[str], feature: str, index: str, batch_size: int
) -> np.ndarray:
    """Features of the images [n, D], of which the index has those it has seen as they are now."""
    if not index:
        return _unit(model, paths, feature, batch_size)
    size = "x".join(map(str, model.description.image_shape))
    who = f"{fingerprint(model.params)} {feature} {size} {model.description.eval_preprocess}"
    keys = [json.dumps([os.path.realpath(p), *_state(p)], ensure_ascii=True) for p in paths]
    known: dict[str, np.ndarray] = {}
    if (file := to_path(index)).exists():
        with reading(index, "is no index of this script"), np.load(file) as stored:
            of, names, rows = (stored[name] for name in ("of", "images", "features"))
            known = dict(zip(names.tolist(), rows, strict=True))
        if str(of) != who:
            raise UserError(f"--index={index} is of another model or feature: choose another file.")
    if new := [(key, path) for key, path in zip(keys, paths, strict=True) if key not in known]:
        rows = _unit(model, [path for _, path in new], feature, batch_size)
        known |= dict(zip((key for key, _ in new), rows, strict=True))
    features = np.stack([known[key] for key in keys])
    write_arrays(index, {"of": np.array(who), "images": np.array(keys), "features": features})
    return features


def _state(path: str) -> tuple[int, int]:
    """Size and time of the last change."""
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def draw_neighbors(found: Iterable[tuple[str, list[tuple[str, float]]]], output: str) -> None:
    """A sheet with a row per query: the image, then its neighbours with their cosines."""
    import_extra("--output", "matplotlib", "embedded")
    rows = [[(query, np.nan), *near] for query, near in found]
    columns, style = max(map(len, rows)), name_style(7)
    figure, axes = sheet(len(rows), columns, 1.3 * len(rows) + 0.4, width=1.15 * columns)
    for line, images in zip(axes, rows, strict=True):
        for axis, (path, cosine) in zip(line, images, strict=False):
            pixels = decode_image(read_file(path), channels=3, exif=True)
            step = max(1, max(pixels.shape[:2]) // 300)
            axis.imshow(pixels[::step, ::step])
            label = Path(path).name if np.isnan(cosine) else f"{cosine:.2f} {Path(path).name}"
            axis.set_xlabel(fitted(label, 1.1, 7), **style)
    figure.savefig(output, dpi=130)
