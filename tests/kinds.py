"""A small model of every kind, made of its family: a new kind is tested like the others."""

from typing import Any

from vit_jax.models.create import MODELS

_SMALL = {"patch_size": 8, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 100}
_SMALL |= {"stage_widths": (8, 16), "group_width": 8}


def small(kind: str) -> dict[str, Any]:
    """Attributes of a tiny model: those of the kind's first variant, shrunk."""
    sizes = dict(next(iter(MODELS[kind].sizes.values())))
    for key, value in sizes.items():
        if isinstance(value, tuple) and key not in _SMALL:
            sizes[key] = (1,) * min(len(value), 2)
        elif key.endswith("mlp_dim"):
            sizes[key] = 24
        else:
            sizes[key] = _SMALL.get(key.removeprefix("decoder_"), value)
    told = {key: value for key, value in sizes.items() if key not in MODELS[kind].conventions}
    return {"name": kind, **told}


# What sees images: a batch holds them under that key.
SHAPES = {"image": (16, 16, 3), "text": (4,)}  # of one example


def shape_of(kind: str) -> tuple[int, ...]:
    """Of what a model of that kind is called with, without the batch."""
    return SHAPES[MODELS[kind].input]


OF_IMAGES = [
    kind for kind, family in MODELS.items() if getattr(family, "input", "image") == "image"
]
