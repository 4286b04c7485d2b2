"""Freezing and layer-wise rates: exactly which parameters, in both forms of the blocks."""

from __future__ import annotations

import functools
from pathlib import Path
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
from vit_jax.parameters.groups import frozen_mask, layer_factors
from vit_jax.parameters.names import flatten_names, stack_blocks, unflatten_names, unstack_blocks
from vit_jax.parameters.sharding import create_mesh, state_shardings
from vit_jax.training.optimizer import create_optimizer
from vit_jax.training.step import TrainState, create_train_state
from vit_jax.workdir.checkpoints import CheckpointManager


def group_model(**overrides: object) -> Any:
    row = {**VARIANTS["Ti/16"], "num_layers": 2, "hidden_size": 8, "mlp_dim": 8, "num_heads": 2}
    return create_model(**{**row, **overrides}, num_classes=3)


def group_params(scan: bool, seed: int = 0) -> dict:
    """The parameters of a small model and, as gradients, others of the same shapes."""
    model = group_model()
    shapes = {
        name: leaf.shape for name, leaf in flatten_names(golden.abstract_params(model)).items()
    }
    rng = np.random.default_rng(seed)
    tree = unflatten_names(
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    )
    return stack_blocks(tree) if scan else tree


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
    mask = flatten_names(frozen_mask(group_params(scan), pattern))
    assert {name for name, frozen in mask.items() if not frozen} == FREEZE[pattern]


def test_single_blocks_can_be_frozen_in_the_loop_form_only() -> None:
    mask = flatten_names(frozen_mask(group_params(scan=False), f"{BLOCK}_0/.*"))
    assert {name.split("/")[1] for name, frozen in mask.items() if frozen} == {"encoderblock_0"}
    with pytest.raises(UserError, match=r"1 of the 2 blocks in .* set model.scan=False"):
        frozen_mask(group_params(scan=True), f"{BLOCK}_0/.*")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("embeding/.*|cls", r"'embeding/\.\*' matches no whole .* Did you mean 'embedding/\.\*'\?"),
        ("Transformer", r"Did you mean 'Transformer/\.\*'\?"),
        ("head/kernal", r"Did you mean 'head/kernel'\? Names are such as .*cls"),
        (r"cls|(embedding|zzz)/x", r"'\(embedding\|zzz\)/x' matches no"),
        (".*", "leaves no parameter to train"),
        ("(cls", "not a regular expression"),
    ],
)
def test_freeze_mistakes_are_named(pattern: str, message: str) -> None:
    tx = create_optimizer("sgd", schedule=lambda _: 0.1, freeze=pattern)
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
    tx = create_optimizer(name, **kwargs, freeze="embedding/.*|cls|Transformer/.*")
    alone = create_optimizer(name, **kwargs)
    head, state, head_state = {"head": params["head"]}, tx.init(params), None
    head_state = alone.init(head)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(each)) for each in (state, head_state)]
    assert sizes[0] == sizes[1]
    for seed in (1, 2):
        grads = group_params(scan, seed)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        updates, head_state = alone.update({"head": grads["head"]}, head_state, head)
        head = optax.apply_updates(head, updates)
    jax.tree.map(np.testing.assert_array_equal, params["head"], head["head"])
    start = group_params(scan)
    for part in ("embedding", "cls", "Transformer"):
        jax.tree.map(np.testing.assert_array_equal, params[part], start[part])


def test_each_layer_has_its_rate() -> None:
    """Exact factors for every parameter of a model with two blocks: layers 0 to 3."""
    model = group_model(representation_size=4)
    factors = flatten_names(layer_factors(golden.abstract_params(model), 0.5))
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


