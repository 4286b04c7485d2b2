"""Attention, queries, keys, values and tokens of every block, on demand.

B: batch, L: blocks, N: tokens (class and distillation token first, then the grid row by row), D:
hidden size, d: width of a head.

| name                    | shape             | what it is                                       |
|-------------------------|-------------------|--------------------------------------------------|
| `attention`             | [L, B, heads, N, N] | softmax(q k^T / sqrt(d)): a row for each query |
| `query`, `key`, `value` | [L, B, N, heads, d] | of equation 5, with their biases               |
| `tokens`                | [L, B, N, D]      | after each block: the residual stream, before    |
|                         |                   | the next layer norm                              |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.models.create import clone_with, family_of

INSIDE = ("attention", "query", "key", "value", "tokens")


def can_show(module: Any) -> tuple[str, ...]:
    """The names of the table above that are available for a model."""
    family = family_of(module)
    return INSIDE if family.attention else ("tokens",) if family.blocks else ()


def look(
    model: Any, params: Any, images: Any, what: str | Sequence[str] = "attention"
) -> dict[str, jax.Array]:
    """The arrays of the table above, by name; UserError: unknown, or not of this model.

    The weights are computed by the reference attention, whichever is used in training: a fused
    kernel never materializes them. The attention pooling of `classifier=map` is not included.

    Args:
      model: of any kind, loop or scan form.
      params: in its form.
      images: as it takes them, [B, H, W, C].
      what: a name of the table, or several.
    """
    what, family = (what,) if isinstance(what, str) else what, family_of(model)
    for name in what:
        check_known("what", name, INSIDE)
        if name not in can_show(model):
            has = " and ".join(can_show(model)) or "no blocks"
            raise UserError(f"this model has no {name}; it has {has}.")
    model = clone_with(model, attention="reference", remat="none")
    is_stacked = getattr(model, "scan", False)
    numbers = [""] if is_stacked else [f"_{i}" for i in range(model.num_layers)]
    blocks = [f"{family.block_name}{number}" for number in numbers] if "tokens" in what else []
    _, captured = capture(model, params, images, {*what, *blocks})
    tails = {"tokens": "__call__", "attention": f"{family.attention}/attention_weights"}

    def of_blocks(name: str) -> jax.Array:
        tail = tails.get(name, f"{family.attention}/{name}/__call__")
        values = [captured[f"{family.blocks}{number}/{tail}"] for number in numbers]
        return values[0] if is_stacked else jnp.stack(values)

    return {name: of_blocks(name) for name in what}


def capture(
    model: Any, params: Any, inputs: Any, names: Collection[str], **options: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The model's output, and by `path/__call__` the outputs of its submodules with these names.

    `options` are of its call, by default in evaluation.
    """
    outputs, state = model.apply(
        {"params": params},
        inputs,
        **{"train": False, **options},
        capture_intermediates=lambda part, method: method == "__call__" and part.name in names,
        mutable=["intermediates"],
    )
    captured = flatten_dict(state.get("intermediates", {}), sep="/")
    return outputs, {name: values[0] for name, values in captured.items()}
