"""What a model file says about its parameters.

Sharding, layer-wise learning rates, loading, conversion and feature extraction look up the rows of
`models/create.py:PARAMETERS`; no other file knows a parameter's name.
"""

from __future__ import annotations

import dataclasses

# Depth of a row: before the first block, in a block (or in the loop of blocks), after the last.
FIRST, BLOCK, LAST = "first", "block", "last"


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of parameter.

    Its role, if any: `token` stands before the grid of patches; `positions` are the position
    embeddings; `head` is replaced in fine-tuning; `pre_logits` is the layer below the head;
    `training` exists only during some training task.
    """

    pattern: str  # of the whole name in the model's own tree; a group `block` holds its number
    # Logical axis of each dimension but the layers' of the scan form; see parameters/sharding.py.
    axes: tuple[str | None, ...]
    depth: str = BLOCK  # for layer-wise learning rates
    role: str = ""
