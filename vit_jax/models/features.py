"""Intermediate features of a model.

B: batch, T: tokens (class and distillation token and registers first, then the grid's P patches row
by row), D: hidden size.

| feature          | shape  | what it is                                                      |
|------------------|--------|-----------------------------------------------------------------|
| `logits`         | [K]    | the head's answer; of a CLIP tower its projected embedding      |
| `pre_logits`     | [D]    | the head's input: pooled tokens after the last layer norm; for  |
|                  |        | models with a pre-training head, its tanh layer, [R]            |
| `cls`, `dist`,   | [D]    | class and distillation token and each register after the last   |
| `register_0`     |        | layer norm                                                      |
| `gap`            | [D]    | mean over the grid's tokens after the last layer norm           |
| `tokens`         | [T, D] | all tokens after the last layer norm                            |
| `patches`        | [P, D] | those of the grid                                               |
| `block_3_tokens` | [T, D] | all tokens after block 3, counted from 0: the residual stream,  |
|                  |        | before the next layer norm                                      |
| `block_3_normed` | [T, D] | these after the model's last norm, as                           |
|                  |        | `get_intermediate_layers(norm=True)` of DINOv2                  |
| `block_3`        | [D]    | the class token of `block_3_tokens`, or `block_3_gap` without   |
|                  |        | one                                                             |
| `block_3_gap`    | [D]    | the mean over the grid's of `block_3_tokens`                    |

Of images in shapes of their own, tokens and patches after the real ones are 0.

A model without tokens (a ResNet) has `logits`, `pre_logits` and `gap`, its mean over the feature
map, which is the head's input; one without blocks of equal shape has no `block_3`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models.create import clone_with, family_of
from vit_jax.models.layers import token_mean
from vit_jax.models.look import capture
from vit_jax.patches import Layout, layout_of
from vit_jax.wording import nearest

_BLOCK = re.compile(r"block_(\d+)(_tokens|_gap|_normed)?")


def available_features(module: Any) -> list[str]:
    """The features of a model, by the names of the table above."""
    family = family_of(module)
    names = ["logits"] if module.num_classes else []
    names += ["pre_logits"] if module.head_input else []
    names += [*module.prefix_tokens, "gap"]
    names += ["tokens"] if family.tokens else []
    names += ["patches"] if family.tokens and family.input == "image" else []
    return names + [f"block_{i}{end}" for i in range(_num_blocks(module)) for end in _ends(module)]


def _num_blocks(module: Any) -> int:
    return module.num_layers if family_of(module).blocks else 0


def _ends(module: Any) -> list[str]:
    """Of the names of a block's features."""
    return ["", "_tokens", "_gap", *(["_normed"] if family_of(module).last_norm(module) else [])]


def check_features(module: Any, features: Iterable[str], key: str = "--features") -> list[str]:
    """The names without duplicates; UserError for a feature that the model does not have."""
    known = available_features(module)
    names = list(dict.fromkeys(name.strip() for name in features if name.strip()))
    shown = [name for name in known if not _BLOCK.fullmatch(name)]
    if last := _num_blocks(module):
        shown += [f"block_0{end} to block_{last - 1}{end}" for end in _ends(module)]
    listing = ", ".join(shown)
    if not names:
        raise UserError(f"{key} is empty; this model has {listing}.")
    for name in names:
        if name not in known:
            raise UserError(
                f"{key}: this model has no {name!r}.{nearest(name, known)} It has {listing}."
            )
    return names


def feature_function(
    module: Any, names: Sequence[str]
) -> Callable[[Any, jax.Array], dict[str, jax.Array]]:
    """`(params, images) -> {name: float32 [B, ...]}`, to be jitted.

    Images are as the model takes them, `names` from `check_features`; parameters have the module's
    form, but the loop form for features of single blocks. Other values are not kept.
    """
    family = family_of(module)
    if any(map(_BLOCK.fullmatch, names)):  # unrolled, so that single blocks can be captured
        module = clone_with(module, scan=False, remat="none")
    sources = {name: _module_of(module, name) for name in names}

    def function(params: Any, images: jax.Array) -> dict[str, jax.Array]:
        logits, captured = capture(module, params, images, sources.values())
        outputs = {path.split("/")[-2]: v for path, v in captured.items() if "__call__" in path}
        outputs["logits"] = logits
        layout = layout_of(images)
        values = {name: _feature(module, name, outputs[sources[name]], layout) for name in sources}
        norm: Any = family.last_norm(module)
        for name in [name for name in values if name.endswith("_normed")]:
            values[name] = norm.apply({"params": params[family.tokens][norm.name]}, values[name])
        return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}

    return function


def vector_feature(
    module: Any, name: str, image_shape: tuple[int, ...], params: Any, key: str = "--feature"
) -> Callable[[Any, jax.Array], jax.Array]:
    """`(params, images) -> float32 [B, D]`, see `feature_function`; of `params` shapes suffice.

    UserError: `key` names an unknown feature, or not one vector per image of [H, W, C].
    """
    check_features(module, [name], key)
    function = feature_function(module, [name])
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    rows = jax.eval_shape(function, params, images)[name]
    if len(rows.shape) != 2:
        raise UserError(f"{key}={name!r} has shape {rows.shape[1:]} per image; choose a vector.")
    return lambda params, images: function(params, images)[name]


def _module_of(module: Any, feature: str) -> str:
    """The submodule whose output yields a feature, or "logits"."""
    family, match = family_of(module), _BLOCK.fullmatch(feature)
    if feature == "logits":
        return feature
    if feature == "pre_logits" or not family.tokens:
        return str(module.head_input)
    return f"{family.block_name}_{match[1]}" if match else family.tokens


def _feature(module: Any, name: str, output: jax.Array, layout: Layout | None) -> jax.Array:
    prefix = module.prefix_tokens
    if name in ("logits", "pre_logits") or not family_of(module).tokens:
        return output
    mask = layout.mask(output.shape[1]) if layout else None
    output = output if mask is None else jnp.where(mask[..., None], output, 0.0)
    if name.endswith(("tokens", "normed")):
        return output
    if name == "patches":
        return output[:, len(prefix) :]  # [B, P, D]
    if name in prefix:
        return output[:, prefix.index(name)]  # [B, D]
    if name.endswith("gap") or not prefix:
        # Means over many tokens are computed in float32 whatever the model's dtype.
        return token_mean(output[:, len(prefix) :], layout, jnp.float32)  # [B, D]
    return output[:, 0]  # [B, D], the class token after a block
