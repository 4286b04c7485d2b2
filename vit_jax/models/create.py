"""Model names to modules."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import UserError, check_known, nearest
from vit_jax.models.deit import DistilledVisionTransformer
from vit_jax.models.vit import VisionTransformer

MODELS: dict[str, type[nn.Module]] = {
    "vit": VisionTransformer,
    "deit": DistilledVisionTransformer,
}

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def create_model(name: str, *, num_classes: int, dtype: Any = "float32", **kwargs: Any) -> Any:
    """Builds the module called `name`.

    Args:
      name: a key of `MODELS`.
      num_classes: number of logits.
      dtype: of the computation, `float32` or `bfloat16` (or the type itself).
      **kwargs: attributes of the module, such as a row of `variants.VARIANTS`.

    Returns:
      A linen module; `module.apply({"params": p}, images, train=False)` gives logits.

    Raises:
      UserError: unknown name, attribute or value.
    """
    check_known("model.name", name, MODELS)
    module = MODELS[name]
    known = [f.name for f in dataclasses.fields(module) if f.name not in ("parent", "name")]  # type: ignore[arg-type]
    for key in kwargs:
        if key not in known:
            raise UserError(
                f"model.{key} is not an attribute of model.name={name!r}.{nearest(key, known)} "
                f"Known: {', '.join(known)}."
            )
    if isinstance(dtype, str):
        check_known("model.dtype", dtype, DTYPES)
        dtype = DTYPES[dtype]
    # Lists become tuples: linen hashes a module's attributes.
    attributes = {k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items()}
    return module(num_classes=num_classes, dtype=dtype, **attributes)