def test_every_parameter_of_every_model_has_a_layer() -> None:
    names = ("Ti/16", "R+Ti/16", "R26+S/32")
    rows = [{**VARIANTS[name], "num_layers": 2} for name in names]
    rows += [
        {**rows[0], "classifier": "map"},
        {**rows[0], "name": "deit"},
        {**rows[0], "scan": True},
    ]
    first = {"cls", "dist", "embedding", "conv_root", "gn_root", "block1"}
    last = {"head", "head_dist", "MAPHead_0"}
    seen = set()
    for row in rows:
        params = golden.abstract_params(create_model(**row, num_classes=3))
        for name, factor in flatten_names(layer_factors(params, 0.5)).items():
            top = name.split("/")[0]
            seen.add(top)
            if top != "Transformer":
                assert np.all(factor == (1.0 if top in last else 0.125)), name
                assert (top in first or top.startswith("block")) != (top in last), name
    assert first | last <= seen
    with pytest.raises(ValueError, match="new_part/kernel"):
        layer_factors({**params, "new_part": {"kernel": jnp.zeros(2)}}, 0.5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scan_and_loop_get_the_same_updates(name: str) -> None:
    kwargs = {**OPTIMIZERS[name], "schedule": lambda _: jnp.float32(0.1), "layer_decay": 0.5}
    after = []
    for scan in (False, True):
        tx = create_optimizer(name, **kwargs)
        params = group_params(scan)
        state = tx.init(params)
        for seed in (1, 2):
            updates, state = tx.update(group_params(scan, seed), state, params)
            params = optax.apply_updates(params, updates)
        after.append(unstack_blocks(params))
    jax.tree.map(np.testing.assert_array_equal, *after)


def test_a_layer_that_learns_slowly_also_decays_slowly() -> None:
    """As BEiT: with zero gradients Adam leaves rate * factor * decay * parameter."""
    params = group_params(scan=False)
    tx = create_optimizer(
        "adamw", schedule=lambda _: jnp.float32(0.1), weight_decay=0.5, layer_decay=0.5
    )
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    flat, start = flatten_names(updates), flatten_names(params)
    for name, factor in {"embedding/kernel": 0.125, "head/kernel": 1.0}.items():
        np.testing.assert_allclose(flat[name], -0.1 * factor * 0.5 * start[name], rtol=1e-6)
    np.testing.assert_array_equal(flat["head/bias"], 0.0)


def test_layer_decay_counts_blocks_that_are_frozen() -> None:
    params = group_params(scan=False)
    kwargs = {"schedule": lambda _: jnp.float32(0.1), "layer_decay": 0.5}
    tx = create_optimizer("sgd", **kwargs, freeze=f"{BLOCK}_1/.*|Transformer/encoder_norm/.*")
    grads = jax.tree.map(jnp.ones_like, params)
    updates = flatten_names(tx.update(grads, tx.init(params), params)[0])
    np.testing.assert_allclose(updates["cls"], -0.1 * 0.125)
    np.testing.assert_allclose(updates[f"{BLOCK}_0/LayerNorm_0/scale"], -0.1 * 0.25)
    np.testing.assert_array_equal(updates[f"{BLOCK}_1/LayerNorm_0/scale"], 0.0)


@pytest.mark.parametrize("decay", [0.0, 1.5, -0.5])
def test_layer_decay_mistakes_are_named(decay: float) -> None:
    tx = create_optimizer("sgd", schedule=lambda _: 0.1, layer_decay=decay)
    with pytest.raises(UserError, match=f"layer_decay={decay}"):
        tx.init(group_params(scan=False))
    tx = create_optimizer("sgd", schedule=lambda _: 0.1, layer_decay=0.5)
    with pytest.raises(UserError, match="no encoder blocks"):
        tx.init({"head": {"kernel": jnp.zeros((2, 2))}})


@pytest.mark.parametrize("scan", [False, True])
def test_moments_are_sharded_as_their_parameters(scan: bool) -> None:
    """With freezing and layer decay around them, on 8 devices."""
    model = group_model(hidden_size=16, mlp_dim=16, scan=scan)
    tx = create_optimizer(
        "adamw", schedule=lambda _: 0.1, freeze="embedding/.*|cls", layer_decay=0.5
    )
    state = jax.eval_shape(
        lambda params: create_train_state(params, tx=tx, polyak_decay=0.0),
        golden.abstract_params(model),
    )
    shardings = state_shardings(state, create_mesh(fsdp=8))
    expected = flatten_names(shardings.params)
    moments = {
        "/".join(str(entry.key) for entry in path if hasattr(entry, "key")): leaf.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(shardings.opt_state)
    }
    del moments[""]  # the counters
    assert set(moments) == {name for name in expected if not name.startswith(("embedding", "cls"))}
    assert all(moments[name] == expected[name].spec for name in moments)
    assert sum(bool(leaf.spec and "fsdp" in leaf.spec) for leaf in expected.values()) > 10


@pytest.mark.parametrize("scan", [False, True])
def test_a_checkpoint_brings_back_what_freezing_left(scan: bool, tmp_path: Path) -> None:
    """Two updates, a checkpoint, two more: bit for bit the same; sharded, bfloat16 momentum."""
    model = group_model(hidden_size=16, mlp_dim=16, scan=scan)
    tx = create_optimizer(
        "sgd",
        schedule=lambda step: 0.1 + 0.01 * step,
        clip_norm=1.0,
        momentum_dtype="bfloat16",
        freeze="embedding/.*|cls",
        layer_decay=0.5,
    )

    def start(rng: jax.Array) -> TrainState:
        params = model.init(rng, jnp.zeros((1, 224, 224, 3)), train=False)["params"]
        return create_train_state(params, tx=tx, polyak_decay=0.0)

    mesh = create_mesh(fsdp=8)
    shapes = jax.eval_shape(start, jax.random.key(0))
    shardings = state_shardings(shapes, mesh)
    abstract = jax.tree.map(
        lambda leaf, each: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=each),
        shapes,
        shardings,
    )

    @functools.partial(jax.jit, out_shardings=shardings)
    def update(state: TrainState) -> TrainState:
        grads = jax.tree.map(lambda p: jnp.sin(p + state.step), state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)

    state = update(update(jax.jit(start, out_shardings=shardings)(jax.random.key(0))))
    checkpoints = CheckpointManager(tmp_path, every_steps=1, keep=1)
    checkpoints.save(2, state)
    step, restored = checkpoints.restore(abstract)
    checkpoints.close()
    assert step == 2
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    undisturbed, resumed = update(update(state)), update(update(restored))
    jax.tree.map(np.testing.assert_array_equal, resumed, undisturbed)
    moments = [leaf for leaf in jax.tree.leaves(resumed.opt_state) if leaf.ndim]
    assert {str(leaf.dtype) for leaf in moments} == {"bfloat16"}
    jax.tree.map(np.testing.assert_array_equal, resumed.params["cls"], state.params["cls"])
