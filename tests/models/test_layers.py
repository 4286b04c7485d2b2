"""Layer norms are Flax's, computed again in the backward pass."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden
from vit_jax.models.layers import LayerNorm


def outputs_and_gradients(norm: nn.Module, x: np.ndarray) -> Any:
    """(y, (gradients of scale and bias, gradient of x)), compiled."""
    rng = np.random.default_rng(1)
    params = {name: np.float32(rng.standard_normal(x.shape[-1])) for name in ("scale", "bias")}
    cotangent = rng.standard_normal(x.shape)

    @golden.jit
    def run(params: Any, x: jax.Array) -> Any:
        y, backward = jax.vjp(lambda p, x: norm.apply({"params": p}, x), params, x)
        return y, backward(jnp.asarray(cotangent, y.dtype))

    return run(params, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layer_norm_has_the_bits_of_flax(dtype: Any) -> None:
    x = (3.0 + np.random.default_rng(0).standard_normal((2, 5, 48))).astype(dtype)
    ours = outputs_and_gradients(LayerNorm(dtype=dtype), x)
    flax = outputs_and_gradients(nn.LayerNorm(dtype=dtype), x)
    assert ours[0].dtype == dtype
    if dtype == jnp.bfloat16:  # Flax rounds the parts of the gradient of x before it adds them up
        exact = outputs_and_gradients(nn.LayerNorm(), x.astype(np.float32))[1][1]
        errors = [np.abs(np.float32(each[1][1]) - exact).mean() for each in (ours, flax)]
        assert errors[0] < errors[1]
        ours, flax = ((y, of_params) for y, (of_params, _) in (ours, flax))
    jax.tree.map(np.testing.assert_array_equal, ours, flax)
