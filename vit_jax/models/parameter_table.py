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
