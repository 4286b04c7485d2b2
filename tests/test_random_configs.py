"""Configs with random values: a line that says what is wrong, or a run that builds; nothing else.

`pytest tests/test_random_configs.py --draws=2000` draws more.
"""

import random
from typing import Any

import jax
import pytest

from configs import mae, masked_patch, quickstart
from tests import tiny
from vit_jax import config as default
from vit_jax.errors import UserError
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import create_run

RECIPES = {
    "default": tiny.config,
    "sgd": lambda: tiny.config(optimizer__name="sgd", schedule__name="linear"),
    "adafactor": lambda: tiny.config(optimizer__name="adafactor", schedule__name="rsqrt"),
    "bit": lambda: tiny.config(model__name="bit", model__resnet_layers=(1, 1, 1, 1)),
    "sam": lambda: tiny.config(gradient__name="sam"),
    "pretrain": lambda: quickstart.get_config("pretrain"),
    "finetune": lambda: quickstart.get_config("finetune"),
    "masked_patch": lambda: masked_patch.get_config("quickstart"),
    "mae": lambda: mae.get_config("quickstart"),
}
TEXTS = [
    "",
    " ",
    "x",
    "None",
    "é\n\0",
    "~nouser/x",
    "/",
    "gs://bucket/x",
    "digits",
    "glyphs(size=100000)",
    "glyphs(size=4, num_examples=1)",
    "decode",
    "decode|resize(1000000000)",
    "decode|resize(8)|randaug(10000000, 10)",
    "decode|resize_small(8192)|central_crop(8)",
    "train[:1%]",
    "train[5:4]",
    "float16",
    "(" * 300,
    "a" * 5000,
]
INTS = [-(10**12), -1, 0, 1, 2, 3, 7, 16, 100, 2**31, 2**63, 10**12]
FLOATS = [-1e30, -1.0, -1e-9, 0.0, 1e-30, 0.5, 1.0, 1.5, 1e9, 1e300, float("nan"), float("inf")]


def draw(value: Any, rng: random.Random) -> Any:
    """Another value of the type that the config accepts in its place."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(INTS)
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice(TEXTS)
    if isinstance(value, tuple):
        of = value[0] if value else 1
        return tuple(draw(of, rng) for _ in range(rng.randrange(5)))
    return rng.choice([None, *INTS])


def test_random_values_are_an_error_of_one_line_or_a_run(request: pytest.FixtureRequest) -> None:
    builds = 0
    draws = request.config.getoption("--draws")
    for number in range(draws):
        rng = random.Random(number)
        recipe = rng.choice(list(RECIPES))
        config = RECIPES[recipe]()
        keys = rng.sample(list(default.flatten(config)), rng.choice([1, 1, 2, 3]))
        changes = {key: draw(default.flatten(config)[key], rng) for key in keys}
        try:
            config.update_from_flattened_dict(changes)
        except (TypeError, ValueError):  # the door of ConfigDict, which flags go through too
            continue
        try:
            with jax.set_mesh(create_mesh(**config.mesh)) as mesh:
                run = create_run(config, mesh or create_mesh(**config.mesh))
                run.abstract_state  # noqa: B018
            builds += 1
        except Exception as error:
            if not isinstance(error, UserError) or "\n" in str(error):
                raise AssertionError(f"draw {number}, {recipe}: {changes}") from error
    assert 0.1 * draws < builds < 0.9 * draws
