"""Any weights as a model that is ready to use."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from vit_jax.errors import UserError
from vit_jax.inference.inputs import at_image_size
from vit_jax.models.create import create_model
from vit_jax.parameters.initial import abstract_params
from vit_jax.parameters.names import flatten_names, unflatten_names
from vit_jax.pretrained.fit.adapt import adapt_params
from vit_jax.pretrained.formats.stored import reading
from vit_jax.pretrained.infer import infer_description
from vit_jax.pretrained.load import read_source
from vit_jax.workdir.description import Description

# How a model is trained and computed, not what it is.
_TRAINING = ("remat", "scan", "dtype", "attention", "position_stddev")


@dataclasses.dataclass(frozen=True)
class PretrainedModel:
    """A model and its parameters.

    Attributes:
      module: linen module; `module.apply({"params": params}, images, train=False)` takes floats
        [B, H, W, C] and gives logits [B, K] float32.
      params: nested dict of numpy float32 arrays, loop form of the blocks.
      description: sizes, classes, and how an image file becomes an input.
      format: in which the weights were found.
      source: where.
      report: what became of every array, see `adapt_params`.
    """

    module: Any
    params: Any = dataclasses.field(repr=False)
    description: Description
    format: str
    source: str
    report: dict[str, Any] = dataclasses.field(repr=False)


def load_model(
    source: str | os.PathLike[str],
    *,
    image_size: int | tuple[int, int] | None = None,
    num_heads: int | None = None,
    grid: tuple[int, int] | None = None,
    posemb: str = "bilinear",
    dtype: str = "float32",
    preprocess: str = "",
) -> PretrainedModel:
    """Loads weights of any format together with the model that they are for.

    Sizes come from what lies beside the weights (our `model.json`, a `config.json`), from the zoo,
    or from the shapes of the arrays. The head is kept.

    Args:
      source: see `vit_jax.pretrained.load.read_source`.
      image_size: pixels of a side, or (height, width), if other than the weights' own; position
        embeddings are interpolated.
      num_heads: of the attention, where the file does not tell.
      grid: rows and columns of tokens of the file, where they are no square.
      posemb: how positions are interpolated, `bilinear` or `bicubic`.
      dtype: of the computation, `float32` or `bfloat16`.
      preprocess: ops from an image to the input, in place of the weights' own.

    Raises:
      UserError: see `read_source`; also if arrays are missing, or sizes contradict each other.
    """
    stored = read_source(source, num_heads=num_heads, grid=grid)
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    try:
        description = infer_description(stored, grid=grid, image_size=size)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    grid, image_shape = description.grid, description.image_shape
    sizes = {key: value for key, value in description.model.items() if key not in _TRAINING}
    with reading(f"the description of {source}"):
        module = create_model(**sizes, dtype=dtype)
        description = dataclasses.replace(
            description,
            # Every attribute, also those that an older description does not have.
            model=attributes(module, sizes["name"]),
            eval_preprocess=description.eval_preprocess or f"official_eval({image_shape[:2]})",
        )
        if size is not None and size != image_shape[:2]:
            description = at_image_size(description, size)
        if preprocess:
            description = dataclasses.replace(description, eval_preprocess=preprocess)
        like = abstract_params(module, description.image_shape)
    flat, report = adapt_params(
        stored.params,
        flatten_names(like),
        grid=description.grid,
        source_grid=grid,
        reset_head=False,
        posemb=posemb,
        dropped=stored.dropped,
        changed=stored.changed,
    )
    return PretrainedModel(
        module=module,
        params=unflatten_names(flat),
        description=description,
        format=stored.format,
        source=str(source),
        report=report,
    )


def attributes(module: Any, name: str) -> dict[str, Any]:
    """Keyword arguments of `create_model` that give `module`."""
    fields = (field.name for field in dataclasses.fields(module))
    left_out = ("parent", "name", *_TRAINING)
    return {"name": name, **{f: getattr(module, f) for f in fields if f not in left_out}}
