"""Looking inside: what it shows is what the model computes, and nothing changes."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests import golden
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.models.look import INSIDE, look
from vit_jax.parameters.table import table_of

SMALL = {"patch_size": 8, "hidden_size": 32, "num_layers": 3, "mlp_dim": 64, "num_heads": 4}
IMAGES = golden.images(2, 16, 24)  # a grid of 2 x 3


def model_and_params(name: str = "vit", **model: Any) -> tuple[Any, Any]:
    sizes = {**SMALL, **model}
    module = create_model(name, num_classes=5, **sizes)
    plain = {**sizes, "scan": False, "attention": "reference"}
    loop = create_model(name, num_classes=5, **plain)
    params = golden.filled(loop, IMAGES.shape)
    return module, table_of(module).stack(params) if module.scan else params


@functools.cache
def of_the_loop() -> dict[str, Any]:
    return jax.device_get(look(*model_and_params(), IMAGES, INSIDE))


@pytest.mark.parametrize("form", [{"scan": True, "remat": "full"}, {"attention": "pallas"}])
def test_the_same_of_every_form(form: dict[str, Any]) -> None:
    expected = of_the_loop()
    module, params = model_and_params(**form)
    arrays = jax.device_get(jax.jit(lambda p: look(module, p, IMAGES, INSIDE))(params))
    assert {key: array.shape for key, array in arrays.items()} == {
        "attention": (3, 2, 4, 7, 7),
        **dict.fromkeys(("query", "key", "value"), (3, 2, 7, 4, 8)),
        "tokens": (3, 2, 7, 32),
    }
    for key, array in arrays.items():
        np.testing.assert_allclose(array, expected[key], atol=2e-6, err_msg=key)


def test_it_is_what_the_model_computes() -> None:
    module, params = model_and_params()
    inside = of_the_loop()
    scores = np.einsum("lbqhd,lbkhd->lbhqk", inside["query"], inside["key"]) / np.sqrt(8)
    np.testing.assert_allclose(inside["attention"], jax.nn.softmax(scores), atol=1e-5)
    # The last tokens, normalised, through the head are the logits.
    norm = params["Transformer"]["encoder_norm"]
    x = np.asarray(inside["tokens"][-1, :, 0])
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    logits = (x * norm["scale"] + norm["bias"]) @ params["head"]["kernel"] + params["head"]["bias"]
    plain = module.apply({"params": params}, IMAGES, train=False)
    np.testing.assert_allclose(logits, plain, atol=1e-5)
    looked, _ = module.apply({"params": params}, IMAGES, train=False, mutable=["intermediates"])
    np.testing.assert_array_equal(looked, plain)


def test_what_cannot_be_shown_is_one_line() -> None:
    module, params = model_and_params()
    with pytest.raises(UserError, match=r"what='atention' is unknown. Did you mean 'attention'"):
        look(module, params, IMAGES, ["atention"])
    resnet = create_model("bit", num_classes=5, resnet_layers=(1,), resnet_width_factor=1)
    with pytest.raises(UserError, match="no attention; it has no blocks"):
        look(resnet, {}, IMAGES)
