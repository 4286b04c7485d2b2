"""The Transformer encoder: blocks, attention pooling, and what is particular to their parameters.

Equation numbers are those of "An Image is Worth 16x16 Words" (arXiv 2010.11929). Modules carry the
names of the official code. B: batch, N: tokens, D: hidden size, M: MLP width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models.attention import MultiHeadDotProductAttention
from vit_jax.models.layers import Dense, Dropout, LayerNorm
from vit_jax.models.parameter_table import BLOCK, Row

# What the forward pass saves; the backward pass recomputes the rest.
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,  # everything is saved
    "full": jax.checkpoint_policies.nothing_saveable,  # only each block's input is saved
    # What dense layers and attention give; scores, norms and activations are cheap to repeat.
    "dots": jax.checkpoint_policies.save_only_these_names("dense", "attention"),
    # What dense layers give.
    "dots_with_no_batch_dims": jax.checkpoint_policies.save_only_these_names("dense"),
}


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Settings of all blocks of a Transformer; see `VisionTransformer`."""

    mlp_dim: int
    num_heads: int
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    gelu: str = "tanh"
    layer_norm_epsilon: float = 1e-6
    attention: str = "auto"
    dtype: Any = jnp.float32


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=1)
def _gelu(x: jax.Array, approximate: bool) -> jax.Array:
    """In float32. A scan would save every step of it, of which x is enough."""
    return nn.gelu(x.astype(jnp.float32), approximate=approximate).astype(x.dtype)


class AddPositionEmbs(nn.Module):
    """Adds a learned embedding per token, E_pos of equation 1: [B, N, D] -> [B, N, D]."""

    stddev: float = 0.02
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (1, *x.shape[1:])
        pos_embedding = self.param("pos_embedding", nn.initializers.normal(self.stddev), shape)
        return x + jnp.asarray(pos_embedding, self.dtype)


class MlpBlock(nn.Module):
    """MLP(x) = gelu(x W1 + b1) W2 + b2 with dropout after each layer: [B, N, D] -> [B, N, D]."""

    config: BlockConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        config = self.config
        dense = functools.partial(
            Dense, dtype=config.dtype, bias_init=nn.initializers.normal(stddev=1e-6)
        )
        hidden_size = x.shape[-1]
        shape = (hidden_size, config.mlp_dim)
        x = dense(shape, shape[1:])(x)  # [B, N, M]
        x = _gelu(x, config.gelu == "tanh")
        x = Dropout(config.dropout_rate)(x, train=train)
        x = dense(shape[::-1], shape[:1])(x)  # [B, N, D]
        return Dropout(config.dropout_rate)(x, train=train)


def _layer_norm(config: BlockConfig, x: jax.Array, name: str | None = None) -> jax.Array:
    return LayerNorm(config.layer_norm_epsilon, config.dtype, name=name)(x)


def _attention(config: BlockConfig) -> MultiHeadDotProductAttention:
    return MultiHeadDotProductAttention(
        num_heads=config.num_heads,
        attention=config.attention,
        dropout_rate=config.attention_dropout_rate,
        dtype=config.dtype,
    )


def drop_rates(rate: float, num_layers: int) -> list[float]:
    """Probability of each block, on a line from 0 for the first block to `rate` for the last."""
    return [rate * i / max(num_layers - 1, 1) for i in range(num_layers)]


class StochasticDepth(nn.Module):
    """Drops a residual branch for single examples (1603.09382): [B, ...] -> [B, ...].

    Each example and each branch (attention and MLP) draws separately, as in timm's DropPath and
    scenic. Kept values are divided by the probability of keeping them, as in timm and unlike
    scenic, so that evaluation needs no scaling.
    """

    @nn.compact
    def __call__(self, x: jax.Array, rate: float | jax.Array, *, train: bool) -> jax.Array:
        """`rate` may be traced: it is an input of a scan over blocks."""
        if not train or (isinstance(rate, float) and rate == 0.0):
            return x
        keep = 1.0 - jnp.asarray(rate, jnp.float32)
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        kept = jax.random.bernoulli(self.make_rng("dropout"), keep, shape)  # [B, 1, ...]
        # Divided in float32: bfloat16(0.9) would scale all of training by 0.2 %.
        return jnp.where(kept, jnp.asarray(x, jnp.float32) / keep, 0.0).astype(x.dtype)


