"""Prepared TFDS directories as random-access sources, without TensorFlow or their builders."""

import functools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import registered
from tensorflow_datasets.proto import tf_example_pb2

from vit_jax.data import computed_labels
from vit_jax.data.computed_labels import COMPUTED_LABELS, Label
from vit_jax.data.decode import decode_image
from vit_jax.data.records import allow_open_files, open_records
from vit_jax.data.sources import GRAMMAR, MOST_CLASSES, Part, Parts, map_threads
from vit_jax.errors import TransientError, UserError, as_user_error, one_line
from vit_jax.files import paths
from vit_jax.wording import nearest

NAME = re.compile(r"(?P<name>[A-Za-z]\w*)(?:/(?P<config>[\w.-]+))?(?::(?P<version>\d+\.\d+\.\d+))?")
INFO_FILE = "dataset_info.json"
_FEATURE_KEYS = ("type", "pythonClassName", "python_class_name")
_OWN_FEATURE = re.compile(r"tensorflow_datasets\.core\.features\.\w+\.\w+")


class TfdsSource(Parts):
    """Encoded images and class numbers from the records of a prepared directory.

    `extents` are TFDS's FileInstructions. A file is opened in the process that reads it. UserError
    if it is damaged, from `check` or on first read.
    """

    def __init__(self, info: Any, extents: Sequence[Any], image_key: str, label: Label | None):
        super().__init__(Part(str(e.filename), e.skip, e.skip + e.take) for e in extents)
        self._lengths = {str(extent.filename): extent.examples_in_shard for extent in extents}
        self._format, self._full_name = info.file_format.value, info.full_name
        self._image_key, self._label = image_key, label
        self._offsets: dict[str, np.ndarray] = {}
        self._files: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def __getitem__(self, index: int) -> dict[str, Any]:
        features = self._features(index)
        try:
            image = features[self._image_key].bytes_list.value[0]
            label = self._label.compute(features) if self._label else 0
        except IndexError as error:
            raise UserError(f"{self.describe(index)} has no image or no label.") from error
        if self._label is None:
            return {"image": image}
        if not 0 <= label < len(self._label.class_names):  # -1 in ImageNet's test split
            where = self.describe(index)
            raise UserError(f"{where}: label {label} is no class; this split may have no labels.")
        if self._label.brightness > 1:
            image = decode_image(image, channels=1, exif=False) * np.uint8(self._label.brightness)
        return {"image": image, "label": label}

    def stored(self, index: int) -> dict[str, list[Any]]:
        """All features of example `index`, each as a flat list."""
        values = {}
        for key, feature in self._features(index).items():
            kind = feature.WhichOneof("kind")  # None if TFDS stored an empty list
            values[key] = list(getattr(feature, kind).value) if kind else []
        return values

    def _features(self, index: int) -> Any:
        name, number = self.locate(index)
        try:
            record = self._file(name).read([number])[0]
            return tf_example_pb2.Example.FromString(record).features.feature
        except UserError:  # from opening it
            raise
        except Exception as error:  # array_record and protobuf have their own kinds
            kind = TransientError if paths.is_bucket(name) else UserError
            raise kind(f"{self.describe(index)}: {one_line(error)}; copy it again.") from error

    def describe(self, index: int) -> str:
        return "{}, record {}".format(*self.locate(index))

    def identity(self) -> Iterator[str]:
        """Name of the dataset; name, size and range of every extent."""
        yield self._full_name
        files = (paths.to_path(part.name) for part in self.parts)
        sizes = map_threads(paths.size_of, files, chunk=1)
        for (name, start, stop), size in zip(self.parts, sizes, strict=True):
            yield f"{os.path.basename(name)} {size} {start} {stop - start}"

    def check(self, _on_bad_image: str) -> Self:
        """Opens every file; none is skipped, as each holds thousands of examples."""
        list(map_threads(self._file, self._lengths, chunk=1))
        return self

    def _file(self, name: str) -> Any:
        if name not in self._files:  # several threads may open it: one is kept
            allow_open_files(len(self._lengths))
            self._files[name] = open_records(name, self._format, self._lengths[name], self._offsets)
        return self._files[name]


def data_root(data_dir: str) -> str:
    """The absolute folder of TFDS datasets; "" means $TFDS_DATA_DIR, else TFDS's own default."""
    chosen = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return str(paths.full_path(os.path.expanduser(chosen)))


def find_prepared(name: str, data_dir: str) -> str:
    """The directory of NAME[/CONFIG][:1.2.3]; for `data_dir` (may be a bucket) see `data_root`.

    By default the newest version, and the only config. UserError if there is none, or several.
    """
    if (match := NAME.fullmatch(name)) is None:
        raise UserError(f"dataset.name={name!r} is not a TFDS name; write NAME[/CONFIG][:1.2.3].")
    root, there = data_root(data_dir), {}
    for depth in ("*", "*/*"):
        found = paths.to_path(root).glob(f"{match['name']}/{depth}/{INFO_FILE}")
        for path in sorted(map(str, found)):
            folder = path.removesuffix(f"/{INFO_FILE}")
            if prepared := NAME.fullmatch(":".join(folder.removeprefix(f"{root}/").rsplit("/", 1))):
                there[prepared] = folder
    wanted = {key: match[key] for key in ("config", "version") if match[key]}
    suitable = [one for one in there if wanted.items() <= one.groupdict().items()]
    if not suitable:
        raise UserError(_not_prepared(name, match["name"], root, [one.string for one in there]))
    if len({one["config"] for one in suitable}) > 1:
        names = ", ".join(one.string for one in suitable)
        raise UserError(f"dataset.name={name!r}: name one of the configs {names}.")
    return there[max(suitable, key=lambda one: tuple(map(int, one["version"].split("."))))]


