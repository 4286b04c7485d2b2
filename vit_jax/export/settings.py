"""What one may ask of an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from vit_jax.errors import UserError, check_known

FORMATS = ("stablehlo", "onnx")
INPUTS = ("float", "uint8")
OUTPUTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "logits": lambda logits: logits,
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
}
INPUT_NAME = "images"


@dataclasses.dataclass(frozen=True)
class ExportSettings:
    """How a model is written.

    Attributes:
      format: one of `FORMATS`.
      input: `float`, scaled as the model's preprocessing scales, or `uint8`, raw pixels.
      output: `logits`, or probabilities by `softmax` or `sigmoid` (the loss it was trained with).
      batch: number of images; None leaves it free.
    """

    format: str
    input: str = "float"
    output: str = "logits"
    batch: int | None = None

    def __post_init__(self) -> None:
        check_known("--format", self.format, FORMATS)
        check_known("--input", self.input, INPUTS)
        check_known("--output", self.output, OUTPUTS)
        if self.batch is not None and self.batch < 1:
            raise UserError(f"--batch={self.batch} must be at least 1, or free.")

    @property
    def output_name(self) -> str:
        return "logits" if self.output == "logits" else "probabilities"

    @property
    def unit(self) -> str:
        """What differences are counted in."""
        return "standard deviations of the logits" if self.output == "logits" else "(absolute)"

    def images(self, image_shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """Shape and type of the input; the batch is symbolic where it is free."""
        batch: Any = self.batch
        if batch is None:
            (batch,) = jax.export.symbolic_shape("b")
        dtype = jnp.uint8 if self.input == "uint8" else jnp.float32
        return jax.ShapeDtypeStruct((batch, *image_shape), dtype)
