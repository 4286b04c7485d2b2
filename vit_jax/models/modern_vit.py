"""Vision Transformers after the paper's: one block whose parts are attributes, off by default.

DeiT III ("DeiT III: Revenge of the ViT", arXiv 2204.07118) turns on LayerScale. Common to all, and
different from `vit.py`: positions are those of the patches alone, the class token joins them
afterwards; kernels start normal with deviation 0.02 and zero biases, as in timm and DeiT III's
`models_v2.py`. Parameters have the names of `vit.py` where they are the same. B: batch, N: tokens,
D: hidden size, M: MLP width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models import vit
from vit_jax.models.attention.choose import NAMES, attention_fn
from vit_jax.models.family import FIRST, HEAD, LAST, Family, Row, Shapes
from vit_jax.models.layers import (
    DEPTH_SHAPES,
    REMAT_POLICIES,
    Dense,
    IdentityLayer,
    MultiHeadDotProductAttention,
    StochasticDepth,
    apply_blocks,
    gelu,
)
from vit_jax.models.tokens import patch_shape, token_grid
from vit_jax.models.variants import ROWS
from vit_jax.models.vit import BLOCKS, AddPositionEmbs, BlockConfig, MAPHead, attention_rows

# timm's truncated normal is cut at +-2, a hundred deviations: a normal.
_INIT = nn.initializers.normal(0.02)
# PyTorch's for convolutions: uniform within 1 / sqrt(inputs).
_PATCH_INIT = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


@dataclasses.dataclass(frozen=True)
class ModernConfig(BlockConfig):
    """Configuration shared by all blocks; see `ModernVisionTransformer`."""

    layer_scale_init: float | None = None

    def layer_scale(self) -> Callable[[jax.Array], jax.Array]:
        init = self.layer_scale_init
        return (lambda x: x) if init is None else LayerScale(init, self.dtype)


class LayerScale(nn.Module):
    """gamma * x with a learned factor per feature: [B, N, D] -> [B, N, D].

    Of "Going deeper with Image Transformers" (2103.17239, section 2); it starts from `initial`.
    """

    initial: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gamma = self.param("gamma", nn.initializers.constant(self.initial), (x.shape[-1],))
        return x * jnp.reshape(jnp.asarray(gamma, self.dtype), (1, 1, -1))


class MlpBlock(nn.Module):
    """MLP(x) = gelu(x W1 + b1) W2 + b2: [B, N, D] -> [B, N, D]."""

    config: ModernConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        dense = functools.partial(Dense, dtype=c.dtype, kernel_init=_INIT)
        y = gelu(dense(c.mlp_dim)(x), c.gelu)  # [B, N, M]
        return dense(x.shape[-1])(y)  # [B, N, D]


class ModernBlock(nn.Module):
    """One Transformer layer, [B, N, D] -> [B, N, D].

    z' = z + gamma_1 * MSA(LN(z)); z = z' + gamma_2 * MLP(LN(z')), without LayerScale gamma = 1.
    Training drops each branch with probability `drop_rate` (stochastic depth); None disables it.
    """

    config: ModernConfig

    @nn.compact
    def __call__(self, x: jax.Array, drop_rate: Any = None, *, train: bool) -> jax.Array:
        c = self.config
        msa = MultiHeadDotProductAttention(
            num_heads=c.num_heads,
            deterministic=not train,
            attention_fn=attention_fn(c.attention, train=train),
            kernel_init=_INIT,
            dtype=c.dtype,
            name=vit.ATTENTION,
        )
        y = c.layer_scale()(msa(c.norm()(x), sow_weights=True))
        x = x + StochasticDepth()(y, drop_rate, deterministic=not train)
        y = c.layer_scale()(MlpBlock(c)(c.norm()(x)))
        x = x + StochasticDepth()(y, drop_rate, deterministic=not train)
        return nn.with_logical_constraint(x, ("batch", None, None))


class ModernEncoder(nn.Module):
    """All blocks and the last layer norm: [B, N, D] -> [B, N, D]."""

    config: ModernConfig
    blocks: Callable[..., jax.Array]  # `apply_blocks` with its settings

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        block = functools.partial(ModernBlock, self.config)
        x = self.blocks(block, x, name="encoderblock", train=train)
        return self.config.norm("encoder_norm")(x)


class ModernVisionTransformer(nn.Module):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32.

    Attributes:
      num_classes: number of logits; 0 returns the representation instead.
      patch_size: side of a patch in pixels, or (height, width).
      hidden_size, num_layers, mlp_dim, num_heads: as in table 1 of the paper (2010.11929).
      layer_scale_init: initial factor of LayerScale; None: no LayerScale. DeiT III: 1e-4 in every
        size. Of weights of others, only whether there is one is known.
      stochastic_depth_rate: probability of dropping a branch in training.
      stochastic_depth_shape: `linear`: from 0 for the first block to the rate for the last, as in
        timm; `constant`: the rate for all, as in DeiT III (`models_v2.py`).
      classifier: the head's input: `token` (class token), `gap` (mean over tokens), `map`
        (attention pooling).
      head_bias_init: constant; -10 if the loss is a sigmoid over many classes.
      gelu: `tanh`, or `exact` as in DeiT III.
      layer_norm_epsilon: of all norms.
      attention: implementation of the attention, see `attention/choose.py`.
      remat: one of `REMAT_POLICIES`.
      scan: compile the blocks as one loop.
      dtype: of the computation; parameters, softmax, norms' statistics and logits are float32.
    """

    num_classes: int
    patch_size: int | tuple[int, int]
    hidden_size: int
    num_layers: int
    mlp_dim: int
    num_heads: int
    layer_scale_init: float | None = None
    stochastic_depth_rate: float = 0.0
    stochastic_depth_shape: str = "linear"
    classifier: str = "token"
    head_bias_init: float = 0.0
    gelu: str = "tanh"
    layer_norm_epsilon: float = 1e-6
    attention: str = "auto"
    remat: str = "none"
    scan: bool = False
    dtype: Any = jnp.float32

    head_input = "pre_logits"
    logits_per_token = False

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        """Parameters that precede the grid of tokens: the class token, if any."""
        return ("cls",) if self.classifier == "token" else ()

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
        """Scaled images [B, H, W, C] -> logits [B, K] float32."""
        config: Any = ModernConfig.of(self)
        patch = self.pixels_per_token
        embedding = functools.partial(nn.Conv, padding="VALID", dtype=self.dtype, name="embedding")
        embed = embedding(self.hidden_size, patch, patch, kernel_init=_PATCH_INIT)
        x = embed(jnp.asarray(images, self.dtype))  # [B, h, w, D]
        x = jnp.reshape(x, (x.shape[0], -1, self.hidden_size))  # [B, h*w, D]
        x = AddPositionEmbs(dtype=self.dtype, name="posembed_patches")(x)
        for name in self.prefix_tokens:
            token = jnp.asarray(self.param(name, _INIT, (1, 1, self.hidden_size)), self.dtype)
            x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)  # [B, N, D]
        blocks = functools.partial(
            apply_blocks,
            num_layers=self.num_layers,
            stochastic_depth_rate=self.stochastic_depth_rate,
            stochastic_depth_shape=self.stochastic_depth_shape,
            remat=self.remat,
            scan=self.scan,
        )
        x = ModernEncoder(config, blocks, name="Transformer")(x, train=train)
        if self.classifier == "map":
            x = MAPHead(config)(x, train=train)  # [B, D]
        else:
            x = x[:, 0] if self.classifier == "token" else jnp.mean(x, axis=1)  # [B, D]
        x = jnp.asarray(IdentityLayer(name="pre_logits")(x), jnp.float32)
        if not self.num_classes:
            return x
        bias = nn.initializers.constant(self.head_bias_init)
        return nn.Dense(self.num_classes, kernel_init=_INIT, bias_init=bias, name="head")(x)


_BLOCK = rf"{BLOCKS}(?:_(?P<block>\d+))?"
POSITIONS = "posembed_patches/pos_embedding"


def infer(shapes: Shapes) -> dict[str, Any]:
    """See `Family.infer`."""
    found = {key: value for key, value in vit.infer(shapes).items() if key in FAMILY.keys}
    has_gamma = f"{BLOCKS}_0/LayerScale_0/gamma" in shapes
    return {**found, "layer_scale_init": 1e-4 if has_gamma else None}


def check(model: ModernVisionTransformer) -> None:
    """Raises UserError for incompatible attributes."""
    vit.check_heads(model)
    init = model.layer_scale_init
    if init is not None and not 0.0 < init < float("inf"):
        raise UserError(f"model.layer_scale_init={init} must be positive, or None (no LayerScale).")


# DeiT III's sizes (`models_v2.py`, *_LS).
SIZES = {
    f"DeiT3-{size}/{patch}": {
        "patch_size": patch,
        **ROWS[size],
        "gelu": "exact",
        "layer_scale_init": 1e-4,
    }
    for size, patch in {"S": 16, "M": 16, "B": 16, "L": 16, "H": 14}.items()
}

FAMILY = Family(
    module=ModernVisionTransformer,
    title="Vision Transformer with LayerScale (DeiT III, arXiv 2204.07118)",
    acronym="DeiT3",
    rows=(
        Row("cls", (None, None, "embed"), FIRST, role="token", title="class token"),
        Row("embedding/kernel", (None, None, None, "embed"), FIRST, role="patches"),
        Row("embedding/bias", ("embed",), FIRST),
        Row(POSITIONS, (None, None, "embed"), FIRST, role="positions", of_tokens=False),
        *attention_rows(_BLOCK),
        Row(f"{_BLOCK}/LayerScale_[01]/gamma", ("embed",)),
        Row("Transformer/encoder_norm/(?:scale|bias)", ("embed",), LAST),
        *vit.MAP_ROWS,
        *HEAD,
    ),
    sizes=SIZES,
    infer=infer,
    choices={
        "stochastic_depth_shape": DEPTH_SHAPES,
        "classifier": ("token", "gap", "map"),
        "gelu": ("tanh", "exact"),
        "attention": NAMES,
        "remat": REMAT_POLICIES,
    },
    check=check,
    blocks=BLOCKS,
    attention=vit.ATTENTION,
    tokens="Transformer",
    sequence=(POSITIONS, 1),
    conventions=("gelu", "layer_norm_epsilon"),
    head_conventions=("classifier",),
)
