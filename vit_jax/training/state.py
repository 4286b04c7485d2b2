"""What a training run carries from step to step, and nothing else."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError


@flax.struct.dataclass
class TrainState:
    """Everything a restart needs; randomness and data order follow from the seed and `step`.

    Attributes:
      step: int32 scalar, number of finished updates.
      params: nested dict of float32 arrays.
      opt_state: of the optimizer.
      polyak_params: running average of `params` (Polyak averaging), or None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    polyak_params: Any = None

    @property
    def eval_params(self) -> Any:
        """The parameters to evaluate and to export: the average where there is one."""
        return self.params if self.polyak_params is None else self.polyak_params


def create_train_state(
    params: Any, tx: optax.GradientTransformation, *, polyak_decay: float
) -> TrainState:
    """State before the first update; the average starts at the parameters.

    Raises:
      UserError: `polyak_decay` is outside [0, 1).
    """
    if not 0.0 <= polyak_decay < 1.0:
        raise UserError(f"train_step.polyak_decay={polyak_decay} must be in [0, 1).")
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=tx.init(params),
        polyak_params=jax.tree.map(jnp.copy, params) if polyak_decay else None,
    )
