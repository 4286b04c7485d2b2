"""`create_dataset`: one interface to all kinds of data, which the table `READERS` lists."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from vit_jax.data.ops import MAPS
from vit_jax.data.preprocess import Chain, PythonOp, load_function, parse
from vit_jax.data.sources import ArraySpec, Request, Source, check_columns, map_threads
from vit_jax.errors import UserError, as_user_error, one_line, with_short_errors
from vit_jax.files.paths import to_path
from vit_jax.files.remote import scheme_of
from vit_jax.kinds import check_known
from vit_jax.wording import counted, list_names


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """A split of a dataset with its preprocessing; picklable."""

    name: str
    split: str
    source: Source
    preprocess: Chain
    class_names: tuple[str, ...]  # by label; () without labels
    on_bad_image: str = "error"  # or "skip": how `check` treats images that do not decode
    balance: float = 0.0  # see `balanced`

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def num_examples(self) -> int:
        return len(self.source)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        """`image` [H, W, C], `label` int32 or uint8 [K], what ops add; UserError says where."""
        try:
            example = self.preprocess(self.source[index], rng)
        except UserError:
            raise
        except (ValueError, OSError, cv2.error) as error:
            where = f"example {index} of {self.name} {self.split} ({self.source.describe(index)})"
            raise as_user_error(f"{where}: {one_line(error)}", error) from error
        texts = str | tuple | list
        arrays = {key: value for key, value in example.items() if not isinstance(value, texts)}
        if (label := arrays.get("label")) is not None:
            several = getattr(label, "ndim", 0) > 0
            arrays["label"] = label.astype(np.uint8) if several else np.int32(label)
        return arrays

    @functools.cached_property
    def element_spec(self) -> dict[str, ArraySpec]:
        """Shapes and dtypes of a preprocessed example, found by preprocessing the first one."""
        example = self.example(0, np.random.default_rng(0))
        return {key: ArraySpec(array.shape, array.dtype) for key, array in example.items()}

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        size, images = "x".join(map(str, self.image_shape)), counted(self.num_examples, "image")
        if op := self.preprocess.patchify:
            size = f"{' or '.join(map(str, op.lengths))} patches of {op.patch_size} at most"
        classes = f"{counted(self.num_classes, 'class')}: {list_names(self.class_names)}"
        labels = classes if self.class_names else "no labels"
        return f"Data: {self.name} {self.split}, {images} of {size}, {labels}."

    def passes(self, num_examples: int) -> dict[str, float]:
        """Over each set, by name, in a run of so many examples."""
        return {self.name: num_examples / self.num_examples}

    def shared(self, other: Dataset) -> int:
        """How many examples are also in `other`, as far as is known without reading them."""
        is_same = self.name == other.name or os.path.isabs(self.source.describe(0))
        return self.source.shared(other.source) if is_same else 0

    def check_keys(self, who: str, keys: Iterable[str]) -> None:
        """Raises a UserError unless examples have all `keys` that `who` reads."""
        if missing := [key for key in keys if key not in self.element_spec]:
            have = f"examples of dataset.name={self.name!r} have {', '.join(self.element_spec)}"
            raise UserError(f"{who} reads {missing[0]!r}, but {have}; preprocess can add it.")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """[H, W, C] of a preprocessed image; of images in shapes of their own that of a square."""
        shape = self.element_spec["image"].shape
        if op := self.preprocess.patchify:
            rows, columns, size = *op.square, op.patch_size
            return rows * size, columns * size, shape[1] // size**2
        height, width, channels = shape
        return height, width, channels

    def of_lengths(self) -> list[Dataset]:
        """For each length of rows of patches that batches may have; this one without several."""
        op, chain = self.preprocess.patchify, self.preprocess
        if op is None or len(op.lengths) == 1:
            return [self]

        place = chain.ops.index(op)
        of = [dataclasses.replace(op, num_tokens=length) for length in op.lengths]
        chains = [Chain((*chain.ops[:place], one, *chain.ops[place + 1 :])) for one in of]
        return [dataclasses.replace(self, preprocess=one) for one in chains]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Short hash that changes with the examples, their order or classes; see `identity`."""
        digest = hashlib.blake2b(digest_size=8)
        identity = list(self.source.identity()) or [self.name]
        for line in (self.split, str(self.num_examples), *self.class_names, *identity):
            digest.update(line.encode(errors="surrogateescape") + b"\0")
        return digest.hexdigest()

    def labels(self) -> np.ndarray:
        """Labels of all examples, [N] or [N, K]; reads every record if they are not indexed."""
        source: Any = self.source
        if (known := getattr(source, "columns", {}).get("label")) is not None:
            if known.dtype == object:  # several for each
                known = np.array([source.column("label", i) for i in range(len(known))])
            return known
        count = counted(self.num_examples, "example")
        logging.getLogger(__name__).info("%s: reading the labels of %s.", self.name, count)
        read = map_threads(lambda index: self.source[index]["label"], range(self.num_examples))
        return np.array(list(read))

    def targets(self, label_key: str) -> tuple[tuple[str, ...], np.ndarray]:
        """Names and values of all numbers to predict, float32 [N, K]."""
        source: Any = self.source
        values = source.columns["target"]
        return tuple(filter(None, map(str.strip, label_key.split(",")))) or ("target",), values

    def balanced(self, balance: float) -> Dataset:
        """Returns the dataset with classes drawn more evenly in training; see balance.py.

        UserError if the exponent is out of range, or examples do not have a single label.
        """
        if not 0 <= balance <= 1:
            raise UserError(f"dataset.balance={balance} must be between 0 and 1.")
        if balance and getattr(self.element_spec.get("label"), "shape", None) != ():
            raise UserError(f"dataset.balance={balance} needs one label per image; set it to 0.")
        if balance and getattr(self.source, "windows", None):
            raise UserError(
                f"dataset.balance={balance} needs all of {self.name} in half of the cache: raise "
                "dataset.cache_gib, or set it to 0."
            )
        return dataclasses.replace(self, balance=balance)

    def check(self) -> Dataset:
        """Checks for damaged files before training; returns the dataset to train on.

        Decodes every image file (0.7 ms of one core each); of a TFDS set, only opens every file.
        UserError for a damaged file, unless it is an image and `on_bad_image` is "skip".
        """
        checked = dataclasses.replace(self, source=self.source.check(self.on_bad_image))
        has_labels = "label" in getattr(self.source, "columns", ["label"])
        if self.class_names and has_labels and checked.num_examples < self.num_examples:
            lost = sorted(self._classes() - checked._classes())
            if names := list_names(self.class_names[label] for label in lost):
                logging.warning(f"{self.name} {self.split}: no images left of {names}.")
        return checked

    def _classes(self) -> set[int]:
        """The labels that occur."""
        labels = self.labels()
        return set(np.unique(labels) if labels.ndim == 1 else np.flatnonzero(labels.any(0)))


