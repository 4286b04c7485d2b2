"""The training state and the training step: pure functions."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from vit_jax.objectives.objective import Batch, Metrics
from vit_jax.parameters.sharding import BATCH_AXES, keep_batch_sharding
from vit_jax.training.gradients import Gradient, Result, ValueAndGrad, plain_gradient
from vit_jax.training.mixing import Mixing
from vit_jax.trees import merge_trees


@flax.struct.dataclass
class TrainState:
    """Everything needed to resume; randomness and data order follow from the seed and `step`."""

    step: jax.Array  # int32 scalar, number of completed updates
    params: Any  # nested dict of float32 arrays
    opt_state: Any
    polyak_params: Any = None  # running average of `params` (Polyak averaging), or None
    # What updates change and no gradient does: statistics of batch norms, an averaged teacher, a
    # centre. Names as for parameters; {} for most objectives.
    buffers: Any = flax.struct.field(default_factory=dict)

    @property
    def eval_params(self) -> Any:
        """The parameters to evaluate and to export: the average if there is one."""
        return self.params if self.polyak_params is None else self.polyak_params


def create_train_state(
    params: Any,
    *,
    tx: optax.GradientTransformation,
    polyak_decay: float,
    split: Callable[[Any], tuple[Any, Any]] = lambda params: (params, {}),
) -> TrainState:
    """State before the first update; the average starts from the parameters.

    `polyak_decay`: 0: no average. `split`: (what gradients change, what else updates change).
    """
    params, buffers = split(params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=tx.init(params),
        polyak_params=jax.tree.map(jnp.copy, params) if polyak_decay else None,
        buffers=jax.tree.map(jnp.copy, buffers),  # a copy of a parameter has memory of its own
    )


# Folded into the key of a step for mixing; its parts fold in their index, 0, 1, ...
MIXING_STREAM = 2**32 - 1
CHOICE_STREAM = 2**32 - 2


def make_train_step(
    objective: Any,
    tx: optax.GradientTransformation,
    *,
    seed: int,
    gradient: Gradient = plain_gradient,
    relative_rate: Callable[[jax.Array], jax.Array] = jnp.ones_like,
    accumulation_steps: int = 1,
    polyak_decay: float = 0.0,
    choices: Sequence[Any] = (),
    mixing: Mixing | None = None,
    to_model: Callable[[Any], Any] = lambda params: params,
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, Metrics]]:
    """Returns `train_step(state, constants, batch) -> (state, metrics)`.

    Args:
      objective: an `Objective`; its loss gets the parameters, the buffers and the constants.
      seed: all randomness of update t is a function of (seed, t).
      gradient: from `create_gradient`.
      relative_rate: `Schedule.relative`, for the gradient.
      accumulation_steps: number of parts to split the batch into.
      polyak_decay: d of average = d * average + (1 - d) * params; 0 disables it.
      choices: objectives of the same parameters, at other patch sizes (FlexiViT, 2212.08013): the
        loss of an update is that of one of them, drawn uniformly; () for the loss of `objective`.
        One program has all of them, and an update runs one.
      mixing: from `create_mixing`; applied before the batch is split.
      to_model: parameters of the state to those of the objective, see `Start.to_model`; frozen
        ones have no part in `grad_norm`.

    Metrics are float32 scalars: `loss`, `grad_norm` (before clipping), `param_norm` (after the
    update) and the objective's own.
    """

    def train_step(state: TrainState, constants: Any, batch: Batch) -> tuple[TrainState, Metrics]:
        fixed = merge_trees(state.buffers, constants)
        of_loss = partial(
            _value_and_grad, fixed=fixed, to_model=to_model, num_steps=accumulation_steps
        )
        rng = jax.random.fold_in(jax.random.key(seed), state.step)
        value_and_grad: ValueAndGrad = of_loss(objective)
        if choices:
            drawn = jax.random.randint(jax.random.fold_in(rng, CHOICE_STREAM), (), 0, len(choices))
            value_and_grad = partial(jax.lax.switch, drawn, [*map(of_loss, choices)])
        if mixing is not None:
            batch = mixing(batch, jax.random.fold_in(rng, MIXING_STREAM))
        batch = objective.prepare(batch)
        rate = relative_rate(state.step)
        (loss, metrics), grads = gradient(value_and_grad, state.params, batch, rng, rate)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        polyak_params = state.polyak_params
        if polyak_decay:
            polyak_params = optax.incremental_update(params, polyak_params, 1.0 - polyak_decay)
        buffers = objective.update(state.buffers, params, metrics.pop("buffers", {}))
        state = TrainState(state.step + 1, params, opt_state, polyak_params, buffers)
        norms = {"grad_norm": optax.tree.norm(grads), "param_norm": optax.tree.norm(params)}
        if choices:
            sizes = [choice.model.patch_size for choice in choices]
            norms["patch_size"] = jnp.asarray(sizes, jnp.float32)[drawn]
        return state, {"loss": loss, **norms, **metrics}

    return train_step


def _value_and_grad(
    objective: Any, fixed: Any, to_model: Callable[[Any], Any], *, num_steps: int
) -> ValueAndGrad:
    """Of the loss in the trainable parameters, accumulated over `num_steps` parts of a batch."""

    def call(method: Callable[..., Any], params: Any, *args: Any) -> Any:
        with keep_batch_sharding():
            return method(merge_trees(to_model(params), fixed), *args)

    value_and_grad = jax.value_and_grad(partial(call, objective.loss), has_aux=True)
    if num_steps == 1:
        return value_and_grad
    if objective.spans_batch:
        embed, loss_of = partial(call, objective.embed), partial(call, objective.loss_of)
        return partial(accumulate_embeddings, embed, loss_of, num_steps=num_steps)
    return partial(accumulate_gradients, value_and_grad, num_steps=num_steps)


def accumulate_gradients(
    value_and_grad: ValueAndGrad, params: Any, batch: Batch, rng: jax.Array, *, num_steps: int
) -> Result:
    """Means of loss, metrics and gradient over parts of the batch, sequentially.

    One gradient is in memory besides the sum. Part k takes rows k, k + num_steps, ..., so that
    devices split their own rows and exchange nothing; its key is `rng` with k folded in.
    """

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

    As in GradCache (2101.06983): the embeddings of all parts, the gradient of the loss with respect
    to them, then each part again to backpropagate its rows to the parameters.
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
