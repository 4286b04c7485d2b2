"""What a weight file holds, in our names."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vit_jax.workdir.description import Description


@dataclasses.dataclass
class Stored:
    """Parameters of a file, and what else it says.

    Attributes:
      format: a key of `formats.FORMATS`, or `orbax`.
      params: flat names of ours (`vit_jax.parameters.names`), loop form of the blocks, float32.
      dropped: arrays of the file that are no parameters, and why they are left out.
      unexpected: arrays of the file that no rule speaks of.
      changed: our names that are not what the file holds bit for bit, and what was done.
      conventions: keyword arguments of the model that do not show in the parameters: `gelu`,
        `layer_norm_epsilon`.
      description: where one lies beside the file.
      image_size: [height, width] where the file's own configuration tells it.
      class_names: likewise; () if not.
      eval_preprocess: likewise; "" if not.
    """

    format: str
    params: dict[str, np.ndarray]
    dropped: dict[str, str] = dataclasses.field(default_factory=dict)
    unexpected: tuple[str, ...] = ()
    changed: dict[str, str] = dataclasses.field(default_factory=dict)
    conventions: dict[str, Any] = dataclasses.field(default_factory=dict)
    description: Description | None = None
    image_size: tuple[int, int] | None = None
    class_names: tuple[str, ...] = ()
    eval_preprocess: str = ""
