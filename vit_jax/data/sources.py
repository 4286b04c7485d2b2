"""Random-access sources of examples, and the split expressions that select parts of them.

A source is any picklable object with `__len__()` and
`__getitem__(i) -> {"image": bytes | uint8 [H, W, C], "label": int}`, where bytes are an encoded
image file. It is safe for threads, and its order is a pure function of the files behind it.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from vit_jax.errors import UserError, nearest

GRAMMAR = "'train', 'train[:98%]', 'train[300:600]', 'train[-50:]' and sums such as 'train+test'"

_PART = re.compile(r"(?P<name>[\w-]+)(?:\[(?P<from>[^:\[\]]*):(?P<to>[^:\[\]]*)\])?")
_BOUND = re.compile(r"(?P<value>-?\d[\d_]*(?:\.\d+)?)(?P<unit>%?)")


class Source(Protocol):
    """What the pipeline reads from; see the module's docstring."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


@runtime_checkable
class CheckedSource(Source, Protocol):
    """A source whose files can be damaged, and which can say so before training starts."""

    def check(self, on_bad_image: str) -> Source:
        """Reads what has to be read; returns the source to train on.

        Raises:
          UserError: a file is damaged (for images: unless `on_bad_image` is "skip").
        """

    def describe(self, index: int) -> str:
        """Where example `index` is stored, for error messages."""

    def identity(self) -> Iterable[str]:
        """Lines that change when the files behind the source change."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One term of a split expression: examples `start:stop` of the split `name`."""

    name: str
    start: int
    stop: int


def resolve_split(
    split: str, known: Iterable[str], length: Callable[[str], int], *, key: str = "dataset.split"
) -> list[Part]:
    """Turns a split expression into absolute, non-empty parts, with the meaning TFDS gives it.

    Percentages are rounded to the nearest example (Python's `round`: halves to even), negative
    bounds count from the end, `+` concatenates, `all` stands for the sum of all splits.

    Args:
      split: the expression, such as `train[:98%]+test`.
      known: names of the splits there are.
      length: number of examples of a split; asked only for splits that the expression names.
      key: config key to name in errors.

    Raises:
      UserError: unknown split, malformed expression, bound outside of the split, nothing selected.
    """
    known = list(known)
    parts = []
    for term in re.split(r"\s*\+\s*", split.strip()):
        match = _PART.fullmatch(term)
        if match is None:
            raise UserError(f"{key}={split!r}: cannot read {term!r}; write {GRAMMAR}.")
        name = match["name"]
        if name == "all" and "all" not in known and match["from"] is None:
            parts += [Part(each, 0, length(each)) for each in known]
            continue
        if name not in known:
            raise UserError(
                f"{key}={split!r}: unknown split {name!r}; known splits: {', '.join(known)}."
                f"{nearest(name, known)}"
            )
        count = length(name)
        if match["from"] is None:
            parts.append(Part(name, 0, count))
            continue
        try:
            parts.append(Part(name, *_bounds(match["from"], match["to"], count)))
        except ValueError as error:
            raise UserError(f"{key}={split!r}: {error} in {term!r}; write {GRAMMAR}.") from None
    parts = [part for part in parts if part.stop > part.start]
    if not parts:
        raise UserError(f"{key}={split!r} selects no example.")
    return parts


def _bounds(start: str, stop: str, count: int) -> tuple[int, int]:
    """Absolute bounds of `[start:stop]` among `count` examples; ValueError with a reason."""
    start, stop = start.strip(), stop.strip()
    if not start and not stop:
        raise ValueError("a slice without bounds")
    matches = []
    for text in (start, stop):
        match = _BOUND.fullmatch(text) if text else None
        if text and match is None:
            raise ValueError(f"cannot read the bound {text!r}")
        matches.append(match)
    # As in TFDS, one percent sign makes both bounds percentages: [50%:60] is [50%:60%].
    percent = any(match is not None and match["unit"] for match in matches)
    bounds = []
    for match, missing in zip(matches, (0, count), strict=True):
        if match is None:
            bounds.append(missing)
            continue
        if percent:
            if abs(float(match["value"])) > 100:
                raise ValueError(f"{match[0]!r} is more than 100%")
            bound = round(float(match["value"]) * count / 100.0)
        elif "." in match["value"]:
            raise ValueError(f"{match[0]!r} is not a whole number")
        else:
            bound = int(match["value"])
        if abs(bound) > count:
            raise ValueError(f"{match[0]!r} is outside of the split's {count} examples")
        bounds.append(bound + count if bound < 0 else bound)
    return bounds[0], bounds[1]


class SlicedSource:
    """Parts of other sources, one after the other; for sources that cannot be damaged."""

    def __init__(self, sources: Mapping[str, Source], parts: Sequence[Part]):
        self._sources = {part.name: sources[part.name] for part in parts}
        self._parts = list(parts)
        self._ends = list(itertools.accumulate(part.stop - part.start for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} outside of {len(self)} examples")
        position = bisect.bisect_right(self._ends, index)
        part = self._parts[position]
        return self._sources[part.name][part.stop - (self._ends[position] - index)]
