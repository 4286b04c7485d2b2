"""What a model computes on the way to its logits, for images or whole datasets.

B: batch, T: tokens (class and distillation token first, then the grid row by row), D: hidden size.

| feature          | shape  | what it is                                                      |
|------------------|--------|-----------------------------------------------------------------|
| `logits`         | [K]    | the head's answer                                               |
| `pre_logits`     | [D]    | what the head sees: pooled tokens after the last layer norm; of |
|                  |        | models with a pre-training head its tanh layer, [R]             |
| `cls`, `dist`    | [D]    | class and distillation token after the last layer norm          |
| `gap`            | [D]    | mean over the grid's tokens after the last layer norm           |
| `tokens`         | [T, D] | all tokens after the last layer norm                            |
| `block_3_tokens` | [T, D] | all tokens after block 3, counted from 0: the residual stream,  |
|                  |        | before any layer norm that follows                              |
| `block_3`        | [D]    | of these the class token, or the mean where there is none       |

A ResNet (`model.name=bit`) has `logits`, `pre_logits` and `gap`, its mean over the feature map,
which is what its head sees.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.errors import UserError, nearest
from vit_jax.evaluators.stream import compile_outputs, stream_outputs
from vit_jax.inference.feature_file import write_rows
from vit_jax.inference.inputs import (
    create_reader,
    example_names,
    file_source,
    find_images,
    input_chain,
)
from vit_jax.inference.load import load_model
from vit_jax.objectives.objective import scale_images
from vit_jax.parameters.names import abstract_params
from vit_jax.parameters.sharding import replicated
from vit_jax.workdir.description import Description

# (params, batch) -> features by name
FeatureFunction = Callable[[Any, dict[str, jax.Array]], dict[str, jax.Array]]

_BLOCK = re.compile(r"block_(\d+)(_tokens)?")


def extract_features(
    source: str,
    images: list[str],
    *,
    features: Iterable[str],
    output: str,
    split: str = "",
    data_dir: str = "",
    label_key: str = "",
    on_bad_image: str = "error",
    batch_size: int = 64,
    **model_options: Any,
) -> dict[str, tuple[int, ...]]:
    """Loads a model and writes features of images into an `.npz`.

    It holds a float32 array [N, ...] per feature; `names` [N], where each image is stored; and for
    a dataset `labels` [N] int32 and `class_names`.

    Args:
      source: of the model, see `load_model`, which takes `model_options`.
      images: with a `split`, the name or folder of one dataset; else image files, and folders of
        which all images are taken.
      features: names of the table above.
      output: path of the `.npz`.
      split, data_dir, label_key, on_bad_image: see `create_dataset`.
      batch_size: over all devices; rounded up to what they can share.

    Returns:
      The shapes of the arrays by feature.

    Raises:
      UserError: an unknown feature, an image that cannot be read, or no place to write to.
    """
    if Path(output).suffix != ".npz" or Path(output).is_dir():
        raise UserError(f"--output={output}: name a file that ends in .npz.")
    model = load_model(source, **model_options)
    names = check_features(model.module, features)
    data = _open_images(
        images,
        split,
        model.description,
        data_dir=data_dir,
        label_key=label_key,
        on_bad_image=on_bad_image,
    ).check()
    others = {"names": np.array(example_names(data.source, data.split))}
    if split:
        others["class_names"] = np.array(data.class_names)
    reader = create_reader(data, batch_size)
    params = jax.device_put(model.params, replicated(reader.mesh))
    function = feature_function(model.module, [*names, "labels"] if split else names)
    image, label = (data.element_spec[key] for key in ("image", "label"))
    images_spec = jax.ShapeDtypeStruct((1, *image.shape), image.dtype)
    batch = {"image": images_spec, "label": np.zeros((1, *label.shape), int)}
    specs = {
        name: jax.ShapeDtypeStruct((data.num_examples, *rows.shape[1:]), rows.dtype)
        for name, rows in jax.eval_shape(function, params, batch).items()
    }
    step = compile_outputs(function, reader.mesh)
    write_rows(Path(output), specs, stream_outputs(step, params, reader), **others)
    shapes = {name: specs[name].shape for name in names}
    logging.info("Wrote %s: %s", output, shapes)
    return shapes


def _open_images(
    images: list[str], split: str, description: Description, **options: Any
) -> Dataset:
    """The dataset of that name, or image files as one without labels."""
    chain, _ = input_chain(description, encoded=not split)
    if not split:
        paths = find_images(images)
        if missing := [path for path in paths if not os.path.exists(path)]:
            raise UserError(f"{missing[0]}: no such file or folder; a dataset needs a --split.")
        return Dataset("images", "", file_source(paths), chain, (), options["on_bad_image"])
    if len(images) != 1:
        raise UserError(f"--split={split} goes with one dataset, not with {len(images)} names.")
    preprocess = description.eval_preprocess
    return create_dataset(name=images[0], split=split, preprocess=preprocess, **options)


def available_features(module: Any) -> list[str]:
    """The features that a model has, by the names of the table above."""
    names = ["logits"] if module.num_classes else []
    if len(module.prefix_tokens) < 2:  # else each of two heads sees a token of its own
        names.append("pre_logits")
    if module.num_layers is None:
        return [*names, "gap"] if module.classifier == "gap" else names
    if module.num_layers:
        names += [*module.prefix_tokens, "gap", "tokens"]
        for i in range(module.num_layers):
            names += [f"block_{i}", f"block_{i}_tokens"]
    return names


def check_features(module: Any, features: Iterable[str], key: str = "--features") -> list[str]:
    """The names without repetition; UserError for one that the model does not have."""
    known = available_features(module)
    names = list(dict.fromkeys(name.strip() for name in features if name.strip()))
    listing = ", ".join(name for name in known if not _BLOCK.fullmatch(name))
    if module.num_layers:
        last = module.num_layers - 1
        listing += f", block_0 to block_{last}, block_0_tokens to block_{last}_tokens"
    if not names:
        raise UserError(f"{key} is empty; this model has {listing}.")
    for name in names:
        if name not in known:
            raise UserError(
                f"{key}: this model has no {name!r}.{nearest(name, known)} It has {listing}."
            )
    return names


def feature_function(module: Any, names: Sequence[str]) -> FeatureFunction:
    """`(params, batch) -> {name: float32 [B, ...]}`, to be compiled.

    It takes batches with an `image`, as the objectives do, and parameters in the module's form, for
    features of single blocks in loop form. Nothing else is kept of what the model computes.

    Args:
      module: a Vision Transformer or a ResNet.
      names: from `check_features`; also `labels`, the batch's own, int32.
    """
    if any(map(_BLOCK.fullmatch, names)):  # one by one, so that a single one can be kept
        module = module.clone(scan=False, remat="none")
    sources = {name: _module_of(module, name) for name in names if name != "labels"}

    def wanted(submodule: nn.Module, method: str) -> bool:
        return method == "__call__" and submodule.name in sources.values()

    def function(params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        logits, state = module.apply(
            {"params": params},
            scale_images(batch["image"]),
            train=False,
            capture_intermediates=wanted,
            mutable=["intermediates"],
        )
        captured = flatten_dict(state.get("intermediates", {}))
        outputs = {path[-2]: value[0] for path, value in captured.items() if "__call__" in path}
        outputs["logits"] = logits
        values = {name: _feature(module, name, outputs[sources[name]]) for name in sources}
        found = {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
        if "labels" in names:
            found["labels"] = jnp.asarray(batch["label"], jnp.int32)
        return found

    return function


def one_feature(
    module: Any, name: str, image_shape: tuple[int, int, int], key: str = "--feature"
) -> Callable[[Any, Any], jax.Array]:
    """`(params, batch) -> float32 [B, D]`, see `feature_function`.

    Raises:
      UserError: it is unknown, or not one vector per image.
    """
    check_features(module, [name], key)
    function = feature_function(module, [name])
    image = jax.ShapeDtypeStruct((1, *image_shape), jnp.uint8)
    params = abstract_params(module, image_shape)
    rows = jax.eval_shape(function, params, {"image": image})[name]
    if len(rows.shape) != 2:
        raise UserError(f"{key}={name!r} is {rows.shape[1:]} per image, not one vector.")
    return lambda params, batch: function(params, batch)[name]


def _module_of(module: Any, feature: str) -> str:
    """The submodule whose output a feature is made of, or "logits"."""
    if module.num_layers is None and feature == "gap":  # of a ResNet both are one
        return "pre_logits"
    if feature in ("logits", "pre_logits"):
        return feature
    match = _BLOCK.fullmatch(feature)
    return f"encoderblock_{match[1]}" if match else "Transformer"


def _feature(module: Any, name: str, output: jax.Array) -> jax.Array:
    if name == "pre_logits":
        return nn.tanh(output) if module.representation_size is not None else output
    prefix = module.prefix_tokens
    if name == "logits" or name.endswith("tokens") or module.num_layers is None:
        return output
    if name in prefix:
        return output[:, prefix.index(name)]  # [B, D]
    if name == "gap" or not prefix:
        # Averages of many tokens are taken in float32 whatever the model computes in.
        return jnp.mean(output[:, len(prefix) :], axis=1, dtype=jnp.float32)  # [B, D]
    return output[:, 0]  # [B, D], the class token after a block
