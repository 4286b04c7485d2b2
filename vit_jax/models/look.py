"""What happens inside the blocks of a model, on demand.

B: batch, L: blocks, N: tokens (class and distillation token first, then the grid row by row), D:
hidden size, d: width of a head.

| name                    | shape             | what it is                                       |
|-------------------------|-------------------|--------------------------------------------------|
| `attention`             | [L, B, heads, N, N] | softmax(q k^T / sqrt(d)): a row for each query |
| `query`, `key`, `value` | [L, B, N, heads, d] | of equation 5, with their biases               |
| `tokens`                | [L, B, N, D]      | after each block: the residual stream, before    |
|                         |                   | any layer norm that follows                      |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError, check_known

PROJECTIONS = ("query", "key", "value")
INSIDE = ("attention", *PROJECTIONS, "tokens")
_ATTENTION = "MultiHeadDotProductAttention_0"


def look(
    model: Any, params: Any, images: Any, what: str | Sequence[str] = "attention"
) -> dict[str, jax.Array]:
    """The arrays of the table above, by name.

    The weights are those of the reference attention, whichever trains: a kernel has none to show.
    Of a head that pools by attention (`classifier=map`) nothing is shown.

    Args:
      model: a Vision Transformer, of any head, loop or scan form.
      params: in its form.
      images: as it takes them, [B, H, W, C].
      what: a name of the table, or several.

    Raises:
      UserError: an unknown name, or a model without blocks of attention.
    """
    what = (what,) if isinstance(what, str) else what
    for name in what:
        check_known("what", name, INSIDE)
    if not getattr(model, "num_layers", None):
        raise UserError("this model has no blocks of attention to look into.")
    model = model.clone(attention="reference", remat="none")

    def wanted(module: nn.Module, method: str) -> bool:
        is_block = (module.name or "").startswith("encoderblock") and "tokens" in what
        return method == "__call__" and (is_block or module.name in what)

    _, state = model.apply(
        {"params": params},
        images,
        train=False,
        capture_intermediates=wanted,
        mutable=["intermediates"],
    )

    def of_block(name: str, block: str) -> jax.Array:
        captured = state["intermediates"]["Transformer"][block]
        if name == "attention":
            return captured[_ATTENTION]["attention_weights"][0]
        return (captured if name == "tokens" else captured[_ATTENTION][name])["__call__"][0]

    if model.scan:  # stacked already
        return {name: of_block(name, "encoderblock") for name in what}
    blocks = [f"encoderblock_{i}" for i in range(model.num_layers)]
    return {name: jnp.stack([of_block(name, each) for each in blocks]) for name in what}
