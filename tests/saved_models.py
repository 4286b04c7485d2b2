"""Tiny models with random parameters, saved as a finished training leaves them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax.files.paths import write_json
from vit_jax.inference.load import attributes
from vit_jax.models.create import create_model
from vit_jax.models.description import Description
from vit_jax.parameters.table import abstract_params, table_of
from vit_jax.workdir.description import MODEL_FILE, PARAMS_FILE, write_params

SIZES = {"name": "vit", "patch_size": 8, "hidden_size": 16, "num_layers": 1, "mlp_dim": 24}


def save_model(
    folder: Path,
    *,
    class_names: tuple[str, ...] = (),
    num_classes: int = 0,
    image_size: int | tuple[int, int] = 16,
    eval_preprocess: str = "",
    seed: int = 0,
    scale: float = 0.5,
    **model: Any,
) -> Path:
    """Writes `params.npz` and `model.json` into `folder`, which it returns.

    Every parameter is random, biases and a head that starts at zero included: nothing may agree
    by being zero. `scale` is their deviation.
    """
    defaults = {**SIZES, "num_heads": 2} if model.get("name", "vit") in ("vit", "deit") else {}
    sizes = {**defaults, **model, "num_classes": num_classes or len(class_names)}
    module = create_model(**sizes)
    height, width = image_size if isinstance(image_size, tuple) else (image_size,) * 2
    side = f"{height}" if height == width else f"{height}, {width}"
    shapes = abstract_params(module, (height, width, 3))
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda s: np.float32(scale * rng.standard_normal(s.shape)), shapes)
    folder.mkdir(parents=True)
    write_params(folder / PARAMS_FILE, params, table_of(module))
    grid = module.token_grid((height, width))
    description = Description(
        model=attributes(module, sizes["name"]),
        image_shape=(height, width, 3),
        grid=grid,
        class_names=class_names,
        eval_preprocess=eval_preprocess or f"decode|resize({side})",
    )
    write_json(folder / MODEL_FILE, description.to_json())
    return folder
