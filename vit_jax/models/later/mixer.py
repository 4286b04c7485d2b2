"""MLP-Mixer ("MLP-Mixer: An all-MLP Architecture for Vision", arXiv 2105.01601).

Each block mixes the tokens of each channel, then the channels of each token, with one MLP each. It
has neither attention nor positions, and takes images with a fixed number of tokens. Modules and
parameters have the names of the official code.

ResMLP (2105.03404) has an affine map instead of each norm, one linear layer over the tokens, and
LayerScale; timm's gMixer gated MLPs. Each is an attribute. B: batch, N: tokens, D: hidden size.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models import family, layers
from vit_jax.models.family import FIRST, HEAD, LAST, Family, ModelBase, Row, Shapes
from vit_jax.models.kernels.elementwise import per_feature
from vit_jax.models.later.modern_block import LayerScale
from vit_jax.models.later.variants import RESMLPS


class Affine(nn.Module):
    """scale * x + bias (ResMLP, equation 1): [B, N, D] -> [B, N, D]."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros_init(), (x.shape[-1],))
        scale, bias = (per_feature(jnp.asarray(y, self.dtype), x.ndim) for y in (scale, bias))
        return x * scale + bias


NORMS = {"layer": layers.LayerNorm, "affine": Affine}


class MlpBlock(nn.Module):
    """gelu(x W1 + b1) W2 + b2 along the last axis: [B, M, K] -> [B, M, K].

    Without `mlp_dim`: x W1 + b1. Gated: with (u, v) = x W1 + b1, (u * silu(v)) W2 + b2.
    """

    mlp_dim: int | None
    gelu: str = "tanh"
    gated: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        dense = functools.partial(layers.Dense, kernel_init=init, dtype=self.dtype)
        y = dense(self.mlp_dim or x.shape[-1])(x)  # [B, M, mlp_dim]
        if self.mlp_dim is None:
            return y
        if self.gated:
            y, gate = jnp.split(y, 2, axis=-1)  # [B, M, mlp_dim / 2] each
            return dense(x.shape[-1])(y * layers.gelu(gate, "silu"))
        return dense(x.shape[-1])(layers.gelu(y, self.gelu))


class MixerBlock(nn.Module):
    """One layer, [B, N, D] -> [B, N, D]; equation 1.

    u = x + gamma_1 * MLP(LN(x)^T)^T; y = u + gamma_2 * MLP(LN(u)), without LayerScale gamma = 1.
    Training drops each branch with probability `drop_rate` (stochastic depth); None disables it.
    """

    tokens_mlp_dim: int | None
    channels_mlp_dim: int
    norm: str
    layer_scale_init: float | None
    gelu: str
    gated: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, drop_rate: Any = None, *, train: bool) -> jax.Array:
        mlp = functools.partial(MlpBlock, gelu=self.gelu, gated=self.gated, dtype=self.dtype)
        norm = functools.partial(NORMS[self.norm], dtype=self.dtype)

        def scaled(y: jax.Array) -> jax.Array:
            init = self.layer_scale_init
            return y if init is None else LayerScale(init)(y)

        y = jnp.swapaxes(norm()(x), 1, 2)  # [B, D, N]
        y = mlp(self.tokens_mlp_dim, name="token_mixing")(y)
        y = scaled(jnp.swapaxes(y, 1, 2))  # [B, N, D]
        x = layers.add_branch(x, y, drop_rate, train=train)
        y = scaled(mlp(self.channels_mlp_dim, name="channel_mixing")(norm()(x)))
        return layers.add_branch(x, y, drop_rate, train=train)


