"""Which parameters learn, how fast, and how much they decay, decided by their names.

Names are those of the loop form (`Transformer/encoderblock_3/...`). A leaf of the scan form, which
holds one parameter of all L blocks, goes by the L names that it has in the loop form.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.errors import UserError, nearest
from vit_jax.models.create import parameter_row
from vit_jax.models.parameter_table import FIRST, LAST
from vit_jax.parameters.names import is_stacked, path_name

Names = tuple[tuple[str, tuple[str, ...], int], ...]
Multipliers = tuple[tuple[str, float], ...]  # (regular expression, factor)


def freeze_parameters(
    tx: optax.GradientTransformation, pattern: str
) -> optax.GradientTransformation:
    """`tx` for the parameters that `pattern` does not match; the others get updates of zero.

    `tx` never sees what is frozen: it keeps no state for it, and norms leave it out. `init` raises
    the errors of `frozen_mask`.
    """

    def frozen(tree: Any) -> Any:
        return frozen_mask(tree, pattern)

    def trained(tree: Any) -> Any:
        return jax.tree.map(lambda is_frozen: not is_frozen, frozen(tree))

    # optax.partition would do the same, but puts its labels into the paths of the moments, by
    # which sharding.state_shardings finds the parameter that a moment belongs to.
    return optax.chain(optax.masked(tx, trained), optax.masked(optax.set_to_zero(), frozen))


def stop_frozen_gradients(params: Any, pattern: str) -> Any:
    """`params` with gradients of zero for what is frozen; XLA then leaves out their work."""
    frozen = frozen_mask(params, pattern)
    return jax.tree.map(
        lambda leaf, is_frozen: jax.lax.stop_gradient(leaf) if is_frozen else leaf, params, frozen
    )


def frozen_mask(tree: Any, pattern: str) -> Any:
    """A tree like `tree` with True where the whole name matches the regular expression.

    Raises:
      UserError: `pattern` is no regular expression; one of its alternatives (`a|b|c`) matches
        nothing; it matches everything; or only some of the blocks that one leaf of the scan form
        holds.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names: Names = tuple(
        (path_name(path), tuple(_loop_names(path, leaf)), math.prod(leaf.shape))
        for path, leaf in leaves
    )
    frozen = _frozen_names(pattern, names)
    return jax.tree_util.tree_map_with_path(lambda path, _: path_name(path) in frozen, tree)


@functools.cache  # the tree is seen several times per run, and should be logged once
def _frozen_names(pattern: str, names: Names) -> frozenset[str]:
    every = [each for _, loop_names, _ in names for each in loop_names]
    for alternative in _alternatives(pattern):
        if not any(re.fullmatch(alternative, each) for each in every):
            groups = sorted({f"{each.rpartition('/')[0]}/.*" for each in every if "/" in each})
            groups += sorted({f"{each.partition('/')[0]}/.*" for each in every if "/" in each})
            raise UserError(
                f"optimizer.freeze={pattern!r}: {alternative!r} matches no whole parameter name."
                f"{nearest(alternative, [*every, *groups])} Names are such as {_some(every)}."
            )
    frozen: set[str] = set()
    for name, loop_names, _ in names:
        matching = [each for each in loop_names if re.fullmatch(pattern, each)]
        if matching and len(matching) < len(loop_names):
            raise UserError(
                f"optimizer.freeze={pattern!r} matches {len(matching)} of the {len(loop_names)} "
                f"blocks in {name!r}, which are one array under model.scan=True; freeze all of "
                "them, or set model.scan=False."
            )
        if matching:
            frozen.add(name)
    if len(frozen) == len(names):
        raise UserError(f"optimizer.freeze={pattern!r} leaves no parameter to train.")
    count = sum(size for name, _, size in names if name in frozen)
    total = sum(size for _, _, size in names)
    trained = [name for name, _, _ in names if name not in frozen]
    logging.info(
        "optimizer.freeze: %s of %s parameters stay as they are; trained are %s.",
        *(f"{count:,}", f"{total:,}", _some(trained)),
    )
    return frozenset(frozen)


def _alternatives(pattern: str) -> list[str]:
    """`a|b(c|d)` -> [`a`, `b(c|d)`]: a bar splits where what it leaves on its left is complete."""
    found: list[str] = []
    pending = ""
    for piece in pattern.split("|"):
        try:
            re.compile(pending + piece)
        except re.error:
            pending += piece + "|"
        else:
            found.append(pending + piece)
            pending = ""
    if pending:
        raise UserError(f"optimizer.freeze={pattern!r} is no regular expression: {pending[:-1]!r}.")
    return found


def scale_by_layer(decay: float) -> optax.GradientTransformation:
    """Multiplies every update by the factor of its layer, see `layer_factors`."""

    def init(params: Any) -> optax.EmptyState:
        layer_factors(params, decay)  # its errors, before anything is compiled
        return optax.EmptyState()

    def update(updates: Any, state: Any, _params: Any = None) -> tuple[Any, Any]:
        factors = layer_factors(updates, decay)
        return jax.tree.map(lambda u, f: u * jnp.asarray(f, u.dtype), updates, factors), state

    return optax.GradientTransformation(init, update)


