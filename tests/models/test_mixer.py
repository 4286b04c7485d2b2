"""MLP-Mixer; its numbers beside the official code's are in test_golden.py."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import golden
from tests.golden import MIXER
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.models.create import VARIANTS, create_model
from vit_jax.parameters.table import abstract_params
from vit_jax.pretrained.fit.adapt import adapt_params
from vit_jax.trees import count_parameters

# With 1000 classes at 224 pixels; those of ResMLP and gMixer are timm's.
COUNTS = {
    "Mixer-S/32": 19_104_624,
    "Mixer-B/32": 60_293_428,
    "Mixer-B/16": 59_880_472,
    "Mixer-L/16": 208_196_168,
    "Mixer-H/14": 432_350_952,
    "ResMLP-S12/16": 15_350_872,
    "ResMLP-S24/16": 30_020_680,
    "ResMLP-S36/16": 44_690_488,
    "ResMLP-B24/8": 129_138_280,
    "gMixer-24/16": 24_721_096,
}
SMALL = {
    **VARIANTS["Mixer-S/16"],
    "hidden_size": 24,
    "num_layers": 2,
    "tokens_mlp_dim": 12,
    "channels_mlp_dim": 40,
}
RESMLP = {"tokens_mlp_dim": None, "norm": "affine", "layer_scale_init": 0.1}
ATTRIBUTES = [{}, RESMLP, {"gated": True}]


@pytest.mark.parametrize("variant", COUNTS)
def test_counts(variant: str) -> None:
    model = create_model(variant, num_classes=1000)
    assert count_parameters(abstract_params(model, (224, 224, 3))) == COUNTS[variant]


def test_big_vision_computes_the_same() -> None:
    model = create_model("Mixer-B/32", num_classes=10, scan=True)
    shapes = golden.shapes(model.clone(scan=False))
    params = MIXER.stack(golden.params(shapes, "fanin"))
    logits = golden.jit(lambda p, x: model.apply({"params": p}, x, train=False))(
        params, golden.images(2, 224, 224)
    )
    expected = golden.arrays("bv_logits")["mlp_mixer B/32|fanin"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attributes", ATTRIBUTES)
def test_scan_remat_and_evaluation_change_no_number(attributes: dict) -> None:
    """Stochastic depth drops something in training alone."""
    images = golden.images(2, 48, 32)
    plain = create_model(**{**SMALL, **attributes}, num_classes=5)
    params = golden.params(golden.shapes(plain, (1, 48, 32, 3)), "fanin")

    def apply(model: Any, params: Any, *, train: bool) -> jax.Array:
        rngs = {"dropout": jax.random.key(0)}
        return jax.jit(lambda p: model.apply({"params": p}, images, train=train, rngs=rngs))(params)

    expected = apply(plain, params, train=True)
    scanned = plain.clone(scan=True, remat="full", stochastic_depth_rate=0.9)
    evaluated = apply(scanned, MIXER.stack(params), train=False)
    np.testing.assert_allclose(evaluated, expected, rtol=0, atol=1e-6)
    dropped = apply(scanned, MIXER.stack(params), train=True)
    assert np.abs(dropped - expected).max() > 1e-3


@pytest.mark.parametrize("attributes", ATTRIBUTES)
def test_every_layer_computes_in_the_models_type(attributes: dict) -> None:
    model = create_model(**{**SMALL, **attributes}, num_classes=5, dtype="bfloat16")
    images = jnp.zeros((1, 32, 32, 3))

    def run() -> object:
        params = model.init(jax.random.key(0), images, train=False)
        return model.apply(params, images, train=False, capture_intermediates=True)

    logits, captured = jax.eval_shape(run)
    assert logits.dtype == jnp.float32
    types = {
        name: value.dtype for name, value in golden.by_module(captured["intermediates"]).items()
    }
    float32 = {name for name, dtype in types.items() if dtype == jnp.float32}
    assert float32 == {"", "head", "pre_logits"}


def test_another_number_of_tokens_is_refused_with_the_number() -> None:
    model = create_model(**SMALL, num_classes=5)
    params = weights.seeded(model, (32, 32, 3))
    like = weights.seeded(model, (48, 48, 3))
    with pytest.raises(UserError, match=r"images with 4 tokens, as in the file \(now 9\)"):
        adapt_params(params, like, kinds=("mixer", "mixer"), grid=(3, 3))


def test_gates_halve_even_widths() -> None:
    with pytest.raises(UserError, match="model.tokens_mlp_dim=11 must be even"):
        create_model(**{**SMALL, "gated": True, "tokens_mlp_dim": 11}, num_classes=5)
