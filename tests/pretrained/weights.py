"""Seeded parameters for tests of weight formats, and their logits."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from tests import golden
from vit_jax.inference.load import attributes
from vit_jax.models.create import create_model, get_variant
from vit_jax.models.description import Description, InputSettings
from vit_jax.parameters.table import table_of
from vit_jax.pretrained.formats.table import FORMATS

SMALL: dict[str, Any] = {"name": "vit", "patch_size": 8, "hidden_size": 24, "num_layers": 2}
SMALL |= {"mlp_dim": 48, "num_heads": 3}


def seeded(module: Any, image_shape: tuple[int, ...], recipe: str = "fanin") -> dict[str, Any]:
    """Parameters of the golden recipe for a module, as flat names."""
    shapes = golden.shapes(module, (1, *image_shape))
    return {name: golden.fill(name, shape, recipe) for name, shape in shapes.items()}


def module_of(variant: str, *, num_classes: int = 10, **overrides: Any) -> Any:
    return create_model(**{**get_variant(variant), **overrides}, num_classes=num_classes)


@functools.cache
def _apply(module: Any) -> Any:
    return jax.jit(lambda params, x: module.apply({"params": params}, x, train=False))


def logits(module: Any, params: Any, images: np.ndarray) -> np.ndarray:
    """Compiled once per module and shape of the images, by the tests' fast compiler."""
    if getattr(module, "num_layers", 0) > 1:  # a scan traces even one block twice
        module, params = golden.scanned(module), table_of(module).stack(params)
    return np.asarray(_apply(module)(params, images))


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def assert_same(params: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """The same flat names and the same bits."""
    assert params.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(params[name], array, err_msg=name, strict=True)


def write(
    path: Path, format: str, module: Any, params: Any, image: tuple[int, ...], name: str = "vit"
) -> Path:
    """Writes flat parameters for images of this shape in a format; returns the file of weights."""
    model = attributes(module, name)
    grid = module.token_grid(image[:2])
    description = Description(model, image, grid, (), "")
    inputs = InputSettings("bilinear", image[:2], None)
    return FORMATS[format].write(path, params, description, inputs)


@contextlib.contextmanager
def without_numbers() -> Iterator[None]:
    """timm's models are made of shapes; PyTorch would draw numbers at length for no memory."""
    import torch

    with torch.device("meta"), mock.patch("timm.layers.weight_init._trunc_normal_"):
        yield


def randomise(model: Any) -> None:
    """Other numbers in every array: a fresh model has zeros and ones, which show no mistake.

    As large as an initialisation: rounding grows with the activations, and tolerances are for
    logits of about 1. From four seeds, those of B/32 differ by at most 3e-6, and by 4e-4 for
    another GELU.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
