from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tests import golden
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.models.variants import HYBRIDS, SIZES, VARIANTS
from vit_jax.optimizer import create_optimizer
from vit_jax.sharding import (
    PARAMETER_AXES,
    check_batch_size,
    create_mesh,
    parameter_axes,
    parameter_spec,
    state_shardings,
)
from vit_jax.train_state import create_train_state
from vit_jax.tree import flatten_names


def models() -> list:
    """One model per variant; blocks differ in their number only, so two of them do."""
    names = [*(f"{size}/16" for size in SIZES), *HYBRIDS]
    rows = [{**VARIANTS[name], "num_layers": 2} for name in names]
    extras = [{"representation_size": 64}, {"classifier": "map"}, {"scan": True}]
    rows += [{**VARIANTS["Ti/16"], **extra} for extra in extras]
    return [create_model(**row, num_classes=10) for row in rows]


def test_every_parameter_of_every_variant_matches_exactly_one_row() -> None:
    used = set()
    for model in models():
        for name, leaf in flatten_names(golden.abstract_params(model)).items():
            assert len(parameter_axes(name, len(leaf.shape))) == len(leaf.shape)
            used |= {pattern for pattern, _ in PARAMETER_AXES if re.fullmatch(pattern, name)}
    assert used == {pattern for pattern, _ in PARAMETER_AXES}, "a row that nothing matches"


def test_an_unknown_parameter_is_an_error() -> None:
    with pytest.raises(ValueError, match="matches 0 rows"):
        parameter_axes("new_layer/kernel", 2)
    with pytest.raises(ValueError, match="has 3 axes"):
        parameter_axes("head/kernel", 3)


def test_specs_on_a_mesh() -> None:
    mesh = create_mesh(data=2, fsdp=2, tensor=2)
    block = "Transformer/encoderblock_0"
    query = f"{block}/MultiHeadDotProductAttention_0/query/kernel"
    assert parameter_spec(query, (192, 4, 48), mesh) == P("fsdp", "tensor", None)
    # 3 heads do not split in two: that axis stays whole, the other does not.
    assert parameter_spec(query, (192, 3, 64), mesh) == P("fsdp", None, None)
    scanned = query.replace("encoderblock_0", "encoderblock")
    assert parameter_spec(scanned, (12, 192, 4, 48), mesh) == P(None, "fsdp", "tensor", None)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_optimizer_state_and_average_are_sharded_like_their_parameters(optimizer: str) -> None:
    mesh = create_mesh(data=1, fsdp=8)
    model = create_model(**{**VARIANTS["Ti/16"], "num_layers": 1}, num_classes=10)
    tx = create_optimizer(optimizer, schedule=lambda _: 0.1, weight_decay=0.1, clip_norm=1.0)
    params = golden.abstract_params(model)
    state = jax.eval_shape(lambda p: create_train_state(p, tx, polyak_decay=0.9), params)
    shardings = state_shardings(state, mesh)
    expected = jax.tree.leaves(jax.tree.map(lambda s: s.spec, shardings.params))
    assert any("fsdp" in spec for spec in expected)
    assert jax.tree.leaves(jax.tree.map(lambda s: s.spec, shardings.polyak_params)) == expected
    moments = jax.tree.leaves(shardings.opt_state[1])
    specs = [s.spec for s in moments if s.spec != P()]
    copies = 2 if optimizer == "adamw" else 1
    assert specs == [spec for spec in expected if spec != P()] * copies


def test_fsdp_divides_the_bytes_of_a_device() -> None:
    mesh = create_mesh(data=1, fsdp=8)
    model = create_model(**{**VARIANTS["Ti/16"], "num_layers": 2}, num_classes=10)
    tx = create_optimizer("adamw", schedule=lambda _: 0.1)
    image = jnp.zeros((1, 32, 32, 3))

    def init(rng: jax.Array) -> object:
        params = model.init(rng, image, train=False)["params"]
        return create_train_state(params, tx, polyak_decay=0.0)

    abstract = jax.eval_shape(init, jax.random.key(0))
    state = jax.jit(init, out_shardings=state_shardings(abstract, mesh))(jax.random.key(0))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    local = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert local < total / 7.5  # all but counters, the head's bias and the attention biases


@pytest.mark.parametrize(
    "sizes", [{"data": 3}, {"data": -1, "fsdp": -1}, {"data": 0}, {"tensor": 16}, {"fsdp": 3}]
)
def test_a_mesh_that_does_not_fit_is_refused(sizes: dict) -> None:
    with pytest.raises(UserError, match=r"mesh\."):
        create_mesh(**sizes)


def test_the_rest_of_the_devices_goes_to_the_free_axis() -> None:
    assert dict(create_mesh(fsdp=2).shape) == {"data": 4, "fsdp": 2, "tensor": 1}
    assert dict(create_mesh(data=2, fsdp=-1, tensor=2).shape) == {
        "data": 2,
        "fsdp": 2,
        "tensor": 2,
    }


def test_batches_must_divide_over_devices_and_parts() -> None:
    mesh = create_mesh(data=2, fsdp=2, tensor=2)
    check_batch_size("dataset.batch_size", 12, mesh)
    with pytest.raises(UserError, match=r"dataset.batch_size=10 .* use 8 or 12"):
        check_batch_size("dataset.batch_size", 10, mesh)
    with pytest.raises(UserError, match="accumulation_steps = 2"):
        check_batch_size("dataset.batch_size", 12, mesh, accumulation_steps=2)
