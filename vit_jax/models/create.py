"""Model names to modules."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import check_keys, check_known
from vit_jax.models import bit, deit, resnet, vit
from vit_jax.models.checks import check_attributes
from vit_jax.models.parameter_table import Found, find_row
from vit_jax.models.variants import VARIANTS, get_variant

MODELS: dict[str, type[nn.Module]] = {
    "vit": vit.VisionTransformer,
    "deit": deit.DistilledVisionTransformer,
    "bit": bit.BiTResNet,
}
PARAMETERS = (*vit.PARAMETERS, *deit.PARAMETERS, *resnet.PARAMETERS, *bit.PARAMETERS)

# Tokens before the grid of patches, in their order.
TOKENS = tuple(row.pattern for row in PARAMETERS if row.role == "token")

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def create_model(name: str, *, num_classes: int, dtype: str = "float32", **kwargs: Any) -> Any:
    """Builds a module without parameters.

    Args:
      name: of the module, or of a row of `variants.VARIANTS`, such as `B/16`.
      num_classes: number of logits.
      dtype: of the computation, `float32` or `bfloat16` (or the type itself).
      **kwargs: attributes of the module; they replace those of the row.

    Returns:
      A linen module; `module.apply({"params": p}, images, train=False)` gives logits.

    Raises:
      UserError: unknown name, attribute or value.
    """
    if "/" in name or name in VARIANTS:
        kwargs = {**get_variant(name), **kwargs}
        name = kwargs.pop("name")
    check_known("model.name", name, MODELS)
    check_keys("model", name, kwargs, model_keys(name))
    if isinstance(dtype, str):
        check_known("model.dtype", dtype, DTYPES)
        dtype = DTYPES[dtype]
    # Lists become tuples: linen hashes a module's attributes.
    attributes = {k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items()}
    module = MODELS[name](num_classes=num_classes, dtype=dtype, **attributes)  # type: ignore[call-arg]
    check_attributes(name, module)
    return module


def model_keys(name: str) -> dict[str, dataclasses.Field[Any]]:
    """The attributes of a kind of model that a config sets."""
    handed_over = ("parent", "name", "num_classes", "dtype")
    fields = dataclasses.fields(MODELS[name])  # type: ignore[arg-type]
    return {field.name: field for field in fields if field.name not in handed_over}


def parameter_row(name: str) -> Found:
    """What the models say of the parameter called `name`; see `parameter_table.find_row`."""
    return find_row(name, PARAMETERS)


def role_of(name: str) -> str:
    """The role of the parameter called `name`; "" if it has none, or is in no model."""
    try:
        return parameter_row(name).row.role
    except ValueError:
        return ""
