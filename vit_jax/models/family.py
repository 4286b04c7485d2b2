"""What a model file declares about its models.

`create.MODELS` maps the name of a kind to its `Family`. Sharding, loading, features, pictures and
exports use the family; no other file knows the name of a model or of a parameter.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn

from vit_jax.models.tokens import pixels_per_token, token_grid

# Depth of a row: before the first block, in a block (or the scan over blocks), after the last.
FIRST, BLOCK, LAST = "first", "block", "last"

Shapes = Mapping[str, Any]  # flat names to anything with a shape; one name per block (no scan)


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of parameter.

    Its role, if any: `image` is the kernel of the convolution on the image; `patches` the one that
    makes tokens of the image or of the output of `image`; `vocabulary` embeds the tokens of a text;
    `token` precedes the grid of patches; `positions` are the position embeddings [1, N, D], with
    rows for these tokens if `of_tokens`, `axis_positions` those along an axis of the grid, [n, d],
    `offsets` relative ones of all N tokens, [2 N - 1, d], `offset_grid` by row and column,
    [2 h - 1, 2 w - 1, d]; `head` is replaced in fine-tuning; `pre_logits` is the layer below it;
    `training` exists only for some training objective.
    """

    pattern: str  # matches the full name in the model's own tree; group `block` is its number
    # Logical axis of each dimension, without the scan's layer axis; see parameters/sharding.py.
    axes: tuple[str | None, ...]
    depth: str = BLOCK  # for layer-wise learning rates
    role: str = ""
    title: str = ""  # of a token, for people
    of_tokens: bool = True
    is_statistic: bool = False  # of a batch norm: measured in training, without a gradient


def dense_rows(
    layer: str, *axes: str | None, depth: str = BLOCK, role: str = ""
) -> tuple[Row, Row]:
    """Kernel with these axes, and bias with the last one."""
    kernel = Row(f"{layer}/kernel", axes, depth, role)
    return kernel, dataclasses.replace(kernel, pattern=f"{layer}/bias", axes=axes[-1:])


