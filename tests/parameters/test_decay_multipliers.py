from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import golden
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.models.variants import VARIANTS
from vit_jax.parameters.groups import decay_factors
from vit_jax.parameters.names import flatten_names, stack_blocks
from vit_jax.training.optimizer import create_optimizer

ROW = {**VARIANTS["Ti/16"], "num_layers": 2, "hidden_size": 12, "mlp_dim": 8}
BLOCK = "Transformer/encoderblock_"
KERNELS = (
    *(f"MultiHeadDotProductAttention_0/{name}/kernel" for name in ("query", "key", "value", "out")),
    *(f"MlpBlock_0/Dense_{i}/kernel" for i in (0, 1)),
)


def ones() -> Any:
    params = golden.abstract_params(create_model(**ROW, num_classes=3), (1, 32, 32, 3))
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), params)


def decay(params: Any, **kwargs: Any) -> dict[str, np.ndarray]:
    """Flat: what one update of rate 0.1 takes from every parameter for decay of 0.5 alone."""
    tx = create_optimizer("adamw", schedule=lambda _: jnp.float32(0.1), weight_decay=0.5, **kwargs)

    @jax.jit
    def update(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = tx.update(zeros, tx.init(params), params)
        return optax.apply_updates(params, updates)

    after = update(params)
    return {name: np.asarray(1.0 - value) for name, value in flatten_names(after).items()}


def test_exactly_these_parameters_decay_so_much() -> None:
    """ViT-g's pairs, and a block of its own; the first that matches counts."""
    multipliers = (("head/kernel", 100.0), (f"{BLOCK}1/.*", 0.5), (".*", 2.0))
    factors = flatten_names(decay_factors(ones(), r".*/kernel", multipliers))
    expected = {"head/kernel": 100.0, "embedding/kernel": 2.0}
    expected |= {f"{BLOCK}0/{name}": 2.0 for name in KERNELS}
    expected |= {f"{BLOCK}1/{name}": 0.5 for name in KERNELS}
    assert {name: factor for name, factor in factors.items() if factor} == expected
    assert len(factors) > len(expected)
    taken = decay(ones(), decay_multipliers=multipliers)
    for name, value in taken.items():
        # Differences from 1 in float32.
        np.testing.assert_allclose(value, 0.05 * expected.get(name, 0.0), atol=1e-6, err_msg=name)


def test_blocks_of_the_scan_form_have_factors_of_their_own() -> None:
    kwargs = {"decay_multipliers": ((f"{BLOCK}1/.*", 3.0),), "layer_decay": 0.5}
    loop = decay(ones(), **kwargs)
    scan = decay(stack_blocks(ones()), **kwargs)
    for name in KERNELS:
        stacked = np.stack([loop[f"{BLOCK}{i}/{name}"] for i in (0, 1)])
        np.testing.assert_array_equal(scan[f"Transformer/encoderblock/{name}"], stacked)
        # Layer decay of 0.5 ** 2 and 0.5 for the two blocks.
        np.testing.assert_allclose(stacked[0], 0.05 * 0.25, atol=1e-6)
        np.testing.assert_allclose(stacked[1], 0.05 * 0.5 * 3.0, atol=1e-6)


def test_what_is_frozen_does_not_decay() -> None:
    taken = decay(
        ones(), freeze="embedding/.*|cls|Transformer/.*", decay_multipliers=(("head/kernel", 2.0),)
    )
    assert {name for name, value in taken.items() if np.any(value)} == {"head/kernel"}


@pytest.mark.parametrize(
    ("multipliers", "message"),
    [
        ((("haed/kernel", 2.0),), "'haed/kernel' matches no .*Did you mean 'head/kernel'"),
        ((("head/bias", 2.0),), "'head/bias' matches no whole name of a parameter that decays"),
        ((("head/kernel", -1.0),), "'head/kernel' has the factor -1.0"),
        ((("head/kernel", float("nan")),), "factor nan"),
        ((("head/(kernel", 1.0),), "pairs of a regular expression"),
        (("head/kernel", 1.0), "pairs of a regular expression"),
        ((("head/kernel", "much"),), "pairs of a regular expression"),
    ],
)  # fmt: skip
def test_mistakes_are_named(multipliers: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decay(ones(), decay_multipliers=multipliers)
