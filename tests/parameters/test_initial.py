"""Shapes from one block are those of `init`, and numbers drawn one kind at a time, bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.models.create import create_model
from vit_jax.parameters import names
from vit_jax.parameters.names import flatten_names

SIZES = {"patch_size": 8, "hidden_size": 32, "num_layers": 3, "mlp_dim": 64, "num_heads": 4}
MODELS = {
    "loop": {"name": "vit", **SIZES},
    "scan": {"name": "vit", **SIZES, "scan": True},
    "fixed position embeddings": {"name": "vit", **SIZES, "position_embedding": "sincos2d"},
    "hybrid": {"name": "vit", **SIZES, "patch_size": 1, "resnet_layers": (1,)},
}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    as_function = initial._as_function

    def spy(*args: Any) -> Any:
        found.append(args)
        return as_function(*args)

    monkeypatch.setattr(initial, "_as_function", spy)
    monkeypatch.setattr(initial, "_programs", {})
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_of_one_program(name: str, programs: list[Any]) -> None:
    model = create_model(**MODELS[name], num_classes=10)
    images = jnp.zeros((1, 32, 32, 3))

    def init(rng: jax.Array) -> dict[str, jax.Array]:
        return flatten_names(model.init(rng, images, train=False)["params"])

    rng = jax.random.key(3)
    expected = jax.jit(init)(rng)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    found = initial.draw(init, rng, dict.fromkeys(expected, place))
    assert found.keys() == expected.keys()
    for key, array in found.items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)
        assert array.sharding == place
    if name == "loop":  # that of one block, of the embeddings and of the head
        assert len(programs) <= 9 < len(found) / 4
    before = len(programs)
    again = initial.draw(init, rng, dict.fromkeys(expected, place))
    np.testing.assert_array_equal(again["head/bias"], expected["head/bias"])
    assert len(programs) == before  # the next model of a process compiles nothing


@pytest.mark.parametrize(
    "config",
    [
        *MODELS.values(),
        {"name": "vit", **SIZES, "classifier": "map", "representation_size": 16},
        {"name": "vit", **SIZES, "num_layers": 1, "classifier": "gap"},
        {"name": "deit", **SIZES},
        {"name": "bit", "resnet_layers": (1, 1)},
    ],
)
def test_shapes(config: dict[str, Any]) -> None:
    model = create_model(**config, num_classes=10)
    images = jnp.zeros((1, 16, 32, 3))
    expected = jax.eval_shape(lambda: model.init(jax.random.key(0), images, train=False)["params"])
    assert names.abstract_params(model, (16, 32, 3)) == expected


def test_what_differs_has_a_program_of_its_own(programs: list[Any]) -> None:
    def init(rng: jax.Array) -> dict[str, jax.Array]:
        wide, narrow, far = (jax.random.fold_in(rng, i) for i in range(3))
        return {
            "wide": jax.random.normal(wide, (4,)),
            "narrow": 0.1 * jax.random.normal(narrow, (4,)),
            "far": jax.random.normal(far, (4,)),
            "table": jnp.asarray(np.arange(4.0)),
        }

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    found = initial.draw(init, jax.random.key(0), dict.fromkeys(("wide", "narrow", "far"), place))
    expected = jax.jit(init)(jax.random.key(0))
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name])
    assert (len(found), len(programs)) == (3, 2)
    assert initial.draw(init, jax.random.key(0), {}) == {}
    [table] = initial.draw(init, jax.random.key(0), {"table": place}).values()
    np.testing.assert_array_equal(table, np.arange(4.0))
