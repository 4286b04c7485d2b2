"""Loads weights of any format as a ready-to-use model, or as the teacher of another."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from vit_jax.console import ensure_logging
from vit_jax.data.ops import Decode, ScalingOp
from vit_jax.data.preprocess import check_no_code, parse
from vit_jax.data.sized import size_of, spell
from vit_jax.errors import UserError, naming
from vit_jax.files.paths import reading
from vit_jax.hardware.devices import quiet_libtpu
from vit_jax.inference.class_order import match_classes
from vit_jax.inference.images import at_image_size, input_range
from vit_jax.inference.model import Model
from vit_jax.models.create import VARIANTS, create_model
from vit_jax.models.description import Description
from vit_jax.models.flexible import at_patch_size, check_any_shape
from vit_jax.parameters.table import abstract_params
from vit_jax.patches import Patches
from vit_jax.pretrained.fit.adapt import adapt_params
from vit_jax.pretrained.formats.stored import Stored
from vit_jax.pretrained.load import read_source, split_part
from vit_jax.trees import flatten_names, unflatten_names
from vit_jax.wording import unsigned

# Attributes of how a model is trained and computed, not of what it is.
_TRAINING = ("remat", "scan", "dtype", "attention", "position_stddev")


def load_model(
    source: str | os.PathLike[str],
    *,
    image_size: int | tuple[int, int] | None = None,
    patch_size: int | None = None,
    num_heads: int | None = None,
    grid: tuple[int, int] | None = None,
    posemb: str = "auto",
    dtype: str | type | np.dtype = "float32",
    preprocess: str = "",
) -> Model:
    """Loads weights of any format together with their model.

    Sizes come from the files beside the weights (our `model.json`, a `config.json`), from the zoo,
    or from the shapes of the arrays. The head is kept.

    Args:
      source: see `vit_jax.pretrained.load.read_source`.
      image_size: side in pixels, or (height, width), if different from the weights' own; position
        embeddings are interpolated.
      patch_size: in pixels, if different from the weights' own: for those of FlexiViT. Of a run
        with `train_step.patch_sizes` the first is the default.
      num_heads: of the attention, if not stored in the file.
      grid: rows and columns of the file's tokens, if not square.
      posemb: interpolation of positions, a key of `resize.METHODS`; `auto`: as the library whose
        weights they are does it.
      dtype: of the computation, `float32` or `bfloat16` (or the type itself).
      preprocess: ops from an image to the input, replacing the weights' own.

    Raises:
      UserError: see `read_source`; also if arrays are missing, sizes are inconsistent, or
        the weights' own ops are Python functions: files must not run code.
    """
    quiet_libtpu()
    ensure_logging(to_stderr=True)
    stored = read_source(source, num_heads=num_heads, grid=grid)
    size: Any = image_size
    if size is not None:
        size = tuple(size) if np.ndim(size) else (int(size), int(size))
    own = stored.description.patch_size if stored.description else None
    patch_size = own if patch_size is None else patch_size
    sizes = size, patch_size
    module, description, source_grid = _create(str(source), stored, grid, *sizes, dtype, preprocess)
    if stored.similarity:
        description = dataclasses.replace(description, similarity=stored.similarity)
    with reading(f"the description of {source}"):
        like = flatten_names(abstract_params(module, description.image_shape))
    logging.info("Preprocessing: %s", description.eval_preprocess)
    params, report = adapt_params(
        stored.params,
        like,
        kinds=(stored.kind, description.model["name"]),
        grid=description.position_grid,
        source_grid=source_grid,
        reset_head=False,
        posemb=posemb,
        source_posemb=stored.posemb if patch_size is None else "siglip2",  # FlexiViT's, too
        resize_patches=patch_size is not None,
        dropped=stored.dropped,
        changed=stored.changed,
    )
    return Model(
        module=module,
        params=unflatten_names(params),
        description=description,
        format=stored.format,
        source=unsigned(str(source)),
        report=report,
        load_texts=functools.cache(
            functools.partial(load_model, f"{split_part(source)[0]}#txt", dtype=dtype)
        ),
    )


def _create(
    source: str,
    stored: Stored,
    grid: tuple[int, int] | None,
    size: tuple[int, int] | None,
    patch_size: int | None,
    dtype: Any,
    preprocess: str,
) -> tuple[Any, Description, tuple[int, int] | None]:
    """The module, its description for images of `size`, and the grid of the file's own tokens."""
    if (description := stored.description) is None:
        from vit_jax.pretrained.infer import infer_description  # for files of other projects

        with naming(source):
            at = size if patch_size is None else None
            description = infer_description(stored, grid=grid, image_size=at)
    grid, image_shape = description.position_grid, description.image_shape
    sizes = {key: value for key, value in description.model.items() if key not in _TRAINING}
    with reading(f"the description of {source}"):
        module = create_model(**sizes, dtype=dtype)
        if patch_size is not None:
            taken: Any = size or image_shape[:2]
            with naming(f"--patch_size={patch_size}"):
                module, _ = at_patch_size(module, taken, patch_size)
        own = description.eval_preprocess
        own = own or (f"official_eval({image_shape[:2]})" if grid else "")
        # Every attribute, including those that a description leaves at their defaults.
        model = attributes(module, sizes["name"])
        description = dataclasses.replace(description, model=model, eval_preprocess=own)
        if patch_size is not None:
            tokens = module.token_grid(taken)
            description = dataclasses.replace(description, grid=tokens, patch_size=None)
        if not preprocess:
            check_no_code(source, own)
        if size is not None and not preprocess and own and parse(own).patchify:
            text = "the model takes images in shapes of their own"
            raise UserError(f"--image_size={size}: {text}; --preprocess sets how many patches.")
        if size is not None and grid is None:
            raise UserError(f"--image_size={size}: {source} takes texts, not images.")
        named = size_of(stored.ops or ()) if not stored.lacks else None
        if size is not None and size != image_shape[:2]:
            description = at_image_size(description, size)
        elif size is None and named and named != image_shape[:2]:
            ours, theirs = ("x".join(map(str, sides)) for sides in (image_shape[:2], named))
            text = f"{source}: images of {ours} pixels, as its positions; its settings of images"
            text += f" say {theirs} (--image_size={named[0]},{named[1]})"
            logging.warning("%s.", text)
        if preprocess:
            description = dataclasses.replace(description, eval_preprocess=preprocess)
        if grid is not None and parse(description.eval_preprocess).patchify:
            with naming(source):
                check_any_shape(module)
            own_grid = module.position_grid or description.grid
            module = module.clone(position_grid=own_grid)
            sizes = {**description.model, "position_grid": own_grid}
            description = dataclasses.replace(description, model=sizes)
    return module, description, grid


