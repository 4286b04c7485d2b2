"""Two naming schemes as one table that is read in both directions.

A `Row` says which arrays of ours are which arrays of theirs, and how one becomes the other. The
same table serves the reader and the writer, so that they are each other's inverse by construction.

Names are templates: `{i}` stands for a number, `{i-1}` for the number before it, and `{i:02}` for a
number written with two digits.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vit_jax.errors import UserError

Arrays = tuple[np.ndarray, ...]
_PLACEHOLDER = re.compile(r"\{(\w)([+-]\d+)?(?::0(\d))?\}")


@dataclasses.dataclass(frozen=True)
class Op:
    """How arrays of theirs become arrays of ours, and back.

    `read` also takes the number of heads and how many arrays of ours it has to give.
    """

    read: Callable[[Arrays, int, int], Arrays]
    write: Callable[[Arrays], Arrays]


@dataclasses.dataclass(frozen=True)
class Row:
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    op: Op


def _heads(size: int, num_heads: int) -> tuple[int, int]:
    if size % num_heads:
        raise UserError(f"{size} attention features do not divide into {num_heads} heads.")
    return num_heads, size // num_heads


def _each(read: Callable[..., np.ndarray], write: Callable[..., np.ndarray]) -> Op:
    """An op of one array each that needs no heads."""
    return Op(lambda x, heads, count: (read(x[0]),), lambda x: (write(x[0]),))


SAME = _each(lambda x: x, lambda x: x)
DENSE = _each(lambda w: w.T, lambda w: w.T)  # [out, in] <-> [in, out]
CONV = _each(  # [out, in, h, w] <-> [h, w, in, out]
    lambda w: w.transpose(2, 3, 1, 0), lambda w: w.transpose(3, 2, 0, 1)
)
# [H*d, D] <-> [D, H, d], and its bias [H*d] <-> [H, d].
HEADS_IN = Op(
    lambda x, heads, count: (x[0].T.reshape(x[0].shape[1], *_heads(x[0].shape[0], heads)),),
    lambda x: (x[0].reshape(x[0].shape[0], -1).T,),
)
HEADS_BIAS = Op(
    lambda x, heads, count: (x[0].reshape(_heads(x[0].shape[0], heads)),),
    lambda x: (x[0].reshape(-1),),
)
# [D, H*d] <-> [H, d, D]
HEADS_OUT = Op(
    lambda x, heads, count: (x[0].T.reshape(*_heads(x[0].shape[1], heads), x[0].shape[0]),),
    lambda x: (x[0].reshape(-1, x[0].shape[-1]).T,),
)


def fused(op: Op) -> Op:
    """Several of ours as one of theirs, one below the other: query, key and value in `qkv`."""

    def read(x: Arrays, heads: int, count: int) -> Arrays:
        if x[0].shape[0] % count:
            raise UserError(f"{x[0].shape} is no stack of {count} arrays.")
        return tuple(op.read((part,), heads, 1)[0] for part in np.split(x[0], count))

    def write(x: Arrays) -> Arrays:
        return (np.concatenate([op.write((part,))[0] for part in x]),)

    return Op(read, write)


def layer(ours: str, theirs: str, op: Op = DENSE, bias: Op = SAME) -> tuple[Row, Row]:
    """A layer of PyTorch: a weight, changed by `op`, and a bias."""
    return (
        Row((f"{ours}/kernel",), (f"{theirs}.weight",), op),
        Row((f"{ours}/bias",), (f"{theirs}.bias",), bias),
    )


def norm(ours: str, theirs: str) -> tuple[Row, Row]:
    """A layer or group norm of PyTorch."""
    return (
        Row((f"{ours}/scale",), (f"{theirs}.weight",), SAME),
        Row((f"{ours}/bias",), (f"{theirs}.bias",), SAME),
    )


def _regex(template: str) -> re.Pattern[str]:
    parts = _PLACEHOLDER.split(template)
    pattern = ""
    for position in range(0, len(parts), 4):
        pattern += re.escape(parts[position])
        if position + 1 < len(parts):
            digits = parts[position + 3]
            pattern += rf"(\d{{{digits}}})" if digits else r"(0|[1-9]\d*)"
    return re.compile(pattern)


def _bindings(template: str, name: str) -> dict[str, int] | None:
    """Values of the template's letters that make it `name`, or None."""
    match = _regex(template).fullmatch(name)
    if match is None:
        return None
    values: dict[str, int] = {}
    placeholders = _PLACEHOLDER.findall(template)
    for (letter, offset, _), text in zip(placeholders, match.groups(), strict=True):
        values[letter] = int(text) - int(offset or 0)
    return values


def _fill(template: str, values: dict[str, int]) -> str:
    def number(match: re.Match[str]) -> str:
        return str(values[match[1]] + int(match[2] or 0)).zfill(int(match[3] or 1))

    return _PLACEHOLDER.sub(number, template)


@dataclasses.dataclass(frozen=True)
class Match:
    """A row applied to the names that there are."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    op: Op


def match_rows(rows: tuple[Row, ...], names: Any, *, side: str) -> tuple[list[Match], list[str]]:
    """Which rows speak of `names`, and the names that no row speaks of.

    Args:
      rows: of one naming scheme.
      names: all names on one side.
      side: `ours` or `theirs`: whose names these are.

    Raises:
      UserError: of several arrays that belong together some are missing.
    """
    matches: dict[tuple[str, ...], Match] = {}
    left = []
    for name in names:
        found = _find(rows, name, side)
        if found is None:
            left.append(name)
        else:
            matches.setdefault(found.ours, found)
    present = set(names)
    for match in matches.values():
        missing = [name for name in getattr(match, side) if name not in present]
        if missing:
            raise UserError(f"{', '.join(missing)} is missing beside {getattr(match, side)[0]}.")
    return list(matches.values()), left


def _find(rows: tuple[Row, ...], name: str, side: str) -> Match | None:
    for row in rows:
        for template in getattr(row, side):
            values = _bindings(template, name)
            if values is not None and min(values.values(), default=0) >= 0:
                ours = tuple(_fill(each, values) for each in row.ours)
                theirs = tuple(_fill(each, values) for each in row.theirs)
                return Match(ours, theirs, row.op)
    return None


def read_match(match: Match, arrays: Arrays, num_heads: int) -> Iterator[tuple[str, np.ndarray]]:
    """(our name, array) for their arrays."""
    yield from zip(match.ours, match.op.read(arrays, num_heads, len(match.ours)), strict=True)


def write_match(match: Match, arrays: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """(their name, array) for our arrays."""
    yield from zip(match.theirs, match.op.write(arrays), strict=True)
