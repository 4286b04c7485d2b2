"""What models and objectives say of a parameter, found by its name."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable

from vit_jax.models.create import MODELS
from vit_jax.models.family import LAST, Row
from vit_jax.objectives.create import OBJECTIVES


@dataclasses.dataclass(frozen=True)
class Found:
    """A parameter's row, and what its name says besides."""

    row: Row
    prefix: str  # "" or what stands before the model's own tree, such as `teacher/`
    block: int | None  # number of its block
    general: str  # the name with * for the number of a block or unit


def all_rows() -> tuple[Row, ...]:
    """Of all models and objectives, each once."""
    rows = [row for family in MODELS.values() for row in family.rows]
    for kind in OBJECTIVES.values():
        rows += [Row(name, axes, LAST) for name, axes in kind.own_parameters.items()]
    return tuple(dict.fromkeys(rows))


def parameter_row(name: str) -> Found:
    """The row of the parameter called `name`, whole or below any prefix (`student/head/kernel`).

    Raises:
      ValueError: no row, or more than one, matches.
    """
    return _find(name, all_rows())


@functools.cache
def _find(name: str, rows: tuple[Row, ...]) -> Found:
    parts = name.split("/")
    matches: list[Found] = []
    for start in range(len(parts)):
        own_name = "/".join(parts[start:])
        for row in rows:
            if match := re.fullmatch(row.pattern, own_name):
                numbers = {k: match.span(k) for k, v in match.groupdict().items() if v is not None}
                block = int(match["block"]) if "block" in numbers else None
                general = own_name
                for first, last in sorted(numbers.values(), reverse=True):
                    general = f"{general[:first]}*{general[last:]}"
                prefix = name.removesuffix(own_name)
                matches.append(Found(row, prefix, block, prefix + general))
        if matches:
            break
    if len(matches) != 1:
        raise ValueError(f"{name!r} matches {len(matches)} rows of the models' families, not 1.")
    return matches[0]


def role_of(name: str) -> str:
    """The role of the parameter called `name`; "" if it has none, or is in no model."""
    try:
        return parameter_row(name).row.role
    except ValueError:
        return ""


def with_role(role: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that have this role, in the order of the rows."""
    rows = [row for row in all_rows() if row.role == role]
    found = [(parameter_row(name).row, name) for name in names if role_of(name) == role]
    return [name for _, name in sorted(found, key=lambda pair: rows.index(pair[0]))]


def image_kernel(names: Iterable[str]) -> str:
    """Name of the convolution that reads the image; "" where there is none."""
    return next(iter(with_role("image", names) or with_role("patches", names)), "")
