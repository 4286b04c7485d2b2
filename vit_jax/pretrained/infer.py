"""Infers the model from its parameters: every size shows in a shape."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from vit_jax.data.sized import at_size, size_of, spell
from vit_jax.errors import UserError
from vit_jax.models.create import MODELS, create_model
from vit_jax.models.description import Description
from vit_jax.models.family import Shapes, axis_of, layer_width
from vit_jax.parameters.table import ParameterTable, table_of
from vit_jax.pretrained.fit.resize import find_source_grid
from vit_jax.pretrained.formats.stored import Grid, Stored, check_description


def position_tokens(names: Collection[str], table: ParameterTable) -> list[str]:
    """Class and distillation token, if the position embeddings have rows for them."""
    rows = [table.find(name).row for name in table.with_role("positions", names)]
    return table.with_role("token", names) if all(row.of_tokens for row in rows) else []


def num_prefix_tokens(names: Collection[str], kind: str) -> int:
    """Number of position embeddings before the grid's."""
    return len(position_tokens(names, table_of(kind)))


def num_tokens(params: Shapes, kind: str) -> int | None:
    """Number of all tokens; None if any number works, or it cannot be inferred."""
    name, axis = MODELS[kind].sequence or ("", 0)
    shape = params[name].shape if name in params else ()
    return shape[axis] if axis < len(shape) else None


def model_sizes(params: Shapes, kind: str) -> dict[str, Any]:
    """The kind of model and its attributes, None if they cannot be inferred or do not exist."""
    return {"name": kind, **MODELS[kind].infer(params)}


def missing_sizes(sizes: Mapping[str, Any]) -> list[str]:
    """Required attributes of the model that cannot be inferred."""
    fields = MODELS[sizes["name"]].keys.items()
    required = {key for key, field in fields if field.default is dataclasses.MISSING}
    return [key for key, value in sizes.items() if not value and key in required]


def infer_model(params: Shapes, kind: str, conventions: Mapping[str, Any]) -> dict[str, Any]:
    """For `create_model`; `conventions`: what no shape shows. UserError: an array is missing."""
    sizes, family = model_sizes(params, kind), MODELS[kind]
    if missing := missing_sizes(sizes):
        title = family.title.partition(" (")[0]
        raise UserError(f"this {title} is incomplete: cannot infer its {missing[0]}.")
    heads = {name.rpartition("/")[0] for name in table_of(kind).with_role("head", params)}
    widths = [layer_width(params, head) for head in sorted(heads)]  # None: of a norm
    unseen = (*family.conventions, *family.head_conventions)
    stated = {key: value for key, value in conventions.items() if key in unseen}
    return {**sizes, "num_classes": next(filter(None, widths), 0), **stated}


def grid_of_images(params: Shapes, kind: str, image_size: Grid | None) -> Grid | None:
    """Rows and columns of tokens for images [height, width]; None if either is unknown."""
    if image_size is None or missing_sizes(model_sizes(params, kind)):
        return None
    pixels = create_model(**infer_model(params, kind, {})).pixels_per_token
    return image_size[0] // pixels[0], image_size[1] // pixels[1]


def known_grid(stored: Stored) -> Grid | None:
    """Rows and columns of tokens, if known from something other than the arrays."""
    if stored.description is not None:
        return stored.description.position_grid
    params, kind = stored.params, stored.kind
    grid, count = grid_of_images(params, kind, stored.image_size), num_tokens(params, kind)
    if grid is None or count is None:
        return None  # unknown, or damaged: reported as a mismatch
    return grid if count - num_prefix_tokens(params, kind) == grid[0] * grid[1] else None


def infer_description(
    stored: Stored, *, grid: Grid | None = None, image_size: Grid | None = None
) -> Description:
    """Infers the description of `stored`, which has none, from its arrays and the files beside it.

    `grid`, rows and columns of tokens, is needed if they are not square, `image_size` for models
    that accept any size. UserError if sizes cannot be inferred, or are inconsistent.
    """
    params, kind = stored.params, stored.kind
    model = infer_model(params, kind, stored.conventions)
    if MODELS[kind].input == "text":
        length = num_tokens(params, kind) or 0
        return Description(model, (length,), None, (), stored.eval_preprocess)
    module, size = create_model(**model), stored.image_size or image_size
    count, pixels = num_tokens(params, kind), module.pixels_per_token
    shape = None
    if count is not None:
        guess = grid_of_images(params, kind, size) or (1, 1)
        prefix = num_prefix_tokens(params, kind)
        grid = find_source_grid((1, count, 1), guess, prefix, grid or known_grid(stored))
    elif size is not None and grid is None:
        grid, shape = module.token_grid(size), size
    elif grid is None:
        raise UserError("without positions no array tells the image size; give --image_size.")
    height, width = shape or (grid[0] * pixels[0], grid[1] * pixels[1])
    # Without that array, or with other axes, the file will not fit.
    num_channels = axis_of(params, table_of(kind).image_kernel(params), 4, 2) or 3
    size_text = f"{height}" if height == width else f"({height}, {width})"
    preprocess, by = stored.eval_preprocess, stored.probabilities_by
    whole = size and (size[0] // pixels[0], size[1] // pixels[1]) == grid
    if not preprocess and stored.ops:
        wanted, own = size if size and whole else (height, width), size_of(stored.ops)
        preprocess = spell(at_size(stored.ops, own or wanted, wanted))
    if preprocess and whole and size != (height, width):  # SigLIP's 384 pixels in patches of 14
        preprocess += f"|corner_crop({height}, {width})"
    description = Description(
        model=model,
        image_shape=(height, width, num_channels),
        grid=grid,
        class_names=stored.class_names if model["num_classes"] else (),
        eval_preprocess=preprocess or f"official_eval({size_text})",
        # The softmax of a single output is always 1.
        probabilities_by="sigmoid" if by == "softmax" and model["num_classes"] == 1 else by,
    )
    return check_description(description, "label_names, id2label")
