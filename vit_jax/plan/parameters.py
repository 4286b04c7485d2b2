"""The parameters of a run by module, and how each lies on the devices."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from jax.sharding import Mesh

from vit_jax.parameters.names import flatten_names
from vit_jax.parameters.sharding import MESH_AXES

_NUMBERED = re.compile(r"(encoderblock|unit)_?\d+")


@dataclasses.dataclass(frozen=True)
class Row:
    """Parameters of one name and shape; those of equal layers in one row.

    Attributes:
      name: with * for the number of a layer.
      copies: how many layers.
      size: scalars of all copies together.
      spec: mesh axis of each dimension, "-" where it is whole.
      split: over how many devices each of them is split; 1 is whole everywhere.
    """

    name: str
    shape: tuple[int, ...]
    copies: int
    size: int
    spec: str
    split: int


def parameter_rows(params: Any, mesh: Mesh) -> list[Row]:
    """Rows in the order of the names.

    Args:
      params: `ShapeDtypeStruct`s with shardings on `mesh`.
    """
    groups: dict[tuple[str, tuple[int, ...], str], list[Any]] = {}
    for name, leaf in flatten_names(params).items():
        axes = [*leaf.sharding.spec, *[None] * (len(leaf.shape) - len(leaf.sharding.spec))]
        spec = ", ".join(
            "+".join([axis] if isinstance(axis, str) else axis or "-") for axis in axes
        )
        key = (_NUMBERED.sub(r"\1_*", name), leaf.shape, spec)
        groups.setdefault(key, []).append(leaf)
    return [
        Row(
            name=name,
            shape=shape,
            copies=len(leaves),
            size=len(leaves) * math.prod(shape),
            spec=spec,
            split=math.prod(shape) // math.prod(leaves[0].sharding.shard_shape(shape)),
        )
        for (name, shape, spec), leaves in groups.items()
    ]


def parameter_table(rows: list[Row], mesh: dict[str, int]) -> list[str]:
    """Lines of text; below them what stays whole although the mesh would split it."""
    width = max(len(row.name) for row in rows)
    header = f"{'shape':>18}{'layers':>8}{'scalars':>15}{'split over':>12}  by"
    lines = [f"{'parameter':{width}}{header}"]
    for row in rows:
        shape = "x".join(map(str, row.shape)) or "scalar"
        copies = row.copies if row.copies > 1 else ""
        by = f"({row.spec})" if row.split > 1 else "whole"
        cells = f"{shape:>18}{copies:>8}{row.size:>15,}{row.split:>12}  {by}"
        lines.append(f"{row.name:{width}}{cells}")
    total = sum(row.size for row in rows)
    ways = math.prod(mesh[axis] for axis in MESH_AXES[1:])  # of all but `data`
    lines.append(f"all {total:,}")
    if ways > 1:
        short = [row for row in rows if row.split < ways]
        share = sum(row.size * (1 / row.split - 1 / ways) for row in short) / total
        names = ", ".join(row.name for row in sorted(short, key=lambda row: -row.size)[:3])
        lines.append(
            f"not split {ways} ways: {len(short)} of {len(rows)} rows"
            + (f" ({names}, ...): {share:.2%} of the parameters more per device" if short else "")
        )
    return lines
