"""BERT (arXiv 1810.04805), the text tower of LiT's B16B, B16B_2 and L16L (2111.07991).

Parameters have the names and shapes of flaxformer's `BertEncoder`, as in the published files.
Unlike in a Vision Transformer, layer norms follow the residual sums, and padding (id 0) is masked.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import layers
from vit_jax.models.family import FIRST, HEAD, Family, ModelBase, Row, Shapes, axis_of, count_blocks

HEAD_DIM = 64  # in all sizes; a narrower model has one head
_INIT = nn.initializers.truncated_normal(0.02)


class Scope(nn.Module):
    """Applies a function in a module scope of its own, to name the parameters below it."""

    function: Callable[..., jax.Array]

    @nn.compact
    def __call__(self, *args: jax.Array) -> jax.Array:
        return self.function(*args)


class BertBlock(nn.Module):
    """z' = LN(z + MSA(z)); z = LN(z' + MLP(z')), [B, T, D] -> [B, T, D]."""

    mask: jax.Array  # [B, 1, 1, T], True for tokens to attend to
    mlp_dim: int
    dropout_rate: float = 0.0
    gelu: str = "tanh"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None, *, train: bool) -> jax.Array:
        dense = functools.partial(layers.Dense, dtype=self.dtype, kernel_init=_INIT)

        def add_and_norm(x: jax.Array, y: jax.Array) -> jax.Array:
            y = dense(x.shape[-1], name="dense_layer")(y)
            y = layers.Dropout(self.dropout_rate)(y, deterministic=not train)
            return layers.LayerNorm(epsilon=1e-12, dtype=self.dtype, name="layer_norm")(x + y)

        def attend(x: jax.Array) -> jax.Array:
            width = x.shape[-1]
            heads = (*x.shape[:2], max(width // HEAD_DIM, 1), -1)
            query, key, value = (
                jnp.reshape(dense(width, name=name)(x), heads) for name in ("query", "key", "value")
            )
            return jnp.reshape(nn.dot_product_attention(query, key, value, mask=self.mask), x.shape)

        def attention_block(x: jax.Array) -> jax.Array:
            return add_and_norm(x, Scope(attend, name="attention_layer")(x))

        def mlp_block(x: jax.Array) -> jax.Array:
            y = Scope(lambda x: dense(self.mlp_dim, name="dense_layer")(x), name="mlp")(x)
            return add_and_norm(x, layers.gelu(y, self.gelu))

        x = Scope(attention_block, name="attention_block")(x)
        return Scope(mlp_block, name="mlp_block")(x)


class Bert(ModelBase):
    """Texts to embeddings, int32 [B, T] -> [B, num_classes] float32; the head sees the first token.

    Attributes:
      vocab_size: number of token ids; 0 is padding.
      hidden_size, num_layers, mlp_dim: table of section 3; the model has hidden_size / 64 heads.
      max_length: maximum length of a text, in tokens.
      dropout_rate: after the embeddings and at the end of each residual branch.
      gelu: `tanh` as in flaxformer, or `exact` as in the original.
    """

    num_classes: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    mlp_dim: int
    max_length: int = 512
    dropout_rate: float = 0.0
    gelu: str = "tanh"
    remat: str = "none"
    scan: bool = False
    dtype: Any = jnp.float32

    kind = "bert"

    @nn.compact
    def __call__(self, texts: jax.Array, *, train: bool) -> jax.Array:
        """Token ids, int32 [B, T] -> embeddings [B, E] float32, not normalised."""
        if texts.shape[1] > self.max_length:
            length = texts.shape[1]
            raise UserError(f"texts of {length} tokens exceed model.max_length={self.max_length}.")

        def embedder() -> jax.Array:
            embed = functools.partial(
                nn.Embed, features=self.hidden_size, dtype=self.dtype, embedding_init=_INIT
            )
            x = embed(self.vocab_size, name="embedders_token_ids")(texts)  # [B, T, D]
            positions = np.arange(texts.shape[1])[None]
            x = x + embed(self.max_length, name="embedders_position_ids")(positions)
            return x + embed(2, name="embedders_segment_ids")(jnp.zeros_like(texts))

        def blocks(x: jax.Array) -> jax.Array:
            mask, sizes = (texts > 0)[:, None, None, :], (self.mlp_dim, self.dropout_rate)
            block = functools.partial(BertBlock, mask, *sizes, self.gelu, self.dtype)
            loop = layers.loop_of(self)
            return layers.apply_blocks(block, x, name="layers", train=train, **loop)

        def encoder() -> jax.Array:
            x = Scope(embedder, name="embedder")()
            x = layers.LayerNorm(epsilon=1e-12, dtype=self.dtype, name="layer_norm")(x)
            x = layers.Dropout(self.dropout_rate)(x, deterministic=not train)
            return Scope(lambda x: Scope(blocks, name="layer_sequence")(x), name="encoder_block")(x)

        x = Scope(encoder, name="BertEncoder_0")()[:, 0]
        x = jnp.asarray(layers.IdentityLayer(name="pre_logits")(x), jnp.float32)  # [B, D]
        # Not initialized to zero: a zero embedding has no direction.
        return nn.Dense(self.num_classes, name="head")(x) if self.num_classes else x


_ENCODER = "BertEncoder_0"
BLOCKS = f"{_ENCODER}/encoder_block/layer_sequence/layers"
_BLOCK = rf"{BLOCKS}(?:_(?P<block>\d+))?"
_VOCABULARY = f"{_ENCODER}/embedder/embedders_token_ids/embedding"
_POSITIONS = f"{_ENCODER}/embedder/embedders_position_ids/embedding"


def infer(shapes: Shapes) -> dict[str, Any]:
    """See `Family.infer`."""
    return {
        "vocab_size": axis_of(shapes, _VOCABULARY, 2, 0),
        "hidden_size": axis_of(shapes, _VOCABULARY, 2, 1),
        "num_layers": count_blocks(shapes, BLOCKS),
        "mlp_dim": axis_of(shapes, f"{BLOCKS}_0/mlp_block/mlp/dense_layer/kernel", 2, 1),
        "max_length": axis_of(shapes, _POSITIONS, 2, 0),
    }


def check(model: Any) -> None:
    if model.hidden_size > HEAD_DIM and model.hidden_size % HEAD_DIM:
        raise UserError(f"model.hidden_size={model.hidden_size} is not a multiple of {HEAD_DIM}.")


FAMILY = Family(
    module=Bert,
    title="BERT (arXiv 1810.04805)",
    acronym="BERT",
    input="text",
    rows=(
        Row(_VOCABULARY, ("vocabulary", "embed"), FIRST, role="vocabulary"),
        Row(f"{_ENCODER}/embedder/embedders_(?:position|segment)_ids/.*", (None, "embed"), FIRST),
        Row(f"{_ENCODER}/layer_norm/(?:scale|bias)", ("embed",), FIRST),
        Row(f"{_BLOCK}/attention_block/attention_layer/[a-z]+/kernel", ("embed", "heads")),
        Row(f"{_BLOCK}/attention_block/attention_layer/[a-z]+/bias", ("heads",)),
        Row(f"{_BLOCK}/attention_block/dense_layer/kernel", ("heads", "embed")),
        Row(f"{_BLOCK}/mlp_block/mlp/dense_layer/kernel", ("embed", "mlp")),
        Row(f"{_BLOCK}/mlp_block/mlp/dense_layer/bias", ("mlp",)),
        Row(f"{_BLOCK}/mlp_block/dense_layer/kernel", ("mlp", "embed")),
        Row(rf"{_BLOCK}/\w+_block/(?:dense_layer/bias|layer_norm/(?:scale|bias))", ("embed",)),
        *HEAD,
    ),
    infer=infer,
    choices={"gelu": ("tanh", "exact"), "remat": layers.REMAT_POLICIES},
    check=check,
    blocks=BLOCKS,
    tokens=_ENCODER,
    sequence=(_POSITIONS, 0),
    conventions=("gelu",),
)
