"""Freezing, layer-wise learning rates and weight decay, selected by parameter names.

Names are those of the loop form (`Transformer/encoderblock_3/...`). A leaf of the scan form, which
holds one parameter of all L blocks, is matched by its L names in the loop form.
"""

import functools
import logging
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.errors import UserError
from vit_jax.models.family import FIRST, LAST
from vit_jax.parameters.table import ParameterTable
from vit_jax.trees import flatten_names, path_name
from vit_jax.wording import nearest

Multipliers = Sequence[tuple[str, float]]  # (regular expression, factor)


def freeze_parameters(
    tx: optax.GradientTransformation, pattern: str, table: ParameterTable
) -> optax.GradientTransformation:
    """Applies `tx` to the parameters that `pattern` does not match; the others are not updated.

    `tx` never sees frozen parameters: it has no state for them, and norms exclude them. `init`
    raises the errors of `frozen_mask`.
    """
    frozen = functools.partial(frozen_mask, pattern=pattern, table=table)

    def trained(tree: Any) -> Any:
        return jax.tree.map(operator.not_, frozen(tree))

    # optax.partition would do the same, but adds its labels to the paths of the moments, by
    # which sharding.state_shardings finds the parameter of a moment.
    return optax.chain(optax.masked(tx, trained), optax.masked(optax.set_to_zero(), frozen))


def stop_frozen_gradients(params: Any, pattern: str, table: ParameterTable) -> Any:
    """`params` with zero gradients for frozen ones, which XLA then does not compute."""
    frozen = frozen_mask(params, pattern, table)
    return jax.tree.map(
        lambda leaf, is_frozen: jax.lax.stop_gradient(leaf) if is_frozen else leaf, params, frozen
    )


def frozen_mask(tree: Any, pattern: str, table: ParameterTable) -> Any:
    """A tree like `tree` with True where the regular expression matches the full name.

    UserError if `pattern` is not a regular expression; one of its alternatives (`a|b|c`) matches
    nothing; it matches everything; or only some of the blocks in one leaf of the scan form.
    """
    names = tuple(
        (name, tuple(table.loop_names(name, leaf)), math.prod(leaf.shape))
        for name, leaf in flatten_names(tree).items()
    )
    frozen = _frozen_names(pattern, names)
    return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path) in frozen, tree)


@functools.cache  # called several times per run, but should be logged once
def _frozen_names(pattern: str, names: Any) -> frozenset[str]:
    every = [single for _, in_blocks, _ in names for single in in_blocks]
    for alternative in _alternatives(pattern):
        if not any(re.fullmatch(alternative, single) for single in every):
            groups = sorted({f"{single.partition('/')[0]}/.*" for single in every if "/" in single})
            raise UserError(
                f"optimizer.freeze={pattern!r}: {alternative!r} matches no full parameter name."
                f"{nearest(alternative, every + groups)} Examples of names: {_sample_names(every)}."
            )
    frozen = set()
    for name, in_blocks, _ in names:
        count = sum(re.fullmatch(pattern, single) is not None for single in in_blocks)
        if 0 < count < len(in_blocks):
            raise UserError(
                f"optimizer.freeze={pattern!r} matches {count} of the {len(in_blocks)} blocks in "
                f"{name!r}, one array under model.scan=True; freeze all, or set model.scan=False."
            )
        if count:
            frozen.add(name)
    trained = [name for name, _, _ in names if name not in frozen]
    if not trained:
        raise UserError(f"optimizer.freeze={pattern!r} matches all parameters; nothing is trained.")
    count = sum(size for name, _, size in names if name in frozen)
    total = sum(size for _, _, size in names)
    logging.info(
        f"optimizer.freeze: {count:,} of {total:,} parameters are frozen; training "
        f"{_sample_names(trained)}."
    )
    return frozenset(frozen)


def _alternatives(pattern: str) -> list[str]:
    """`a|b(c|d)` -> [`a`, `b(c|d)`]: splits at a bar if the part before it is complete."""
    alternatives: list[str] = []
    pending = ""
    for piece in pattern.split("|"):
        try:
            re.compile(pending + piece)
        except re.error:
            pending += piece + "|"
        else:
            alternatives.append(pending + piece)
            pending = ""
    if pending:
        raise UserError(
            f"optimizer.freeze={pattern!r} is not a regular expression: {pending[:-1]!r}."
        )
    return alternatives


def scale_by_layer(decay: float, table: ParameterTable) -> optax.GradientTransformation:
    """Multiplies each update by the factor of its layer, see `layer_factors`."""
    return _update_by_name(
        lambda params: layer_factors(params, decay, table),
        lambda update, _, factor: update * jnp.asarray(factor, update.dtype),
    )


