"""Random-access sources of examples, and the split expressions that select parts of them."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import itertools
import logging
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from vit_jax.errors import UserError, counted, escaped, nearest

A = TypeVar("A")
B = TypeVar("B")
P = TypeVar("P", bound="Parts")

GRAMMAR = "'train', 'train[:98%]', 'train[300:600]', 'train[-50:]' and sums such as 'train+test'"


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of an array, as `jax.eval_shape` takes them."""

    shape: tuple[int, ...]
    dtype: np.dtype


def describe(array: ArraySpec | np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"


class Source(Protocol):
    """Examples by number: picklable, thread-safe, in an order that depends only on the files."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"image": bytes of a file | uint8 [H, W, C]}, with labels also "label", an int or
        uint8 [K] of 0 and 1, and the text of columns by name.
        """

    def check(self, _on_bad_image: str) -> Source:
        """The source to train on; UserError for damage, unless in images, with "skip"."""
        return self

    def describe(self, index: int) -> str:
        """Where example `index` is stored."""
        return f"[{index}]"

    def identity(self) -> Iterable[str]:
        """Lines that change with the files, but not if the folder is moved. None: only the name."""
        return ()


def check_columns(name: str, columns: Iterable[str], known: Sequence[str]) -> None:
    """Raises a UserError unless a dataset that is not a table has the columns that ops read."""
    if missing := [column for column in columns if column not in known]:
        found = f"{', '.join(known) or 'none'}; preprocess reads it"
        raise UserError(f"dataset.name={name!r} has no column {missing[0]!r}, but {found}.")


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts class names: by value if all are numbers, else as text."""
    found = set(names)
    if all(name.isdecimal() and len(name) < 16 for name in found):
        return sorted(found, key=lambda name: (int(name), name))
    return sorted(found)


def check_classes(where: str, names: Sequence[str], num_examples: int) -> None:
    """Checks the class names of folders, tables and in-memory data.

    UserError for a name that is not one line of UTF-8, or two that differ only in Unicode
    normalisation. Warns if there are nearly as many classes as images: labels may be image numbers.
    `num_examples`: of the training split; 0 if unknown or partial.
    """
    forms: dict[str, str] = {}
    for name in names:
        if escaped(name) != name:
            raise UserError(f"{where}: class {name!a:.80} must be a single line of UTF-8.")
        other = forms.setdefault(unicodedata.normalize("NFC", name), name)
        if other != name:
            raise UserError(
                f"{where}: the classes {other!a:.80} and {name!a:.80} are one name in two forms of "
                "Unicode; rename one."
            )
    if num_examples and len(names) > max(10, 0.8 * num_examples):
        logging.getLogger(__name__).warning(
            f"{where}: {counted(len(names), 'class')} for {counted(num_examples, 'image')}; "
            "are these labels or image numbers?"
        )


class Part(NamedTuple):
    """One term of a split expression: examples `start:stop` of the split `name`."""

    name: str
    start: int
    stop: int


def resolve_split(split: str, known: Iterable[str], length: Callable[[str], int]) -> list[Part]:
    """Resolves a split expression into absolute, non-empty parts, as TFDS does.

    `known` are the names of the splits; `length`, a split's number of examples, is called only for
    splits in the expression. UserError for an unknown split, a malformed expression, a bound
    outside the split, or an empty selection.
    """
    import tensorflow_datasets as tfds

    names, spec = list(known), "".join(split.split())
    requested = [term.partition("[")[0] for term in spec.split("+")]
    for name in requested:
        if re.fullmatch(r"[\w-]+", name) and name not in [*names, "all"]:
            known_splits = f"known splits: {', '.join(names)}.{nearest(name, names)}"
            raise UserError(f"dataset.split={split!r}: unknown split {name!r}; {known_splits}")
    counts = {name: length(name) for name in names if name in requested or "all" in requested}
    infos = {
        name: tfds.core.SplitInfo(name=name, shard_lengths=[count], num_bytes=0)
        for name, count in counts.items()
    }
    try:
        if re.search(r"\dshard", spec):
            raise ValueError("shards can only be selected in a prepared TFDS dataset")
        terms = tfds.core.ReadInstruction.from_spec(spec).to_absolute(infos)
    except (ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[-1].partition(" See format")[0].rstrip(".")
        raise UserError(f"dataset.split={split!r}: {reason}; write {GRAMMAR}.") from None
    bounds = [slice(each.from_, each.to).indices(counts[each.splitname]) for each in terms]
    parts = [Part(each.splitname, *ends[:2]) for each, ends in zip(terms, bounds, strict=True)]
    if not (parts := [part for part in parts if part.stop > part.start]):
        raise UserError(f"dataset.split={split!r} selects no examples.")
    return parts


def select(split: str, known: Iterable[str], rows: Callable[[str], np.ndarray]) -> np.ndarray:
    """The rows [n] of the splits in an expression, each from `rows(name)` [N]."""
    read = functools.cache(rows)
    parts = resolve_split(split, known, lambda name: len(read(name)))
    return np.concatenate([read(part.name)[part.start : part.stop] for part in parts])


class Parts(Source):
    """Concatenated parts of named splits, or some of their examples: locates the n-th."""

    def __init__(self, parts: Iterable[Part]):
        self.parts = list(parts)
        self._ends = list(itertools.accumulate(part.stop - part.start for part in self.parts))
        self._kept: np.ndarray | None = None

    def keep(self: P, rows: np.ndarray) -> P:
        """The source with only some rows, sorted, of those that it has now."""
        kept = copy.copy(self)
        kept._kept = rows if self._kept is None else self._kept[rows]
        return kept

    def __len__(self) -> int:
        return self._ends[-1] if self._kept is None else len(self._kept)

    def locate(self, index: int) -> tuple[str, int]:
        """Name of the part, and the example's number in that split."""
        if self._kept is not None:
            index = int(self._kept[index])
        position = bisect.bisect_right(self._ends, index)
        part = self.parts[position]
        return part.name, part.stop - (self._ends[position] - index)

    def describe(self, index: int) -> str:
        return "{}[{}]".format(*self.locate(index))


class SlicedSource(Parts):
    """Concatenated slices of sources, by name."""

    def __init__(self, sources: Mapping[str, Any], parts: Sequence[Part]):
        super().__init__(parts)
        self.sources = {part.name: sources[part.name] for part in parts}

    def __getitem__(self, index: int) -> dict[str, Any]:
        name, number = self.locate(index)
        return self.sources[name][number]


def map_threads(
    function: Callable[[A], B], arguments: Iterable[A], *, chunk: int = 64, num_threads: int = 0
) -> Iterator[B]:
    """`map` in threads, in order; each takes `chunk` arguments at a time: a future costs 40 us."""
    rest = iter(arguments)
    parts = iter(lambda: tuple(itertools.islice(rest, chunk)), ())
    with ThreadPoolExecutor(num_threads or (os.cpu_count() or 1) + 2) as pool:
        for results in pool.map(lambda part: list(map(function, part)), parts):
            yield from results
