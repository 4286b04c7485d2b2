"""Tiny models with random parameters, saved as a finished training leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.inference.load import attributes
from vit_jax.models.create import create_model
from vit_jax.models.tokens import token_grid
from vit_jax.workdir.description import MODEL_FILE, PARAMS_FILE, Description, write_params

SIZES = {"name": "vit", "patch_size": 8, "hidden_size": 16, "num_layers": 1, "mlp_dim": 24}


def save_model(
    folder: Path,
    *,
    class_names: tuple[str, ...] = (),
    num_classes: int = 0,
    image_size: int = 16,
    eval_preprocess: str = "",
    seed: int = 0,
    scale: float = 0.5,
    **model: Any,
) -> Path:
    """Writes `params.npz` and `model.json` into `folder`, which it returns.

    Every parameter is random, biases and a head that starts at zero included: nothing may agree
    by being zero. `scale` is their deviation.
    """
    sizes = {**SIZES, "num_heads": 2, **model, "num_classes": num_classes or len(class_names)}
    module = create_model(**sizes)
    images = jnp.zeros((1, image_size, image_size, 3))
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), images, train=False))["params"]
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda s: np.float32(scale * rng.standard_normal(s.shape)), shapes)
    folder.mkdir(parents=True)
    write_params(folder / PARAMS_FILE, params)
    grid = token_grid((image_size, image_size), module.patch_size, module.resnet_layers)
    Description(
        model=attributes(module, sizes["name"]),
        image_shape=(image_size, image_size, 3),
        grid=grid,
        class_names=class_names,
        eval_preprocess=eval_preprocess or f"decode|resize({image_size})",
    ).write(folder / MODEL_FILE)
    return folder
