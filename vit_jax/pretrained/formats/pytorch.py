"""What timm's and Hugging Face's files have in common: what is not in their arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vit_jax.models.create import TOKENS
from vit_jax.models.tokens import sincos2d
from vit_jax.models.variants import SIZES
from vit_jax.pretrained.files.array_file import Container
from vit_jax.pretrained.fit.posemb import POSEMB
from vit_jax.workdir.description import Description


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the JSON files beside the weights say; see `stored.Stored` for what each means."""

    num_heads: int | None
    conventions: dict[str, Any]
    image_size: tuple[int, int] | None
    class_names: tuple[str, ...]
    eval_preprocess: str
    pooling: str = ""


def known_heads(container: Container) -> int | None:
    """Number of heads of the size in `SIZES` that has this width; None if none or several have."""
    width = next(
        (
            info.shape[-1]
            for name, info in container.arrays.items()
            if name.endswith(("cls_token", "pos_embed", "position_embeddings")) and info.shape
        ),
        0,
    )
    heads = {num_heads for size, _, _, num_heads in SIZES.values() if size == width}
    return heads.pop() if len(heads) == 1 else None


def with_learned_positions(
    params: dict[str, np.ndarray], description: Description
) -> dict[str, np.ndarray]:
    """Fixed position embeddings as a parameter: these formats know only learned ones."""
    if POSEMB in params:
        return params
    table = sincos2d(description.grid, description.model["hidden_size"])
    prefix = sum(name in params for name in TOKENS)
    zeros = np.zeros((1, prefix, table.shape[-1]), np.float32)
    return {**params, POSEMB: np.concatenate([zeros, table], axis=1)}  # [1, P + h*w, D]