def layer_factors(tree: Any, decay: float) -> Any:
    """`decay ** (L + 1 - layer)` for every leaf; [L, 1, ...] for a leaf of the scan form.

    Layer 0 is all that stands before the first of the L blocks, block i is layer i + 1, and L + 1
    is what comes after the last one, which keeps the full rate. Trees below different prefixes
    (`image/...`, `text/...`) are counted separately.

    Raises:
      UserError: `decay` is outside (0, 1], or there are no encoder blocks.
    """
    if not 0.0 < decay <= 1.0:
        raise UserError(f"optimizer.layer_decay={decay} must be above 0 and at most 1 (off).")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = [parameter_row(each) for path, leaf in leaves for each in _loop_names(path, leaf)]
    depths: dict[str, int] = {}
    for each in found:
        if each.block is not None:
            depths[each.prefix] = max(depths.get(each.prefix, 0), each.block + 1)
    if not depths:
        raise UserError(f"optimizer.layer_decay={decay}: the model has no encoder blocks to count.")

    def exponent(name: str) -> int:
        each = parameter_row(name)
        depth = depths.get(each.prefix, 0)
        if each.block is not None:
            return depth - each.block
        return {FIRST: depth + 1, LAST: 0}[each.row.depth]

    def factor(path: Any, leaf: Any) -> np.ndarray:
        factors = np.array([decay ** exponent(each) for each in _loop_names(path, leaf)])
        scanned = is_stacked(path_name(path))
        return factors.reshape((-1,) + (1,) * (leaf.ndim - 1)) if scanned else factors[0]

    return jax.tree_util.tree_map_with_path(factor, tree)


def check_decay_multipliers(multipliers: Any) -> Multipliers:
    """The pairs (regular expression, factor) of `optimizer.decay_multipliers`.

    Raises:
      UserError: something else, no regular expression, or a factor that is negative or not finite.
    """
    checked: list[tuple[str, float]] = []
    for pair in multipliers:
        try:
            pattern, factor = pair
            re.compile(pattern)
            factor = float(factor)
        except (TypeError, ValueError, re.error):
            raise UserError(
                f"optimizer.decay_multipliers={multipliers!r} must hold pairs of a regular "
                "expression and a number, such as (('head/kernel', 100.0),)."
            ) from None
        if not 0.0 <= factor < math.inf:
            raise UserError(
                f"optimizer.decay_multipliers: the factor {factor} of {pattern!r} must be finite "
                "and not negative."
            )
        checked.append((pattern, factor))
    return tuple(checked)


def add_multiplied_decay(
    weight_decay: float, decaying: str, multipliers: Multipliers
) -> optax.GradientTransformation:
    """Adds weight_decay * factor * parameter to every update, see `decay_factors`."""

    def init(params: Any) -> optax.EmptyState:
        decay_factors(params, decaying, multipliers)  # its errors, before anything is compiled
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factors = decay_factors(params, decaying, multipliers)

        def decayed(u: jax.Array, p: jax.Array, factor: np.ndarray) -> jax.Array:
            return u + jnp.asarray(weight_decay * factor, p.dtype) * p if np.any(factor) else u

        return jax.tree.map(decayed, updates, params, factors), state

    return optax.GradientTransformation(init, update)


def decay_factors(tree: Any, decaying: str, multipliers: Multipliers) -> Any:
    """The factor of every leaf's decay; [L, 1, ...] for a leaf of the scan form.

    It is 0 where `decaying` does not match the whole name; else that of the first of
    `multipliers` that does; else 1.

    Raises:
      UserError: a multiplier whose regular expression matches nothing that decays.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [each for path, leaf in leaves for each in _loop_names(path, leaf)]
    names = [each for each in names if re.fullmatch(decaying, each)]
    for pattern, _ in multipliers:
        if not any(re.fullmatch(pattern, each) for each in names):
            raise UserError(
                f"optimizer.decay_multipliers: {pattern!r} matches no whole name of a parameter "
                f"that decays.{nearest(pattern, names)} They are such as {_some(names)}."
            )

    def factor(name: str) -> float:
        if not re.fullmatch(decaying, name):
            return 0.0
        return next((f for pattern, f in multipliers if re.fullmatch(pattern, name)), 1.0)

    def factors(path: Any, leaf: Any) -> np.ndarray:
        values = np.array([factor(each) for each in _loop_names(path, leaf)])
        scanned = is_stacked(path_name(path))
        return values.reshape((-1,) + (1,) * (leaf.ndim - 1)) if scanned else values[0]

    return jax.tree_util.tree_map_with_path(factors, tree)


def _loop_names(path: Any, leaf: Any) -> list[str]:
    """The name, or for a leaf of the scan form the names of what it holds of every block."""
    name = path_name(path)
    head, separator, tail = name.partition("encoderblock/")
    if not separator:
        return [name]
    return [f"{head}encoderblock_{i}/{tail}" for i in range(leaf.shape[0])]


def _some(names: list[str], limit: int = 6) -> str:
    """A few names from all over the list."""
    shown = names if len(names) <= limit else names[:: -(-len(names) // limit)]
    return ", ".join(shown) + (" and more" if len(shown) < len(names) else "")
