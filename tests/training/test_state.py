"""Initial states: one program's numbers, drawn only where nothing is loaded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.golden import VIT
from vit_jax.models.create import create_model
from vit_jax.parameters.sharding import (
    create_mesh,
    parameter_shardings,
    state_shardings,
    with_shardings,
)
from vit_jax.parameters.table import ParameterTable, abstract_params
from vit_jax.training.initial import initial_state, with_strong_types
from vit_jax.training.step import create_train_state
from vit_jax.trees import flatten_names

SIZES = {"patch_size": 8, "hidden_size": 32, "num_layers": 3, "mlp_dim": 64, "num_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "loop": {"name": "vit", **SIZES},
    "scan": {"name": "vit", **SIZES, "scan": True},
    "hybrid": {"name": "vit", **SIZES, "patch_size": 1, "resnet_layers": (1,)},
}
TX = optax.sgd(0.1)


def start_state(params: Any) -> Any:
    return create_train_state(params, tx=TX, polyak_decay=0.9)


@pytest.mark.parametrize("name", ["loop", "scan"])
def test_random_parameters_are_those_of_init_and_loaded_ones_stay(name: str) -> None:
    model = create_model(**{**MODELS[name], "num_layers": 2}, num_classes=10)
    images = jnp.zeros((1, 16, 32, 3))

    def init(rng: jax.Array) -> Any:
        return model.init(rng, images, train=False)["params"]

    shapes = jax.eval_shape(init, jax.random.key(0))
    abstract = jax.eval_shape(start_state, shapes)
    mesh = create_mesh(fsdp=2)
    abstract = with_shardings(abstract, state_shardings(abstract, mesh, VIT))
    parts = init, start_state, parameter_shardings(shapes, mesh, VIT), abstract
    expected = flatten_names(jax.jit(init)(jax.random.key(3)))
    with jax.set_mesh(mesh):
        state = initial_state(*parts, seed=3)
    for key, array in flatten_names(state.params).items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)
        assert array.sharding == flatten_names(abstract.params)[key].sharding

    loaded = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, leaf.dtype), shapes)
    loaded["embedding"] = shapes["embedding"]  # wanted anew
    with jax.set_mesh(mesh):
        state = initial_state(*parts, seed=3, loaded=loaded)
    for key, array in flatten_names(state.polyak_params).items():
        wanted = expected[key] if key.startswith("embedding/") else np.full(array.shape, 0.5)
        np.testing.assert_array_equal(array, wanted, err_msg=key)


def test_an_update_of_the_first_state_is_that_of_all_others() -> None:
    """`jnp.full` of a Python number has a weak type, for which an update is compiled anew."""
    init, mesh = with_strong_types(lambda _: {"t": jnp.full((1,), 2.0)}), create_mesh()
    table = ParameterTable({}, {"t": (None,)})
    shapes = jax.eval_shape(init, jax.random.key(0))
    abstract = jax.eval_shape(start_state, shapes)
    abstract = with_shardings(abstract, state_shardings(abstract, mesh, table))
    places = parameter_shardings(shapes, mesh, table)
    state = initial_state(init, start_state, places, abstract, seed=0)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    "config",
    [
        *MODELS.values(),
        {"name": "vit", **SIZES, "position_embedding": "sincos2d"},
        {"name": "vit", **SIZES, "classifier": "map", "representation_size": 16},
        {"name": "vit", **SIZES, "num_layers": 1, "classifier": "gap"},
        {"name": "deit", **SIZES},
        {"name": "bit", "resnet_layers": (1, 1)},
    ],
)
def test_shapes_from_one_block(config: dict[str, Any]) -> None:
    model = create_model(**config, num_classes=10)
    images = jnp.zeros((1, 16, 32, 3))
    expected = jax.eval_shape(lambda: model.init(jax.random.key(0), images, train=False)["params"])
    assert abstract_params(model, (16, 32, 3)) == expected
