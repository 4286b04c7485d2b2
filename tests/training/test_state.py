"""Initial states: one program's numbers, drawn only where nothing is loaded."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import golden
from vit_jax.models.create import create_model
from vit_jax.parameters.sharding import create_mesh, replicated, state_shardings, with_shardings
from vit_jax.parameters.table import abstract_params
from vit_jax.training.initial import draw, initial_state, trace_initial
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

    initial = trace_initial(init)
    abstract = jax.eval_shape(start_state, initial.shapes)
    mesh = create_mesh(fsdp=2)
    abstract = with_shardings(abstract, state_shardings(abstract, mesh))
    expected = flatten_names(jax.jit(init)(jax.random.key(3)))
    with jax.set_mesh(mesh):
        state = initial_state(initial, start_state, abstract, seed=3)
    for key, array in flatten_names(state.params).items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)
        assert array.sharding == flatten_names(abstract.params)[key].sharding

    loaded = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, leaf.dtype), initial.shapes)
    loaded["embedding"] = initial.shapes["embedding"]  # wanted anew
    with jax.set_mesh(mesh):
        state = initial_state(initial, start_state, abstract, seed=3, loaded=loaded)
    for key, array in flatten_names(state.polyak_params).items():
        wanted = expected[key] if key.startswith("embedding/") else np.full(array.shape, 0.5)
        np.testing.assert_array_equal(array, wanted, err_msg=key)


def test_the_next_run_draws_with_the_same_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, with another seed; but not with an initializer that differs a little."""
    places = {0: replicated(create_mesh())}

    def drawn(init: Any, seed: int) -> np.ndarray:
        initial = trace_initial(lambda rng: {"w": init(rng, (5,))})
        return np.asarray(draw(initial.program, jax.random.key(seed), places)[0])

    normal = jax.nn.initializers.normal
    first = drawn(normal(0.1), 0)
    with monkeypatch.context() as patch:
        patch.delattr("jax._src.compiler.compile_or_get_cached")
        again = drawn(normal(0.1), 1)
        np.testing.assert_array_equal(drawn(normal(0.1), 0), first)
    np.testing.assert_allclose(drawn(normal(0.100001), 1) / again, 1.00001, rtol=0, atol=2e-7)
    for table in np.arange(10, dtype=np.float32).reshape(2, 5):  # the program shows its shape only
        held = jax.jit(lambda _, table=table: table + 1)
        found = drawn(lambda rng, shape, held=held: held(jax.random.normal(rng, shape)), 0)
        np.testing.assert_array_equal(found, table + 1)


def test_an_update_of_the_first_state_is_that_of_all_others() -> None:
    """`jnp.full` of a Python number has a weak type, for which an update is compiled anew."""
    initial = trace_initial(lambda _: {"t": jnp.full((1,), 2.0)})
    abstract = jax.eval_shape(start_state, initial.shapes)
    abstract = with_shardings(abstract, state_shardings(abstract, create_mesh()))
    state = initial_state(initial, start_state, abstract, seed=0)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))


def test_quick_compilation_draws_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What users start from, with the first level of optimization, beside their default level."""
    model = create_model(**{**MODELS["loop"], "num_layers": 1}, num_classes=10)
    images = jnp.zeros((1, 16, 16, 3))

    def init(rng: jax.Array) -> Any:
        return model.init(rng, images, train=False)["params"]

    initial = trace_initial(init)
    # One of each initializer: the others differ in their keys, and in the order of the axes.
    kinds = re.compile("(^embedding|query|Dense_0|posembed_input)/")
    names = {i: x for i, x in enumerate(flatten_names(initial.shapes)) if kinds.search(x)}
    assert len(names) == 7
    places = dict.fromkeys(names, replicated(create_mesh()))
    monkeypatch.setenv("XLA_FLAGS", "")  # the tests' has a level, which would count
    drawn = draw(initial.program, jax.random.key(3), places)

    def chosen(rng: jax.Array) -> dict[str, jax.Array]:
        params = flatten_names(init(rng))
        return {name: params[name] for name in names.values()}

    expected = golden.jit(chosen)(jax.random.key(3))
    for index, name in names.items():
        np.testing.assert_array_equal(drawn[index], expected[name], err_msg=name)


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
