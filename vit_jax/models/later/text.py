"""The text towers of LiT (arXiv 2111.07991) and SigLIP (2303.15343).

Numbers and parameter names are those of big_vision's `text_transformer`. There is no mask: every
token attends to all T tokens, including padding.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models import vit
from vit_jax.models.family import FIRST, HEAD, LAST, Family, ModelBase, Row, Shapes, axis_of
from vit_jax.models.kernels.attention import NAMES
from vit_jax.models.layers import REMAT_POLICIES, IdentityLayer, loop_of

EMBEDDING, POSITIONS, BLOCKS = "Embed_0/embedding", "pos_embedding", "Encoder_0/encoderblock"


class TextTransformer(ModelBase):
    """Texts to embeddings, int32 [B, T] -> [B, num_classes] float32.

    Attributes:
      vocab_size: number of token ids.
      hidden_size, num_layers, mlp_dim, num_heads: as in a Vision Transformer.
      dropout_rate: after every dense layer except query, key and value, and after adding the
        position embeddings.
      pooling: the head's input: the `last` token (SigLIP, whose texts end in an end-of-text id),
        the `first` ([CLS] of LiT), `gap` and `max` over tokens, or `map` (attention pooling).
    """

    num_classes: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    mlp_dim: int
    num_heads: int
    dropout_rate: float = 0.0
    pooling: str = "last"
    gelu: str = "tanh"
    layer_norm_epsilon: float = 1e-6
    attention: str = "auto"
    remat: str = "none"
    scan: bool = False
    dtype: Any = jnp.float32

    kind = "text"

    @nn.compact
    def __call__(self, texts: jax.Array, *, train: bool) -> jax.Array:
        """Token ids, int32 [B, T] -> embeddings [B, E] float32, not normalised."""
        config = vit.BlockConfig.of(self)
        x = nn.Embed(self.vocab_size, self.hidden_size, dtype=self.dtype)(texts)  # [B, T, D]
        init = nn.initializers.normal(1 / math.sqrt(self.hidden_size))
        positions = self.param(POSITIONS, init, (1, *x.shape[1:]))
        x = vit.Encoder(config, **loop_of(self))(x, positions, train=train)
        x = IdentityLayer(name="pre_logits")(self._pool(x, config, train=train))
        x = jnp.asarray(x, jnp.float32)  # [B, D]
        # Not initialized to zero: a zero embedding has no direction.
        return nn.Dense(self.num_classes, name="head")(x) if self.num_classes else x

    def _pool(self, x: jax.Array, config: vit.BlockConfig, *, train: bool) -> jax.Array:
        """[B, T, D] -> [B, D]."""
        if self.pooling == "map":
            return vit.MAPHead(config)(x, train=train)
        if self.pooling in ("gap", "max"):
            return jnp.mean(x, axis=1) if self.pooling == "gap" else jnp.max(x, axis=1)
        return x[:, 0 if self.pooling == "first" else -1]


def infer(shapes: Shapes) -> dict[str, Any]:
    """See `Family.infer`."""
    return {
        "vocab_size": axis_of(shapes, EMBEDDING, 2, 0),
        "hidden_size": axis_of(shapes, EMBEDDING, 2, 1),
        **vit.infer_blocks(shapes, BLOCKS),
        "pooling": "map" if "MAPHead_0/probe" in shapes else "last",
    }


FAMILY = Family(
    module=TextTransformer,
    title="text Transformer (arXiv 2111.07991)",
    acronym="text",
    input="text",
    rows=(
        Row(EMBEDDING, ("vocabulary", "embed"), FIRST, role="vocabulary"),
        Row(POSITIONS, (None, None, "embed"), FIRST),  # not a grid: never interpolated
        *vit.attention_rows(rf"{BLOCKS}(?:_(?P<block>\d+))?"),
        Row("Encoder_0/encoder_norm/(?:scale|bias)", ("embed",), LAST),
        *vit.MAP_ROWS,
        *HEAD,
    ),
    infer=infer,
    choices={
        "pooling": ("last", "first", "gap", "max", "map"),
        "gelu": ("tanh", "exact"),
        "attention": NAMES,
        "remat": REMAT_POLICIES,
    },
    check=vit.check_heads,
    blocks=BLOCKS,
    attention=vit.ATTENTION,
    tokens="Encoder_0",
    sequence=(POSITIONS, 1),
    conventions=("gelu", "layer_norm_epsilon"),
    head_conventions=("pooling",),
)