class MlpMixer(ModelBase):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32; global average pooling.

    Attributes:
      hidden_size, num_layers, channels_mlp_dim: table 1 of the paper.
      tokens_mlp_dim: also table 1; None: one linear layer over the tokens (ResMLP).
      norm: `layer`, or `affine` as in ResMLP, an affine map per feature.
      layer_scale_init: initial factor of LayerScale (ResMLP); None: no LayerScale.
      gated: SwiGLUs (2002.05202) as MLPs (timm's gMixer); widths are those before the gate.
      stochastic_depth_rate: probability of dropping a branch of the last block in training, falling
        linearly to 0 for the first.
      head_bias_init: constant; -6.9 in big_vision's recipe, whose loss is a sigmoid.
      gelu: `tanh` as in the official code, or `exact` as in timm and ResMLP.
    """

    num_classes: int
    patch_size: int | tuple[int, int]
    hidden_size: int
    num_layers: int
    channels_mlp_dim: int
    tokens_mlp_dim: int | None = None
    norm: str = "layer"
    layer_scale_init: float | None = None
    gated: bool = False
    stochastic_depth_rate: float = 0.0
    head_bias_init: float = 0.0
    gelu: str = "tanh"
    remat: str = "none"
    scan: bool = False
    dtype: Any = jnp.float32

    kind = "mixer"

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Images in [-1, 1], [B, H, W, C] -> logits [B, K] float32."""
        x = layers.embed_patches(self, images, "stem")  # [B, h, w, D]
        x = jnp.reshape(x, (x.shape[0], -1, self.hidden_size))  # [B, N, D]
        keys = ("tokens_mlp_dim", "channels_mlp_dim", "norm", "layer_scale_init", "gelu", "gated")
        own = {key: getattr(self, key) for key in (*keys, "dtype")}
        block, loop = functools.partial(MixerBlock, **own), layers.loop_of(self)
        x = layers.apply_blocks(block, x, name=BLOCKS, train=train, **loop)
        x = NORMS[self.norm](dtype=self.dtype, name="pre_head_layer_norm")(x)
        x = jnp.mean(x, axis=1, dtype=jnp.float32)  # [B, D]
        x = layers.IdentityLayer(name="pre_logits")(x)
        return layers.head(self.num_classes, self.head_bias_init)(x) if self.num_classes else x


BLOCKS = "MixerBlock"
_BLOCK = rf"{BLOCKS}(?:_(?P<block>\d+))?"
_TOKENS, _CHANNELS = (f"{BLOCKS}_0/{axis}_mixing/Dense" for axis in ("token", "channel"))


def infer(shapes: Shapes) -> dict[str, Any]:
    """See `Family.infer`."""
    wide, narrow = (family.axis_of(shapes, f"{_CHANNELS}_{k}/kernel", 2, 1 - k) for k in (0, 1))
    depth, width = family.count_blocks(shapes, BLOCKS), family.axis_of(shapes, "stem/kernel", 4, 3)
    scales: dict[Any, float] = {(depth, width): init for depth, width, init in RESMLPS.values()}
    has_gamma = f"{BLOCKS}_0/LayerScale_0/gamma" in shapes
    tokens = family.axis_of(shapes, f"{_TOKENS}_0/kernel", 2, 1)
    return {
        "patch_size": family.patch_size_of(shapes, "stem/kernel"),
        "hidden_size": width,
        "num_layers": depth,
        "tokens_mlp_dim": tokens if f"{_TOKENS}_1/kernel" in shapes else None,
        "channels_mlp_dim": wide,
        "norm": "affine" if f"{BLOCKS}_0/Affine_0/scale" in shapes else "layer",
        "layer_scale_init": scales.get((depth, width), 0.1) if has_gamma else None,
        "gated": bool(wide and narrow and wide == 2 * narrow),
    }


def check(model: MlpMixer) -> None:
    """Raises UserError for widths of MLPs that gates cannot halve."""
    for key in ("tokens_mlp_dim", "channels_mlp_dim"):
        if model.gated and (width := getattr(model, key) or 0) % 2:
            raise UserError(f"model.{key}={width} must be even with model.gated=True.")


FAMILY = Family(
    module=MlpMixer,
    title="MLP-Mixer (arXiv 2105.01601)",
    acronym="Mixer",
    rows=(
        Row("stem/kernel", (None, None, None, "embed"), FIRST, role="patches"),
        Row("stem/bias", ("embed",), FIRST),
        Row(rf"{_BLOCK}/(?:LayerNorm|Affine)_[01]/(?:scale|bias)", ("embed",)),
        Row(rf"{_BLOCK}/LayerScale_[01]/gamma", ("embed",)),
        *family.dense_rows(f"{_BLOCK}/token_mixing/Dense_0", None, "mlp"),
        *family.dense_rows(f"{_BLOCK}/token_mixing/Dense_1", "mlp", None),
        *family.dense_rows(f"{_BLOCK}/channel_mixing/Dense_0", "embed", "mlp"),
        *family.dense_rows(f"{_BLOCK}/channel_mixing/Dense_1", "mlp", "embed"),
        Row("pre_head_layer_norm/(?:scale|bias)", ("embed",), LAST),
        *HEAD,
    ),
    infer=infer,
    choices={"gelu": ("tanh", "exact"), "norm": NORMS, "remat": layers.REMAT_POLICIES},
    check=check,
    blocks=BLOCKS,
    tokens="pre_head_layer_norm",
    sequence=(f"{_TOKENS}_0/kernel", 0),
    conventions=("gelu",),
)
