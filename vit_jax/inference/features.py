"""Writes features of images or whole datasets to a file."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax.data.datasets import Dataset
from vit_jax.data.folder import FolderSource
from vit_jax.errors import UserError
from vit_jax.files.paths import replacing, to_path
from vit_jax.inference.images import example_names, find_images, input_chain
from vit_jax.inference.load import load_model
from vit_jax.models.features import check_features, feature_function
from vit_jax.objectives.objective import of_batches


def extract_features(
    source: str,
    images: list[str],
    *,
    features: Iterable[str],
    output: str,
    split: str = "",
    data_dir: str = "",
    label_key: str = "",
    on_bad_image: str = "",
    batch_size: int = 64,
    **model_options: Any,
) -> dict[str, tuple[int, ...]]:
    """Loads a model and writes features of images to an `.npz`.

    It has a float32 array [N, ...] per feature; `names` [N], the location of each image; for a
    dataset `labels` [N] int32 and `class_names`; for images in shapes of their own `grid` [N, 2],
    rows and columns of patches.

    Args:
      source: of the model, see `load_model`, which takes `model_options`.
      images: with a `split`, the name or folder of one dataset; else image files, and folders
        whose images are all used.
      features: names of `models/features.py`.
      output: path of the `.npz`.
      split, data_dir, label_key, on_bad_image: see `Model.open_dataset`.
      batch_size: over all devices; rounded up to a multiple of their number.

    Returns the shapes of the arrays by feature; UserError for an unknown feature, an unreadable
    image, or an output that cannot be written.
    """
    target = to_path(output)
    if target.suffix != ".npz" or target.is_dir():
        raise UserError(f"--output={output}: must be a file name ending in .npz.")
    model = load_model(source, **model_options)
    names = check_features(model.module, features)
    if split:
        if len(images) != 1:
            raise UserError(f"--split={split} takes one dataset, not {len(images)} names.")
        options = {"data_dir": data_dir, "label_key": label_key, "on_bad_image": on_bad_image}
        data = model.open_dataset(name=images[0], split=split, **options)
    else:
        paths = find_images(images)
        if missing := [path for path in paths if not os.path.exists(path)]:
            raise UserError(f"{missing[0]}: no such file or folder; a dataset needs a --split.")
        chain, _ = input_chain(model.description)
        encoded = np.array([os.fsencode(path) for path in paths], np.bytes_)
        source_of_files = FolderSource(encoded, {}, "")
        data = Dataset("images", "", source_of_files, chain, (), on_bad_image or model.on_bad_image)
    data = data.check()
    inputs = {
        key: jax.ShapeDtypeStruct((data.num_examples, *spec.shape), spec.dtype)
        for key, spec in data.element_spec.items()
    }
    function = of_batches(feature_function(model.module, names))
    specs = dict(jax.eval_shape(function, model.params, inputs))
    if "grid" in inputs:
        specs["grid"] = inputs["grid"]
    others = {"names": np.array(example_names(data.source))}
    if split:
        label = data.element_spec["label"]
        specs["labels"] = jax.ShapeDtypeStruct((data.num_examples, *label.shape), np.int32)
        others["class_names"] = np.array(data.class_names)
    _write_rows(target, specs, model.stream(list(specs), data, batch_size), **others)
    shapes = {name: specs[name].shape for name in names}
    logging.info("Wrote %s: %s", output, shapes)
    return shapes


def _write_rows(
    path: Path,
    specs: Mapping[str, jax.ShapeDtypeStruct],
    parts: Iterable[Mapping[str, np.ndarray]],
    **others: np.ndarray,
) -> None:
    """Writes an `.npz` of arrays [N, ...] that arrive in parts [n, ...], and of small `others`.

    It appears complete or not at all. Rows are buffered in one file per array, in a hidden folder
    beside the target: while they are packed, they are on disk twice; UserError if it is too small.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    needed = 2 * sum(spec.size * spec.dtype.itemsize for spec in specs.values()) / 1e9
    free = shutil.disk_usage(path.parent).free / 1e9
    if needed > free:  # a full disk would end the process: its files are mapped into memory
        raise UserError(f"--output={path}: needs {needed:.1f} GB, but only {free:.1f} GB are free.")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        arrays: dict[str, Any] = {
            name: np.lib.format.open_memmap(f"{folder}/{name}.npy", "w+", spec.dtype, spec.shape)
            for name, spec in specs.items()
        }
        done = 0
        for part in parts:
            count = len(next(iter(part.values())))
            for name, array in arrays.items():
                array[done : done + count] = part[name]
            done += count
        with replacing(path) as unfinished, open(unfinished, "wb") as file:
            np.savez(file, **{**arrays, **others})
