"""LoRA: low-rank adapters of query and value ("LoRA", Hu et al., 2106.09685, section 4).

A kernel W of an encoder block gets `lora_a` [D, r] and `lora_b` [r, ...] next to it, and the model
is applied with W + alpha / r * A B instead. So models do not know about adapters, and results
contain only the parameters of the model.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.parameters.table import ParameterTable
from vit_jax.trees import flatten_names, unflatten_names

_KERNEL = re.compile(r"(.*/(?:query|value))/kernel")
# Folded into the key of the random parameters to draw adapters.
_STREAM = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Lora:
    """Adapters of one rank. A is initialized from N(0, 1 / D), B with zeros."""

    rank: int
    alpha: float

    def __post_init__(self) -> None:
        if not self.alpha > 0.0:
            raise UserError(f"lora.alpha={self.alpha} must be positive.")

    def add(self, params: Any, rng: jax.Array, table: ParameterTable) -> Any:
        """`params`, either form of the blocks, with adapters; UserError: no query and value."""
        flat = flatten_names(params)
        adapted = [match[1] for match in map(_KERNEL.fullmatch, flat) if match]
        adapted = [name for name in adapted if table.is_in_block(f"{name}/kernel")]
        if not adapted:
            raise UserError(
                f"lora.rank={self.rank}: the model has no blocks with query and value; set it to 0."
            )
        keys = jax.random.split(jax.random.fold_in(rng, _STREAM), len(adapted))
        for name, key in zip(adapted, keys, strict=True):
            shape = flat[f"{name}/kernel"].shape
            first = int(table.is_stacked(f"{name}/kernel"))  # skips the scan form's layer axis
            layers, width, outputs = shape[:first], shape[first], shape[first + 1 :]
            normal = jax.random.normal(key, (*layers, width, self.rank))
            flat[f"{name}/lora_a"] = normal / math.sqrt(width)
            flat[f"{name}/lora_b"] = jnp.zeros((*layers, self.rank, *outputs))
        return unflatten_names(flat)

    def merge(self, params: Any) -> Any:
        """The model's own parameters, from arrays of any kind."""
        flat = flatten_names(params)
        for name in [name for name in flat if name.endswith("/lora_a")]:
            a, b = flat.pop(name), flat.pop(f"{name[:-1]}b")
            kernel = f"{name.removesuffix('lora_a')}kernel"
            product = (a @ b.reshape(*a.shape[:-2], self.rank, -1)).reshape(flat[kernel].shape)
            flat[kernel] = flat[kernel] + self.alpha / self.rank * product
        return unflatten_names(flat)

    def frozen(self, params: Any, others: str, table: ParameterTable) -> str:
        """`optimizer.freeze` for all but adapters, heads and the objective's; and for `others`."""
        names = map(re.escape, [*table.with_role("head", flatten_names(params)), *table.own])
        pattern = f"(?!(?:{'|'.join(['.*/lora_[ab]', *names])})$).*"
        return f"{pattern}|{others}" if others else pattern
