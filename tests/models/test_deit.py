from typing import Any

import jax
import numpy as np
import pytest

from tests import golden
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.models.create import create_model, get_variant
from vit_jax.trees import count_parameters, flatten_names, unflatten_names

SMALL = {**weights.SMALL, "name": "deit", "num_layers": 1}
IMAGES = golden.images(2, 16, 16)


def test_parameters() -> None:
    """5,910,800 = the count of timm's deit_tiny_distilled_patch16_224."""
    model = create_model(**get_variant("DeiT-distilled-Ti/16"), num_classes=1000)
    shapes = golden.abstract_params(model)
    assert count_parameters(shapes) == 5_910_800
    flat = flatten_names(shapes)
    assert flat["dist"].shape == (1, 1, 192)
    assert flat["Transformer/posembed_input/pos_embedding"].shape == (1, 198, 192)
    assert flat["head_dist/kernel"].shape == (192, 1000)


def test_logits_are_the_mean_of_two_heads_on_two_tokens() -> None:
    model = create_model(**SMALL, num_classes=5)
    params = weights.seeded(model, IMAGES.shape[1:])
    features = create_model(**{**SMALL, "num_classes": 0})

    @jax.jit
    def outputs(params: Any) -> Any:
        without = {n: p for n, p in params.items() if not n.startswith("head")}
        means = features.apply({"params": unflatten_names(without)}, IMAGES, train=False)
        tree = {"params": unflatten_names(params)}
        return means, *model.apply(tree, IMAGES, train=False, capture_intermediates=True)

    means, logits, state = jax.device_get(outputs(params))
    tokens = state["intermediates"]["Transformer"]["__call__"][0]  # [B, 2 + N, D]
    head = tokens[:, 0] @ params["head/kernel"] + params["head/bias"][None]
    head_dist = tokens[:, 1] @ params["head_dist/kernel"] + params["head_dist/bias"][None]
    np.testing.assert_allclose(logits, (head + head_dist) / 2, rtol=0, atol=1e-6)
    np.testing.assert_allclose(means, (tokens[:, 0] + tokens[:, 1]) / 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("key", "value"), [("classifier", "gap"), ("representation_size", 16)])
def test_what_does_not_go_with_it(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"model.{key}={value!r} is unknown. Known: "):
        create_model(**SMALL, num_classes=5, **{key: value})
