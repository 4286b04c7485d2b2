"""The block of today's plain Vision Transformers: every part is an attribute, off by default.

B: batch, N: tokens, D: hidden size, H: heads, d: width of a head, M: MLP width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models import vit
from vit_jax.models.kernels.attention import AttentionFn
from vit_jax.models.kernels.elementwise import per_feature, scale_features
from vit_jax.models.later.rotary import MixedAngles, rotate
from vit_jax.models.layers import Dense, LayerNorm, add_branch, dot_general, gelu
from vit_jax.patches import Layout

# timm's truncated normal is cut at +-2, a hundred deviations: a normal.
INIT = nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class ModernConfig(vit.BlockConfig):
    """Configuration shared by all blocks; see `ModernVisionTransformer`."""

    pre_norm: bool = False
    final_norm: str = "tokens"
    norm_kind: str = "layer"
    norm_after: bool = False
    qkv_bias: str = "qkv"
    dense_bias: bool = True
    qk_norm: bool = False
    attention_norm: bool = False
    mlp: str = "mlp"
    mlp_norm: bool = False
    layer_scale_init: float | None = None
    relative_bias: bool = False
    rope: str = "none"
    rope_base: float = 100.0
    rope_grid: tuple[int, int] | None = None
    rope_offset: float = 0.0

    def norm(self, name: str | None = None) -> nn.Module:
        if self.norm_kind == "rms":
            return RMSNorm(self.layer_norm_epsilon, self.dtype, name=name)
        return LayerNorm(self.layer_norm_epsilon, self.dtype, self.norm_kind == "layer", name=name)

    def layer_scale(self) -> Callable[[jax.Array], jax.Array]:
        init = self.layer_scale_init
        return (lambda x: x) if init is None else LayerScale(init)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale over features (1910.07467): [..., D] -> [..., D].

    In float32, with one rounding to `dtype` at the end.
    """

    epsilon: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],))
        x = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        factor = jax.lax.rsqrt(mean_square + self.epsilon) * per_feature(scale, x.ndim)
        return (x * factor).astype(self.dtype)


class LayerScale(nn.Module):
    """gamma * x with a learned factor per feature: [B, N, D] -> [B, N, D].

    Of "Going deeper with Image Transformers" (2103.17239, section 2); it starts from `initial`.
    """

    initial: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gamma = self.param("gamma", nn.initializers.constant(self.initial), (x.shape[-1],))
        return scale_features(x, gamma)


class RelativeBias(nn.Module):
    """BEiT's learned bias of scores (2106.08254, appendix): grid (h, w), H, N -> [1, H, N, N].

    One for each offset between two patches, and three for scores with the N - h*w tokens before
    them: of these with patches, of patches with these, and among these. All start from zero.
    """

    @nn.compact
    def __call__(self, grid: tuple[int, int], num_heads: int, num_tokens: int) -> jax.Array:
        zeros = nn.initializers.zeros_init()
        height, width = grid
        offsets = self.param("offsets", zeros, (2 * height - 1, 2 * width - 1, num_heads))
        tokens = self.param("tokens", zeros, (3, num_heads))
        y, x = np.divmod(np.arange(height * width), width)
        rows, columns = (a[:, None] - a + size - 1 for a, size in ((y, height), (x, width)))
        bias, prefix = offsets[rows, columns], num_tokens - height * width  # [h*w, h*w, H]
        if prefix:
            to_patches = jnp.broadcast_to(tokens[0], (prefix, height * width, num_heads))
            to_tokens = jnp.broadcast_to(tokens[1], (height * width, prefix, num_heads))
            among = jnp.broadcast_to(tokens[2], (prefix, prefix, num_heads))
            top = jnp.concatenate([among, to_patches], axis=1)
            bias = jnp.concatenate([top, jnp.concatenate([to_tokens, bias], axis=1)])
        return jnp.transpose(bias, (2, 0, 1))[None]  # [1, H, N, N]


