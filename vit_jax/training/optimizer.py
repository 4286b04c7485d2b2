"""Optimizers (paper, section 4.1 and tables 3 and 4).

Keyword-only parameters of a row of `OPTIMIZERS` are the keys of that kind in `config.optimizer`,
besides those that `create_optimizer` reads for all kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError, check_known
from vit_jax.parameters.groups import add_multiplied_decay, freeze_parameters, scale_by_layer
from vit_jax.parameters.names import is_stacked, path_name
from vit_jax.training.schedule import Schedule

DECAY_MASKS = {
    # Weights of dense layers, attention and convolutions; no biases, norms, cls, positions.
    "kernels": r".*/kernel",
    "all": r".*",
}
MOMENTUM_DTYPES = ("float32", "bfloat16")


def adamw(
    *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, momentum_dtype: str = "float32"
) -> optax.GradientTransformation:
    """Adam, the paper's optimizer; `create_optimizer` adds the decay.

    Args:
      b1, b2, eps: of Adam.
      momentum_dtype: float32, or bfloat16, in which the first moment is stored.
    """
    _check_fractions(b1=b1, b2=b2)
    _check_positive(eps=eps)
    return optax.scale_by_adam(b1, b2, eps, mu_dtype=momentum_dtype)


def sgd(*, momentum: float = 0.9, momentum_dtype: str = "float32") -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum.

    Args:
      momentum: decay of the sum of gradients.
      momentum_dtype: float32, or bfloat16, in which momentum is stored; 0.9 then becomes
        bfloat16(0.9) = 0.8984375, as in the official code.
    """
    _check_fractions(momentum=momentum)
    return optax.trace(decay=momentum, accumulator_dtype=momentum_dtype)


def adafactor(
    *,
    momentum: float = 0.9,
    b2: float = 0.999,
    factored_decay: float = 0.8,
    momentum_dtype: str = "float32",
) -> optax.GradientTransformation:
    """ViT-g's (2106.04560, section 3.4; big_vision's `scale_by_adafactor`).

    A factored second moment, then momentum as an average that starts from 0 uncorrected:
    momentum * m + (1 - momentum) * update.

    Args:
      momentum: of that average; 0 keeps none.
      b2: what the second moment's decay rises to.
      factored_decay: its exponent: the decay is 1 - t ** -0.8 in update t.
      momentum_dtype: float32, or bfloat16, in which momentum is stored.
    """
    _check_fractions(momentum=momentum, b2=b2)
    _check_positive(factored_decay=factored_decay)
    scale = scale_by_factored_rms(factored_decay, b2)
    if not momentum:
        return scale
    ema = optax.ema(momentum, debias=False, accumulator_dtype=momentum_dtype)
    return optax.chain(scale, ema)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "sgd": sgd,
    "adafactor": adafactor,
}


def create_optimizer(
    name: str,
    *,
    schedule: Schedule,
    weight_decay: float = 0.0,
    decay_parameters: str = "kernels",
    decay_multipliers: Sequence[tuple[str, float]] = (),
    clip_norm: float | None = None,
    freeze: str = "",
    layer_decay: float = 1.0,
    **kwargs: Any,
) -> optax.GradientTransformation:
    """Clip, precondition, decay, scale by the learning rate, in this order.

    Weight decay is decoupled and multiplied by the learning rate: each update subtracts
    `rate * weight_decay * parameter` (the paper's 0.1 is this 0.1; big_vision's is 0.1 * base).
    `layer_decay` scales this rate too, as in BEiT's AdamW (2106.08254).

    Args:
      schedule: from `create_schedule`.
      weight_decay: decoupled, multiplied by the learning rate.
      decay_parameters: which parameters decay: kernels | all.
      decay_multipliers: pairs (regular expression, factor). The first pair that matches the whole
        name of a parameter that decays multiplies its decay (ViT-g: 100 for `head/kernel`,
        big_vision's `wd_mults`). Names are those of `freeze`.
      clip_norm: upper bound of the gradient's global norm; None: no clipping.
      freeze: regular expression on whole parameter names (`embedding/.*|cls|Transformer/.*`). These
        parameters stay as they are, have no optimizer state, and do not count in the gradient's
        norm. Blocks are named as in the loop form, also under `model.scan`.
      layer_decay: the learning rate of layer l of L is multiplied by layer_decay ** (L + 1 - l):
        l = 0 for what stands before the first block, i + 1 for block i, L + 1 for what comes after
        the last one. 1.0 is off.

    Raises:
      UserError: unknown name or value; `init` raises those of `freeze`, `decay_multipliers` and
        `layer_decay`, see `parameters.groups`.
    """
    check_known("optimizer.name", name, OPTIMIZERS)
    check_known("optimizer.decay_parameters", decay_parameters, DECAY_MASKS)
    if "momentum_dtype" in kwargs:
        check_known("optimizer.momentum_dtype", kwargs["momentum_dtype"], MOMENTUM_DTYPES)
    if weight_decay < 0.0:
        raise UserError(f"optimizer.weight_decay={weight_decay} must not be negative.")
    if clip_norm is not None and clip_norm <= 0:
        raise UserError(f"optimizer.clip_norm={clip_norm} must be positive, or None (off).")
    if decay_multipliers and not weight_decay:
        raise UserError("optimizer.decay_multipliers multiply optimizer.weight_decay, which is 0.")
    steps = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
    steps.append(OPTIMIZERS[name](**kwargs))
    if weight_decay:
        pattern = DECAY_MASKS[decay_parameters]
        steps.append(add_multiplied_decay(weight_decay, pattern, decay_multipliers))
    steps.append(optax.scale_by_learning_rate(schedule))
    tx = optax.chain(*steps)
    if freeze:
        tx = freeze_parameters(tx, freeze)
    # Outside the freezing, which hides blocks: all of them count.
    return tx if layer_decay == 1.0 else optax.chain(tx, scale_by_layer(layer_decay))


def _check_fractions(**values: float) -> None:
    for key, value in values.items():
        if not 0.0 <= value < 1.0:
            raise UserError(f"optimizer.{key}={value} must be in [0, 1).")


def _check_positive(**values: float) -> None:
    for key, value in values.items():
        if not value > 0.0:
            raise UserError(f"optimizer.{key}={value} must be positive.")


# Of Adafactor: smaller matrices keep a second moment per entry; big_vision's value.
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