Opened = tuple[Source, tuple[str, ...]]  # and the class names by label; () without labels

_ARROW_FILES = ("state.json", "dataset_dict.json")  # of a folder saved by `datasets`
_INFO_FILE = "dataset_info.json"  # of a prepared directory


class Reader(NamedTuple):
    """How data of a kind are recognised and opened."""

    matches: Callable[[str, str], bool]  # from `dataset.name` and `dataset.data_dir`
    open: Callable[[Request], Opened]
    columns: tuple[str, ...] | None = ()  # that ops may read; None: `open` checks them
    has_label_keys: bool = False
    has_maps: bool = False


def _later(name: str) -> Callable[[Request], Opened]:
    """The function MODULE.NAME, imported when it is called: most runs need one kind of data."""
    module, _, function = name.partition(".")
    return lambda request: getattr(import_module(f"vit_jax.data.{module}"), function)(request)


def _is_saved(name: str, _data_dir: str) -> bool:
    folder = os.path.expanduser(name)
    return bool(name) and any(os.path.isfile(os.path.join(folder, file)) for file in _ARROW_FILES)


def _is_folder(name: str, data_dir: str) -> bool:
    """Whether a name is a path rather than a TFDS name, which may also contain one separator.

    A file is one, for the message. A prepared set in `data_dir` comes before a folder of its name.
    """
    path = os.path.expanduser(name)
    if os.path.isfile(os.path.join(path, _INFO_FILE)):
        return False
    if name.startswith(("/", "./", "../", "~")) or name.count(os.sep) > 1 or name in (".", ".."):
        return True
    # Inside data_dir itself, TFDS's folder has the same name as the dataset.
    is_there = os.path.isdir(path) or (os.path.isfile(path) and bool(Path(path).suffix))
    is_folder = is_there and not _holds_prepared(Path(path))
    return is_folder and not (data_dir and _holds_prepared(to_path(data_dir) / name))


def _holds_prepared(folder: Path) -> bool:
    """Whether a folder holds versions of a prepared dataset, or of its configurations."""
    return any(any(folder.glob(f"{depth}/{_INFO_FILE}")) for depth in ("*", "*/*"))


def _holds_tars(name: str, data_dir: str) -> bool:
    if not name.lower().endswith(".tar") and not _is_folder(name, data_dir):
        return False
    from vit_jax.data.tars import find_tars

    return bool(find_tars(name))


def _holds_parquet(name: str, data_dir: str) -> bool:
    """Whether it means Parquet files of images; a single one may be a table."""
    if not name.lower().endswith(".parquet") and not _is_folder(name, data_dir):
        return False
    from vit_jax.data.parquet import holds_images
    from vit_jax.data.remote import parquet_files

    files = parquet_files(name)
    return len(files) > 1 or (bool(files) and holds_images(files[0]))


def _holds_idx(name: str, _data_dir: str) -> bool:
    from vit_jax.data.idx import find_idx

    return bool(find_idx(name))