def attributes(module: Any, name: str) -> dict[str, Any]:
    """Keyword arguments of `create_model` that give `module`."""
    fields = (field.name for field in dataclasses.fields(module))
    left_out = ("parent", "name", *_TRAINING)
    return {"name": name, **{f: getattr(module, f) for f in fields if f not in left_out}}


class Teacher(NamedTuple):
    """A model whose predictions another one learns."""

    module: Any  # a linen module
    logits: Callable[[Any, jax.Array], jax.Array]  # (params, images as in the data) -> [B, K]
    params: Any  # on the host


def load_teacher(
    key: str,
    source: str,
    *,
    image_shape: tuple[int, ...],
    class_names: Sequence[str],
    dtype: str,
    preprocess: str = "",
) -> Teacher:
    """Loads a model of any format as teacher for images of that shape and these classes.

    Args:
      key: config key, for errors.
      image_shape: [H, W, C]; position embeddings are interpolated.
      class_names: of the data, in the order of the teacher's logits.
      preprocess: of the data, which may scale pixels differently.

    UserError: see `load_model`; also if channels or classes do not match the data.
    """
    model = _load_for(key, source, image_shape, dtype)
    own = model.description
    with naming(f"{key}={source!r}"):
        outputs = match_classes(class_names, own.class_names, own.model["num_classes"])
    to_input = _rescaled(own, preprocess)

    def logits(params: Any, images: jax.Array) -> jax.Array:
        return model.module.apply({"params": params}, to_input(images), train=False)[:, outputs]

    return Teacher(model.module, logits, model.params)


