"""The state before the first update: random parameters, or loaded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from vit_jax.training.step import TrainState
from vit_jax.trees import flatten_names, unflatten_names

Init = Callable[[jax.Array], Any]  # key -> nested dict of arrays


def with_strong_types(init: Init) -> Init:
    """`init` without weak types: an update returns strong ones, and would be compiled twice."""
    return lambda rng: jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), init(rng))


def initial_state(
    init: Init,
    start_state: Callable[[Any], TrainState],
    shardings: Any,
    abstract_state: TrainState,
    *,
    seed: int,
    loaded: Any = None,
) -> TrainState:
    """The state before the first update, on the devices.

    Args:
      init: draws all parameters.
      start_state: parameters -> the state before their first update; pure.
      shardings: of the parameters, a tree like the result of `init`.
      abstract_state: shapes of the state, with shardings.
      seed: of the random parameters.
      loaded: host arrays to start from, with shapes (or nothing) where one is to be random.
    """
    places, leaves = flatten_names(shardings), flatten_names(loaded)
    arrays = {k: x for k, x in leaves.items() if not isinstance(x, jax.ShapeDtypeStruct)}
    random = {name: place for name, place in places.items() if name not in arrays}

    def draw(rng: jax.Array) -> dict[str, jax.Array]:
        params = flatten_names(init(rng))
        return {name: params[name] for name in random}

    params = jax.jit(draw, out_shardings=random)(jax.random.key(seed)) if random else {}
    for name in list(arrays):
        # One at a time: a large model is never completely on both host and devices.
        array = arrays.pop(name)
        params[name] = jax.make_array_from_callback(array.shape, places[name], array.__getitem__)
    start = jax.jit(
        start_state,
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract_state),
        donate_argnums=0,
    )
    return start(unflatten_names(params))
