"""What a model file says about its models.

`create.MODELS` maps the name of a kind to its `Family`. Sharding, loading, features, pictures and
exports ask that; no other file knows a model's name, or that of a parameter.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn

# Depth of a row: before the first block, in a block (or in the loop of blocks), after the last.
FIRST, BLOCK, LAST = "first", "block", "last"

Shapes = Mapping[str, Any]  # flat names to arrays, or to what has a shape; loop form of the blocks


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of parameter.

    Its role, if any: `image` is the kernel that convolves the image; `patches` the one that makes
    tokens of the image, or of what comes after `image`; `vocabulary` those of a text's tokens;
    `token` stands before the grid of patches;
    `positions` are the position embeddings; `head` is replaced in fine-tuning; `pre_logits` is the
    layer below the head; `training` exists only during some training task.
    """

    pattern: str  # of the whole name in the model's own tree; a group `block` holds its number
    # Logical axis of each dimension but the layers' of the scan form; see parameters/sharding.py.
    axes: tuple[str | None, ...]
    depth: str = BLOCK  # for layer-wise learning rates
    role: str = ""
    title: str = ""  # of a token, in words


# One head.
HEAD = (
    Row("head/kernel", ("embed", "classes"), LAST, role="head"),
    Row("head/bias", ("classes",), LAST, role="head"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model.

    Its module is called with images [B, H, W, C] and `train`, and has, besides `num_classes` and
    `dtype`, these attributes: `prefix_tokens` (the parameters that stand before the grid of
    tokens), `head_input` (the submodule whose output the head sees, [B, D]; "" where two heads see
    two), `logits_per_token`, `pixels_per_token` (height and width of the part of the image that
    becomes a token, or a cell of the last feature map) and `token_grid(image_size)` (rows and
    columns of tokens; UserError where the images do not fit).

    Attributes:
      module: of linen.
      input: the key of an example that it is called with: `image`, or `text` (int32 [B, T], without
        the attributes above but `prefix_tokens`, `head_input` and `logits_per_token`).
      title: for model cards.
      acronym: what a variant is called by, as in ViT-B/16.
      rows: of all parameters.
      sizes: attributes by the name of a variant, such as `B/16`.
      infer: the attributes that the shapes of a foreign file's arrays tell, in our names; None for
        one that they do not tell, where there has to be one.
      choices: the known values of attributes.
      check: raises UserError for attributes that do not go together.
      blocks: what stands before the number of a block; the scan form, if there is one (an attribute
        `scan`), has no number. "": the model has no blocks of one shape.
      attention: the submodule of a block that attends, one of linen's; "" where none does.
      tokens: the submodule whose output is all tokens after the last norm, [B, N, D]; "": none.
      sequence: the parameter, and its axis, that is as long as there are tokens; None: any number.
      conventions: attributes that change what the same parameters compute.
      head_conventions: those that change how the head is reached.
    """

    module: type[nn.Module]
    title: str
    acronym: str
    input: str = "image"
    rows: tuple[Row, ...]
    sizes: Mapping[str, Mapping[str, Any]]
    infer: Callable[[Shapes], dict[str, Any]]
    choices: Mapping[str, Iterable[Any]] = dataclasses.field(default_factory=dict)
    check: Callable[[Any], None] = lambda _: None
    blocks: str = ""
    attention: str = ""
    tokens: str = ""
    sequence: tuple[str, int] | None = None
    conventions: tuple[str, ...] = ()
    head_conventions: tuple[str, ...] = ()

    @property
    def keys(self) -> dict[str, dataclasses.Field[Any]]:
        """The attributes that a config sets."""
        handed_over = ("parent", "name", "num_classes", "dtype")
        fields = dataclasses.fields(self.module)  # type: ignore[arg-type]
        return {field.name: field for field in fields if field.name not in handed_over}

    @property
    def block_name(self) -> str:
        """`blocks` without the modules around them."""
        return self.blocks.rpartition("/")[2]


def axis_of(shapes: Shapes, name: str, ndim: int, axis: int) -> int | None:
    """Length of an axis; None where there is no such array or it has other axes."""
    shape = shapes[name].shape if name in shapes else ()
    return shape[axis] if len(shape) == ndim else None


def layer_width(shapes: Shapes, layer: str) -> int | None:
    """Outputs of a dense layer, of which the kernel or the bias may be missing."""
    return axis_of(shapes, f"{layer}/kernel", 2, 1) or axis_of(shapes, f"{layer}/bias", 1, 0)


def patch_size_of(shapes: Shapes, kernel: str) -> int | tuple[int, int] | None:
    """Of the patches that a kernel [h, w, C, D] cuts; None where it is missing or damaged."""
    height, width = (axis_of(shapes, kernel, 4, axis) for axis in (0, 1))
    if height is None or width is None:
        return None
    return height if height == width else (height, width)


def count_blocks(shapes: Shapes, blocks: str) -> int | None:
    """How many blocks there must be; a damaged name may hold any number."""
    found = (re.match(rf"{blocks}_(\d+)/", name) for name in shapes)
    return min(max([0, *(int(match[1]) + 1 for match in found if match)]), len(shapes)) or None
