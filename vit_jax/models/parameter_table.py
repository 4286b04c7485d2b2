"""What a model file says about its parameters.

Sharding, layer-wise learning rates, loading, conversion and feature extraction look up the rows of
`models/create.py:PARAMETERS`; no other file knows a parameter's name.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

# Depth of a row: before the first block, in a block (or in the loop of blocks), after the last.
FIRST, BLOCK, LAST = "first", "block", "last"


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of parameter.

    Attributes:
      pattern: regular expression on the whole name in the model's own tree. A group `block` holds
        the number of the block.
      axes: logical axis of each dimension (`parameters/sharding.py` maps them to the mesh), without
        the layer axis of the scan form.
      depth: where in the model it stands, for layer-wise learning rates.
      role: `token` stands before the grid of patches; `positions` are the position embeddings;
        `head` is replaced in fine-tuning; `pre_logits` is the layer below the head; `training`
        exists only during some training task.
    """

    pattern: str
    axes: tuple[str | None, ...]
    depth: str = BLOCK
    role: str = ""

    @functools.cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern)


@dataclasses.dataclass(frozen=True)
class Found:
    """The row of a parameter.

    Attributes:
      row: as the model file has it.
      prefix: "" or what stands before the model's own tree, such as `teacher/`.
      block: number of the block, or None.
    """

    row: Row
    prefix: str
    block: int | None


def find_row(name: str, rows: Sequence[Row]) -> Found:
    """The row of the parameter called `name`, whole or below any prefix (`student/head/kernel`).

    Raises:
      ValueError: no row, or more than one, matches.
    """
    parts = name.split("/")
    for start in range(len(parts)):
        own_name = "/".join(parts[start:])
        matches = [(row, match) for row in rows if (match := row.regex.fullmatch(own_name))]
        if len(matches) == 1:
            row, match = matches[0]
            block = match.groupdict().get("block")
            prefix = name.removesuffix(own_name)
            return Found(row, prefix, None if block is None else int(block))
        if matches:
            break
    raise ValueError(
        f"parameter {name!r} matches {len(matches)} rows of the models' PARAMETERS, not one."
    )
