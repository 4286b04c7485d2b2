"""Model names to families, and a model from its name and attributes."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp

from vit_jax.errors import UserError, accepts
from vit_jax.kinds import Kinds, check_keys, check_known
from vit_jax.models import variants
from vit_jax.models.family import Family
from vit_jax.models.later import variants as later
from vit_jax.models.tokens import patch_shape
from vit_jax.wording import nearest

# Of each kind its file, and attributes by the name of a size, such as `B/16`.
KINDS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "vit": ("vit", variants.VIT),
    "deit": ("later.deit", later.DEIT),
    "modern_vit": ("later.modern_vit", later.MODERN),
    "mae": ("later.mae", later.MAE),
    "bit": ("bit", variants.BIT),
    "mixer": ("later.mixer", later.MIXER),
    "axial_vit": ("axial_vit", variants.AXIAL),
    "axial_resnet": ("axial_resnet", variants.AXIAL_RESNET),
    "text": ("later.text", later.TEXT),
    "bert": ("later.bert", later.BERT),
    "regnet": ("later.regnet", later.REGNET),
}
MODELS = Kinds({name: f"vit_jax.models.{file}:FAMILY" for name, (file, _) in KINDS.items()})
VARIANTS_OF = {name: sizes for name, (_, sizes) in KINDS.items()}

# All named sizes, each with its kind of model.
VARIANTS: dict[str, dict[str, Any]] = {
    variant: {"name": name, **attributes}
    for name, sizes in VARIANTS_OF.items()
    for variant, attributes in sizes.items()
}

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def create_model(
    name: str,
    *,
    num_classes: int | None = None,
    dtype: str | type | jnp.dtype = "float32",
    **kwargs: Any,
) -> Any:
    """Builds a linen module without parameters; UserError: unknown name, attribute or value.

    `module.apply({"params": params}, images, train=False)` gives logits.

    Args:
      name: of a kind of model or of a variant, such as `B/16`.
      num_classes: number of logits; must be given.
      dtype: of the computation, `float32` or `bfloat16` (or the type itself).
      **kwargs: attributes of the module; they replace those of the variant.
    """
    if name not in MODELS:
        kwargs = {**get_variant(name), **kwargs}
        name = kwargs.pop("name")
    if num_classes is None:
        raise UserError("create_model needs num_classes, the number of outputs (0: no head).")
    family = MODELS[name]
    check_keys("model", name, kwargs, family.keys)
    for key, field in family.keys.items():
        if key not in kwargs and field.default is dataclasses.MISSING:
            raise UserError(f"model.{key} has no default for model.name={name!r}; set it.")
    if isinstance(dtype, str):
        check_known("model.dtype", dtype, DTYPES)
        dtype = DTYPES[dtype]
    # Lists become tuples: linen hashes a module's attributes.
    attributes = {k: tuple(v) if isinstance(v, list) else v for k, v in kwargs.items()}
    attributes |= {"num_classes": num_classes, "dtype": dtype}
    module = family.module(**attributes)
    _check_attributes(family, module)
    return module


def family_of(module: Any) -> Family:
    """The family of a module that `create_model` made; UserError for anything else."""
    if getattr(module, "kind", None) not in MODELS:
        raise UserError(f"model={module!r:.80} is not a model of create_model.")
    return MODELS[module.kind]


def clone_with(module: Any, **attributes: Any) -> Any:
    """A copy with new values for those of `attributes` that the module has."""
    return module.clone(**{k: v for k, v in attributes.items() if hasattr(module, k)})


def get_variant(name: str) -> dict[str, Any]:
    """A copy of the variant called `name`, such as `R50+L/32`; else a UserError that lists all."""
    if name in VARIANTS:
        return dict(VARIANTS[name])
    known = []
    for rows in VARIANTS_OF.values():
        sizes = dict.fromkeys(variant.partition("/")[0] for variant in rows)
        patches = dict.fromkeys(variant.partition("/")[2] for variant in rows)
        ends = f" with /{', /'.join(patches)}" if any(patches) else ""
        known.append(f"{', '.join(sizes)}{ends}")
    meant = variant_called(name)
    hint = f" Did you mean {meant!r}?" if meant else nearest(name, [*MODELS, *VARIANTS])
    raise UserError(f"unknown model {name!r}.{hint} Known: {'; '.join(known)}.")


_FOREIGN_SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}
_FOREIGN_SIZES |= {size.lower(): size for size in _FOREIGN_SIZES.values()} | {"medium": "M"}
_FOREIGN_KINDS = {"vit": "", "deit": "DeiT-", "deit3": "DeiT3-", "mixer": "Mixer-"}
_FOREIGN_KINDS |= {"beit": "BEiT-", "eva02": "EVA02-"}
_TRAININGS = {"dinov2": "DINOv2-", "dinov3": "DINOv3-", "clip": "CLIP-"}
_FOREIGN_NAME = re.compile(
    rf"(?:.*_)?({'|'.join(_FOREIGN_KINDS)})_({'|'.join(_FOREIGN_SIZES)})_?"
    r"(distilled_)?(?:patch_?)?(\d+)(?:_.*)?"
)


def variant_called(name: str) -> str:
    """The variant that timm, torchvision or Hugging Face call by this name; "" if none.

    `vit_base_patch16_224`, `google/vit-base-patch16-224`, `vit_b_16`, `ViT-B_16` -> `B/16`.
    """
    text = re.sub("[^a-z0-9]+", "_", name.lower())
    if match := re.fullmatch(r"(?:.*_)?resnetv2_(\d+x\d)(?:_.*)?", text):
        variant = f"R{match[1]}"
    elif match := _FOREIGN_NAME.fullmatch(text):
        kind, size, distilled, patch = match.groups()
        middle = "distilled-" if distilled else ""
        middle += next((t for word, t in _TRAININGS.items() if kind == "vit" and word in text), "")
        variant = f"{_FOREIGN_KINDS[kind]}{middle}{_FOREIGN_SIZES[size]}/{patch}"
    else:
        return ""
    return variant if variant in VARIANTS else ""


def variant_defaults(name: str) -> dict[str, Any]:
    """The defaults of all attributes that some variant of this kind sets."""
    keys = MODELS[name].keys
    return {key: keys[key].default for sizes in VARIANTS_OF[name].values() for key in sizes}


def variant_of(model: Mapping[str, Any]) -> str:
    """The variant with these attributes (those that no variant sets are ignored); "" if none."""
    defaults = variant_defaults(model["name"])
    for name, sizes in VARIANTS_OF[model["name"]].items():
        if all(_plain(model.get(k, d)) == _plain(sizes.get(k, d)) for k, d in defaults.items()):
            return name
    return ""


def _plain(value: Any) -> Any:
    """A square patch may be one number or two."""
    value = tuple(value) if isinstance(value, list | tuple) else value
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def _check_attributes(family: Family, module: Any) -> None:
    """Raises UserError for a value that the family does not support."""
    for key, known in family.choices.items():
        check_known(f"model.{key}", getattr(module, key), known)
    hints = typing.get_type_hints(family.module)
    for key in family.keys:
        value, hint = getattr(module, key), hints[key]
        if not accepts(hint, value):
            raise UserError(f"model.{key}={value!r} must be {getattr(hint, '__name__', hint)}.")
        is_count = hint is int or (hint == int | None and value is not None)
        if is_count and value < 1:
            raise UserError(f"model.{key}={value!r} must be an int of at least 1.")
        if key.endswith("_rate") and not 0.0 <= value < 1.0:
            raise UserError(f"model.{key}={value} must be in [0, 1).")
    if getattr(module, "position_grid", None) is not None and not family.any_shape:
        raise UserError(f"model.position_grid: a {family.title} has the positions of its images.")
    if "patch_size" in family.keys:
        patch_shape(module.patch_size)
    family.check(module)


def recognise(names: Collection[str]) -> str:
    """The kind of model whose parameters have these names (in our own format).

    The first kind whose rows match all names, else the one whose rows match most.
    """

    def known(family: Family) -> int:
        every = "|".join(f"(?:{row.pattern})" for row in family.rows)
        pattern = re.compile(re.sub(r"\?P<\w+>", "?:", every))  # group names must be unique
        return sum(pattern.fullmatch(name) is not None for name in names)

    counts = {name: known(family) for name, family in MODELS.items()}
    return max(counts, key=lambda name: counts[name])
