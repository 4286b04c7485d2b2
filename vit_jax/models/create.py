"""Model names to modules, and the values that their attributes take."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import UserError, check_keys, check_known
from vit_jax.models import bit, deit, resnet, vit
from vit_jax.models.attention.choose import NAMES
from vit_jax.models.layers import REMAT_POLICIES
from vit_jax.models.parameter_table import Row
from vit_jax.models.tokens import patch_shape
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


@dataclasses.dataclass(frozen=True)
class Found:
    """What the models say of a parameter."""

    row: Row
    prefix: str  # "" or what stands before the model's own tree, such as `teacher/`
    block: int | None  # its number


def parameter_row(name: str) -> Found:
    """The row of the parameter called `name`, whole or below any prefix (`student/head/kernel`).

    Raises:
      ValueError: no row, or more than one, matches.
    """
    parts = name.split("/")
    matches: list[Found] = []
    for start in range(len(parts)):
        own_name = "/".join(parts[start:])
        for row in PARAMETERS:
            if match := re.fullmatch(row.pattern, own_name):
                block = match.groupdict().get("block")
                number = None if block is None else int(block)
                matches.append(Found(row, name.removesuffix(own_name), number))
        if matches:
            break
    if len(matches) != 1:
        raise ValueError(f"{name!r} matches {len(matches)} rows of the models' PARAMETERS, not 1.")
    return matches[0]


def role_of(name: str) -> str:
    """The role of the parameter called `name`; "" if it has none, or is in no model."""
    try:
        return parameter_row(name).row.role
    except ValueError:
        return ""


CHOICES: dict[str, Iterable[str]] = {
    "classifier": ("token", "gap", "map", "unpooled", "token_unpooled"),
    "position_embedding": ("learned", "sincos2d"),
    "gelu": ("tanh", "exact"),
    "attention": NAMES,
    "remat": REMAT_POLICIES,
}
COUNTS = ("hidden_size", "num_layers", "mlp_dim", "num_heads", "representation_size")
RATES = ("dropout_rate", "attention_dropout_rate", "stochastic_depth_rate")


def check_attributes(name: str, module: Any) -> None:
    """Raises UserError for a value that the kind of model `name` does not take."""
    if name == "bit":
        _check_bit(module)
        return
    for key, known in CHOICES.items():
        check_known(f"model.{key}", getattr(module, key), known)
    patch_shape(module.patch_size)
    for key in COUNTS:
        value = getattr(module, key)
        optional = key == "representation_size" and value is None
        if not optional and not _is_count(value):
            raise UserError(f"model.{key}={value} must be an int of at least 1.")
    for key in RATES:
        if not 0.0 <= getattr(module, key) < 1.0:
            raise UserError(f"model.{key}={getattr(module, key)} must be in [0, 1).")
    if module.hidden_size % module.num_heads:
        raise UserError(
            f"model.hidden_size={module.hidden_size} does not divide into "
            f"model.num_heads={module.num_heads} heads; choose a multiple."
        )
    if module.attention_dropout_rate and module.attention not in ("auto", "reference"):
        raise UserError(
            f"model.attention={module.attention!r} has no dropout of attention weights; use "
            f"'reference', or model.attention_dropout_rate=0 (given: "
            f"{module.attention_dropout_rate})."
        )
    if name == "deit":
        for key, only in (("classifier", "token"), ("representation_size", None)):
            if getattr(module, key) != only:
                raise UserError(
                    f"model.{key}={getattr(module, key)!r} does not work with model.name='deit', "
                    f"whose heads need its two tokens; leave it at {only!r}."
                )


def _check_bit(module: Any) -> None:
    # The Transformer's other policies do not save convolutions.
    check_known("model.remat", module.remat, ("none", "full"))
    layers, width = module.resnet_layers, module.resnet_width_factor
    if not isinstance(layers, tuple) or not layers or not all(map(_is_count, layers)):
        raise UserError(
            f"model.resnet_layers={layers!r} must be the units of each stage of "
            "model.name='bit', such as (3, 4, 6, 3) for an R50."
        )
    if not _is_count(width):
        raise UserError(f"model.resnet_width_factor={width!r} must be an int of at least 1.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1
