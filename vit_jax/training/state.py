"""What a training run carries from step to step, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from vit_jax.errors import UserError
from vit_jax.parameters.names import flatten_names, unflatten_names


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
    params: Any, *, tx: optax.GradientTransformation, polyak_decay: float
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


class Initial(NamedTuple):
    """Random parameters that are not drawn yet.

    Attributes:
      program: a key -> the arrays, in the order of the leaves of `shapes`.
      shapes: nested dict of jax.ShapeDtypeStruct.
    """

    program: core.ClosedJaxpr
    shapes: Any


def trace_initial(init: Callable[[jax.Array], Any]) -> Initial:
    """Traces `init`, from a key to a tree of parameters: the only time that a start does."""
    traced = jax.jit(init).trace(jax.eval_shape(lambda: jax.random.key(0)))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.out_info)
    return Initial(traced.jaxpr, shapes)


def initial_state(
    initial: Initial,
    start_state: Callable[[Any], TrainState],
    abstract_state: TrainState,
    *,
    seed: int,
    loaded: Any = None,
) -> TrainState:
    """The state before the first update, on the devices.

    Args:
      initial: random parameters.
      start_state: parameters -> the state before their first update; pure.
      abstract_state: shapes with shardings.
      seed: of the random parameters.
      loaded: a tree of host arrays to start from, with shapes where a random array is wanted (a
        new head); None: all are random.
    """
    arrays = flatten_names(initial.shapes if loaded is None else loaded)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    places = flatten_names(shardings.params)
    new = [name for name in places if isinstance(arrays[name], jax.ShapeDtypeStruct)]

    def draw(rng: jax.Array) -> dict[str, jax.Array]:
        drawn = core.jaxpr_as_fun(initial.program)(rng)
        return {name: array for name, array in zip(places, drawn, strict=True) if name in new}

    out_shardings = {name: places[name] for name in new}
    params = jax.jit(draw, out_shardings=out_shardings)(jax.random.key(seed)) if new else {}
    for name in [name for name in arrays if name not in params]:
        # One at a time: a large model is never whole on both host and devices.
        array = arrays.pop(name)
        params[name] = jax.make_array_from_callback(array.shape, places[name], array.__getitem__)
    start = jax.jit(start_state, out_shardings=shardings, donate_argnums=0)
    return start(unflatten_names(params))
