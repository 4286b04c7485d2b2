"""Layer norms are Flax's, computed again in the backward pass; shapes are checked as by Flax."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError

from tests import golden
from vit_jax.models.layers import Conv, Dense, GroupNorm, LayerNorm


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
    ours = outputs_and_gradients(LayerNorm(1e-6, dtype), x)
    flax = outputs_and_gradients(nn.LayerNorm(epsilon=1e-6, dtype=dtype), x)
    assert ours[0].dtype == dtype
    if dtype == jnp.bfloat16:  # Flax rounds the parts of the gradient of x before it adds them up
        exact = outputs_and_gradients(nn.LayerNorm(epsilon=1e-6), x.astype(np.float32))[1][1]
        errors = [np.abs(np.float32(each[1][1]) - exact).mean() for each in (ours, flax)]
        assert errors[0] < errors[1]
        ours, flax = ((y, of_params) for y, (of_params, _) in (ours, flax))
    jax.tree.map(np.testing.assert_array_equal, ours, flax)


LAYERS: list[tuple[nn.Module, tuple[int, ...], str]] = [
    (Dense((8, 2, 4), (2, 4), jnp.float32), (1, 3, 8), "kernel"),
    (LayerNorm(1e-6, jnp.float32), (1, 3, 8), "scale"),
    (Conv(4, (2, 2)), (1, 4, 4, 8), "bias"),
    (GroupNorm(num_groups=4), (1, 4, 4, 8), "bias"),
]


@pytest.mark.parametrize(("layer", "shape", "name"), LAYERS)
def test_a_parameter_of_another_shape_is_an_error(
    layer: nn.Module, shape: tuple[int, ...], name: str
) -> None:
    x = np.ones(shape, np.float32)
    params = dict(layer.init(jax.random.key(0), x)["params"])
    layer.apply({"params": params}, x)
    params[name] = params[name][..., :1]
    with pytest.raises(ScopeParamShapeError, match=f'"{name}"'):
        layer.apply({"params": params}, x)
