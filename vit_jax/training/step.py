"""One update of the parameters: a pure function of (state, constants, batch)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from vit_jax.parameters.groups import stop_frozen_gradients
from vit_jax.parameters.sharding import BATCH_AXES, keep_batch_sharding
from vit_jax.training.gradient import Batch, Gradient, Metrics, ValueAndGrad, plain_gradient
from vit_jax.training.mixing import Mixing
from vit_jax.training.state import TrainState

# Folded into the key of a step for mixing; its parts fold in their index, 0, 1, ...
MIXING_STREAM = 2**32 - 1


def accumulate_gradients(
    value_and_grad: ValueAndGrad,
    params: Any,
    batch: Batch,
    rng: jax.Array,
    *,
    num_steps: int,
) -> tuple[tuple[jax.Array, Metrics], Any]:
    """Means of loss, metrics and gradient over `num_steps` parts of the batch, one at a time.

    Only one gradient is held besides the sum. Part k takes rows k, k + num_steps, ..., so that
    every device cuts its own rows and nothing moves between devices.
    """

    def split(x: jax.Array) -> jax.Array:
        parts = jnp.reshape(x, (x.shape[0] // num_steps, num_steps, *x.shape[1:]))
        parts = jnp.swapaxes(parts, 0, 1)  # [num_steps, B / num_steps, ...]
        return jax.lax.with_sharding_constraint(parts, PartitionSpec(None, BATCH_AXES))

    def body(carry: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        micro_batch, index = part
        result = value_and_grad(params, micro_batch, jax.random.fold_in(rng, index))
        return jax.tree.map(jnp.add, carry, result), None

    parts = (jax.tree.map(split, batch), jnp.arange(num_steps))
    shapes = jax.eval_shape(value_and_grad, params, jax.tree.map(lambda x: x[0], parts[0]), rng)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, _ = jax.lax.scan(body, zeros, parts)
    return jax.tree.map(lambda x: x / num_steps, sums)


def make_train_step(
    objective: Any,
    tx: optax.GradientTransformation,
    *,
    seed: int,
    gradient: Gradient = plain_gradient,
    accumulation_steps: int = 1,
    polyak_decay: float = 0.0,
    freeze: str = "",
    mixing: Mixing | None = None,
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, Metrics]]:
    """Returns `train_step(state, constants, batch) -> (state, metrics)`.

    Args:
      objective: has `loss({**params, **constants}, batch, rng) -> (scalar, metrics)`.
      seed: all randomness of update t is a function of (seed, t).
      accumulation_steps: parts that the batch is cut into.
      polyak_decay: d of average = d * average + (1 - d) * params; 0 for no average.
      freeze: of the optimizer; frozen parameters get no gradient and do not count in `grad_norm`.
      mixing: from `create_mixing`; applied before the batch is cut into parts.

    Metrics are float32 scalars: `loss`, `grad_norm` (before clipping), `param_norm` (after the
    update) and the objective's own.
    """

    def train_step(state: TrainState, constants: Any, batch: Batch) -> tuple[TrainState, Metrics]:
        def loss_fn(params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
            if freeze:
                params = stop_frozen_gradients(params, freeze)
            with keep_batch_sharding():
                return objective.loss({**params, **constants}, batch, rng)

        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        if accumulation_steps > 1:
            value_and_grad = functools.partial(
                accumulate_gradients, value_and_grad, num_steps=accumulation_steps
            )
        rng = jax.random.fold_in(jax.random.key(seed), state.step)
        if mixing is not None:
            batch = mixing(batch, jax.random.fold_in(rng, MIXING_STREAM))
        (loss, metrics), grads = gradient(value_and_grad, state.params, batch, rng)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        polyak_params = state.polyak_params
        if polyak_decay:
            polyak_params = optax.incremental_update(params, polyak_params, 1.0 - polyak_decay)
        state = TrainState(state.step + 1, params, opt_state, polyak_params)
        norms = {"grad_norm": optax.tree.norm(grads), "param_norm": optax.tree.norm(params)}
        return state, {"loss": loss, **norms, **metrics}

    return train_step
