"""Random-access sources of examples, the names of splits, and expressions that select parts."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from vit_jax.errors import UserError
from vit_jax.wording import list_names, nearest

A = TypeVar("A")
B = TypeVar("B")

GRAMMAR = "'train', 'train[:98%]', 'train[300:600]', 'train[-50:]' and sums such as 'train+test'"
MOST_CLASSES = 1_000_000
# If one of these is requested but is not there, the first that is.
HELD_OUT = ("validation", "val", "valid", "dev", "test")
# What words mean in the names of splits.
SPLIT_WORDS = {word: word for word in ("train", *HELD_OUT)}
SPLIT_WORDS |= {"training": "train", "testing": "test", "eval": "val", "evaluation": "val"}


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

    @property
    def windows(self) -> Any:
        """The order of training, a remote.Windows, or None for a plain one."""
        return None

    def shared(self, _other: Source) -> int:
        """How many examples are also in another source, as far as is known without reading them."""
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The data that a reader is asked for; see `datasets.create_dataset`."""

    name: str
    split: str
    data_dir: str = ""
    label_key: str = ""
    needs: Collection[str] = ("label",)  # keys of an example besides its image
    columns: tuple[str, ...] = ()  # of text, that ops read
    cache_gib: float = 64.0  # of files on servers
    exif: bool | None = True  # whether photos are turned as their EXIF says; None: no decode

    @property
    def path(self) -> str:
        return os.path.expanduser(self.name)

    @property
    def needs_label(self) -> bool:
        return "label" in self.needs

    @property
    def map(self) -> str:
        """The key of a map of pixels that is needed, see `ops.MAPS`, or ""."""
        return next((key for key in self.needs if key.endswith("_map")), "")


def check_columns(name: str, columns: Iterable[str], known: Sequence[str]) -> None:
    """Raises a UserError unless a dataset that is not a table has the columns that ops read."""
    if missing := [column for column in columns if column not in known]:
        but = f"but {', '.join(known) or 'none'}; preprocess reads it"
        raise UserError(f"dataset.name={name!r} has no column {missing[0]!r}, {but}.")


class Part(NamedTuple):
    """One term of a split expression: examples `start:stop` of the split `name`."""

    name: str
    start: int
    stop: int


def split_names(split: str) -> list[str]:
    """The names in a split expression, in turn."""
    return [term.partition("[")[0].strip() for term in split.split("+")]


def split_word(name: str) -> str:
    """The split that a name means: `train` for `seg_train`, `TrainSet`; "" if none, or several."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    meant = {SPLIT_WORDS.get(word.lower().removesuffix("set"), "") for word in words} - {""}
    return meant.pop() if len(meant) == 1 else ""


def named_splits(names: Iterable[str]) -> dict[str, str]:
    """By the name to ask for, the name as written: `train: Training`, unless two are `train`."""
    words = {name: split_word(name) for name in names}
    counts = collections.Counter(words.values())
    return {word if word and counts[word] == 1 else name: name for name, word in words.items()}


def known_split(where: str, split: str, written: Mapping[str, str]) -> str:
    """The split expression in the names of `named_splits`; says which stands for another."""
    terms = split.split("+")
    for i, name in enumerate(split_names(split)):
        word = split_word(name)
        is_there = word in map(split_word, written)
        known = (name, word, *(HELD_OUT if word in HELD_OUT and not is_there else ()))
        there = next((other for other in known if other in written), name)
        if written.get(there, name) != name:
            logging.info(f"{where} has no split {name!r}: using {written[there]!r}.")
        terms[i] = terms[i].replace(name, there, 1)
    return "+".join(terms)


def naming_splits(splits: Mapping[str, A]) -> list[A]:
    """What names the classes: the split `train`, or else all."""
    written = named_splits(splits)
    return [splits[written["train"]]] if "train" in written else list(splits.values())


def resolve_split(split: str, known: Iterable[str], length: Callable[[str], int]) -> list[Part]:
    """Resolves a split expression into absolute, non-empty parts, as TFDS does.

    `length`, a split's number of examples, is called only for splits in the expression. UserError
    for an unknown split, a malformed expression, a bound outside the split, or no examples.
    """
    import tensorflow_datasets as tfds

    names, spec = list(known), "".join(split.split())
    requested = split_names(spec)
    for name in requested:
        if re.fullmatch(r"[\w-]+", name) and name not in [*names, "all"]:
            known_splits = f"known splits: {list_names(names, 20)}.{nearest(name, names)}"
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
    parts = [
        Part(term.splitname, *slice(term.from_, term.to).indices(counts[term.splitname])[:2])
        for term in terms
    ]
    if not (parts := [part for part in parts if part.stop > part.start]):
        raise UserError(f"dataset.split={split!r} selects no examples.")
    return parts


def by_place(items: Any, what: str) -> Any:
    """The items so that `[i]` is the i-th, in pandas the one of that name; UserError if none is."""
    is_other = isinstance(items, Mapping | Set | str | bytes) or hasattr(items, "columns")
    if is_other or not hasattr(items, "__getitem__"):
        kind = type(items).__name__
        raise UserError(f"{what}: a {kind} is no sequence; pass a list or a column.")
    is_array = hasattr(items, "__array__") and np.ndim(items) == 1
    return list(items) if is_array and np.asarray(items).dtype.kind in "OSU" else items


class Parts(Source):
    """Concatenated parts of named splits: locates the n-th example."""

    def __init__(self, parts: Iterable[Part]):
        self.parts = list(parts)
        self._ends = list(itertools.accumulate(part.stop - part.start for part in self.parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def locate(self, index: int) -> tuple[str, int]:
        """Name of the part, and the example's number in that split."""
        position = bisect.bisect_right(self._ends, index)
        part = self.parts[position]
        return part.name, part.stop - (self._ends[position] - index)

    def describe(self, index: int) -> str:
        return "{}[{}]".format(*self.locate(index))

    def shared(self, other: Source) -> int:
        theirs = other.parts if isinstance(other, Parts) else []
        pairs = [(a, b) for a in self.parts for b in theirs if a.name == b.name]
        return sum(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in pairs)


class SlicedSource(Parts):
    """The parts of sources, by name, that a split expression selects."""

    def __init__(self, sources: Mapping[str, Any], split: str):
        super().__init__(resolve_split(split, sources, lambda name: len(sources[name])))
        self.sources = {part.name: sources[part.name] for part in self.parts}

    def __getitem__(self, index: int) -> dict[str, Any]:
        name, number = self.locate(index)
        return self.sources[name][number]


def map_threads(
    function: Callable[[A], B], arguments: Iterable[A], *, chunk: int = 64, num_threads: int = 0
) -> Iterator[B]:
    """`map` in threads, in order; each takes `chunk` arguments at a time: a future costs 40 us."""
    remaining = iter(arguments)
    parts = iter(lambda: tuple(itertools.islice(remaining, chunk)), ())
    with ThreadPoolExecutor(num_threads or (os.cpu_count() or 1) + 2) as pool:
        for results in pool.map(lambda part: list(map(function, part)), parts):
            yield from results
