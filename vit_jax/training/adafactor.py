"""Adafactor's scaling (1804.04235) as in "Scaling Vision Transformers" (2106.04560)."""

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

    In update t = 1, 2, ... the moment decays by min(decay_cap, 1 - t ** -decay): the first update
    has no history, and the cap keeps late ones from freezing the moment (2106.04560, section 3.4).
    For gradients G with squares S = G^2 + 1e-30, the two largest axes are factored if both are at
    least MIN_FACTORED_SIZE: R and C are the averages of S along each of them, and the update is
    G / sqrt(R C / mean(R)). No relative step sizes, clipping or scaling by the parameter.

    The scan form is factored block by block, like the loop form. Each part of the state is a tree
    like the parameters, so a moment's path ends in its parameter's; an unused part is one number
    (per layer).
    """

    def moment_decay(step: jax.Array, exponent: float) -> jax.Array:
        return jnp.minimum(decay_cap, 1.0 - (step + 1.0) ** -exponent)

    one = optax.scale_by_factored_rms(
        decay_rate=decay, min_dim_size_to_factor=MIN_FACTORED_SIZE, decay_rate_fn=moment_decay
    )
    per_layer = optax.FactoredState(count=None, v_row=0, v_col=0, v=0)

    def gather(treedef: Any, states: Any, count: jax.Array) -> optax.FactoredState:
        """The states of all leaves as one state of trees."""
        parts = zip(*((state.v_row, state.v_col, state.v) for state in states), strict=True)
        return optax.FactoredState(count, *(treedef.unflatten(part) for part in parts))

    def init(params: Any) -> optax.FactoredState:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
        stacked = jax.vmap(one.init, out_axes=per_layer)
        states = [(stacked if is_stacked(path_name(p)) else one.init)(leaf) for p, leaf in leaves]
        return gather(treedef, states, jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, _params: Any = None) -> tuple[Any, Any]:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(updates)
        stacked = jax.vmap(one.update, in_axes=(0, per_layer, 0), out_axes=(0, per_layer))
        moments = [jax.tree.leaves(part) for part in (state.v_row, state.v_col, state.v)]
        found = []
        for (path, gradient), *parts in zip(leaves, *moments, strict=True):
            leaf_update = stacked if is_stacked(path_name(path)) else one.update
            # Of the parameter, only shape and type are asked for: the gradient has them too.
            leaf_state = optax.FactoredState(state.count, *parts)
            found.append(leaf_update(gradient, leaf_state, gradient))
        new_updates, states = zip(*found, strict=True)
        count = optax.safe_increment(state.count)
        return jax.tree.unflatten(treedef, new_updates), gather(treedef, states, count)

    return optax.GradientTransformation(init, update)
