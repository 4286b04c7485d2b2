"""The table of attention implementations, and the look at their weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden
from vit_jax.errors import UserError
from vit_jax.models.attention import ATTENTIONS, attention_weights
from vit_jax.models.create import create_model
from vit_jax.parameters.names import flatten_names, stack_blocks

SMALL = {"patch_size": 8, "hidden_size": 32, "num_layers": 3, "mlp_dim": 64, "num_heads": 4}
IMAGES = golden.images(2, 16, 24)


def model_and_params(**model: Any) -> tuple[Any, Any]:
    module = create_model("vit", num_classes=5, **SMALL, **model)
    loop = create_model("vit", num_classes=5, **SMALL)
    flat = flatten_names(golden.abstract_params(loop, IMAGES.shape))
    params = golden.params({name: leaf.shape for name, leaf in flat.items()}, "fanin")
    return module, stack_blocks(params) if module.scan else params


@pytest.mark.parametrize("model", [{}, {"scan": True}, {"scan": True, "remat": "full"}])
def test_the_weights_are_those_of_queries_and_keys(model: dict) -> None:
    module, params = model_and_params(**model)
    weights = np.asarray(attention_weights(module, params, IMAGES))
    assert weights.shape == (3, 2, 4, 7, 7)
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
    loop, loop_params = model_and_params()
    _, state = loop.apply({"params": loop_params}, IMAGES, train=False, capture_intermediates=True)
    captured = state["intermediates"]["Transformer"]["encoderblock_1"]
    assert "attention_weights" not in captured["MultiHeadDotProductAttention_0"]
    query, key = (
        captured["MultiHeadDotProductAttention_0"][name]["__call__"][0] for name in ("query", "key")
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(8)
    np.testing.assert_allclose(weights[1], jax.nn.softmax(scores), atol=1e-5)


def test_looking_changes_nothing() -> None:
    module, params = model_and_params()
    plain = module.apply({"params": params}, IMAGES, train=False)
    looked, _ = module.apply({"params": params}, IMAGES, train=False, mutable=["attention"])
    np.testing.assert_array_equal(looked, plain)


def test_an_unknown_attention_is_named() -> None:
    assert "reference" in ATTENTIONS
    with pytest.raises(UserError, match="model.attention='flash' is unknown"):
        create_model("vit", num_classes=5, **SMALL, attention="flash")
