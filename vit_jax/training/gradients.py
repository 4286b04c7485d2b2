"""How a loss becomes a gradient: plain, or sharpness-aware in two passes.

Keyword-only parameters of a row of `GRADIENTS` are the keys of that kind in `config.gradient`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.objectives.objective import Batch, Metrics

Result = tuple[tuple[jax.Array, Metrics], Any]  # (loss, metrics), gradient
ValueAndGrad = Callable[[Any, Batch, jax.Array], Result]  # of params, batch, rng
# (value_and_grad, params, batch, rng, rate); accumulation and freezing are inside `value_and_grad`.
# `rate` is `Schedule.relative` of the update.
Gradient = Callable[[ValueAndGrad, Any, Batch, jax.Array, jax.Array], Result]


def plain_gradient(
    value_and_grad: ValueAndGrad, params: Any, batch: Batch, rng: jax.Array, _rate: jax.Array
) -> Result:
    """The gradient of the loss at the parameters."""
    return value_and_grad(params, batch, rng)


def sam_gradient(*, rho: float = 0.05) -> Gradient:
    """The gradient at the worst nearby parameters ("Sharpness-Aware Minimization", 2010.01412).

    They are params + rho * g / ||g|| with the gradient g of the whole batch; the authors use that
    of each device's own images (m-sharpness, section 4.1). Loss and metrics are those of the first
    pass. Both passes use the same dropout.

    Args:
      rho: distance, in the Euclidean norm over all parameters.
    """

    def gradient(
        value_and_grad: ValueAndGrad, params: Any, batch: Batch, rng: jax.Array, _rate: jax.Array
    ) -> Result:
        result, grads = value_and_grad(params, batch, rng)
        _, worst_grads = value_and_grad(_ascend(params, grads, rho), batch, rng)
        return result, worst_grads

    return gradient


def gsam_gradient(*, rho_max: float = 0.6, rho_min: float = 0.1, alpha: float = 0.6) -> Gradient:
    """SAM that also closes the gap between both losses (GSAM, 2203.08065, algorithm 1).

    With g at the parameters and g_p at the worst nearby ones, as for `sam`: g_p - alpha * g_v,
    where g_v = g - <g, g_p> g_p / ||g_p||^2 is the part of g that leaves the loss at the worst ones
    as it is. The distance follows the learning rate: rho_min + (rho_max - rho_min) *
    `Schedule.relative`, where big_vision extrapolates below the end.

    Args:
      rho_max: distance at the peak of the learning rate; defaults are big_vision's for ViT-B/32.
      rho_min: distance at its end.
      alpha: weight of the gap; with 0 and equal distances it is `sam`.
    """

    def gradient(
        value_and_grad: ValueAndGrad, params: Any, batch: Batch, rng: jax.Array, rate: jax.Array
    ) -> Result:
        result, grads = value_and_grad(params, batch, rng)
        rho = rho_min + (rho_max - rho_min) * rate
        _, worst_grads = value_and_grad(_ascend(params, grads, rho), batch, rng)
        squared = optax.tree.norm(worst_grads, squared=True)
        share = optax.tree.vdot(grads, worst_grads) / jnp.where(squared > 0.0, squared, 1.0)
        return result, jax.tree.map(
            lambda worst, grad: worst - alpha * (grad - share * worst), worst_grads, grads
        )

    return gradient


def _ascend(params: Any, grads: Any, rho: Any) -> Any:
    """params + rho * g / ||g||; a zero gradient moves nothing."""
    norm = optax.tree.norm(grads)
    norm = jnp.where(norm > 0.0, norm, 1.0)
    return jax.tree.map(lambda param, grad: param + rho * (grad / norm), params, grads)


class GradientKind(NamedTuple):
    create: Callable[..., Gradient]  # its keyword-only parameters are config keys
    passes: int  # forward and backward passes over the whole batch


GRADIENTS: dict[str, GradientKind] = {
    "plain": GradientKind(lambda: plain_gradient, passes=1),
    "sam": GradientKind(sam_gradient, passes=2),
    "gsam": GradientKind(gsam_gradient, passes=2),
}


def create_gradient(name: str, **kwargs: Any) -> Gradient:
    """The gradient called `name`."""
    return GRADIENTS[name].create(**kwargs)
