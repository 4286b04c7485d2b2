"""Adafactor's scaling (1804.04235) as "Scaling Vision Transformers" (2106.04560) has it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.parameters.names import is_stacked, path_name

# Smaller matrices keep a second moment per entry; big_vision's value.
MIN_FACTORED_SIZE = 32


def scale_by_factored_rms(decay: float, decay_cap: float) -> optax.GradientTransformation:
    """Divides gradients by the root of a second moment that is kept as a row and a column.

    Of update t = 1, 2, ... the moment's decay is min(decay_cap, 1 - t ** -decay): the first update
    has no history, and the cap keeps late ones from freezing the moment (2106.04560, section 3.4).
    Per parameter G with squares S = G^2 + 1e-30, the two largest axes are factored, if both are at
    least MIN_FACTORED_SIZE: R and C are the averages of S along each of them, and the update is
    G / sqrt(R C / mean(R)). Neither relative step sizes nor clipping nor scaling by the parameter.

    The scan form is factored block by block as the loop form is: the axis of layers is none of the
    two. Each part of the state is a tree like the parameters, so a moment's path ends in its
    parameter's; what a parameter has no use for is one number (per layer).
    """

    def moment_decay(step: jax.Array, exponent: float) -> jax.Array:
        return jnp.minimum(decay_cap, 1.0 - (step + 1.0) ** -exponent)

    one = optax.scale_by_factored_rms(
        decay_rate=decay, min_dim_size_to_factor=MIN_FACTORED_SIZE, decay_rate_fn=moment_decay
    )
    per_layer = optax.FactoredState(count=None, v_row=0, v_col=0, v=0)

    def init_leaf(path: Any, param: jax.Array) -> optax.FactoredState:
        init = one.init
        if is_stacked(path_name(path)):
            init = jax.vmap(init, out_axes=per_layer)
        return init(param)

    def init(params: Any) -> optax.FactoredState:
        states = jax.tree_util.tree_map_with_path(init_leaf, params)
        return _gather(states, jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, _params: Any = None) -> tuple[Any, Any]:
        def update_leaf(path: Any, gradient: jax.Array, v_row: Any, v_col: Any, v: Any) -> Any:
            leaf_update = one.update
            if is_stacked(path_name(path)):
                leaf_update = jax.vmap(
                    leaf_update, in_axes=(0, per_layer, 0), out_axes=(0, per_layer)
                )
            # Of the parameter, only shape and type are asked for: the gradient has them too.
            leaf_state = optax.FactoredState(state.count, v_row, v_col, v)
            return _Leaf(*leaf_update(gradient, leaf_state, gradient))

        leaves = jax.tree_util.tree_map_with_path(
            update_leaf, updates, state.v_row, state.v_col, state.v
        )
        updates = jax.tree.map(lambda leaf: leaf.update, leaves)
        states = jax.tree.map(lambda leaf: leaf.state, leaves)
        return updates, _gather(states, optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


class _Leaf:
    """A pair that tree functions take for one leaf."""

    def __init__(self, update: jax.Array, state: optax.FactoredState):
        self.update = update
        self.state = state


def _gather(states: Any, count: jax.Array) -> optax.FactoredState:
    """A tree of states -> a state of trees."""

    def part(name: str) -> Any:
        return jax.tree.map(
            lambda state: getattr(state, name),
            states,
            is_leaf=lambda node: isinstance(node, optax.FactoredState),
        )

    return optax.FactoredState(count, part("v_row"), part("v_col"), part("v"))
