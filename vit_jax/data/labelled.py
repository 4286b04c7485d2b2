"""What readers of labelled images share: a source, and the rules of splits, classes and order.

A reader (`folder.py`, `table.py`, `tars.py`, `arrow.py`, `memory.py`) lists the place, split and
label of all images; `Listing` does what is the same for all of them.

Images in `groups` (mostly classes) are shuffled: the k-th of a group of n, by a hash of its place,
gets rank k / (n - 1), and all are sorted by rank, ties by hash. So every prefix and suffix at least
as long as the number of groups contains every group of two images. Without splits, the fifth of
each group with the lowest hashes is `test`. So an image keeps its split when others are added,
unless a group would be off by more than one image (of 100: three). A file that is listed several
times, as other paths or links too, counts as the first of them.
"""

import dataclasses
import functools
import hashlib
import itertools
import logging
import os
import re
import unicodedata
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from vit_jax.data import sources
from vit_jax.data.check_images import usable_images
from vit_jax.data.sources import Source, map_threads, named_splits, naming_splits
from vit_jax.errors import UserError
from vit_jax.wording import counted, escaped, list_names

TEST_SHARE = 0.2  # of images without splits


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledSource(Source):
    """Images by number, and what is known about each; a kind of storage says how to `read` one."""

    places: np.ndarray  # [N] where each is: compact to send to worker processes
    # [N] each; `label` is int32, or arrays of class numbers if there are several per image.
    columns: Mapping[str, np.ndarray]
    # Whether the images of a part stay as they are stored: random reads of large files are slow.
    keeps_order: ClassVar[bool] = True
    drawn: bool = dataclasses.field(default=False, kw_only=True)  # the data have no splits
    num_classes: int = dataclasses.field(default=0, kw_only=True)
    # Whether every image is decoded before training; not if that would fetch them all.
    is_checked: bool = dataclasses.field(default=True, kw_only=True)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        columns = {name: self.column(name, index) for name in self.columns}
        return {"image": self.read(index), **columns}

    def file_ids(self) -> np.ndarray:
        """A hash of where each image is, S16 [N]: equal for links and other spellings."""
        real = functools.cache(os.path.realpath)

        def digest(index: int) -> bytes:
            folder, name = os.path.split(self.describe(index))
            path = os.path.join(real(folder), name)
            path = real(path) if os.path.islink(path) else path
            return hashlib.blake2b(os.fsencode(path), digest_size=16).digest()

        return np.fromiter(map_threads(digest, range(len(self))), "S16", len(self))

    def shared(self, other: Source) -> int:
        theirs = other.file_ids() if isinstance(other, LabelledSource) else np.empty(0, "S16")
        return int(np.isin(self.file_ids(), theirs).sum())

    def read(self, index: int) -> Any:
        """An image's file as bytes, or its pixels; OSError or ValueError if it cannot be read."""
        raise NotImplementedError

    def column(self, name: str, index: int) -> Any:
        value = self.columns[name][index]
        if name != "label" or not isinstance(value, np.ndarray):
            return value
        return (np.bincount(value, minlength=self.num_classes) > 0).astype(np.uint8)

    def describe(self, index: int) -> str:
        return "{}[{}]".format(*self.places[index])

    def keep(self, rows: np.ndarray) -> Self:
        """The images of these numbers, in their order."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return dataclasses.replace(self, places=self.places[rows], columns=columns)

    def check(self, on_bad_image: str) -> Self:
        """Decodes every image, see `usable_images`; UserError for "skip" if that cannot be."""
        if not self.is_checked:
            if on_bad_image != "error":
                raise UserError(f"dataset.on_bad_image={on_bad_image!r}: not for files on servers.")
            return self
        return self.keep(usable_images(len(self), self.read, self.describe, on_bad_image))


def number_images(lengths: Mapping[str, int]) -> tuple[np.ndarray, dict[str, range]]:
    """Places of images that are stored by split and number in it, and the images of each split."""
    total = sum(lengths.values())
    places, splits, first = np.empty(total, [("split", object), ("row", np.int64)]), {}, 0
    for split, length in lengths.items():
        splits[split] = range(first, first + length)
        places["split"][first : first + length] = split
        places["row"][first : first + length] = np.arange(length)
        first += length
    return places, splits


def rows_by(names: Iterable[str], known: Iterable[str] = ()) -> dict[str, list[int]]:
    """The rows of each name, from the name of each row; `known` names may have none."""
    rows: dict[str, list[int]] = {name: [] for name in known}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    return rows


def numbered(values: Iterable[Hashable]) -> np.ndarray:
    """A number for each value, the same for equal ones, int64 [N]."""
    numbers: dict[Hashable, int] = {}
    return np.fromiter((numbers.setdefault(value, len(numbers)) for value in values), np.int64)


@dataclasses.dataclass
class Listing:
    """The images that a reader knows, in the order of `source`; `open` selects a split.

    UserError for fewer than two classes, one that is not in `train`, or an odd name.
    """

    where: str  # names the data in messages
    source: LabelledSource  # gets the labels as a column
    splits: Mapping[str, Sequence[int]]  # the images of each; if `source.drawn`, all in each
    # Text of each image, "" if missing, or (`several`) any number of texts; None if they are not
    # wanted, or only the source knows them.
    labels: dataclasses.InitVar[Sequence[Any] | None]
    _: dataclasses.KW_ONLY
    several: bool = False
    classes: Sequence[str] | None = None  # None: the texts of `train`, or else of all splits
    groups: Sequence[str] = ()  # of each image; (): by label, if each has one that is known
    files: Any = ()  # of each image, a number or see `file_ids`; () if all differ

    def __post_init__(self, labels: Sequence[Any] | None) -> None:
        self._written = named_splits(self.splits)
        self.splits = {name: self.splits[written] for name, written in self._written.items()}
        if labels is not None:
            texts = {split: self._texts(labels, rows) for split, rows in self.splits.items()}
            if self.classes is None:
                self.classes = in_order(itertools.chain(*naming_splits(texts)))
                if (count := len(self.classes)) < 2 - self.several:
                    raise UserError(f"{self.where}: a classifier needs two classes, not {count}.")
            for split, names in texts.items():
                if unknown := sorted(names.difference(self.classes)):
                    lacks = f"'train' lacks the classes {list_names(unknown):.400} of {split!r}"
                    raise UserError(f"{self.where}: {lacks}.")
            encoded, size = _encode(labels, self.classes, self.several), len(self.classes)
            columns = {**self.source.columns, "label": encoded}
            self.source = dataclasses.replace(self.source, columns=columns, num_classes=size)
        by_label = labels if labels and not self.several else [""] * len(self.source)
        self._group = numbered(self.groups or by_label)
        of_pixels = "label_map" in self.source.columns
        count = 0 if of_pixels else sum(map(len, naming_splits(self.splits)))
        _check_classes(self.where, self.classes or (), count)

    def open(self, split: str) -> tuple[Any, tuple[str, ...]]:
        """Images of a split expression, and class names; UserError: invalid, or a label lacks."""
        split = sources.known_split(self.where, split, self._written)
        ordered = functools.cache(self._ordered)
        parts = sources.resolve_split(split, self.splits, lambda name: len(ordered(name)))
        chosen = [ordered(part.name)[part.start : part.stop] for part in parts]
        rows = np.concatenate([*map(np.sort, chosen)] if self.source.keeps_order else chosen)
        source, total = self.source.keep(rows), len(self.source)
        if missing := 0 if self.several else int(np.sum(source.columns.get("label", 0) < 0)):
            count = counted(missing, "example")
            raise UserError(f"{self.where}: {count} of {split!r} without a label.")
        if source.drawn and len(rows) < total:
            count = f"{len(rows):,} of {counted(total, 'image')}"
            logging.info(f"{self.where} has no splits: {split!r} is {count}, 'train+test' is all.")
        return source, tuple(self.classes or ())

    def _texts(self, labels: Sequence[Any], rows: Iterable[int]) -> set[str]:
        """The labels of some images."""
        texts = (labels[row] for row in rows)
        return set(itertools.chain.from_iterable(texts) if self.several else texts) - {""}

    def _ordered(self, split: str) -> np.ndarray:
        """The images of a split in their order, int64 [n]; see above."""
        rows = same = np.array(self.splits[split], np.int64)
        if len(self.files):
            _, first, codes = np.unique(np.asarray(self.files)[rows], True, True)
            same = rows[first[codes]]

        # What stays if the data are moved: a relative path, or the first two numbers and names.
        def digest(place: Any) -> bytes:
            key = place if isinstance(place, bytes) else str(place[:2]).encode()
            return hashlib.blake2b(key, digest_size=8).digest()

        stored = map(digest, map(self.source.places.item, same))
        digests = np.fromiter(stored, "S8", len(same)).view(">u8").astype(np.uint64)
        order = np.lexsort((rows, digests, groups := self._group[same]))
        rank = np.full(len(rows), -1.0)  # of those that are in the split
        for group in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
            if self.source.drawn:  # both get an image, if there are two
                low = np.sum(digests[group] < np.uint64(int(256 * TEST_SHARE) << 56))
                share, slack = len(group) * TEST_SHARE, 1 + len(group) // 50
                count = round(min(max(int(low), share - slack), share + slack))
                cuts = (np.flatnonzero(np.diff(digests[group])) + 1).tolist()
                count = min(cuts, key=lambda cut: abs(cut - count), default=0)
                group = group[:count] if split == "test" else group[count:]
            rank[group] = np.arange(len(group)) / max(len(group) - 1, 1)
        return rows[np.lexsort((rows, digests, rank))[np.sum(rank < 0) :]]


def _encode(labels: Sequence[Any], classes: Sequence[str], several: bool) -> np.ndarray:
    numbers = {name: number for number, name in enumerate(classes)}
    if not several:
        return np.array([numbers.get(label, -1) for label in labels], np.int32)
    rows = (np.array([numbers[text] for text in texts], np.int32) for texts in labels)
    return np.fromiter(rows, object, len(labels))


def class_numbers(names: Iterable[str]) -> list[int]:
    """The classes as numbers, if all are, in any form: `3`, `003`, `3.0`; else []."""
    whole = [re.sub(r"\.0*$", "", name) for name in names]
    are_numbers = all(name.isdecimal() and len(name) < 16 for name in whole)
    return list(map(int, whole)) if are_numbers else []


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts class names: by value if all are numbers, else as text."""
    distinct = sorted(set(names))
    numbers = class_numbers(distinct) or range(len(distinct))
    return [name for _, name in sorted(zip(numbers, distinct, strict=True))]


def _check_classes(where: str, names: Sequence[str], num_examples: int) -> None:
    """UserError for a name that is not one line of UTF-8, or two names that look the same.

    Warns of nearly as many classes as images to train on: they may be numbers of images.
    """
    forms: dict[Any, str] = {}
    for name, number in itertools.zip_longest(names, class_numbers(names)):
        if escaped(name) != name or len(name) > 1000:
            limits = "a single line of UTF-8, at most 1,000 characters"
            raise UserError(f"{where}: class {name!a:.80} must be {limits}.")
        form = unicodedata.normalize("NFC", name) if number is None else number
        if form in forms:
            same = "look the same" if number is None else "are the same number"
            raise UserError(f"{where}: {forms[form]!a:.80} and {name!a:.80} {same}; rename one.")
        forms[form] = name
    if num_examples and len(names) > max(10, 0.8 * num_examples):
        count = f"{counted(len(names), 'class')} for {counted(num_examples, 'image')}"
        logging.warning(f"{where}: {count}; are these labels or image numbers?")
