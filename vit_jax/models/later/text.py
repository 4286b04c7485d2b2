"""The text towers of LiT (arXiv 2111.07991), SigLIP (2303.15343) and CLIP (2103.00020).

Numbers and parameter names are those of big_vision's `text_transformer`. Padding is not masked: in
LiT and SigLIP every token attends to all T tokens; in CLIP it comes after all that counts.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.models.family import FIRST, HEAD, LAST, Family, ModelBase, Row, Shapes, axis_of
from vit_jax.models.kernels.attention import BIASED, NAMES
from vit_jax.models.layers import REMAT_POLICIES, IdentityLayer, loop_of

EMBEDDING, POSITIONS, BLOCKS = "Embed_0/embedding", "pos_embedding", "Encoder_0/encoderblock"


class CausalBlock(vit.Encoder1DBlock):
    """Every token attends to itself and to those before it, as in CLIP: [B, T, D] -> [B, T, D]."""

    def _attend(self, x: jax.Array, bias: Any, lengths: Any, *, train: bool) -> jax.Array:
        del bias, lengths  # of positions relative to each other, which texts do not have
        later = jnp.triu(jnp.full((x.shape[1], x.shape[1]), -jnp.inf, x.dtype), 1)
        msa = self.config.msa(train=train, bias=lambda _: later[None, None])  # [1, 1, T, T]
        return msa(x, sow_weights=True)


class TextTransformer(ModelBase):
    """Texts to embeddings, int32 [B, T] -> [B, num_classes] float32.

    Attributes:
      vocab_size: number of token ids.
      hidden_size, num_layers, mlp_dim, num_heads: as in a Vision Transformer.
      dropout_rate: after every dense layer except query, key and value, and after adding the
        position embeddings.
      causal: whether a token attends only to itself and those before it (CLIP).
      pooling: the head's input: the `last` token (SigLIP, whose texts end in an end-of-text id),
        the `first` ([CLS] of LiT), the first `end` of the text (CLIP), `gap` and `max` over tokens,
        or `map` (attention pooling).
      end_token: the id that ends a text; None: the highest id of each text, as in OpenAI's CLIP.
      gelu: `tanh`, `exact`, or `quick` (OpenAI's CLIP).
    """

    num_classes: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    mlp_dim: int
    num_heads: int
    dropout_rate: float = 0.0
    causal: bool = False
    pooling: str = "last"
    end_token: int | None = None
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
        block = CausalBlock if self.causal else vit.Encoder1DBlock
        x = vit.Encoder(config, **loop_of(self), block=block)(x, positions, train=train)
        x = IdentityLayer(name="pre_logits")(self._pool(x, texts, config, train=train))
        x = jnp.asarray(x, jnp.float32)  # [B, D]
        # Not initialized to zero: a zero embedding has no direction.
        return nn.Dense(self.num_classes, name="head")(x) if self.num_classes else x

    def _pool(
        self, x: jax.Array, texts: jax.Array, config: vit.BlockConfig, *, train: bool
    ) -> jax.Array:
        """[B, T, D] -> [B, D]."""
        if self.pooling == "map":
            return vit.MAPHead(config)(x, train=train)
        if self.pooling == "end":
            ends = texts if self.end_token is None else texts == self.end_token
            return x[jnp.arange(len(x)), jnp.argmax(ends, axis=1)]
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


def check(model: TextTransformer) -> None:
    """Raises UserError for incompatible attributes."""
    vit.check_heads(model)
    if model.causal and model.attention not in BIASED:
        raise UserError(
            f"model.attention={model.attention!r} does not support model.causal=True; use "
            f"{', '.join(map(repr, BIASED))}."
        )


FAMILY = Family(
    module=TextTransformer,
    title="text Transformer (LiT, SigLIP, CLIP)",
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
        "pooling": ("last", "first", "end", "gap", "max", "map"),
        "gelu": ("tanh", "exact", "quick"),
        "attention": NAMES,
        "remat": REMAT_POLICIES,
    },
    check=check,
    blocks=BLOCKS,
    attention=vit.ATTENTION,
    tokens="Encoder_0",
    sequence=(POSITIONS, 1),
    conventions=("gelu", "layer_norm_epsilon", "causal"),
    head_conventions=("pooling", "end_token"),
)
