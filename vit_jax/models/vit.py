"""The Vision Transformer of "An Image is Worth 16x16 Words" (arXiv 2010.11929).

Equation numbers are those of the paper. Modules and parameters carry the names of the official
code, so published weights load by name. B: batch, N: tokens, D: hidden size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError, check_known
from vit_jax.models import attention as attentions
from vit_jax.models.parameter_table import FIRST, LAST, Row
from vit_jax.models.resnet import resnet_features
from vit_jax.models.tokens import patch_shape, pixels_per_token, sincos2d
from vit_jax.models.transformer import (
    REMAT_POLICIES,
    BlockConfig,
    Encoder,
    MAPHead,
    attention_rows,
)

CLASSIFIERS = ("token", "gap", "map", "unpooled", "token_unpooled")
# Google's weights were trained with the tanh form; timm and Hugging Face compute the error function
# itself. Logits of B/16 differ by about 4e-4.
GELUS = ("tanh", "exact")
POSITION_EMBEDDINGS = ("learned", "sincos2d")

POSITIONS = "Transformer/posembed_input/pos_embedding"

PARAMETERS = (
    Row("cls", (None, None, "embed"), FIRST, role="token"),
    Row("mask_embedding", (None, None, "embed"), FIRST, role="training"),
    Row("embedding/kernel", (None, None, None, "embed"), FIRST),
    Row("embedding/bias", ("embed",), FIRST),
    Row(POSITIONS, (None, None, "embed"), FIRST, role="positions"),
    *attention_rows(r"Transformer/encoderblock(?:_(?P<block>\d+))?"),
    Row("Transformer/encoder_norm/(?:scale|bias)", ("embed",), LAST),
    Row("MAPHead_0/probe", (None, None, "embed"), LAST),
    *attention_rows("MAPHead_0", LAST),
    Row("pre_logits/kernel", ("embed", None), LAST, role="pre_logits"),
    Row("pre_logits/bias", (None,), LAST, role="pre_logits"),
    Row("head/kernel", ("embed", "classes"), LAST, role="head"),
    Row("head/bias", ("classes",), LAST, role="head"),
)


class IdentityLayer(nn.Module):
    """Names a value among the intermediates."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class VisionTransformer(nn.Module):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32.

    Attributes:
      num_classes: number of logits; 0 returns the representation instead.
      patch_size: side of a patch in pixels, or (height, width); for a hybrid, in cells of the
        ResNet's feature map. Incomplete patches at the border are dropped.
      hidden_size, num_layers, mlp_dim, num_heads: table 1 of the paper; `num_layers=None` is no
        Transformer at all (the official code's `transformer=None`).
      dropout_rate: after every dense layer but query, key and value, and after adding the
        position embeddings (paper, B.1).
      attention_dropout_rate: of the attention weights; 0 in all published recipes.
      stochastic_depth_rate: probability of dropping a branch of the last block in training, falling
        linearly to 0 for the first (AugReg, 2106.10270, section 3.1; DeiT).
      representation_size: width of the tanh layer before the head (section 3.1); None: no layer.
      classifier: what the head sees: `token` (class token), `gap` (mean over tokens), `map`
        (attention pooling), or every token: `unpooled` (without class token) and
        `token_unpooled` (with it), which give [B, N, num_classes].
      head_bias_init: constant; -10 where the loss is a sigmoid over many classes.
      position_embedding: `learned`, or `sincos2d`: fixed (`tokens.sincos2d`), without a parameter,
        for any grid; a class token gets none.
      position_stddev: of learned positions at initialisation: 0.02 in the official code,
        1 / sqrt(hidden_size) in big_vision.
      gelu: `tanh` or `exact`, see `GELUS`.
      layer_norm_epsilon: 1e-6 in every published model but Hugging Face's own (1e-12).
      attention: implementation of the attention, one of `attention.NAMES`.
      resnet_layers: units per stage of a hybrid's ResNet; () is its stem alone; None no ResNet.
      resnet_width_factor: multiplies the channels of a hybrid's ResNet.
      remat: one of `REMAT_POLICIES`.
      scan: compile the blocks as one loop.
      dtype: of the computation; parameters, softmax, norms' statistics and logits are float32.
    """

    num_classes: int
    patch_size: int | tuple[int, int]
    hidden_size: int
    num_layers: int | None
    mlp_dim: int
    num_heads: int
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    stochastic_depth_rate: float = 0.0
    representation_size: int | None = None
    classifier: str = "token"
    head_bias_init: float = 0.0
    position_embedding: str = "learned"
    position_stddev: float = 0.02
    gelu: str = "tanh"
    layer_norm_epsilon: float = 1e-6
    attention: str = "auto"
    resnet_layers: tuple[int, ...] | None = None
    resnet_width_factor: int = 1
    remat: str = "none"
    scan: bool = False
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        check_known("model.classifier", self.classifier, CLASSIFIERS)
        check_known("model.remat", self.remat, REMAT_POLICIES)
        check_known("model.attention", self.attention, attentions.NAMES)
        attentions.check_attention(self.attention, self.attention_dropout_rate)
        check_known("model.gelu", self.gelu, GELUS)
        check_known("model.position_embedding", self.position_embedding, POSITION_EMBEDDINGS)
        patch_shape(self.patch_size)
        for key in ("hidden_size", "num_heads", "mlp_dim", "num_layers", "representation_size"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"model.{key}={value} must be at least 1.")
        for key in ("dropout_rate", "attention_dropout_rate", "stochastic_depth_rate"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise UserError(f"model.{key}={getattr(self, key)} must be in [0, 1).")
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"model.hidden_size={self.hidden_size} does not divide into "
                f"model.num_heads={self.num_heads} heads; choose a multiple."
            )
        super().__post_init__()

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        """Parameters that stand before the grid of tokens: the class token, if any."""
        return ("cls",) if self.classifier in ("token", "token_unpooled") else ()

    @property
    def block_config(self) -> BlockConfig:
        names = (field.name for field in dataclasses.fields(BlockConfig))
        return BlockConfig(**{name: getattr(self, name) for name in names})

    @property
    def pixels_per_token(self) -> tuple[int, int]:
        """Height and width of the part of the image that becomes a token."""
        return pixels_per_token(self.patch_size, self.resnet_layers)

    @nn.compact
    def __call__(
        self, images: jax.Array, *, train: bool, corruption: dict[str, jax.Array] | None = None
    ) -> jax.Array:
        """Images in [-1, 1], [B, H, W, C] -> logits [B, K] ([B, N, K] unpooled) float32.

        `corruption` is that of masked patch prediction, see `_corrupt`.
        """
        x = jnp.asarray(images, self.dtype)
        if self.resnet_layers is not None:
            width = 64 * self.resnet_width_factor
            x = resnet_features(x, self.resnet_layers, width, self.dtype)  # [B, H/d, W/d, C']

        x = self._embed_patches(x)  # [B, h, w, D]
        if corruption is not None:
            x = self._corrupt(x, **corruption)
        if self.num_layers is not None:
            x = self._encode(x, train=train)  # [B, N, D]
        x = self._pool(x, train=train)  # [B, D] or [B, N, D]
        return self._classify(x)  # [B, K] or [B, N, K]

    def _embed_patches(self, x: jax.Array) -> jax.Array:
        """x_p E of equation 1, as a convolution: [B, H, W, C] -> [B, h, w, D]."""
        patch = patch_shape(self.patch_size)
        if x.shape[1] < patch[0] or x.shape[2] < patch[1]:
            raise UserError(
                f"model.patch_size={self.patch_size} is larger than its input of "
                f"{x.shape[1]}x{x.shape[2]}; use larger images or a smaller patch."
            )
        return nn.Conv(
            self.hidden_size, patch, patch, padding="VALID", dtype=self.dtype, name="embedding"
        )(x)

    def _corrupt(self, x: jax.Array, masked: jax.Array, source: jax.Array) -> jax.Array:
        """Masked patch prediction (appendix B.1.2): [B, h, w, D] -> [B, h, w, D].

        The learned [mask] embedding where `masked` [B, P] is true, elsewhere the embedding of patch
        `source` [B, P] of the same image.
        """
        tokens = jnp.reshape(x, (x.shape[0], -1, x.shape[-1]))  # [B, P, D]
        mask = self.param("mask_embedding", nn.initializers.normal(0.02), (1, 1, x.shape[-1]))
        tokens = jnp.take_along_axis(tokens, source[..., None], axis=1)
        tokens = jnp.where(masked[..., None], jnp.asarray(mask, self.dtype), tokens)
        return jnp.reshape(tokens, x.shape)

    def _encode(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Equations 1 to 4 on a grid of embeddings: [B, h, w, D] -> [B, N, D]."""
        assert self.num_layers is not None
        batch_size, height, width, hidden_size = x.shape
        x = jnp.reshape(x, (batch_size, height * width, hidden_size))  # [B, h*w, D]
        prefix = [
            self.param(name, nn.initializers.zeros_init(), (1, 1, hidden_size))
            for name in self.prefix_tokens
        ]
        if prefix:
            tokens = jnp.asarray(jnp.concatenate(prefix, axis=1), self.dtype)  # [1, P, D]
            tokens = jnp.tile(tokens, (batch_size, 1, 1))  # [B, P, D]
            x = jnp.concatenate([tokens, x], axis=1)  # [B, P + h*w, D]
        positions = None
        if self.position_embedding == "sincos2d":
            no_position = np.zeros((1, len(prefix), hidden_size), np.float32)
            table = sincos2d((height, width), hidden_size)
            positions = np.concatenate([no_position, table], axis=1)  # [1, P + h*w, D]
        return Encoder(
            self.block_config,
            num_layers=self.num_layers,
            stochastic_depth_rate=self.stochastic_depth_rate,
            position_stddev=self.position_stddev,
            remat=self.remat,
            scan=self.scan,
            name="Transformer",
        )(x, positions, train=train)

    def _pool(self, x: jax.Array, *, train: bool) -> jax.Array:
        """[B, N, D] -> [B, D], or all tokens for the unpooled classifiers."""
        if self.classifier == "token":
            return x[:, 0]
        if self.classifier == "gap":
            return jnp.mean(x, axis=tuple(range(1, x.ndim - 1)))
        if self.classifier == "map":
            x = jnp.reshape(x, (x.shape[0], -1, x.shape[-1]))  # also when there is no Transformer
            return MAPHead(self.block_config)(x, train=train)
        return x

    def _classify(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., K] float32; the representation where num_classes is 0."""
        if self.representation_size is None:
            x = IdentityLayer(name="pre_logits")(x)
        else:
            pre_logits = nn.Dense(self.representation_size, dtype=self.dtype, name="pre_logits")
            x = nn.tanh(pre_logits(x))  # [..., R]
        x = jnp.asarray(x, jnp.float32)
        if not self.num_classes:
            return x
        return self._head("head", x)

    def _head(self, name: str, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., K], zero at first but for its bias."""
        return nn.Dense(
            self.num_classes,
            kernel_init=nn.initializers.zeros_init(),
            bias_init=nn.initializers.constant(self.head_bias_init),
            name=name,
        )(x)
