"""Seeded parameters for tests of weight formats, and their logits."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests import golden
from vit_jax.models.create import create_model
from vit_jax.models.variants import get_variant
from vit_jax.parameters.names import stack_blocks

SMALL: dict[str, Any] = {
    "name": "vit",
    "patch_size": 8,
    "hidden_size": 24,
    "num_layers": 2,
    "mlp_dim": 48,
    "num_heads": 3,
}


def seeded(module: Any, image_shape: tuple[int, ...], recipe: str = "fanin") -> dict[str, Any]:
    """Parameters of the golden recipe for a module, as flat names."""
    shapes = golden.shapes(module, (1, *image_shape))
    return {name: golden.fill(name, shape, recipe) for name, shape in shapes.items()}


def module_of(variant: str, *, num_classes: int = 10, **overrides: Any) -> Any:
    return create_model(**{**get_variant(variant), **overrides}, num_classes=num_classes)


@functools.cache
def _apply(module: Any) -> Any:
    return golden.jit(lambda params, x: module.apply({"params": params}, x, train=False))


def logits(module: Any, params: Any, images: np.ndarray) -> np.ndarray:
    """Compiled once per module and shape of the images."""
    return np.asarray(_apply(golden.scanned(module))(stack_blocks(params), images))
