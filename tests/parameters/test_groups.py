"""Freezing, layer-wise rates and decay: exactly which parameters, in both forms of the blocks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import golden
from tests.golden import VIT
from vit_jax.errors import UserError
from vit_jax.models.create import VARIANTS, create_model
from vit_jax.parameters.groups import decay_factors, frozen_mask, layer_factors
from vit_jax.parameters.table import table_of
from vit_jax.training.optimizer import create_optimizer
from vit_jax.trees import flatten_names


def group_model(**overrides: object) -> Any:
    row = {**VARIANTS["Ti/16"], "num_layers": 2, "hidden_size": 8, "mlp_dim": 8, "num_heads": 2}
    return create_model(**{**row, **overrides}, num_classes=3)


def group_params(scan: bool, seed: int = 0) -> dict:
    """The parameters of a small model and, as gradients, others of the same shapes."""
    rng = np.random.default_rng(seed)
    tree = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
        golden.abstract_params(group_model()),
    )
    return VIT.stack(tree) if scan else tree


@functools.partial(jax.jit, static_argnums=0)
def update(tx: Any, grads: Any, state: Any, params: Any) -> Any:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


BLOCK = "Transformer/encoderblock"
FREEZE = {
    # pattern: what it leaves to train
    "embedding/.*|cls|Transformer/.*": {"head/kernel", "head/bias"},
    r"(?!head/|Transformer/encoder_norm/).*": {
        "head/kernel",
        "head/bias",
        "Transformer/encoder_norm/scale",
        "Transformer/encoder_norm/bias",
    },
}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("pattern", FREEZE)
def test_freeze_leaves_exactly_these_to_train(pattern: str, scan: bool) -> None:
    mask = flatten_names(frozen_mask(group_params(scan), pattern, VIT))
    assert {name for name, frozen in mask.items() if not frozen} == FREEZE[pattern]


def test_single_blocks_can_be_frozen_in_the_loop_form_only() -> None:
    mask = flatten_names(frozen_mask(group_params(scan=False), f"{BLOCK}_0/.*", VIT))
    assert {name.split("/")[1] for name, frozen in mask.items() if frozen} == {"encoderblock_0"}
    with pytest.raises(UserError, match=r"1 of the 2 blocks in .* set model.scan=False"):
        frozen_mask(group_params(scan=True), f"{BLOCK}_0/.*", VIT)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("embeding/.*|cls", r"'embeding/\.\*' matches no full .* Did you mean 'embedding/\.\*'\?"),
        ("Transformer", r"Did you mean 'Transformer/\.\*'\?"),
        ("head/kernal", r"Did you mean 'head/kernel'\? Examples of names: .*cls"),
        (".*", "matches all parameters"),
        ("(cls", "not a regular expression"),
    ],
)
def test_freeze_mistakes_are_named(pattern: str, message: str) -> None:
    tx = create_optimizer("sgd", table=VIT, schedule=lambda _: 0.1, freeze=pattern)
    with pytest.raises(UserError, match=message):
        tx.init(group_params(scan=False))


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum_dtype": "bfloat16"},
    "adamw": {"weight_decay": 0.5, "momentum_dtype": "bfloat16"},
}


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_frozen_stays_and_has_no_memory_and_no_norm(name: str, scan: bool) -> None:
    """Two updates equal those of an optimizer that was given the head alone."""
    kwargs = {**OPTIMIZERS[name], "schedule": lambda _: jnp.float32(0.1), "clip_norm": 1.0}
    params = group_params(scan)
    tx = create_optimizer(name, table=VIT, **kwargs, freeze="embedding/.*|cls|Transformer/.*")
    alone = create_optimizer(name, table=VIT, **kwargs)
    head = {"head": params["head"]}
    state, head_state = jax.jit(tx.init)(params), jax.jit(alone.init)(head)
    size, head_size = (sum(x.size for x in jax.tree.leaves(s)) for s in (state, head_state))
    assert size == head_size
    for seed in (1, 2):
        grads = group_params(scan, seed)
        params, state = update(tx, grads, state, params)
        head, head_state = update(alone, {"head": grads["head"]}, head_state, head)
    jax.tree.map(np.testing.assert_array_equal, params["head"], head["head"])
    start = group_params(scan)
    for part in ("embedding", "cls", "Transformer"):
        jax.tree.map(np.testing.assert_array_equal, params[part], start[part])


def test_each_layer_has_its_rate() -> None:
    """Exact factors for every parameter of a model with two blocks: layers 0 to 3."""
    model = group_model(representation_size=4)
    factors = flatten_names(layer_factors(golden.abstract_params(model), 0.5, VIT))
    by_factor = {
        factor: {name for name, value in factors.items() if value == factor}
        for factor in set(factors.values())
    }
    block = (
        *(f"LayerNorm_{i}/{x}" for i in (0, 1) for x in ("scale", "bias")),
        *(f"MlpBlock_0/Dense_{i}/{x}" for i in (0, 1) for x in ("kernel", "bias")),
        *(
            f"MultiHeadDotProductAttention_0/{part}/{x}"
            for part in ("query", "key", "value", "out")
            for x in ("kernel", "bias")
        ),
    )
    assert by_factor == {
        0.125: {
            "cls",
            "embedding/kernel",
            "embedding/bias",
            "Transformer/posembed_input/pos_embedding",
        },
        0.25: {f"{BLOCK}_0/{name}" for name in block},
        0.5: {f"{BLOCK}_1/{name}" for name in block},
        1.0: {
            "Transformer/encoder_norm/scale",
            "Transformer/encoder_norm/bias",
            "pre_logits/kernel",
            "pre_logits/bias",
            "head/kernel",
            "head/bias",
        },
    }


def test_ends_of_other_models_have_a_layer_too() -> None:
    """A stem is below the first block, heads are above the last."""
    below = {"cls", "dist", "embedding", "conv_root", "gn_root", "block1"}
    row = {**VARIANTS["R26+S/32"], "num_layers": 2}
    for attributes in ({"name": "deit"}, {"classifier": "map"}):
        params = golden.abstract_params(create_model(**{**row, **attributes}, num_classes=3))
        table = table_of({**row, **attributes}["name"])
        for name, factor in flatten_names(layer_factors(params, 0.5, table)).items():
            top = name.partition("/")[0]
            if top != "Transformer":
                is_below = top in below or top.startswith("block")
                assert np.all(factor == (0.125 if is_below else 1.0)), name
    with pytest.raises(ValueError, match="new_part/kernel"):
        layer_factors({**params, "new_part": {"kernel": jnp.zeros(2)}}, 0.5, VIT)


def test_layer_decay_counts_blocks_that_are_frozen() -> None:
    params = group_params(scan=False)
    kwargs = {"schedule": lambda _: jnp.float32(0.1), "layer_decay": 0.5}
    tx = create_optimizer(
        "sgd", table=VIT, **kwargs, freeze=f"{BLOCK}_1/.*|Transformer/encoder_norm/.*"
    )
    grads = jax.tree.map(np.ones_like, params)
    updates = flatten_names(jax.jit(lambda x: tx.update(x, tx.init(params), params)[0])(grads))
    np.testing.assert_allclose(updates["cls"], -0.1 * 0.125)
    np.testing.assert_allclose(updates[f"{BLOCK}_0/LayerNorm_0/scale"], -0.1 * 0.25)
    np.testing.assert_array_equal(updates[f"{BLOCK}_1/LayerNorm_0/scale"], 0.0)


@pytest.mark.parametrize("decay", [0.0, 1.5, -0.5])
def test_layer_decay_mistakes_are_named(decay: float) -> None:
    tx = create_optimizer("sgd", table=VIT, schedule=lambda _: 0.1, layer_decay=decay)
    with pytest.raises(UserError, match=f"layer_decay={decay}"):
        tx.init(group_params(scan=False))
    tx = create_optimizer("sgd", table=VIT, schedule=lambda _: 0.1, layer_decay=0.5)
    with pytest.raises(UserError, match="no encoder blocks"):
        tx.init({"head": {"kernel": jnp.zeros((2, 2))}})


KERNELS = (
    *(f"MultiHeadDotProductAttention_0/{name}/kernel" for name in ("query", "key", "value", "out")),
    *(f"MlpBlock_0/Dense_{i}/kernel" for i in (0, 1)),
)


def ones() -> Any:
    params = golden.abstract_params(group_model(), (1, 32, 32, 3))
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), params)


def decay(params: Any, **kwargs: Any) -> dict[str, np.ndarray]:
    """Flat: what one update of rate 0.1 takes from every parameter for decay of 0.5 alone."""
    tx = create_optimizer(
        "adamw", table=VIT, schedule=lambda _: jnp.float32(0.1), weight_decay=0.5, **kwargs
    )

    @jax.jit
    def update(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = tx.update(zeros, tx.init(params), params)
        return optax.apply_updates(params, updates)

    after = update(params)
    return {name: 1.0 - np.asarray(value) for name, value in flatten_names(after).items()}


def test_exactly_these_parameters_decay_so_much() -> None:
    """ViT-g's pairs, and a block of its own; the first that matches counts."""
    multipliers = (("head/kernel", 100.0), (f"{BLOCK}_1/.*", 0.5), (".*", 2.0))
    factors = flatten_names(decay_factors(ones(), r".*/kernel", multipliers, VIT))
    expected = {"head/kernel": 100.0, "embedding/kernel": 2.0}
    expected |= {f"{BLOCK}_0/{name}": 2.0 for name in KERNELS}
    expected |= {f"{BLOCK}_1/{name}": 0.5 for name in KERNELS}
    assert {name: factor for name, factor in factors.items() if factor} == expected
    assert len(factors) > len(expected)
    taken = decay(ones(), decay_multipliers=multipliers)
    for name, value in taken.items():
        # Differences from 1 in float32.
        np.testing.assert_allclose(value, 0.05 * expected.get(name, 0.0), atol=1e-6, err_msg=name)


def test_blocks_of_the_scan_form_have_factors_of_their_own() -> None:
    kwargs = {"decay_multipliers": ((f"{BLOCK}_1/.*", 3.0),), "layer_decay": 0.5}
    loop = decay(ones(), **kwargs)
    scan = decay(VIT.stack(ones()), **kwargs)
    for name in KERNELS:
        stacked = np.stack([loop[f"{BLOCK}_{i}/{name}"] for i in (0, 1)])
        np.testing.assert_array_equal(scan[f"{BLOCK}/{name}"], stacked)
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
        ((("head/bias", 2.0),), "'head/bias' matches no full name of a decayed parameter"),
        ((("head/kernel", -1.0),), "'head/kernel' has the factor -1.0"),
        ((("head/(kernel", 1.0),), "pairs of a regular expression"),
        ((("head/kernel", "much"),), "pairs of a regular expression"),
    ],
)  # fmt: skip
def test_decay_multiplier_mistakes_are_named(multipliers: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decay(ones(), decay_multipliers=multipliers)
