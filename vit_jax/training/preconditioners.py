"""Parts of optimizers that treat each block of the scan form like a separate array.

Each part of a state is a tree like the parameters, so that a moment's path ends in its parameter's.
"""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from vit_jax.parameters.table import ParameterTable
from vit_jax.trees import path_name

# For Adafactor: smaller matrices have an unfactored second moment; big_vision's value.
MIN_FACTORED_SIZE = 32


def scale_by_factored_rms(
    decay: float, decay_cap: float, table: ParameterTable
) -> optax.GradientTransformation:
    """Divides gradients by the root of a second moment that is stored as a row and a column.

    In update t = 1, 2, ... the moment decays by min(decay_cap, 1 - t ** -decay): the first update
    has no history, and the cap keeps later ones from freezing the moment (2106.04560, section 3.4).
    For gradients G with squares S = G^2 + 1e-30, the two largest axes are factored if both are at
    least MIN_FACTORED_SIZE: R and C are the averages of S along each of them, and the update is
    G / sqrt(R C / mean(R)). No relative step sizes, clipping or scaling by the parameter.
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
        states = [
            (stacked if table.is_stacked(path_name(path)) else one.init)(leaf)
            for path, leaf in leaves
        ]
        return gather(treedef, states, jnp.zeros([], jnp.int32))

    def update(updates: Any, state: Any, _params: Any = None) -> tuple[Any, Any]:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(updates)
        stacked = jax.vmap(one.update, in_axes=(0, per_layer, 0), out_axes=(0, per_layer))
        moments = [jax.tree.leaves(part) for part in (state.v_row, state.v_col, state.v)]
        results = []
        for (path, gradient), *parts in zip(leaves, *moments, strict=True):
            leaf_update = stacked if table.is_stacked(path_name(path)) else one.update
            # Only shape and dtype of the parameter are used: the gradient has the same.
            leaf_state = optax.FactoredState(state.count, *parts)
            results.append(leaf_update(gradient, leaf_state, gradient))
        new_updates, states = zip(*results, strict=True)
        count = optax.safe_increment(state.count)
        return jax.tree.unflatten(treedef, new_updates), gather(treedef, states, count)

    return optax.GradientTransformation(init, update)


def scale_by_trust_ratio(
    pattern: str, table: ParameterTable, coefficient: float = 1.0
) -> optax.GradientTransformation:
    """The layer-wise rate of LAMB and LARS: coefficient * ||parameters|| / ||update||.

    The factor is 1 if one of them is zero, and for names that do not match `pattern`.
    """
    one = optax.scale_by_trust_ratio(trust_coefficient=coefficient)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def scaled(path: Any, leaf: jax.Array, param: jax.Array) -> jax.Array:
            name = path_name(path)
            if not re.fullmatch(pattern, name):
                return leaf
            stacked = jax.vmap(one.update, in_axes=(0, None, 0))
            return (stacked if table.is_stacked(name) else one.update)(leaf, state, param)[0]

        return jax.tree_util.tree_map_with_path(scaled, updates, params), state

    return optax.GradientTransformation(one.init, update)


def scale_by_muon(
    momentum: float, momentum_dtype: str, table: ParameterTable
) -> optax.GradientTransformation:
    """Orthogonalised and scaled momentum of kernels as matrices [inputs, outputs], see `muon`."""

    def matrix_axes(path: Any, leaf: jax.Array) -> MuonDimensionNumbers:
        parameter = table.find(path_name(path))
        axes = range(int(parameter.is_stacked), leaf.ndim)
        # Query, key and value are [D, heads, D / heads]; other kernels have one output axis.
        num_inputs = 1 if parameter.row.axes[0] == "embed" else len(axes) - 1
        return MuonDimensionNumbers(tuple(axes[:num_inputs]), tuple(axes[num_inputs:]))

    def all_axes(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(matrix_axes, tree)

    def scaled(leaf: jax.Array, axes: MuonDimensionNumbers) -> jax.Array:
        sides = [math.prod(leaf.shape[axis] for axis in side) for side in axes]
        return 0.2 * math.sqrt(max(sides)) * leaf

    orthogonal = optax.contrib.scale_by_muon(
        beta=momentum, mu_dtype=momentum_dtype, weight_dimension_numbers=all_axes
    )
    scale = optax.stateless(lambda updates, _: jax.tree.map(scaled, updates, all_axes(updates)))
    return optax.chain(orthogonal, scale)
