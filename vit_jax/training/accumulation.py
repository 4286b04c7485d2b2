"""The gradient of a batch in parts, one after the other, to save memory.

Part k takes rows k, k + num_steps, ..., so that every device cuts its own rows and nothing moves
between devices. Its key is that of the update with k folded in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from vit_jax.parameters.sharding import BATCH_AXES

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Result = tuple[tuple[jax.Array, Metrics], Any]  # (loss, metrics), gradient
ValueAndGrad = Callable[[Any, Batch, jax.Array], Result]  # of params, batch, rng


def accumulate_gradients(
    value_and_grad: ValueAndGrad, params: Any, batch: Batch, rng: jax.Array, *, num_steps: int
) -> Result:
    """Means of loss, metrics and gradient over the parts; one gradient is held besides the sum."""

    def body(carry: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        micro_batch, index = part
        result = value_and_grad(params, micro_batch, jax.random.fold_in(rng, index))
        return jax.tree.map(jnp.add, carry, result), None

    parts = (_split(batch, num_steps), jnp.arange(num_steps))
    shapes = jax.eval_shape(value_and_grad, params, jax.tree.map(lambda x: x[0], parts[0]), rng)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, _ = jax.lax.scan(body, zeros, parts)
    return jax.tree.map(lambda x: x / num_steps, sums)


def accumulate_embeddings(
    embed: Any, loss_of: Any, params: Any, batch: Batch, rng: jax.Array, *, num_steps: int
) -> Result:
    """The gradient of the whole batch, although `embed` sees one part at a time (see `Objective`).

    As in GradCache (2101.06983): first the embeddings of all parts, then the gradient of the loss
    with respect to them, then each part again, which passes its rows of that on to the parameters.
    """

    def embed_part(params: Any, part: tuple[Batch, jax.Array]) -> Any:
        micro_batch, index = part
        return embed(params, micro_batch, jax.random.fold_in(rng, index))

    def backward(grads: Any, part: tuple[Any, Any]) -> tuple[Any, None]:
        inputs, cotangents = part
        _, pull_back = jax.vjp(lambda params: embed_part(params, inputs), params)
        return jax.tree.map(jnp.add, grads, *pull_back(cotangents)), None

    parts = (_split(batch, num_steps), jnp.arange(num_steps))
    _, embeddings = jax.lax.scan(lambda _, part: (None, embed_part(params, part)), None, parts)
    value_and_grad = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
    result, (grads, cotangents) = value_and_grad(params, jax.tree.map(_join, embeddings), batch)
    grads, _ = jax.lax.scan(backward, grads, (parts, _split(cotangents, num_steps)))
    return result, grads


def _split(tree: Any, num_steps: int) -> Any:
    def split(x: jax.Array) -> jax.Array:
        parts = jnp.reshape(x, (x.shape[0] // num_steps, num_steps, *x.shape[1:]))
        parts = jnp.swapaxes(parts, 0, 1)  # [num_steps, B / num_steps, ...]
        return jax.lax.with_sharding_constraint(parts, PartitionSpec(None, BATCH_AXES))

    return jax.tree.map(split, tree)


def _join(parts: jax.Array) -> jax.Array:
    x = jnp.swapaxes(parts, 0, 1)
    x = jnp.reshape(x, (-1, *x.shape[2:]))  # [B, ...]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES))
