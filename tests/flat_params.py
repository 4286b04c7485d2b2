"""Parameters of tiny models under their flat names, for what is done to them by name."""

import functools
from typing import Any

import numpy as np

from tests import golden
from vit_jax.models.create import VARIANTS, create_model, recognise
from vit_jax.models.vit import POSITIONS
from vit_jax.pretrained.fit.adapt import adapt_params
from vit_jax.trees import flatten_names

Flat = dict[str, np.ndarray]


@functools.cache
def shapes(image: tuple[int, int, int], pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    model = create_model(**{**VARIANTS["mu/16"], "num_classes": 3, **dict(pairs)})
    flat = flatten_names(golden.abstract_params(model, (1, *image)))
    return {name: leaf.shape for name, leaf in flat.items()}


def small(image: tuple[int, int, int] = (32, 32, 3), **kwargs: Any) -> Flat:
    """Flat parameters of a tiny model, no two values alike."""
    names = shapes(image, tuple(kwargs.items()))
    return {name: golden.fill(name, shape, "r02") for name, shape in names.items()}


def distilled(**kwargs: Any) -> Flat:
    """As `small`, with the distillation token and head of DeiT."""
    flat = small(**kwargs)
    before = flat[POSITIONS]
    flat |= {
        "dist": golden.fill("dist", flat["cls"].shape, "r02"),
        "head_dist/kernel": golden.fill("head_dist/kernel", flat["head/kernel"].shape, "r02"),
        "head_dist/bias": golden.fill("head_dist/bias", flat["head/bias"].shape, "r02"),
    }
    flat[POSITIONS] = np.concatenate(
        [before[:, :1], 0 * before[:, :1] + 7.0, before[:, 1:]], axis=1
    )
    return flat


def without(flat: Flat, prefix: str) -> Flat:
    return {name: array for name, array in flat.items() if not name.startswith(prefix)}


def adapt(loaded: Flat, like: Any, **options: Any) -> Any:
    """`adapt_params` for models whose kinds show in the names of their parameters."""
    return adapt_params(loaded, like, kinds=(recognise(loaded), recognise(like)), **options)
