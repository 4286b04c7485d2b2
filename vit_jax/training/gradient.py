"""From parameters and a batch to a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
# (params, batch, rng) -> ((loss, metrics), gradient); accumulation and freezing are inside.
ValueAndGrad = Callable[[Any, Batch, jax.Array], tuple[tuple[jax.Array, Metrics], Any]]
Gradient = Callable[[ValueAndGrad, Any, Batch, jax.Array], tuple[tuple[jax.Array, Metrics], Any]]


def plain_gradient(
    value_and_grad: ValueAndGrad, params: Any, batch: Batch, rng: jax.Array
) -> tuple[tuple[jax.Array, Metrics], Any]:
    """The gradient of the loss at the parameters."""
    return value_and_grad(params, batch, rng)


# Keyword-only parameters of a row are the keys of its kind of `config.gradient`.
GRADIENTS: dict[str, Callable[..., Any]] = {"plain": plain_gradient}


def create_gradient(name: str, **kwargs: Any) -> Gradient:
    """The gradient called `name`."""
    return functools.partial(GRADIENTS[name], **kwargs)
