"""Blocks of one shape, one after the other: as so many programs, or as the body of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from vit_jax.models.layers import REMAT_POLICIES, drop_rates


def apply_blocks(
    create_block: Callable[..., nn.Module],
    x: jax.Array,
    *,
    name: str,
    num_layers: int,
    stochastic_depth_rate: float,
    remat: str,
    scan: bool,
    train: bool,
) -> jax.Array:
    """Blocks `NAME_0`, `NAME_1`, ... of the module in whose compact `__call__` this is called.

    With `scan` XLA compiles one block as the body of a loop; its parameters are those of the loop
    form stacked along a leading axis (`parameters.names.stack_blocks`).

    Args:
      create_block: called with `name`; the block is called as `block(x, drop_rate, train=train)`.
      x: [B, N, D], as is the result.
      stochastic_depth_rate: of the last block, see `layers.drop_rates`.
      remat: one of `REMAT_POLICIES`.
    """

    def apply_block(block: nn.Module, x: jax.Array, drop_rate: Any) -> jax.Array:
        return block(x, drop_rate, train=train)

    if remat != "none":
        # Inside a scan the loop itself keeps XLA from merging the two forward passes.
        apply_block = nn.remat(apply_block, prevent_cse=not scan, policy=REMAT_POLICIES[remat])
    rates = drop_rates(stochastic_depth_rate, num_layers)  # [L], or None
    if not scan:
        for i in range(num_layers):
            block = create_block(name=f"{name}_{i}")
            x = apply_block(block, x, None if rates is None else rates[i])
        return x
    loop = nn.scan(
        lambda block, x, drop_rate: (apply_block(block, x, drop_rate), None),
        variable_axes={"params": 0, "intermediates": 0},
        split_rngs={"params": True, "dropout": True},
        length=num_layers,
    )
    x, _ = loop(create_block(name=name), x, rates)
    return x
