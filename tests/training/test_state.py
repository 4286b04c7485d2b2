"""Initial states: one program's numbers, drawn only where nothing is loaded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import tiny
from vit_jax.objectives.objective import Objective
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import create_run
from vit_jax.trees import flatten_names


def test_random_parameters_are_those_of_init_and_loaded_ones_stay(monkeypatch):
    init = Objective.init

    def init_weakly(self: Objective, rng: jax.Array, batch: Any) -> Any:
        params = init(self, rng, batch)
        params["head"]["bias"] = jnp.full((10,), 2.0)  # has a weak type
        return params

    monkeypatch.setattr(Objective, "init", init_weakly)
    config = tiny.config(model__scan=True, model__num_layers=2, train_step__polyak_decay=0.9)
    with jax.set_mesh(mesh := create_mesh(fsdp=2)):
        run = create_run(config, mesh)
        expected = flatten_names(jax.jit(run.start.init)(jax.random.key(3)))
        state = run.initial_state(3)
    for key, array in flatten_names(state.params).items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)
        assert array.sharding == flatten_names(run.abstract_state.params)[key].sharding
    # Of weak types the second update would be compiled anew.
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))

    shapes = run.start.shapes
    loaded = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, leaf.dtype), shapes)
    loaded["embedding"] = shapes["embedding"]  # is to be random
    with jax.set_mesh(mesh):
        state = run.initial_state(3, loaded)
    for key, array in flatten_names(state.polyak_params).items():
        wanted = expected[key] if key.startswith("embedding/") else np.full(array.shape, 0.5)
        np.testing.assert_array_equal(array, wanted, err_msg=key)
