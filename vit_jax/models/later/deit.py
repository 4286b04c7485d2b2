"""The distilled DeiT of "Training data-efficient image transformers" (2012.12877, section 4).

A Vision Transformer with a second token next to the class token, and a head on each. When trained
with a teacher, the second head learns the teacher's predictions.
"""

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.models import vit
from vit_jax.models.family import FIRST, LAST, Row, dense_rows
from vit_jax.models.layers import head
from vit_jax.patches import Layout


class DistilledVisionTransformer(vit.VisionTransformer):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32: the mean of both heads.

    Attributes are those of `VisionTransformer`; additional parameters are `dist` (the distillation
    token) and `head_dist`. The published models use `gelu="exact"`.
    """

    kind = "deit"
    prefix_tokens = ("cls", "dist")
    head_input = ""  # there are two

    def _pool(self, x: jax.Array, layout: Layout | None, *, train: bool) -> jax.Array:
        """Class and distillation token: [B, N, D] -> [B, 2, D]."""
        del layout, train
        return x[:, :2]

    def _classify(self, x: jax.Array, *, train: bool) -> jax.Array:
        """[B, 2, D] -> [B, K] float32, as timm and Hugging Face combine the heads."""
        del train
        x = jnp.asarray(x, jnp.float32)
        if not self.num_classes:
            return jnp.mean(x, axis=1)  # [B, D]
        logits = head(self.num_classes, self.head_bias_init)(x[:, 0])
        logits_dist = head(self.num_classes, self.head_bias_init, "head_dist")(x[:, 1])
        self.sow("outputs", "class_logits", logits)  # for the distillation loss
        self.sow("outputs", "distillation_logits", logits_dist)
        return (logits + logits_dist) / 2.0


FAMILY = dataclasses.replace(
    vit.FAMILY,
    module=DistilledVisionTransformer,
    title="distilled Vision Transformer (DeiT, arXiv 2012.12877)",
    acronym="DeiT",
    rows=(
        *vit.FAMILY.rows,
        Row("dist", (None, None, "embed"), FIRST, role="token", title="distillation token"),
        *dense_rows("head_dist", "embed", "classes", depth=LAST, role="head"),
    ),
    # The two heads need the two tokens, and no layer in between.
    objective="hard_distillation",
    choices={
        **vit.FAMILY.choices,
        "classifier": ("token",),
        "representation_size": (None,),
        "head_norm": (False,),
    },
)
