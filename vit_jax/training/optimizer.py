"""Learning-rate schedules and optimizers (paper, section 4.1 and tables 3 and 4)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError, check_known
from vit_jax.parameters.groups import (
    add_multiplied_decay,
    check_decay_multipliers,
    freeze_parameters,
    scale_by_layer,
)
from vit_jax.training.adafactor import scale_by_factored_rms

Schedule = Callable[[Any], jax.Array]

OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor")
SCHEDULES = ("cosine", "linear", "rsqrt", "constant")
DECAY_MASKS = {
    # Weights of dense layers, attention and convolutions: not biases, norms, cls, positions.
    "kernels": r".*/kernel",
    "all": r".*",
}
# Settings that only some read; for the others they have to stay at their defaults.
OPTIMIZER_KEYS = {
    "b1": ("adamw", "adam"),
    "b2": ("adamw", "adam", "adafactor"),
    "eps": ("adamw", "adam"),
    "momentum": ("sgd", "adafactor"),
    "factored_decay": ("adafactor",),
}
SCHEDULE_KEYS = {"linear_end": ("linear",), "timescale_steps": ("rsqrt",)}
MOMENTUM_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def create_schedule(
    name: str,
    *,
    learning_rate: float,
    total_steps: int,
    warmup_steps: int = 0,
    linear_end: float = 1e-5,
    timescale_steps: int = 10_000,
    cooldown_steps: int = 0,
) -> Schedule:
    """A function from the number of finished updates to the learning rate of the next one.

    Args:
      name: `cosine`: base * (1 + cos(pi p)) / 2; `linear`: from base to `linear_end` in p;
        `rsqrt`: base / sqrt(1 + (step - warmup) / timescale); `constant`. p runs from 0 at the end
        of the warm-up to 1 at `total_steps`.
      learning_rate: the base.
      total_steps: updates in all.
      warmup_steps: the result is multiplied by step / warmup_steps up to there; the first update
        of a warm-up has rate 0, as in the official code.
      linear_end: last value of `linear`.
      timescale_steps: of `rsqrt`.
      cooldown_steps: the result is multiplied by a line to 0 over so many last updates.

    Raises:
      UserError: unknown name, a rate that is none, or warm-up and cool-down do not fit into
        `total_steps`.
    """
    check_known("schedule.name", name, SCHEDULES)
    given = {"linear_end": linear_end, "timescale_steps": timescale_steps}
    _check_read("schedule", name, given, SCHEDULE_KEYS, create_schedule)
    if timescale_steps <= 0:
        raise UserError(f"schedule.timescale_steps={timescale_steps} must be positive.")
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
        if name == "cosine":
            rate = learning_rate * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        elif name == "linear":
            rate = linear_end + (learning_rate - linear_end) * (1.0 - progress)
        elif name == "rsqrt":
            past_warmup = jnp.maximum(step - warmup_steps, 0.0)
            rate = learning_rate / jnp.sqrt(1.0 + past_warmup / timescale_steps)
        else:
            rate = jnp.full_like(step, learning_rate)
        if warmup_steps:
            rate = rate * jnp.minimum(1.0, step / warmup_steps)
        if cooldown_steps:
            rate = rate * jnp.clip((total_steps - step) / cooldown_steps, 0.0, 1.0)
        return rate

    return schedule


def _check_read(
    section: str,
    name: str,
    given: dict[str, float],
    readers: Mapping[str, tuple[str, ...]],
    function: Callable[..., Any],
) -> None:
    """Raises UserError for a setting that `name` does not read and that is not at its default."""
    for key, value in given.items():
        default = inspect.signature(function).parameters[key].default
        if name not in readers[key] and value != default:
            raise UserError(
                f"{section}.{key}={value} is not read by {section}.name={name!r}, but by "
                f"{' and '.join(readers[key])}; leave it at {default}."
            )


def create_optimizer(
    name: str,
    *,
    schedule: Schedule,
    clip_norm: float | None = None,
    weight_decay: float = 0.0,
    decay_parameters: str = "kernels",
    decay_multipliers: Sequence[tuple[str, float]] = (),
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    momentum: float = 0.9,
    momentum_dtype: str = "float32",
    factored_decay: float = 0.8,
    freeze: str = "",
    layer_decay: float = 1.0,
) -> optax.GradientTransformation:
    """Clip, precondition, decay, scale by the learning rate, in this order.

    Weight decay is decoupled and multiplied by the learning rate: each update subtracts
    `rate * weight_decay * parameter` (the paper's 0.1 is this 0.1; big_vision's is 0.1 * base).
    With `layer_decay` the rate of the parameter's own layer counts here too, as in BEiT's AdamW
    (2106.08254): a layer that learns slowly also decays slowly.

    Args:
      name: `adamw`, `adam` (no decay), `sgd`, or `adafactor`: ViT-g's (2106.04560, section 3.4;
        big_vision's `scale_by_adafactor`): a factored second moment, then momentum as an average
        that starts from 0 uncorrected, momentum * m + (1 - momentum) * update.
      schedule: from `create_schedule`.
      clip_norm: upper bound of the gradient's global norm, or None.
      weight_decay: see above.
      decay_parameters: which parameters decay, a key of `DECAY_MASKS`.
      decay_multipliers: pairs (regular expression, factor). Of what decays, a parameter whose whole
        name matches has its decay multiplied by the factor of the first pair that does (ViT-g: 100
        for `head/kernel`, big_vision's `wd_mults`). Names are those of `freeze`.
      b1, b2, eps: of Adam; b2 also is what Adafactor's decay rises to (0.999 in ViT-g).
      momentum: of SGD and Adafactor; 0 keeps none for Adafactor.
      momentum_dtype: in which Adam's first moment, SGD's and Adafactor's momentum are stored;
        `bfloat16` halves their memory (the decay of SGD then is bfloat16(0.9) = 0.8984375, as in
        the official code).
      factored_decay: exponent of Adafactor: the second moment's decay is 1 - t ** -0.8 in update t.
      freeze: regular expression on whole parameter names (`embedding/.*|cls|Transformer/.*`). What
        matches stays as it is, has no optimizer memory, and does not count in the gradient's norm.
        Blocks are named as in the loop form, also under `model.scan`.
      layer_decay: the learning rate of layer l of L is multiplied by layer_decay ** (L + 1 - l):
        l = 0 for what stands before the first block, i + 1 for block i, L + 1 for what comes after
        the last one. 1.0 is off.

    Raises:
      UserError: unknown name or value; later, from `init`: what `freeze` matches is nothing or
        everything, one of `decay_multipliers` matches nothing that decays, or the model has no
        encoder blocks to count for `layer_decay`.
    """
    given = {"b1": b1, "b2": b2, "eps": eps, "momentum": momentum, "factored_decay": factored_decay}
    check_known("optimizer.name", name, OPTIMIZERS)
    _check_read("optimizer", name, given, OPTIMIZER_KEYS, create_optimizer)
    _check_values(name, given, clip_norm, weight_decay)
    check_known("optimizer.decay_parameters", decay_parameters, DECAY_MASKS)
    check_known("optimizer.momentum_dtype", momentum_dtype, MOMENTUM_DTYPES)
    multipliers = check_decay_multipliers(decay_multipliers)
    if multipliers and not weight_decay:
        raise UserError("optimizer.decay_multipliers multiply optimizer.weight_decay, which is 0.")
    steps = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
    steps.append(_precondition(name, MOMENTUM_DTYPES[momentum_dtype], **given))
    if weight_decay:
        pattern = DECAY_MASKS[decay_parameters]
        steps.append(add_multiplied_decay(weight_decay, pattern, multipliers))
    steps.append(optax.scale_by_learning_rate(schedule))
    tx = optax.chain(*steps)
    if freeze:
        tx = freeze_parameters(tx, freeze)
    # Outside of the freezing, which hides blocks: all of them have to be counted.
    return tx if layer_decay == 1.0 else optax.chain(tx, scale_by_layer(layer_decay))


def _check_values(
    name: str, given: Mapping[str, float], clip_norm: float | None, weight_decay: float
) -> None:
    """Raises UserError for a number that the optimizer cannot mean."""
    for key in ("b1", "b2", "momentum"):
        if not 0.0 <= given[key] < 1.0:
            raise UserError(f"optimizer.{key}={given[key]} must be in [0, 1).")
    for key in ("eps", "factored_decay"):
        if not given[key] > 0.0:
            default = inspect.signature(create_optimizer).parameters[key].default
            raise UserError(f"optimizer.{key}={given[key]} must be positive, such as {default}.")
    if name == "adam" and weight_decay:
        raise UserError(
            f"optimizer.weight_decay={weight_decay} is not read by optimizer.name='adam'; "
            "the paper's Adam with decoupled decay is 'adamw'."
        )
    if weight_decay < 0.0:
        raise UserError(f"optimizer.weight_decay={weight_decay} must not be negative.")
    if clip_norm is not None and clip_norm <= 0:
        raise UserError(
            f"optimizer.clip_norm={clip_norm} must be positive, or None for no clipping."
        )


def _precondition(
    name: str,
    dtype: Any,
    *,
    b1: float,
    b2: float,
    eps: float,
    momentum: float,
    factored_decay: float,
) -> optax.GradientTransformation:
    """What makes an update of a gradient; `dtype` is that of its momentum."""
    if name == "sgd":
        return optax.trace(decay=momentum, accumulator_dtype=dtype)
    if name == "adafactor":
        scale = scale_by_factored_rms(factored_decay, b2)
        if not momentum:
            return scale
        return optax.chain(scale, optax.ema(momentum, debias=False, accumulator_dtype=dtype))
    return optax.scale_by_adam(b1, b2, eps, mu_dtype=dtype)
