"""`create_dataset`: one interface for TFDS, image folders and the embedded sets."""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import importlib.util
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from vit_jax.data.preprocess import Chain, PythonOp, evaluate_calls, load_function, parse
from vit_jax.data.sources import (
    ArraySpec,
    SlicedSource,
    Source,
    check_columns,
    map_threads,
    resolve_split,
)
from vit_jax.errors import (
    UserError,
    as_user_error,
    check_known,
    counted,
    list_names,
    missing_package,
)

_OF_ARROW = ("state.json", "dataset_dict.json")  # of a folder that `datasets` has saved
DIGITS = tuple("0123456789")  # the classes of `digit_splits`


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A part of a dataset with its preprocessing; picklable."""

    name: str
    split: str
    source: Source
    preprocess: Chain
    class_names: tuple[str, ...]  # in the order of the labels; () where there are no labels
    on_bad_image: str = "error"  # or "skip": what `check` does with images that do not decode
    balance: float = 0.0  # see `balanced`

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def num_examples(self) -> int:
        return len(self.source)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        """Arrays: `image` [H, W, C], `label` int32 or uint8 [K] if there is one, what ops add.

        UserError, with its place, on failure.
        """
        try:
            example = self.preprocess(self.source[index], rng)
        except UserError:
            raise
        except (ValueError, OSError, cv2.error) as error:
            where = f"example {index} of {self.name} {self.split} ({self.source.describe(index)})"
            reason = getattr(error, "strerror", None) or error
            raise as_user_error(f"{where}: {reason}", error) from error
        arrays = {key: each for key, each in example.items() if not isinstance(each, str)}
        if (label := arrays.get("label")) is not None:
            several = getattr(label, "ndim", 0) > 0
            arrays["label"] = label.astype(np.uint8) if several else np.int32(label)
        return arrays

    @functools.cached_property
    def element_spec(self) -> dict[str, ArraySpec]:
        """Shapes and dtypes of a preprocessed example, found by making the first one."""
        example = self.example(0, np.random.default_rng(0))
        return {key: ArraySpec(array.shape, array.dtype) for key, array in example.items()}

    def check_keys(self, who: str, keys: Iterable[str]) -> None:
        """Raises a UserError unless an example has all that `who` reads of it."""
        if missing := [key for key in keys if key not in self.element_spec]:
            raise UserError(
                f"{who} reads {missing[0]!r}, but examples of dataset.name={self.name!r} have "
                f"{', '.join(self.element_spec)}; preprocess needs an op that makes it."
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """[H, W, C] of a preprocessed image."""
        height, width, channels = self.element_spec["image"].shape
        return height, width, channels

    @functools.cached_property
    def fingerprint(self) -> str:
        """Short hash that changes with the examples, their order or classes; see `identity`."""
        digest = hashlib.blake2b(digest_size=8)
        identity = list(self.source.identity()) or [self.name]
        for line in (self.split, str(self.num_examples), *self.class_names, *identity):
            digest.update(line.encode(errors="surrogateescape") + b"\0")
        return digest.hexdigest()

    def labels(self) -> np.ndarray:
        """Of all examples, [N] or [N, K]; where they are not at hand each record is read."""
        if (known := getattr(self.source, "columns", {}).get("label")) is not None:
            return known
        count = counted(self.num_examples, "example")
        logging.getLogger(__name__).info("%s: reading the labels of %s.", self.name, count)
        read = map_threads(lambda index: self.source[index]["label"], range(self.num_examples))
        return np.array(list(read))

    def balanced(self, balance: float) -> Dataset:
        """The dataset whose classes training draws more equally, see balance.py.

        UserError for an exponent out of range, or unless an example has one label.
        """
        if not 0 <= balance <= 1:
            found = f"dataset.balance={balance} must be from 0 (as stored)"
            raise UserError(f"{found} to 1 (all classes equally often).")
        if balance and getattr(self.element_spec.get("label"), "shape", None) != ():
            has = "several labels" if "label" in self.element_spec else "no label that is read"
            raise UserError(
                f"dataset.balance={balance} needs one label per image, dataset.name={self.name!r} "
                f"has {has}; set it to 0."
            )
        return dataclasses.replace(self, balance=balance)

    def check(self) -> Dataset:
        """Looks for damaged files before the training does; returns the dataset to train on.

        Reads every image of a folder (0.7 ms of a core each), opens every file of a TFDS set.
        UserError for a damaged file, unless it is an image and to be skipped.
        """
        source = self.source.check(self.on_bad_image)
        if lost := _labels(self.source) - _labels(source):
            names = list_names(self.class_names[label] for label in sorted(lost))
            logging.getLogger(__name__).warning(
                "%s %s: no image is left of %s.", self.name, self.split, names
            )
        return dataclasses.replace(self, source=source)


def _labels(source: Any) -> set[int]:
    """Those of a folder or table that its images have."""
    labels = getattr(source, "columns", {}).get("label", np.array([]))
    return set(np.unique(labels).tolist() if labels.ndim == 1 else np.flatnonzero(labels.any(0)))


def create_dataset(
    *,
    name: str,
    split: str,
    preprocess: str,
    data_dir: str = "",
    on_bad_image: str = "error",
    label_key: str = "",
    needs_label: bool = True,
) -> Dataset:
    """Opens a dataset; reads its metadata or lists its files, but reads and downloads no example.

    Args:
      name: `digits`; `glyphs` or `glyphs(size=32, ...)`; the path of an image folder
        (`folder.LAYOUT`), a table (`table.py`), tars of WebDataset (`tars.py`), a folder saved by
        Hugging Face `datasets` (`arrow.py`) or a prepared directory; else a TFDS name with
        optional config and version (`cifar10`, `imagenet2012:5.1.0`, `cifar10_corrupted/fog_1`).
      split, preprocess, data_dir: see `sources.resolve_split`, preprocess.py, `data_root`.
      on_bad_image: `error` or `skip`; for image folders.
      label_key: the class label to learn of a set of TFDS or `datasets`, of TFDS also a key of
        `COMPUTED_LABELS`; "" for the usual one.
      needs_label: False: a set without labels will do; without class names, examples have none.

    UserError for a mistake in an argument or in how the data are laid out.
    """
    check_known("dataset.on_bad_image", on_bad_image, ("error", "skip"))
    chain = parse(preprocess)
    for op in chain.ops:
        if isinstance(op, PythonOp):
            load_function(op.call)  # a misspelt name is said before all images are read
    source, class_names = _open(name, split, data_dir, label_key, needs_label, chain.columns)
    return Dataset(name, split, source, chain, class_names, on_bad_image)


def _open(
    name: str, split: str, data_dir: str, label_key: str, needs_label: bool, columns: Sequence[str]
) -> tuple[Source, tuple[str, ...]]:
    if not name:
        raise UserError("dataset.name is empty; set it to a dataset or to an image folder's path.")
    path = os.path.expanduser(name)
    is_embedded = name.partition("(")[0].strip() in ("digits", "glyphs")
    if any(os.path.isfile(os.path.join(path, file)) for file in _OF_ARROW):
        from vit_jax.data.arrow import open_saved

        return open_saved(path, split, label_key, needs_label=needs_label, columns=columns)
    is_prepared = os.path.isfile(os.path.join(path, "dataset_info.json"))
    is_table = path.lower().endswith((".csv", ".parquet"))
    is_folder = not is_prepared and not is_table and _is_image_folder(name)
    is_tar = path.lower().endswith(".tar")
    if label_key and (is_embedded or is_folder or is_table or is_tar):
        raise UserError(f"dataset.label_key={label_key!r} is for TFDS names, not for {name!r}.")
    if is_table:
        from vit_jax.data.table import open_table

        return open_table(path, split, needs_label=needs_label, columns=columns)
    if is_folder or is_tar:
        from vit_jax.data.tars import find_tars, open_tars

        if tars := find_tars(path):
            return open_tars(path, tars, split, needs_label=needs_label, columns=columns)
    check_columns(name, columns, ["caption"] if is_embedded and name != "digits" else [])
    if is_embedded:
        sources, names = (digit_splits(), DIGITS) if name == "digits" else _glyphs(name)
        parts = resolve_split(split, sources, lambda each: len(sources[each]))
        return SlicedSource(sources, parts), names
    if is_folder:
        from vit_jax.data.folder import open_folder

        return open_folder(path, split, needs_label=needs_label)
    from vit_jax.data import tfds_reader  # TFDS takes seconds to import

    directory = path if is_prepared else tfds_reader.find_prepared(name, data_dir)
    return tfds_reader.open_prepared(directory, split, label_key, needs_label=needs_label)


def _is_image_folder(name: str) -> bool:
    """Whether a name is a path rather than a TFDS name, which may hold one separator too."""
    path = os.path.expanduser(name)
    if name.startswith(("/", "./", "../", "~")) or name.count(os.sep) > 1 or name in (".", ".."):
        return True
    # In the data_dir itself, TFDS's own folder of a dataset has its name.
    infos = (os.path.join(path, depth, "dataset_info.json") for depth in ("*", "*/*"))
    return os.path.isdir(path) and not any(map(glob.glob, infos))


def _glyphs(name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    from vit_jax.data.glyphs import CLASSES, glyph_splits

    return evaluate_calls("dataset.name", name, {"glyphs": glyph_splits})[0][1], CLASSES


def digit_splits() -> dict[str, list[dict[str, Any]]]:
    """1,797 real handwritten digits that come with scikit-learn, in its order.

    Scans, uint8 [8, 8, 1] with 17 grey levels (UCI, "Optical Recognition of Handwritten Digits",
    its test part). The last 300, `test`, were written by other people than the others, `train`: a
    random split would flatter by several points. UserError without scikit-learn.
    """
    # The file alone: importing scikit-learn takes longer than a small model's first update.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise missing_package("dataset.name='digits'", "scikit-learn", "embedded")
    path = Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz"
    rows = np.loadtxt(path, np.int64, delimiter=",")  # 64 pixels from 0 to 16, and the label
    images = np.round(rows[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = rows[:, -1].tolist()
    scans = [{"image": image, "label": i} for image, i in zip(images, labels, strict=True)]
    return {"train": scans[:1497], "test": scans[1497:]}
