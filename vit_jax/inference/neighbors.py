"""The nearest neighbours of images in a folder, by a feature; with an index on disk."""

import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.decode import decode_image
from vit_jax.errors import UserError
from vit_jax.files.paths import read_file, reading, to_path, write_arrays
from vit_jax.inference.images import Images, find_images
from vit_jax.inference.load import load_model
from vit_jax.inference.model import Model
from vit_jax.inference.pictures import fitted, name_style, sheet
from vit_jax.inference.predict import MAX_PICTURES, printable
from vit_jax.models.features import vector_feature
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
      index: `.npz` file of the features of this folder: new and changed images are added to it,
        and those that are gone left out. "": none.
      count: neighbours of each.

    Images that cannot be read are named and left out. UserError for an index of another model.
    """
    if count < 1:
        raise UserError(f"--count={count} must be at least 1.")
    model = load_model(source, **model_options)
    vector_feature(model.module, feature, model.description.image_shape, model.params)
    paths, asked = find_images([folder]), find_images(queries)
    known = _indexed(model, paths, feature, index, batch_size)
    places, features = list(known), np.stack([*known.values()])
    real = list(map(os.path.realpath, places))
    found = []
    for query, vector in _vectors(model, asked, feature, batch_size).items():
        cosines = features @ vector
        order = np.argsort(-cosines, kind="stable")
        near = [i for i in order if real[i] != os.path.realpath(query)][:count]
        found.append((query, [(places[i], float(cosines[i])) for i in near]))
    return found


def _vectors(
    model: Model, paths: Sequence[str], feature: str, batch_size: int
) -> dict[str, np.ndarray]:
    """Unit vectors [D] by path; images that cannot be read are named and left out."""
    images = Images(paths, model.description)
    rows = (row for part in model.stream([feature], images, batch_size) for row in part[feature])
    vectors = dict(zip(paths, rows, strict=True))
    for index, reason in images.failures.items():
        logging.warning(f"not used: {printable(paths[index])}: {reason}")
        vectors.pop(paths[index], None)
    return {path: x / max(float(np.linalg.norm(x)), 1e-12) for path, x in vectors.items()}


def _indexed(
    model: Model, paths: Sequence[str], feature: str, index: str, batch_size: int
) -> dict[str, np.ndarray]:
    """Of the images those that can be read; the index has those it has seen as they are now."""
    size = "x".join(map(str, model.description.image_shape))
    who = f"{fingerprint(model.params)} {feature} {size} {model.description.eval_preprocess}"
    keys = {
        path: json.dumps([os.path.realpath(path), os.path.getsize(path), os.stat(path).st_mtime_ns])
        for path in paths
    }
    known: dict[str, np.ndarray] = {}
    if index and (file := to_path(index)).exists():
        with reading(index, "is no index of this script"), np.load(file) as stored:
            of, names, rows = (stored[name] for name in ("of", "images", "features"))
            known = dict(zip(names.tolist(), rows, strict=True))
        if str(of) != who:
            raise UserError(f"--index={index} is of another model or feature: choose another file.")
    if new := [path for path, key in keys.items() if key not in known]:
        vectors = _vectors(model, new, feature, batch_size)
        known |= {keys[path]: vector for path, vector in vectors.items()}
    indexed = {path: known[key] for path, key in keys.items() if key in known}
    if not indexed:
        raise UserError("no image of the folder can be read.")
    if index:
        names, features = [keys[path] for path in indexed], np.stack([*indexed.values()])
        arrays = {"of": np.array(who), "images": np.array(names), "features": features}
        write_arrays(index, arrays)
    return indexed


def draw_neighbors(found: Iterable[tuple[str, list[tuple[str, float]]]], output: str) -> None:
    """A sheet with a row per query, of the first ones: the image, its neighbours, their cosines."""
    rows = [[(query, np.nan), *near] for query, near in [*found][:MAX_PICTURES]]
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
