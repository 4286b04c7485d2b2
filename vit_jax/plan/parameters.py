"""The parameters of a run by module, and how each lies on the devices."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import Any

from vit_jax.parameters.names import flatten_names

_NUMBERED = re.compile(r"(encoderblock|unit)_?\d+")


@dataclasses.dataclass(frozen=True)
class Row:
    """Parameters of one name and shape; those of equal layers in one row."""

    name: str  # with * for the number of a layer
    shape: tuple[int, ...]
    spec: str  # mesh axis of each dimension, "-" where it is whole
    split: int  # over how many devices each of them is split; 1 is whole everywhere
    copies: int  # layers

    @property
    def size(self) -> int:
        """Scalars of all copies together."""
        return self.copies * math.prod(self.shape)


def parameter_rows(params: Any) -> list[Row]:
    """Rows in the order of the names, of `ShapeDtypeStruct`s with shardings."""
    rows: collections.Counter[tuple[str, tuple[int, ...], str, int]] = collections.Counter()
    for name, leaf in flatten_names(params).items():
        spec = ", ".join(axis or "-" for axis in leaf.sharding.spec)
        split = math.prod(leaf.shape) // math.prod(leaf.sharding.shard_shape(leaf.shape))
        rows[_NUMBERED.sub(r"\1_*", name), leaf.shape, spec, split] += 1
    return [Row(*key, copies) for key, copies in rows.items()]


def parameter_table(rows: list[Row]) -> list[str]:
    """Lines of text."""
    width = max(len(row.name) for row in rows)
    columns = f"{'shape':>18}{'layers':>8}{'scalars':>15}{'split over':>12}  by"
    lines = [f"{'parameter':{width}}{columns}"]
    for row in rows:
        shape = "x".join(map(str, row.shape)) or "scalar"
        by = f"({row.spec})" if row.split > 1 else "whole"
        cells = f"{shape:>18}{row.copies:>8}{row.size:>15,}{row.split:>12}  {by}"
        lines.append(f"{row.name:{width}}{cells}")
    return [*lines, f"all {sum(row.size for row in rows):,}"]