def _not_prepared(name: str, base: str, root: str, there: list[str]) -> str:
    """What to do about a dataset that is not prepared."""
    where = f"dataset.name={name!r}: not prepared in {root} (dataset.data_dir, else $TFDS_DATA_DIR)"
    if there:
        return f"{where}; prepared there: {', '.join(there)}."
    own = {"imagenet2012": "imagenet2012 FOLDER", "imagenet21k": "imagenet21k TAR_OR_FOLDER"}
    known = [*registered.list_imported_builders(), *own, "digits", "glyphs"]
    if base not in known:
        names = "'digits', 'glyphs', the path of an image folder, or a TFDS name"
        return f"dataset.name={name!r}: no such dataset; expected {names}.{nearest(base, known)}"
    what = own.get(base, f"tfds {name}")
    command = f"python scripts/prepare_data.py {what} --data_dir={shlex.quote(root)}"
    return f"{where}; prepare it with: {command}"


def open_prepared(
    directory: str, split: str, label_key: str = "", *, needs_label: bool = True
) -> tuple[TfdsSource, tuple[str, ...]]:
    """Reads the metadata of a prepared directory, no records; returns source and class names.

    `label_key` is a feature or a key of COMPUTED_LABELS; "" means the supervised one, else `label`.
    """
    try:
        _check_metadata(paths.to_path(directory))
        info = tfds.builder_from_directory(directory).info
    except Exception as error:  # TFDS raises many kinds, with multi-line texts
        message = f"dataset {directory}: cannot read its metadata ({one_line(error)})."
        raise as_user_error(message, error) from None
    image = image_key(info)
    label = _label(info, label_key) if needs_label or label_key else None
    if (stored := info.file_format and info.file_format.value) not in ("array_record", "tfrecord"):
        raise UserError(f"dataset {directory} is stored as {stored}; prepare it as array_record.")
    try:
        extents = info.splits["".join(split.split())].file_instructions
    except Exception as error:  # likewise
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"dataset.split={split!r}: {reason}; write {GRAMMAR}.") from None
    if not extents:
        raise UserError(f"dataset.split={split!r} selects no examples.")
    folders = set(map(paths.full_path, {os.path.dirname(extent.filename) for extent in extents}))
    if away := folders - {paths.full_path(directory)}:
        raise UserError(f"dataset {directory}: its records are elsewhere, in {min(away)}.")
    return TfdsSource(info, extents, image, label), label.class_names if label else ()


def _check_metadata(folder: Path) -> None:
    """Raises ValueError for features that are not TFDS's own: it would import what a file names."""
    for file in folder.glob("*.txt"):  # names of classes
        paths.check_file(file)
    files = filter(lambda file: file.exists(), (folder / INFO_FILE, folder / "features.json"))
    waiting = [paths.parse_json(paths.read_file(file, paths.LARGEST_TEXT)) for file in files]
    while waiting:
        value = waiting.pop()
        waiting += value if isinstance(value, list) else []
        for key, part in value.items() if isinstance(value, dict) else ():
            if not isinstance(part, str):
                waiting.append(part)
            elif key == "content":  # TFDS before 4.4 stored JSON in JSON
                waiting.append(paths.parse_json(part))
            elif key in _FEATURE_KEYS and "." in part and not _OWN_FEATURE.fullmatch(part):
                raise ValueError(f"its feature {part!r:.80} is not one of TFDS's own")


def _supervised(info: Any) -> tuple[Any, Any]:
    """Names of the image and label features, if TFDS declares the dataset supervised."""
    return info.supervised_keys if len(info.supervised_keys or ()) == 2 else ("", "")


def _listing(info: Any) -> str:
    return ", ".join(f"{key} ({type(kind).__name__})" for key, kind in info.features.items())


def _features(info: Any, kind: type) -> list[str]:
    """Names of the features of a kind."""
    return [key for key, feature in info.features.items() if isinstance(feature, kind)]


def image_key(info: Any) -> str:
    """Name of the image feature; UserError if there is none that can be read."""
    images = _features(info, tfds.features.Image)
    chosen = next((key for key in (_supervised(info)[0], "image", *images) if key in images), "")
    where = f"dataset {info.full_name}"
    if not chosen:
        raise UserError(f"{where} has no image feature; its features: {_listing(info)}.")
    dtype = np.dtype(info.features[chosen].np_dtype).name
    if dtype not in ("uint8", "uint16"):  # others are stored as bytes in a PNG's channels
        raise UserError(f"{where}: its images are {dtype}; only uint8 and uint16 can be read.")
    return chosen


def _label(info: Any, label_key: str) -> Label:
    """The stored or computed label; UserError if there is none."""
    where = f"dataset {info.full_name}"
    if label := COMPUTED_LABELS.get(label_key):
        if info.name == label.dataset:
            return label
        raise UserError(f"{where}: dataset.label_key={label_key!r} is for {label.dataset}.")
    labels = _features(info, tfds.features.ClassLabel)
    # The last is for imagenet2012_real, whose supervised key is a list of labels.
    usual = [label_key] if label_key else [_supervised(info)[1], "label", "original_label"]
    counts = {key: info.features[key].num_classes or 0 for key in labels}
    chosen = next((key for key in usual if 0 < counts.get(key, 0) <= MOST_CLASSES), "")
    if not chosen:
        what = f"dataset.label_key={label_key!r} is not a ClassLabel" if label_key else "no label"
        computed = [key for key, row in COMPUTED_LABELS.items() if row.dataset == info.name]
        known = ", ".join([_listing(info), *computed])
        raise UserError(f"{where}: {what}; set dataset.label_key to a ClassLabel of: {known}.")
    compute = functools.partial(computed_labels.stored, key=chosen)
    return Label(tuple(info.features[chosen].names), compute)
