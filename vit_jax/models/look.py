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

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.models.create import clone_with, family_of

PROJECTIONS = ("query", "key", "value")
INSIDE = ("attention", *PROJECTIONS, "tokens")


def can_show(module: Any) -> tuple[str, ...]:
    """The names of the table above that are available for a model."""
    family = family_of(module)
    return INSIDE if family.attention else ("tokens",) if family.blocks else ()


def look(
    model: Any, params: Any, images: Any, what: str | Sequence[str] = "attention"
) -> dict[str, jax.Array]:
    """The arrays of the table above, by name.

    The weights are computed by the reference attention, whichever is used in training: a fused
    kernel never materializes them. The attention pooling of `classifier=map` is not included.

    Args:
      model: of any kind, loop or scan form.
      params: in its form.
      images: as it takes them, [B, H, W, C].
      what: a name of the table, or several.

    Raises:
      UserError: an unknown name, or one that is not available for this model.
    """
    what, family = (what,) if isinstance(what, str) else what, family_of(model)
    for name in what:
        check_known("what", name, INSIDE)
        if name not in can_show(model):
            has = " and ".join(can_show(model)) or "no blocks"
            raise UserError(f"this model has no {name}; it has {has}.")
    model = clone_with(model, attention="reference", remat="none")

    def wanted(module: nn.Module, method: str) -> bool:
        is_block = (module.name or "").startswith(family.block_name) and "tokens" in what
        return method == "__call__" and (is_block or module.name in what)

    _, state = model.apply(
        {"params": params},
        images,
        train=False,
        capture_intermediates=wanted,
        mutable=["intermediates"],
    )
    captured = flatten_dict(state["intermediates"], sep="/")

    def of_block(name: str, block: str) -> jax.Array:
        if name == "tokens":
            return captured[f"{block}/__call__"][0]
        inside = "attention_weights" if name == "attention" else f"{name}/__call__"
        return captured[f"{block}/{family.attention}/{inside}"][0]

    if getattr(model, "scan", False):  # stacked already
        return {name: of_block(name, family.blocks) for name in what}
    blocks = [f"{family.blocks}_{i}" for i in range(model.num_layers)]
    return {name: jnp.stack([of_block(name, block) for block in blocks]) for name in what}