def _open_remote(request: Request) -> Opened:
    from vit_jax.data.remote import find_files

    files = find_files(request.name, request.cache_gib)
    if files[0].address.lower().endswith(".parquet"):
        from vit_jax.data.parquet import open_parquet

        return open_parquet(request, files)
    if request.label_key:
        raise UserError(f"dataset.label_key={request.label_key!r} is not for tars.")
    from vit_jax.data.tars import open_tars

    return open_tars(request, files)


def _open_tfds(request: Request) -> Opened:
    if not request.name:
        raise UserError("dataset.name is empty; set it to a dataset or an image folder's path.")
    from vit_jax.data import tfds_reader  # takes seconds to import

    directory = request.path
    if not os.path.isfile(os.path.join(directory, _INFO_FILE)):
        directory = tfds_reader.find_prepared(request.name, request.data_dir)
    return tfds_reader.open_prepared(
        directory, request.split, request.label_key, needs_label=request.needs_label
    )


# The first that matches opens the data.
READERS = {
    "remote": Reader(
        lambda name, _: bool(scheme_of(name)), _open_remote, columns=None, has_label_keys=True
    ),
    "parquet": Reader(_holds_parquet, _open_remote, columns=None, has_label_keys=True),
    "saved": Reader(_is_saved, _later("arrow.open_saved"), columns=None, has_label_keys=True),
    "table": Reader(
        lambda name, _: name.lower().endswith((".csv", ".tsv", ".parquet")),
        _later("table.open_table"),
        columns=None,
        has_label_keys=True,
        has_maps=True,
    ),
    "idx": Reader(_holds_idx, _later("idx.open_idx")),
    "tars": Reader(_holds_tars, _later("tars.open_tars"), columns=None),
    "digits": Reader(lambda name, _: name == "digits", _later("digits.open_digits")),
    "glyphs": Reader(
        lambda name, _: name.partition("(")[0].strip() in ("digits", "glyphs"),
        _later("glyphs.open_glyphs"),
        columns=("caption",),
    ),
    "folder": Reader(
        _is_folder,
        lambda request: _later("maps.open_maps" if request.map else "folder.open_folder")(request),
        has_maps=True,
    ),
    "tfds": Reader(lambda *_: True, _open_tfds, has_label_keys=True),
}


@with_short_errors
def create_dataset(
    *,
    name: str,
    split: str,
    preprocess: str,
    data_dir: str = "",
    on_bad_image: str = "error",
    label_key: str = "",
    cache_gib: float = 64.0,
    needs: Collection[str] = ("label",),
    readers: Iterable[Reader] = READERS.values(),
) -> Dataset:
    """Opens a dataset: reads metadata or lists files; reads and downloads no examples.

    Args:
      name: what a row of READERS reads: `digits`, `glyphs(size=32, ...)`, a path, else a TFDS name
        with optional config and version (`imagenet2012:5.1.0`, `cifar10_corrupted/fog_1`).
      split, preprocess, data_dir: see `sources.resolve_split`, preprocess.py, `data_root`.
      on_bad_image: `error` or `skip`; not for TFDS.
      label_key: which label of a TFDS or `datasets` set, a key of COMPUTED_LABELS, or columns of a
        table.
      cache_gib: of files on servers, what is kept on disk, see remote.py.
      needs: keys that examples must have besides the image. Without `label` the set may have no
        labels; without class names, examples have none. Or a key of `ops.MAPS`, or `target`.
      readers: the first that matches the name opens it.

    UserError for an invalid argument or data layout.
    """
    check_known("dataset.on_bad_image", on_bad_image, ("error", "skip"))
    chain = parse(preprocess)
    for op in chain.ops:
        if isinstance(op, PythonOp):
            load_function(op.call)  # report a misspelt name before reading all images
    if "://" in name and not scheme_of(name):
        known = "hf://datasets/..., https:// or gs://; mount other file systems"
        raise UserError(f"dataset.name={name!r} must be a path, or {known}.")
    reader = next(reader for reader in readers if reader.matches(name, data_dir))
    if label_key and not reader.has_label_keys:
        kinds = f"only for TFDS names and tables, not {name!r}"
        raise UserError(f"dataset.label_key={label_key!r} is {kinds}.")
    if (maps := {"target", *MAPS}.intersection(needs)) and not reader.has_maps:
        raise UserError(
            f"dataset.name={name!r} has no {min(maps)}; folders and tables can have it."
        )
    if reader.columns is not None:
        check_columns(name, chain.columns, reader.columns)
    request = Request(
        name=name,
        split=split,
        data_dir=data_dir,
        label_key=label_key,
        needs=needs,
        columns=chain.columns,
        cache_gib=cache_gib,
        exif=getattr(chain.ops[0], "exif", None),
    )
    source, class_names = reader.open(request)
    return Dataset(name, split, source, chain, class_names, on_bad_image)
