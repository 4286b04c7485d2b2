"""What a training run carries from step to step, and where it comes from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError
from vit_jax.parameters.initial import draw
from vit_jax.parameters.names import flatten_names, unflatten_names
from vit_jax.workdir.checkpoints import CheckpointManager


@flax.struct.dataclass
class TrainState:
    """Everything a restart needs; randomness and data order follow from the seed and `step`."""

    step: jax.Array  # int32 scalar, number of finished updates
    params: Any  # nested dict of float32 arrays
    opt_state: Any
    polyak_params: Any = None  # running average of `params` (Polyak averaging), or None

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


def initial_state(
    checkpoints: CheckpointManager,
    abstract_state: TrainState,
    *,
    init_params: Callable[[jax.Array], Any],
    start_state: Callable[[Any], TrainState],
    load_params: Callable[[], Any] | None,
    seed: int,
) -> TrainState:
    """The last checkpoint of the work directory, or pre-trained parameters, or random ones.

    Args:
      abstract_state: shapes with shardings.
      init_params: rng -> random parameters; pure.
      start_state: parameters -> the state before their first update; pure.
      load_params: returns a tree of host arrays, with shapes where a random array is wanted (a new
        head); None without pre-trained parameters.
    """
    restored = checkpoints.restore(abstract_state)
    if restored is not None:
        step, state = restored
        logging.info("Resuming from the checkpoint of step %d.", step)
        return state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    loaded = load_params() if load_params else abstract_state.params
    arrays, places = flatten_names(loaded), flatten_names(shardings.params)
    new = {n: places[n] for n, leaf in arrays.items() if isinstance(leaf, jax.ShapeDtypeStruct)}
    params = draw(lambda rng: flatten_names(init_params(rng)), jax.random.key(seed), new)
    for name in [name for name in arrays if name not in params]:
        # One at a time: a large model is never whole on both host and devices.
        array = arrays.pop(name)
        params[name] = jax.make_array_from_callback(array.shape, places[name], array.__getitem__)
    start = jax.jit(start_state, out_shardings=shardings, donate_argnums=0)
    return start(unflatten_names(params))
