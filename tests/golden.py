"""Numbers of the reference implementation (tests/data/golden), and how to rebuild their inputs.

Parameters are not stored: a generator seeded by each parameter's name makes them. The recipe
`r02` (all 0.02 * z) sees a wrong epsilon in the layer norms; `fanin` sees attention, bias and
position errors.
"""

import functools
import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax.models.create import VARIANTS, create_model, family_of
from vit_jax.parameters import table as parameter_table
from vit_jax.parameters.groups import stop_frozen_gradients
from vit_jax.parameters.table import table_of
from vit_jax.trees import flatten_names, unflatten_names

FOLDER = Path(__file__).parent / "data" / "golden"
RECIPES = ("r02", "fanin")
VIT = table_of("vit")
MIXER = table_of("mixer")


def frozen(pattern: str) -> Any:
    """`to_model` of an update in which these parameters of a ViT have no gradient."""
    return lambda params: stop_frozen_gradients(params, pattern, VIT) if pattern else params


SHAPES = {"image": (1, 224, 224, 3), "text": (1, 16)}  # of batches


@functools.cache
def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


@functools.cache
def table(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def _draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)


_draw_once = functools.lru_cache(maxsize=256)(_draw)  # both recipes and many models want them


def fill(name: str, shape: tuple[int, ...], recipe: str) -> np.ndarray:
    """The parameter called `name` (flat, without prefix)."""
    z = (_draw_once if math.prod(shape) <= 2**18 else _draw)(name, shape)
    *_, parent, last = ["", *name.split("/")]
    if last in ("scale", "var"):
        value = 1.0 + (0.02 if recipe == "r02" else 0.1) * z
    elif recipe == "r02":
        value = 0.02 * z
    elif last == "kernel":
        fan_in = shape[0] if parent in ("query", "key", "value") else math.prod(shape[:-1])
        value = z / math.sqrt(fan_in)
    else:
        value = 0.1 * z
    return value.astype(np.float32)


def params(shapes: dict[str, tuple[int, ...]], recipe: str) -> dict[str, Any]:
    """A nested tree from flat names and shapes."""
    return unflatten_names({name: fill(name, tuple(s), recipe) for name, s in shapes.items()})


def filled(model: Any, input_shape: tuple[int, ...], recipe: str = "fanin") -> Any:
    """Parameters of a model for images, or texts, of this shape."""
    return params(shapes(model, input_shape), recipe)


def images(n: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (n, height, width, 3)).astype(np.float32)


# As users compile, whatever the flags of this process say (see conftest.py).
USERS_COMPILER: dict[str, Any] = {"xla_backend_optimization_level": 3}
if "xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]:
    USERS_COMPILER["xla_cpu_use_fusion_emitters"] = True
jit = functools.partial(jax.jit, compiler_options=USERS_COMPILER)


@functools.cache  # the models are traced again and again otherwise
def abstract_params(model: Any, input_shape: tuple[int, ...] = ()) -> Any:
    """Shapes of a model's parameters without computing any."""
    return parameter_table.abstract_params(
        model, (input_shape or SHAPES[family_of(model).input])[1:]
    )


def shapes(model: Any, input_shape: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
    """The same by name."""
    leaves = flatten_names(abstract_params(model, input_shape))
    return {name: leaf.shape for name, leaf in leaves.items()}


def by_module(captured: Any) -> dict[str, Any]:
    """What every module gave, by its name, from the collection `intermediates` of linen."""
    flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(captured):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        flat[name.removesuffix("/0").removesuffix("__call__").rstrip("/")] = leaf
    return flat


def scanned(model: Any) -> Any:
    """The model with its blocks in a scan, which traces and compiles one of them instead of all."""
    return model.clone(scan=True) if hasattr(model, "scan") else model


TESTING = {"name": "vit", "patch_size": 16, "hidden_size": 10, "num_layers": 1, "mlp_dim": 10}
TESTING |= {"num_heads": 2}


def model(config: str, **kwargs: Any) -> Any:
    """Our model for a name of the golden files, such as `R26+ViT-S_32` or `ViT-S_16-gap-norep`."""
    if config.startswith("testing"):
        classifier = "unpooled" if config == "testing-unpooled" else "token"
        return create_model(**TESTING, **{"classifier": classifier, **kwargs})
    name = config.replace("ViT-", "").replace("_", "/").removesuffix("-gap-norep")
    if config.endswith("-gap-norep"):
        kwargs["classifier"] = "gap"
    return create_model(**{**VARIANTS[name], **kwargs})
