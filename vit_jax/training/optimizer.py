"""Learning-rate schedules and optimizers (paper, section 4.1 and tables 3 and 4).

Keyword-only parameters of a row of `SCHEDULES` and `OPTIMIZERS` are the keys of that kind in
`config.schedule` and `config.optimizer`, besides those that `create_...` reads for all kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError, check_known
from vit_jax.parameters.groups import (
    add_multiplied_decay,
    freeze_parameters,
    scale_by_layer,
)
from vit_jax.training.adafactor import scale_by_factored_rms

Schedule = Callable[[Any], jax.Array]

DECAY_MASKS = {
    # Weights of dense layers, attention and convolutions; no biases, norms, cls, positions.
    "kernels": r".*/kernel",
    "all": r".*",
}
MOMENTUM_DTYPES = ("float32", "bfloat16")


class Position(NamedTuple):
    """A point in the training; float32 scalars."""

    progress: jax.Array  # p, from 0 at the end of the warm-up to 1 after the last step
    past_warmup: jax.Array  # steps since the end of the warm-up


def cosine(base: float, at: Position) -> jax.Array:
    """base * (1 + cos(pi p)) / 2."""
    return base * 0.5 * (1.0 + jnp.cos(jnp.pi * at.progress))


def linear(base: float, at: Position, *, linear_end: float = 1e-5) -> jax.Array:
    """From base to `linear_end` in p.

    Args:
      linear_end: the last learning rate.
    """
    return linear_end + (base - linear_end) * (1.0 - at.progress)


def rsqrt(base: float, at: Position, *, timescale_steps: int = 10_000) -> jax.Array:
    """base / sqrt(1 + steps after the warm-up / timescale).

    Args:
      timescale_steps: after so many steps the rate has fallen by a factor of sqrt(2).
    """
    return base / jnp.sqrt(1.0 + at.past_warmup / timescale_steps)


def constant(base: float, at: Position) -> jax.Array:
    """base."""
    return jnp.full_like(at.progress, base)


SCHEDULES: dict[str, Callable[..., jax.Array]] = {
    "cosine": cosine,
    "linear": linear,
    "rsqrt": rsqrt,
    "constant": constant,
}


def create_schedule(
    name: str,
    *,
    learning_rate: float,
    total_steps: int,
    warmup_steps: int = 0,
    cooldown_steps: int = 0,
    **kwargs: Any,
) -> Schedule:
    """A function from the number of finished updates to the learning rate of the next one.

    Args:
      learning_rate: the base.
      total_steps: updates in all.
      warmup_steps: until then the rate is multiplied by step / warmup_steps; it is 0 in the first
        update, as in the official code.
      cooldown_steps: over the last updates the rate is multiplied by a line to 0.

    Raises:
      UserError: unknown name, a negative or non-finite rate, or warm-up and cool-down do not fit
        into `total_steps`.
    """
    check_known("schedule.name", name, SCHEDULES)
    if kwargs.get("timescale_steps", 1) <= 0:
        raise UserError(f"schedule.timescale_steps={kwargs['timescale_steps']} must be positive.")
    if not (math.isfinite(learning_rate) and learning_rate >= 0.0):
        raise UserError(f"optimizer.learning_rate={learning_rate} must be finite and not negative.")
    if warmup_steps < 0 or cooldown_steps < 0 or warmup_steps + cooldown_steps >= total_steps:
        raise UserError(
            f"schedule.warmup_steps={warmup_steps} and schedule.cooldown_steps={cooldown_steps} "
            f"must not be negative, and leave room in a training of {total_steps} steps."
        )

    def schedule(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - warmup_steps) / (total_steps - warmup_steps), 0.0, 1.0)
        at = Position(progress, past_warmup=jnp.maximum(step - warmup_steps, 0.0))
        rate = SCHEDULES[name](learning_rate, at, **kwargs)
        if warmup_steps:
            rate = rate * jnp.minimum(1.0, step / warmup_steps)
        if cooldown_steps:
            rate = rate * jnp.clip((total_steps - step) / cooldown_steps, 0.0, 1.0)
        return rate

    return schedule


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