def add_multiplied_decay(
    weight_decay: float, decaying: str, multipliers: Multipliers, table: ParameterTable
) -> optax.GradientTransformation:
    """Adds weight_decay * factor * parameter to each update, see `decay_factors`."""

    def decayed(update: jax.Array, param: jax.Array, factor: np.ndarray) -> jax.Array:
        if not np.any(factor):
            return update
        return update + jnp.asarray(weight_decay * factor, param.dtype) * param

    return _update_by_name(lambda tree: decay_factors(tree, decaying, multipliers, table), decayed)


def _update_by_name(
    factors: Callable[[Any], Any], function: Callable[..., jax.Array]
) -> optax.GradientTransformation:
    """Replaces each update by function(update, parameter, factor)."""

    def init(params: Any) -> optax.EmptyState:
        factors(params)  # raises its errors before compilation
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(function, updates, params, factors(params)), state

    return optax.GradientTransformation(init, update)


def layer_factors(tree: Any, decay: float, table: ParameterTable) -> Any:
    """`decay ** (L + 1 - layer)` for each leaf; [L, 1, ...] for a leaf of the scan form.

    Layer 0 contains all parameters before the first of L blocks, block i is layer i + 1, and layer
    L + 1 those after the last one, which keep the full rate. Trees below different prefixes
    (`image/...`, `text/...`) are counted separately. UserError: `decay` outside (0, 1], no blocks.
    """
    if not 0.0 < decay <= 1.0:
        raise UserError(f"optimizer.layer_decay={decay} must be in (0, 1]; 1 disables it.")
    parameters = [table.find(name) for name in _all_loop_names(tree, table)]
    blocks = sorted((p.prefix, p.block + 1) for p in parameters if p.block is not None)
    depths = dict(blocks)  # of each prefix the last, and highest
    if not depths:
        raise UserError(f"optimizer.layer_decay={decay}: there are no encoder blocks; set it to 1.")

    def factor(name: str) -> float:
        parameter = table.find(name)
        depth = depths.get(parameter.prefix, 0)
        if parameter.block is not None:
            return decay ** (depth - parameter.block)
        return decay ** {FIRST: depth + 1, LAST: 0}[parameter.row.depth]

    return _map_names(factor, tree, table)


def decay_factors(tree: Any, decaying: str, multipliers: Multipliers, table: ParameterTable) -> Any:
    """The decay factor of each leaf; [L, 1, ...] for a leaf of the scan form.

    It is 0 if `decaying` does not match the full name; else that of the first match in
    `multipliers`; else 1. UserError for a multiplier that is not a pair of a regular expression and
    a finite number of at least 0, or that matches no decayed parameter.
    """
    names = [name for name in _all_loop_names(tree, table) if re.fullmatch(decaying, name)]
    for pair in multipliers:
        try:
            pattern, value = pair
            matches = any(re.fullmatch(pattern, name) for name in names)
            valid = 0.0 <= float(value) < math.inf
        except (TypeError, ValueError, re.error):
            raise UserError(
                f"optimizer.decay_multipliers={multipliers!r} must be pairs of a regular "
                "expression and a number, such as (('head/kernel', 100.0),)."
            ) from None
        key = f"optimizer.decay_multipliers: {pattern!r}"
        if not valid:
            raise UserError(f"{key} has the factor {value}; it must be finite and at least 0.")
        if not matches:
            raise UserError(
                f"{key} matches no full name of a decayed parameter."
                f"{nearest(pattern, names)} Examples of names: {_sample_names(names)}."
            )

    def factor(name: str) -> float:
        if not re.fullmatch(decaying, name):
            return 0.0
        return next((float(f) for pattern, f in multipliers if re.fullmatch(pattern, name)), 1.0)

    return _map_names(factor, tree, table)


def _map_names(function: Callable[[str], float], tree: Any, table: ParameterTable) -> Any:
    """`function(name)` for each leaf; [L, 1, ...] for a leaf of the scan form."""

    def values(path: Any, leaf: Any) -> np.ndarray:
        name = path_name(path)
        factors = np.array([function(single) for single in table.loop_names(name, leaf)])
        shape = (-1,) + (1,) * (leaf.ndim - 1)
        return factors.reshape(shape) if table.is_stacked(name) else factors[0]

    return jax.tree_util.tree_map_with_path(values, tree)


def _all_loop_names(tree: Any, table: ParameterTable) -> list[str]:
    leaves = flatten_names(tree).items()
    return [single for name, leaf in leaves for single in table.loop_names(name, leaf)]


def _sample_names(names: list[str], limit: int = 6) -> str:
    """A few evenly spaced names."""
    shown = names[:: -(-len(names) // limit) or 1]
    return ", ".join(shown) + (" and more" if len(shown) < len(names) else "")
