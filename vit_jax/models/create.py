"""Model names to modules."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import UserError, check_known, nearest
from vit_jax.models.bit import BiTResNet
from vit_jax.models.deit import DistilledVisionTransformer
from vit_jax.models.vit import VisionTransformer

MODELS: dict[str, type[nn.Module]] = {
    "vit": VisionTransformer,
    "deit": DistilledVisionTransformer,
    "bit": BiTResNet,
}

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def create_model(name: str, *, num_classes: int, dtype: Any = "float32", **kwargs: Any) -> Any:
    """Builds the module called `name`.

    Args:
      name: a key of `MODELS`.
      num_classes: number of logits.
      dtype: of the computation, `float32` or `bfloat16` (or the type itself).
      **kwargs: attributes of the module, such as a row of `variants.VARIANTS`. What only other
        models have may be given too, as None or as they have it by default: one config serves all.

    Returns:
      A linen module; `module.apply({"params": p}, images, train=False)` gives logits.

    Raises:
      UserError: unknown name, attribute or value.
    """
    check_known("model.name", name, MODELS)
    module = MODELS[name]
    kwargs = {key: value for key, value in kwargs.items() if _is_read(name, key, value)}
    if isinstance(dtype, str):
        check_known("model.dtype", dtype, DTYPES)
        dtype = DTYPES[dtype]
    # Lists become tuples: linen hashes a module's attributes.
    attributes = {k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items()}
    return module(num_classes=num_classes, dtype=dtype, **attributes)


def _is_read(name: str, key: str, value: Any) -> bool:
    """Whether the model has this attribute; UserError for one whose value it would ignore."""
    defaults = _defaults(MODELS[name])
    if key in defaults:
        return True
    for other, module in MODELS.items():
        if key in (others := _defaults(module)):
            default = others[key]
            if value is None or value == default:
                return False
            way_out = f"leave it at {default!r}"
            if default is dataclasses.MISSING:
                way_out = "it must be None, as in the rows of models/variants.py"
            raise UserError(
                f"model.{key}={value!r} is for model.name={other!r}; model.name={name!r} has no "
                f"such attribute: {way_out}."
            )
    raise UserError(
        f"model.{key} is not an attribute of model.name={name!r}.{nearest(key, defaults)} "
        f"Known: {', '.join(defaults)}."
    )


def _defaults(module: type[nn.Module]) -> dict[str, Any]:
    """Attributes of a kind of model, and their defaults."""
    fields = dataclasses.fields(module)  # type: ignore[arg-type]
    return {f.name: f.default for f in fields if f.name not in ("parent", "name")}