# A single head.
HEAD = dense_rows("head", "embed", "classes", depth=LAST, role="head")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model.

    Its module is called with images [B, H, W, C] and `train`, and has, besides `num_classes` and
    `dtype`, these attributes: `prefix_tokens` (the parameters that precede the grid of tokens),
    `head_input` (the submodule whose output is the head's input, [B, D]; "" if there are two heads
    with two inputs), `outputs_per` (`image`, `token` or `pixel`), `pixels_per_token` (height and
    width of the image region of a token, or of a cell of the last feature map) and
    `token_grid(image_size)` (rows and columns of tokens; UserError if the images do not fit).

    Attributes:
      module: a linen module class.
      input: key of the example that is its input: `image`, or `text` (int32 [B, T]).
      title: for model cards.
      acronym: prefix of variant names, as in ViT-B/16.
      rows: of all parameters.
      infer: the attributes inferred from the shapes of a foreign file's arrays, in our names; None
        for a required one that cannot be inferred.
      choices: the supported values of attributes.
      check: raises UserError for attributes that are incompatible.
      blocks: name of a block without its number; the scan form, if there is one (an attribute
        `scan`), has no number. "": no blocks of equal shape.
      attention: the submodule of a block that is linen's attention; "" if there is none.
      tokens: the submodule whose output is all tokens after the last norm, [B, N, D]; "": none.
      last_norm: (model) -> that norm, named as within `tokens`; None if a model has none there.
      sequence: the parameter, and its axis, whose length is the number of tokens; None: any number.
      any_shape: whether it takes images in shapes of their own (`vit_jax/patches.py`).
      conventions: attributes that change the output for the same parameters.
      head_conventions: those that change the head's input.
      objective: the one that trains it from scratch.
      scale: of a model with these attributes, for recipes: 0; from 1 on blocks are recomputed and
        scanned, from 2 on the state is split over devices.
    """

    module: type[nn.Module]
    title: str
    acronym: str
    input: str = "image"
    rows: tuple[Row, ...]
    infer: Callable[[Shapes], dict[str, Any]]
    choices: Mapping[str, Iterable[Any]] = dataclasses.field(default_factory=dict)
    check: Callable[[Any], None] = lambda _: None
    blocks: str = ""
    attention: str = ""
    tokens: str = ""
    last_norm: Callable[[Any], nn.Module | None] = lambda _: None
    sequence: tuple[str, int] | None = None
    any_shape: bool = False
    conventions: tuple[str, ...] = ()
    head_conventions: tuple[str, ...] = ()
    objective: str = "classification"
    # A Transformer's: L is 1; So400m, H, g and G are 2.
    scale: Callable[[Mapping[str, Any]], int] = lambda model: sum(
        model["hidden_size"] >= width for width in (1024, 1152)
    )

    @functools.cached_property
    def keys(self) -> dict[str, dataclasses.Field[Any]]:
        """The attributes that a config can set."""
        handed_over = ("parent", "name", "num_classes", "dtype")
        fields = dataclasses.fields(self.module)  # type: ignore[arg-type]
        return {field.name: field for field in fields if field.name not in handed_over}

    @property
    def block_name(self) -> str:
        """`blocks` without its parent modules."""
        return self.blocks.rpartition("/")[2]


class ModelBase(nn.Module):
    """What most models have of what `Family` asks for, and attributes that several have.

    Attributes:
      num_classes: number of logits, or width of a text's embedding; 0 returns the representation
        instead.
      patch_size: side of a patch in pixels, or (height, width).
      head_bias_init: constant; -10 if the loss is a sigmoid over many classes.
      gelu: `tanh`, or `exact`.
      layer_norm_epsilon: of all norms.
      attention: implementation of the attention, see `kernels/attention.py`.
      remat: one of `REMAT_POLICIES`.
      scan: compile the blocks as one loop.
      dtype: of the computation; parameters, softmax, norms' statistics, means over places and
        logits are float32.
    """

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        return ()

    @property
    def head_input(self) -> str:
        return "pre_logits"

    @property
    def outputs_per(self) -> str:
        return "image"

    @property
    def stem(self) -> tuple[Any, Any]:
        """The patch size, and the stages of convolutions below; None for what there is not."""
        return getattr(self, "patch_size", None), getattr(self, "resnet_layers", None)

    @property
    def pixels_per_token(self) -> tuple[int, int]:
        return pixels_per_token(*self.stem)

    @nn.nowrap
    def token_grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        return token_grid(image_size, *self.stem)


def axis_of(shapes: Shapes, name: str, ndim: int, axis: int) -> int | None:
    """Length of an axis; None if the array is missing or has another rank."""
    shape = shapes[name].shape if name in shapes else ()
    return shape[axis] if len(shape) == ndim else None


def layer_width(shapes: Shapes, layer: str) -> int | None:
    """Outputs of a dense layer whose kernel or bias may be missing."""
    return axis_of(shapes, f"{layer}/kernel", 2, 1) or axis_of(shapes, f"{layer}/bias", 1, 0)


def patch_size_of(shapes: Shapes, kernel: str) -> int | tuple[int, int] | None:
    """Of a kernel [h, w, C, D] on patches; None if it is missing or corrupt."""
    height, width = (axis_of(shapes, kernel, 4, axis) for axis in (0, 1))
    if height is None or width is None:
        return None
    return height if height == width else (height, width)


def count_blocks(shapes: Shapes, blocks: str) -> int | None:
    """Number of blocks, limited by the number of arrays: a corrupt name may hold any number."""
    matches = (re.match(rf"{blocks}_(\d+)/", name) for name in shapes)
    return min(max([0, *(int(match[1]) + 1 for match in matches if match)]), len(shapes)) or None