class Encoder1DBlock(nn.Module):
    """One Transformer layer, [B, N, D] -> [B, N, D].

    z' = MSA(LN(z)) + z (equation 2); z = MLP(LN(z')) + z' (equation 3). Training drops each branch
    with probability `drop_rate`; None draws nothing.
    """

    config: BlockConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, drop_rate: float | jax.Array | None = None, *, train: bool
    ) -> jax.Array:
        def drop(y: jax.Array) -> jax.Array:
            return y if drop_rate is None else StochasticDepth()(y, drop_rate, train=train)

        y = _layer_norm(self.config, x)
        y = _attention(self.config)(y, train=train)
        y = Dropout(self.config.dropout_rate)(y, train=train)
        x = x + drop(y)

        y = _layer_norm(self.config, x)
        return x + drop(MlpBlock(self.config)(y, train=train))


class Encoder(nn.Module):
    """Position embeddings, `num_layers` blocks and the last layer norm: [B, N, D] -> [B, N, D].

    With `scan` XLA compiles one block as the body of a loop; its parameters are those of the loop
    form stacked along a leading axis (`parameters.names.stack_blocks`).
    """

    config: BlockConfig
    num_layers: int
    stochastic_depth_rate: float = 0.0
    position_stddev: float = 0.02
    remat: str = "none"
    scan: bool = False

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: np.ndarray | None = None, *, train: bool
    ) -> jax.Array:
        """`positions` [1, N, D] are added; None: learned ones."""
        dtype = self.config.dtype
        if positions is None:
            x = AddPositionEmbs(self.position_stddev, dtype, name="posembed_input")(x)
        else:
            x = x + jnp.asarray(positions, dtype)
        x = Dropout(self.config.dropout_rate)(x, train=train)

        rates: list[float] | None = None
        if self.stochastic_depth_rate:
            rates = drop_rates(self.stochastic_depth_rate, self.num_layers)

        def apply_block(
            module: nn.Module, x: jax.Array, drop_rate: float | jax.Array | None
        ) -> jax.Array:
            return module(x, drop_rate, train=train)

        if self.remat != "none":
            # Inside a scan the loop itself keeps XLA from merging the two forward passes.
            apply_block = nn.remat(
                apply_block, prevent_cse=not self.scan, policy=REMAT_POLICIES[self.remat]
            )
        if self.scan:
            scan = nn.scan(
                lambda module, x, drop_rate: (apply_block(module, x, drop_rate), None),
                variable_axes={"params": 0, "intermediates": 0, "attention": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.num_layers,
            )
            stacked = None if rates is None else jnp.array(rates, jnp.float32)  # [L]
            x, _ = scan(Encoder1DBlock(self.config, name="encoderblock"), x, stacked)
        else:
            for i in range(self.num_layers):
                drop_rate = None if rates is None else rates[i]
                block = Encoder1DBlock(self.config, name=f"encoderblock_{i}")
                x = apply_block(block, x, drop_rate)
        return _layer_norm(self.config, x, "encoder_norm")  # equation 4


class MAPHead(nn.Module):
    """Multihead attention pooling by a learned probe: [B, N, D] -> [B, D].

    x = MSA(probe, tokens); x + MLP(LN(x)) ("Scaling Vision Transformers", 2106.04560, section 3).
    """

    config: BlockConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        config = dataclasses.replace(self.config, dropout_rate=0.0, attention_dropout_rate=0.0)
        batch_size, _, hidden_size = x.shape
        xavier = nn.initializers.xavier_uniform()
        probe = self.param("probe", xavier, (1, 1, hidden_size))
        probe = jnp.tile(jnp.asarray(probe, config.dtype), (batch_size, 1, 1))  # [B, 1, D]
        x = _attention(config)(probe, x, train=train)  # [B, 1, D]
        y = _layer_norm(config, x)
        x = x + MlpBlock(config)(y, train=train)
        return x[:, 0]  # [B, D]


def attention_rows(prefix: str, depth: str = BLOCK) -> tuple[Row, ...]:
    """Parameters of the attention below `prefix`, and of the MLP and its norm beside it."""
    attention, mlp = f"{prefix}/MultiHeadDotProductAttention_0", f"{prefix}/MlpBlock_0"
    return (
        Row(f"{attention}/(?:query|key|value)/kernel", ("embed", "heads", None), depth),
        Row(f"{attention}/(?:query|key|value)/bias", ("heads", None), depth),
        Row(f"{attention}/out/kernel", ("heads", None, "embed"), depth),
        Row(f"{attention}/out/bias", ("embed",), depth),
        Row(f"{mlp}/Dense_0/kernel", ("embed", "mlp"), depth),
        Row(f"{mlp}/Dense_0/bias", ("mlp",), depth),
        Row(f"{mlp}/Dense_1/kernel", ("mlp", "embed"), depth),
        Row(f"{mlp}/Dense_1/bias", ("embed",), depth),
        Row(f"{prefix}/LayerNorm_[01]/(?:scale|bias)", ("embed",), depth),
    )
