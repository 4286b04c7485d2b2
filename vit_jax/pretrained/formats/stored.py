"""What a weight file holds, in our names."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vit_jax.workdir.description import Description


@dataclasses.dataclass
class Stored:
    """Parameters of a file, and what the files beside it say.

    Attributes:
      format: a key of `table.FORMATS`, or `orbax`.
      params: flat names of ours (`vit_jax.parameters.names`), loop form of the blocks, float32.
      dropped: arrays of the file that are no parameters, and why they are left out.
      unexpected: arrays of the file that no rule speaks of.
      changed: our names that are not what the file holds bit for bit, and what was done.
      conventions: keyword arguments of the model that do not show in the parameters: `gelu`,
        `layer_norm_epsilon`, `position_embedding`.
      description: ours, where one lies beside the file.
      num_heads, image_size, class_names, eval_preprocess, probabilities_by: where another
        configuration tells them; image_size is [height, width].
    """

    format: str
    params: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    changed: dict[str, str] = dataclasses.field(default_factory=dict)
    conventions: dict[str, Any] = dataclasses.field(default_factory=dict)
    description: Description | None = None
    num_heads: int | None = None
    image_size: tuple[int, int] | None = None
    class_names: tuple[str, ...] = ()
    eval_preprocess: str = ""
    probabilities_by: str = "softmax"
