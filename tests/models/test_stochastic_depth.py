from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden
from tests.golden import VIT
from vit_jax.models.create import create_model
from vit_jax.models.layers import StochasticDepth, drop_rates
from vit_jax.models.vit import Encoder1DBlock, MlpBlock
from vit_jax.parameters.table import table_of

SMALL = {"name": "vit", "patch_size": 8, "hidden_size": 16, "num_layers": 3, "mlp_dim": 16}
SMALL |= {"num_heads": 2, "num_classes": 5}
IMAGES = golden.images(512, 16, 16)
RNGS = {"dropout": jax.random.key(3)}
TWO_BLOCKS = {**SMALL, "num_layers": 2}


def params_of(**model: Any) -> Any:
    return golden.filled(create_model(**model), IMAGES.shape)


def logits_of(model: Any, params: Any, *, train: bool) -> np.ndarray:
    rngs = RNGS if train else {}
    apply = jax.jit(lambda p: model.apply({"params": p}, IMAGES[:8], train=train, rngs=rngs))
    return np.asarray(apply(params))


def test_the_rate_rises_on_a_line_from_zero() -> None:
    assert drop_rates(0.1, 12) == pytest.approx(np.linspace(0.0, 0.1, 12))
    assert drop_rates(0.1, 1) == [0.0]
    assert drop_rates(0.0, 12) is None
    assert drop_rates(0.1, 3, "constant") == pytest.approx([0.1] * 3)  # DeiT III


@pytest.mark.parametrize("scan", [False, True])
def test_branches_of_single_examples_are_dropped_at_the_rate_of_their_block(scan: bool) -> None:
    model = create_model(**SMALL, stochastic_depth_rate=0.6, scan=scan)
    params = params_of(**SMALL)
    seen_types = (Encoder1DBlock, StochasticDepth, MlpBlock, nn.MultiHeadDotProductAttention)
    _, captured = jax.jit(
        lambda p: model.apply(
            {"params": p},
            IMAGES,
            train=True,
            rngs=RNGS,
            capture_intermediates=lambda module, method: (
                method == "__call__" and isinstance(module, seen_types)
            ),
        )
    )(VIT.stack(params) if scan else params)
    encoder = captured["intermediates"]["Transformer"]
    x = None
    for i, rate in enumerate((0.0, 0.3, 0.6)):
        block = encoder["encoderblock"] if scan else encoder[f"encoderblock_{i}"]
        if scan:
            block = jax.tree.map(lambda leaf, i=i: leaf[i], block)
        values = jax.device_get(golden.by_module(block))
        block = {name: value for name, value in values.items() if "/" not in name}
        after = block.pop("")
        dropped = {}
        for branch, name in (("StochasticDepth_0", "MultiHead"), ("StochasticDepth_1", "MlpBlock")):
            (before,) = (value for key, value in block.items() if key.startswith(name))
            gone = ~np.any(block[branch], axis=(1, 2))
            # Divided by the share that stays; float32 rounds once.
            np.testing.assert_allclose(
                block[branch][~gone], before[~gone] / (1.0 - rate), rtol=1e-6
            )
            # Four standard deviations of a share of 512 draws.
            assert np.mean(gone) == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / 512))
            dropped[branch] = gone
        if rate:
            both = dropped["StochasticDepth_0"] & dropped["StochasticDepth_1"]
            share = rate**2  # each branch draws for itself
            assert np.mean(both) == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 512))
            np.testing.assert_array_equal(after[both], x[both])
            assert np.all(np.any(after[~both] != x[~both], axis=(1, 2)))
        x = after


def test_remat_draws_the_same_again() -> None:
    """The second forward pass, for the gradient, must not drop other branches than the first."""
    results = []
    for remat in ("none", "full"):
        model = create_model(**TWO_BLOCKS, stochastic_depth_rate=0.6, scan=True, remat=remat)
        params = VIT.stack(params_of(**TWO_BLOCKS))

        def loss(p: Any, model: Any = model) -> jax.Array:
            logits = model.apply({"params": p}, IMAGES[:8], train=True, rngs=RNGS)
            return jnp.sum(logits**2)

        results.append(jax.jit(jax.grad(loss))(params))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        # float32 sums in another order.
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * (1 + np.abs(one).max()))


def test_evaluation_is_that_of_the_model_without() -> None:
    """Of the distilled DeiT, which is a VisionTransformer with another end."""
    plain = create_model(**{**TWO_BLOCKS, "name": "deit"}, scan=True)
    model = create_model(**{**TWO_BLOCKS, "name": "deit"}, scan=True, stochastic_depth_rate=0.6)
    params = table_of("deit").stack(params_of(**{**TWO_BLOCKS, "name": "deit"}))
    logits, plain_logits = (logits_of(m, params, train=False) for m in (model, plain))
    np.testing.assert_array_equal(logits, plain_logits)
    trained = logits_of(model, params, train=True)
    assert np.abs(trained - plain_logits).max() > 1e-2
