"""MLP-Mixer ("MLP-Mixer: An all-MLP Architecture for Vision", arXiv 2105.01601).

Each block mixes the tokens of each channel, then the channels of each token, with one MLP each. It
has neither attention nor positions, and takes images with a fixed number of tokens. Modules and
parameters have the names of the official code. B: batch, N: tokens, D: hidden size.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.family import (
    FIRST,
    HEAD,
    LAST,
    Family,
    Row,
    Shapes,
    axis_of,
    count_blocks,
    patch_size_of,
)
from vit_jax.models.layers import (
    REMAT_POLICIES,
    Dense,
    IdentityLayer,
    LayerNorm,
    StochasticDepth,
    apply_blocks,
    gelu,
)
from vit_jax.models.tokens import patch_shape, token_grid

# Paper, table 1: blocks, hidden size, width of the channel MLP and of the token MLP. S/8 is GSAM's
# (2203.08065).
SIZES = {
    "S": (8, 512, 2048, 256),
    "B": (12, 768, 3072, 384),
    "L": (24, 1024, 4096, 512),
    "H": (32, 1280, 5120, 640),
}
PATCH_SIZES = {"S": (32, 16, 8), "B": (32, 16), "L": (32, 16), "H": (14,)}
_KEYS = ("num_layers", "hidden_size", "channels_mlp_dim", "tokens_mlp_dim")


class MlpBlock(nn.Module):
    """gelu(x W1 + b1) W2 + b2 along the last axis: [B, M, K] -> [B, M, K]."""

    mlp_dim: int
    gelu: str = "tanh"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        dense = functools.partial(Dense, kernel_init=init, dtype=self.dtype)
        y = gelu(dense(self.mlp_dim)(x), self.gelu)  # [B, M, mlp_dim]
        return dense(x.shape[-1])(y)


class MixerBlock(nn.Module):
    """One layer, [B, N, D] -> [B, N, D]; equation 1.

    u = x + MLP(LN(x)^T)^T; y = u + MLP(LN(u)). Training drops each branch with probability
    `drop_rate` (stochastic depth); None disables it.
    """

    tokens_mlp_dim: int
    channels_mlp_dim: int
    gelu: str = "tanh"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, drop_rate: Any = None, *, train: bool) -> jax.Array:
        mlp = functools.partial(MlpBlock, gelu=self.gelu, dtype=self.dtype)
        y = jnp.swapaxes(LayerNorm(dtype=self.dtype)(x), 1, 2)  # [B, D, N]
        y = mlp(self.tokens_mlp_dim, name="token_mixing")(y)
        y = jnp.swapaxes(y, 1, 2)  # [B, N, D]
        x = x + StochasticDepth()(y, drop_rate, deterministic=not train)
        y = LayerNorm(dtype=self.dtype)(x)
        y = mlp(self.channels_mlp_dim, name="channel_mixing")(y)
        x = x + StochasticDepth()(y, drop_rate, deterministic=not train)
        return nn.with_logical_constraint(x, ("batch", None, None))


class MlpMixer(nn.Module):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32; global average pooling.

    Attributes:
      num_classes: number of logits; 0 returns the representation instead.
      patch_size: side of a patch in pixels, or (height, width).
      hidden_size, num_layers, tokens_mlp_dim, channels_mlp_dim: table 1 of the paper.
      stochastic_depth_rate: probability of dropping a branch of the last block in training, falling
        linearly to 0 for the first.
      head_bias_init: constant; -6.9 in big_vision's recipe, whose loss is a sigmoid.
      gelu: `tanh` as in the official code, or `exact` as in timm.
      remat: one of `REMAT_POLICIES`.
      scan: compile the blocks as one loop.
      dtype: of the computation; parameters, norms' statistics, the mean over the tokens and the
        logits are float32.
    """

    num_classes: int
    patch_size: int | tuple[int, int]
    hidden_size: int
    num_layers: int
    tokens_mlp_dim: int
    channels_mlp_dim: int
    stochastic_depth_rate: float = 0.0
    head_bias_init: float = 0.0
    gelu: str = "tanh"
    remat: str = "none"
    scan: bool = False
    dtype: Any = jnp.float32

    prefix_tokens = ()
    head_input = "pre_logits"
    logits_per_token = False

    @property
    def pixels_per_token(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return patch_shape(self.patch_size)

    @nn.nowrap
    def token_grid(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of tokens of images of (height, width); UserError if they do not fit."""
        return token_grid(image_size, self.patch_size)

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Images in [-1, 1], [B, H, W, C] -> logits [B, K] float32."""
        patch = self.pixels_per_token
        stem = nn.Conv(
            self.hidden_size, patch, patch, padding="VALID", dtype=self.dtype, name="stem"
        )
        x = stem(jnp.asarray(images, self.dtype))  # [B, h, w, D]
        x = jnp.reshape(x, (x.shape[0], -1, self.hidden_size))  # [B, N, D]
        x = apply_blocks(
            functools.partial(
                MixerBlock, self.tokens_mlp_dim, self.channels_mlp_dim, self.gelu, self.dtype
            ),
            x,
            name=BLOCKS,
            num_layers=self.num_layers,
            stochastic_depth_rate=self.stochastic_depth_rate,
            remat=self.remat,
            scan=self.scan,
            train=train,
        )
        x = LayerNorm(dtype=self.dtype, name="pre_head_layer_norm")(x)
        x = jnp.mean(x, axis=1, dtype=jnp.float32)  # [B, D]
        x = IdentityLayer(name="pre_logits")(x)
        if not self.num_classes:
            return x
        zeros, bias = nn.initializers.zeros_init(), nn.initializers.constant(self.head_bias_init)
        head = nn.Dense(self.num_classes, kernel_init=zeros, bias_init=bias, name="head")
        return head(x)  # [B, K]


BLOCKS = "MixerBlock"
_BLOCK = rf"{BLOCKS}(?:_(?P<block>\d+))?"
_TOKENS = f"{BLOCKS}_0/token_mixing/Dense_0/kernel"


def infer(shapes: Shapes) -> dict[str, Any]:
    """See `Family.infer`."""
    return {
        "patch_size": patch_size_of(shapes, "stem/kernel"),
        "hidden_size": axis_of(shapes, "stem/kernel", 4, 3),
        "num_layers": count_blocks(shapes, BLOCKS),
        "tokens_mlp_dim": axis_of(shapes, _TOKENS, 2, 1),
        "channels_mlp_dim": axis_of(shapes, f"{BLOCKS}_0/channel_mixing/Dense_0/kernel", 2, 1),
    }


FAMILY = Family(
    module=MlpMixer,
    title="MLP-Mixer (arXiv 2105.01601)",
    acronym="Mixer",
    rows=(
        Row("stem/kernel", (None, None, None, "embed"), FIRST, role="patches"),
        Row("stem/bias", ("embed",), FIRST),
        Row(rf"{_BLOCK}/LayerNorm_[01]/(?:scale|bias)", ("embed",)),
        Row(rf"{_BLOCK}/token_mixing/Dense_0/kernel", (None, "mlp")),
        Row(rf"{_BLOCK}/token_mixing/Dense_1/kernel", ("mlp", None)),
        Row(rf"{_BLOCK}/token_mixing/Dense_1/bias", (None,)),
        Row(rf"{_BLOCK}/channel_mixing/Dense_0/kernel", ("embed", "mlp")),
        Row(rf"{_BLOCK}/channel_mixing/Dense_1/kernel", ("mlp", "embed")),
        Row(rf"{_BLOCK}/channel_mixing/Dense_1/bias", ("embed",)),
        Row(rf"{_BLOCK}/(?:token|channel)_mixing/Dense_0/bias", ("mlp",)),
        Row("pre_head_layer_norm/(?:scale|bias)", ("embed",), LAST),
        *HEAD,
    ),
    sizes={
        f"Mixer-{size}/{patch}": dict(zip(_KEYS, row, strict=True), patch_size=patch)
        for size, row in SIZES.items()
        for patch in PATCH_SIZES[size]
    },
    infer=infer,
    choices={"gelu": ("tanh", "exact"), "remat": REMAT_POLICIES},
    blocks=BLOCKS,
    tokens="pre_head_layer_norm",
    sequence=(_TOKENS, 0),
    conventions=("gelu",),
)