class Attention(nn.Module):
    """Multi-head self-attention, equations 5 to 8 of the paper: [B, N, D] -> [B, N, D].

    In this order, each if it is on: queries and keys are normalised (2302.05442), turned by
    `angles` [B or 1, h*w, 1, d / 2] (`rotary.py`); scores get a relative bias; all heads of a token
    are normalised together before the last product (sub-LN, 2210.06423).
    """

    config: ModernConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, angles: Any = None, layout: Layout | None = None, *, train: bool
    ) -> jax.Array:
        c = self.config
        batch_size, num_tokens, hidden_size = x.shape
        heads = (c.num_heads, hidden_size // c.num_heads)
        dense = functools.partial(
            nn.DenseGeneral, dtype=c.dtype, kernel_init=INIT, dot_general=dot_general
        )
        x = jnp.asarray(x, c.dtype)
        x = self._attend(x, angles, layout, dense, heads, train)  # [B, N, H, d]
        if c.attention_norm:
            x = c.norm("norm")(jnp.reshape(x, (batch_size, num_tokens, -1)))  # [B, N, D]
            x = jnp.reshape(x, (batch_size, num_tokens, *heads))  # [B, N, H, d]
        return dense(hidden_size, axis=(-2, -1), use_bias=c.dense_bias, name="out")(x)

    def _attend(
        self,
        x: jax.Array,
        angles: Any,
        layout: Layout | None,
        dense: Any,
        heads: tuple[int, int],
        train: bool,
    ) -> jax.Array:
        """Equations 5 to 7: [B, N, D] -> [B, N, H, d]."""
        c, lengths = self.config, layout and layout.lengths(x.shape[1])
        if not (self.is_initializing() or c.qk_norm or c.rope != "none" or c.relative_bias):
            attend = AttentionFn(c.attention, train, lengths=lengths)
            out = attend.of_tokens(x, self.variables["params"], c.num_heads)
            if out is not None:
                return out
        query, key, value = (
            dense(heads, use_bias=name[0] in c.qkv_bias, name=name)(x)  # [B, N, H, d]
            for name in ("query", "key", "value")
        )
        if c.qk_norm:
            query, key = c.norm("query_norm")(query), c.norm("key_norm")(key)
        if c.rope == "mixed":
            angles = MixedAngles(c, name="rope")(*heads, layout)  # [B or 1, h*w, H, d / 2]
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        bias: Any = None
        if c.relative_bias:
            table = RelativeBias(name="relative_bias")(c.grid, c.num_heads, x.shape[1])
            bias = functools.partial(lambda table, _: table, table)
        return AttentionFn(c.attention, train, bias, lengths)(query, key, value, module=self)


class MlpBlock(nn.Module):
    """[B, N, D] -> [B, N, D]: gelu(x W1 + b1) W2 + b2, or SwiGLU (2002.05202).

    SwiGLU: (silu(x V + c) * (x W1 + b1)) W2 + b2. With `mlp_norm`, W2 follows a norm.
    """

    config: ModernConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        dense = functools.partial(Dense, dtype=c.dtype, kernel_init=INIT, use_bias=c.dense_bias)
        y = dense(c.mlp_dim, name="Dense_0")(x)  # [B, N, M]
        if c.mlp == "swiglu":
            y = gelu(dense(c.mlp_dim, name="gate")(x), "silu") * y
        else:
            y = gelu(y, c.gelu)
        if c.mlp_norm:
            y = c.norm("norm")(y)
        return dense(x.shape[-1], name="Dense_1")(y)  # [B, N, D]


class ModernBlock(nn.Module):
    """One Transformer layer, [B, N, D] -> [B, N, D].

    z' = z + gamma_1 * MSA(LN(z)); z = z' + gamma_2 * MLP(LN(z')), without LayerScale gamma = 1.
    With `norm_after`, LN(MSA(z)) and LN(MLP(z')) instead. Training drops each branch with
    probability `drop_rate` (stochastic depth); None disables it.
    """

    config: ModernConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        drop_rate: Any = None,
        angles: Any = None,
        layout: Layout | None = None,
        *,
        train: bool,
    ) -> jax.Array:
        """`angles` are those that blocks share, if any; see `Attention`."""
        c, attention = self.config, Attention(self.config, name=vit.ATTENTION)
        msa = functools.partial(attention, angles=angles, layout=layout, train=train)
        for layer in (msa, MlpBlock(c, name="MlpBlock_0")):
            norm = c.norm()
            y = norm(layer(x)) if c.norm_after else layer(norm(x))
            x = add_branch(x, c.layer_scale()(y), drop_rate, train=train)
        return x


class ModernEncoder(nn.Module):
    """The norm before all blocks, the blocks and the one after, [B, N, D] -> [B, N, D]."""

    config: ModernConfig
    blocks: Callable[..., jax.Array]  # `apply_blocks` with its settings

    @nn.compact
    def __call__(self, x: jax.Array, *shared: Any, train: bool) -> jax.Array:
        c = self.config
        x = c.norm("pre_norm")(x) if c.pre_norm else x
        block = functools.partial(ModernBlock, c)
        x = self.blocks(block, x, *shared, name="encoderblock", train=train)
        return c.norm("encoder_norm")(x) if c.final_norm == "tokens" else x