def _rescaled(description: Description, preprocess: str) -> Callable[[jax.Array], jax.Array]:
    """Maps images scaled by `preprocess` to the input of a model with its own normalisation."""
    of_data = dataclasses.replace(description, eval_preprocess=preprocess or "decode")
    ranges = (*input_range(of_data), *input_range(description))
    low, high, black, white = (x.reshape(1, 1, 1, -1) for x in ranges)
    if np.all(black == low) and np.all(white == high):
        return lambda images: images

    def rescale(images: Any) -> Any:
        if isinstance(images, Patches):
            pixels = images.pixels.reshape(*images.pixels.shape[:2], -1, low.size)  # [B, N, pp, C]
            return images.replace(pixels=rescale(pixels).reshape(images.pixels.shape))  # type: ignore[attr-defined]
        return (images - low) / (high - low) * (white - black) + black

    return rescale


class Tower(NamedTuple):
    """A model up to its representation, one of several trained together."""

    module: Any  # images -> [B, D]
    width: int  # D
    to_input: Callable[[jax.Array], jax.Array]  # from images as in the data
    params: Any  # on the host; None to initialise randomly
    description: Description  # for a new one without preprocessing


def load_tower(
    key: str, source: str, *, image_shape: tuple[int, ...], dtype: str, preprocess: str = ""
) -> Tower:
    """The weights of `source` for images of that shape, [H, W, C]; or a new model of that variant.

    UserError: see `load_model`; also if channels do not match.
    """
    if source in VARIANTS and not os.path.exists(source):
        op = parse(preprocess or "decode").patchify
        own_shape = {"position_grid": op.square} if op else {}
        module, params = create_model(source, num_classes=0, dtype=dtype, **own_shape), None
        grid, sizes = module.token_grid(image_shape[:2]), VARIANTS[source]["name"]
        description = Description(attributes(module, sizes), image_shape, grid, (), "")
    else:
        model = _load_for(key, source, image_shape, dtype, preprocess)
        own = model.description  # a projection is part of the embedding
        is_projection = own.probabilities_by == "none" and own.values is None
        model = model.without_head() if own.model["num_classes"] and not is_projection else model
        module, params, description = model.module, model.params, model.description
    apply = functools.partial(module.apply, train=False)
    shapes = {"params": abstract_params(module, image_shape)}
    output = jax.eval_shape(apply, shapes, jax.ShapeDtypeStruct((1, *image_shape), np.float32))
    to_input = _rescaled(description, preprocess) if params else lambda images: images
    return Tower(module, output.shape[-1], to_input, params, description)


def _load_for(
    key: str, source: str, image_shape: tuple[int, ...], dtype: str, preprocess: str = ""
) -> Model:
    """`load_model` for training images; if these have their own shapes, with its own positions."""
    with naming(f"{key}={source!r}"):
        if op := parse(preprocess or "decode").patchify:
            own = load_model(source, dtype=dtype).description
            scale = [x for x in parse(own.eval_preprocess).ops if isinstance(x, ScalingOp)]
            op = dataclasses.replace(op, num_tokens=op.lengths[0])
            return load_model(source, dtype=dtype, preprocess=spell([Decode(), op, *scale]))
        model = load_model(source, image_size=(image_shape[0], image_shape[1]), dtype=dtype)
        if (taken := model.description.image_shape) != image_shape:
            raise UserError(f"it takes images of {taken}, but the data have {image_shape}.")
    return model
