"""Damaged, renamed, re-shaped and removed arrays, in every format: a clear error, or the truth.

Never another exception, never a model with other numbers than the file's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.files.paths import write_arrays
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model
from vit_jax.pretrained.arrays import read_arrays, write_safetensors
from vit_jax.pretrained.formats import table as formats
from vit_jax.trees import flatten_names

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Per format: its file, the arrays in it, and the parameters that it means."""
    module = create_model(**weights.SMALL, num_classes=7)
    params = weights.seeded(module, (32, 32, 3))
    files = {}
    for name, row in formats.FORMATS.items():
        path = tmp_path_factory.mktemp(name) / ("folder" if row.is_folder else "file.npz")
        file = weights.write(path, name, module, params, (32, 32, 3))
        files[name] = (file, read_arrays(file), flatten_names(load_model(path).params))
    return files


def rename(arrays: Arrays, name: str, rng: np.random.Generator) -> Arrays:
    position = int(rng.integers(len(name)))
    other = name[:position] + chr(int(rng.integers(97, 123))) + name[position + 1 :]
    return {other if key == name else key: array for key, array in arrays.items()}


def remove(arrays: Arrays, name: str, _: np.random.Generator) -> Arrays:
    return {key: array for key, array in arrays.items() if key != name}


def reshape(arrays: Arrays, name: str, rng: np.random.Generator) -> Arrays:
    array = arrays[name]
    flat = array.reshape(-1) if array.ndim > 1 else array[None, None]
    choices = [array[None], flat, array[..., :-1], np.concatenate([array, array])]
    return {**arrays, name: np.ascontiguousarray(choices[int(rng.integers(len(choices)))])}


def retype(arrays: Arrays, name: str, _: np.random.Generator) -> Arrays:
    return {**arrays, name: arrays[name].astype(np.int32)}


def swap(arrays: Arrays, name: str, rng: np.random.Generator) -> Arrays:
    """Two arrays of different shapes under each other's name."""
    others = [key for key in arrays if arrays[key].shape != arrays[name].shape]
    other = others[int(rng.integers(len(others)))]
    return {**arrays, name: arrays[other], other: arrays[name]}


MUTATIONS = (rename, remove, reshape, retype, swap)


@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize("name", list(formats.FORMATS))
def test_arrays_that_are_not_what_they_should_be(
    name: str, mutate: Callable[..., Arrays], originals: dict[str, Any], tmp_path: Path
) -> None:
    file, arrays, params = originals[name]
    rng = np.random.default_rng([len(name), MUTATIONS.index(mutate)])
    errors = 0
    # big_vision has models without these two, so that a file may well lack them: nothing in it
    # tells. (`load_pretrained` notices: the model that is asked for has them.)
    optional = ("params/cls", "params/pos_embedding") if name == "big_vision" else ()
    for turn in range(3):
        chosen = rng.choice(sorted(set(arrays) - set(optional)))
        changed = mutate(arrays, chosen, rng)
        path = tmp_path / str(turn) / file.name
        path.parent.mkdir()
        if file.suffix == ".npz":
            write_arrays(path, changed)
        else:
            write_safetensors(path, changed, {})
            (path.parent / "config.json").write_bytes((file.parent / "config.json").read_bytes())
        message = ""
        try:
            weights.assert_same(flatten_names(load_model(path).params), params)
        except UserError as error:
            message = str(error)
        assert "\n" not in message
        errors += bool(message)
    assert errors >= 2  # a letter replaced by itself renames nothing; the rest is noticed
