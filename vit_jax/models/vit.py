"""The Vision Transformer of "An Image is Worth 16x16 Words" (arXiv 2010.11929).

Equation numbers are those of the paper. Modules and parameters have the names of the official
code, so published weights load by name. B: batch, N: tokens, D: hidden size, M: MLP width.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models import family, layers, resnet
from vit_jax.models.family import BLOCK, FIRST, HEAD, LAST, Family, ModelBase, Row, Shapes
from vit_jax.models.interpolation import POSITION_RESIZES
from vit_jax.models.kernels.attention import NAMES, AttentionFn, MultiHeadDotProductAttention
from vit_jax.models.positions import (
    POSITION_EMBEDDINGS,
    add_at_stem,
    add_in_block,
    check_positions,
    infer_positions,
    position_rows,
)
from vit_jax.patches import Layout, Patches


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Configuration shared by all blocks of a Transformer; see `VisionTransformer`."""

    mlp_dim: int
    num_heads: int
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    gelu: str = "tanh"
    layer_norm_epsilon: float = 1e-6
    attention: str = "auto"
    position_embedding: str = "learned"
    position_stddev: float = 0.02
    position_resize: str | None = None
    grid: tuple[int, int] = (0, 0)  # rows and columns of the last tokens' positions
    dtype: Any = jnp.float32

    @classmethod
    def of(cls, model: Any, **others: Any) -> Self:
        """From the model's attributes of these names, and `others`."""
        names = [field.name for field in dataclasses.fields(cls) if hasattr(model, field.name)]
        return cls(**{name: getattr(model, name) for name in names}, **others)

    def norm(self, name: str | None = None) -> nn.Module:
        return layers.LayerNorm(epsilon=self.layer_norm_epsilon, dtype=self.dtype, name=name)

    def msa(self, *, train: bool, bias: Any = None, lengths: Any = None) -> nn.Module:
        """Equations 5 to 8; for `bias` and `lengths` see `AttentionFn`."""
        return MultiHeadDotProductAttention(
            num_heads=self.num_heads,
            dropout_rate=self.attention_dropout_rate,
            deterministic=not train,
            attention_fn=AttentionFn(self.attention, train, bias, lengths),
            dtype=self.dtype,
        )


class MlpBlock(nn.Module):
    """MLP(x) = gelu(x W1 + b1) W2 + b2 with dropout after each layer: [B, N, D] -> [B, N, D]."""

    config: BlockConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        c = self.config
        init = nn.initializers.normal(1e-6)
        dense = functools.partial(layers.Dense, dtype=c.dtype, bias_init=init)
        y = dense(c.mlp_dim)(x)  # [B, N, M]
        y = layers.gelu(y, c.gelu)
        y = layers.Dropout(c.dropout_rate)(y, deterministic=not train)
        y = dense(x.shape[-1])(y)  # [B, N, D]
        return layers.Dropout(c.dropout_rate)(y, deterministic=not train)


class Encoder1DBlock(nn.Module):
    """One Transformer layer, [B, N, D] -> [B, N, D]; equations 2 and 3.

    z' = MSA(LN(z)) + z; z = MLP(LN(z')) + z'. Training drops each branch with probability
    `drop_rate` (stochastic depth); None disables it.
    """

    config: BlockConfig

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        drop_rate: Any = None,
        positions: Any = None,
        layout: Layout | None = None,
        *,
        train: bool,
    ) -> jax.Array:
        """`positions` [1, N, D] are those that blocks share, if any."""
        c = self.config
        x, bias = add_in_block(
            c, x, positions, layout
        )  # the paper's model adds its own at the stem
        y = c.norm()(x)
        y = self._attend(y, bias, layout and layout.lengths(x.shape[1]), train=train)
        y = layers.Dropout(c.dropout_rate)(y, deterministic=not train)
        x = layers.add_branch(x, y, drop_rate, train=train)

        y = c.norm()(x)
        y = MlpBlock(c)(y, train=train)
        return layers.add_branch(x, y, drop_rate, train=train)

    def _attend(self, x: jax.Array, bias: Any, lengths: Any, *, train: bool) -> jax.Array:
        """MSA of all tokens, [B, N, D] -> [B, N, D]; other models have lines of them."""
        return self.config.msa(train=train, bias=bias, lengths=lengths)(x, sow_weights=True)


class Encoder(nn.Module):
    """Position embeddings, `num_layers` blocks and the last layer norm: [B, N, D] -> [B, N, D]."""

    config: BlockConfig
    num_layers: int
    stochastic_depth_rate: float = 0.0
    remat: str = "none"
    scan: bool = False
    block: type[nn.Module] = Encoder1DBlock

    @nn.compact
    def __call__(
        self, x: jax.Array, positions: Any = None, layout: Layout | None = None, *, train: bool
    ) -> jax.Array:
        """`positions` [1, N, D] are added; None: those of the config, as `layout` places them."""
        c = self.config
        x, shared = add_at_stem(c, x, positions, layout)
        shared = shared if layout is None else (*(shared or (None,)), layout)
        x = layers.Dropout(c.dropout_rate)(x, deterministic=not train)
        x = layers.apply_blocks(
            functools.partial(self.block, c),
            x,
            *shared,
            name="encoderblock",
            train=train,
            **layers.loop_of(self),
        )
        return c.norm("encoder_norm")(x)  # equation 4


class MAPHead(nn.Module):
    """Multihead attention pooling by a learned probe: [B, N, D] -> [B, D].

    x = MSA(probe, tokens); x + MLP(LN(x)) ("Scaling Vision Transformers", 2106.04560, section 3).
    """

    config: BlockConfig

    @nn.compact
    def __call__(self, x: jax.Array, lengths: Any = None, *, train: bool) -> jax.Array:
        """For `lengths` see `AttentionFn`."""
        c = dataclasses.replace(self.config, dropout_rate=0.0, attention_dropout_rate=0.0)
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, x.shape[-1]))
        probe = jnp.tile(jnp.asarray(probe, c.dtype), (x.shape[0], 1, 1))  # [B, 1, D]
        x = c.msa(train=train, lengths=lengths)(probe, x)  # [B, 1, D]
        return (x + MlpBlock(c)(c.norm()(x), train=train))[:, 0]  # [B, D]


def corrupt(
    model: nn.Module, x: jax.Array, masked: jax.Array, source: jax.Array | None = None
) -> jax.Array:
    """Masked patch prediction (appendix B.1.2): [B, P, D] -> [B, P, D].

    The model's learned [mask] embedding where `masked` [B, P] is true, elsewhere the embedding of
    patch `source` [B, P] of the same image, by default its own.
    """
    mask = model.param("mask_embedding", nn.initializers.normal(0.02), (1, 1, x.shape[-1]))
    if source is not None:
        x = jnp.take_along_axis(x, source[..., None], axis=1)
    return jnp.where(masked[..., None], jnp.asarray(mask, x.dtype), x)


class VisionTransformer(ModelBase):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32. See also `ModelBase`.

    Attributes:
      patch_size: side of a patch in pixels, or (height, width); for a hybrid, in cells of the
        ResNet's feature map. Incomplete patches at the border are dropped.
      hidden_size, num_layers, mlp_dim, num_heads: table 1 of the paper.
      dropout_rate: after every dense layer except query, key and value, and after adding the
        position embeddings (paper, B.1).
      attention_dropout_rate: of the attention weights; 0 in all published recipes.
      stochastic_depth_rate: probability of dropping a branch of the last block in training, falling
        linearly to 0 for the first (AugReg, 2106.10270, section 3.1; DeiT).
      representation_size: width of the tanh layer before the head (section 3.1); None: no layer.
      classifier: the head's input: `token` (class token), `gap` (mean over tokens), `map`
        (attention pooling), or every token: `unpooled` (without class token) and
        `token_unpooled` (with it), which give [B, N, num_classes]; or every patch: `dense` and
        `token_dense`, whose logits are interpolated to [B, H, W, num_classes].
      head_norm: a batch norm without scale and bias in front of the head (MAE's linear probe,
        2111.06377, appendix A.1; DINOv2's segmentation).
      position_embedding: `learned`, or another of the table in `positions.py`.
      position_grid: rows and columns of the positions, which are interpolated to those of the
        images; None: those of the images. Needed for images in shapes of their own.
      position_resize: how, one of `POSITION_RESIZES`; None: `bilinear`, as SigLIP 2.
      position_stddev: of learned positions at the start: 0.02 in the official code, 1 / sqrt(D) in
        big_vision.
      gelu: `tanh` as in Google's models, or `exact` as in timm and Hugging Face
        (logits of B/16 differ by about 4e-4).
      layer_norm_epsilon: 1e-6 in every published model but Hugging Face's own (1e-12).
      resnet_layers: units per stage of a hybrid's ResNet; (): only its stem; None: no ResNet.
      resnet_width_factor: multiplies the channels of a hybrid's ResNet.
      resnet_batch_norm: batch norms and plain convolutions in a hybrid's ResNet, instead of group
        norms and standardised convolutions.
    """

    num_classes: int
    patch_size: int | tuple[int, int]
    hidden_size: int
    num_layers: int
    mlp_dim: int
    num_heads: int
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    stochastic_depth_rate: float = 0.0
    representation_size: int | None = None
    classifier: str = "token"
    head_bias_init: float = 0.0
    head_norm: bool = False
    position_embedding: str = "learned"
    position_grid: tuple[int, int] | None = None
    position_resize: str | None = None
    position_stddev: float = 0.02
    gelu: str = "tanh"
    layer_norm_epsilon: float = 1e-6
    attention: str = "auto"
    resnet_layers: tuple[int, ...] | None = None
    resnet_width_factor: int = 1
    resnet_batch_norm: bool = False
    remat: str = "none"
    scan: bool = False
    dtype: Any = jnp.float32

    kind = "vit"
    block: ClassVar[type[nn.Module]] = Encoder1DBlock

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        """Parameters that precede the grid of tokens: the class token, if any."""
        return ("cls",) if self.classifier.startswith("token") else ()

    @property
    def head_input(self) -> str:
        """The submodule whose output is the head's input."""
        return "pre_logits" if self.representation_size is None else "representation"

    @property
    def outputs_per(self) -> str:
        kinds = {"unpooled": "token", "dense": "pixel"}
        return kinds.get(self.classifier.removeprefix("token_"), "image")

    @nn.compact
    def __call__(
        self,
        images: jax.Array | Patches,
        *,
        train: bool,
        corruption: dict[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Images in [-1, 1], [B, H, W, C] -> float32 logits [B, K], [B, N, K] or [B, H, W, K].

        `corruption` is for masked patch prediction, see `corrupt`.
        """
        x: Any = images
        if self.resnet_layers is not None:
            x = jnp.asarray(images, self.dtype)
            width = 64 * self.resnet_width_factor
            parts = resnet.ResNetLayers(self.resnet_batch_norm, train, self.dtype)
            x = resnet.resnet_features(x, self.resnet_layers, width, parts)  # [B, H/d, W/d, C']

        x, grid, layout = layers.embed_tokens(self, x)  # x_p E of equation 1, [B, h*w, D]
        if corruption is not None:
            x = corrupt(self, x, **corruption)

        tokens = [
            jnp.tile(jnp.asarray(token, self.dtype), (x.shape[0], 1, 1))  # [B, 1, D]
            for token in map(self._token, self.prefix_tokens)
        ]
        x = jnp.concatenate([*tokens, x], axis=1)  # [B, N, D]
        config = BlockConfig.of(self, grid=grid)
        encoder = Encoder(config, **layers.loop_of(self), block=self.block, name="Transformer")
        x = encoder(x, layout=layout, train=train)
        x = self._classify(self._pool(x, layout, train=train), train=train)
        return layers.per_pixel(self, x, images)

    def _token(self, name: str) -> jax.Array:
        """A learned token, [1, 1, D]."""
        return self.param(name, nn.initializers.zeros_init(), (1, 1, self.hidden_size))

    def _pool(self, x: jax.Array, layout: Layout | None, *, train: bool) -> jax.Array:
        """[B, N, D] -> [B, D], or all tokens, or the patches [B, P, D]."""
        if self.classifier == "token":
            return x[:, 0]
        if self.classifier == "gap":
            return layers.token_mean(x, layout)
        if self.classifier == "map":
            lengths = layout and layout.lengths(x.shape[1])
            return MAPHead(BlockConfig.of(self))(x, lengths, train=train)
        return x[:, len(self.prefix_tokens) :] if self.outputs_per == "pixel" else x

    def _classify(self, x: jax.Array, *, train: bool) -> jax.Array:
        """[..., D] -> [..., K] float32; the representation if num_classes is 0."""
        if self.representation_size is None:
            x = layers.IdentityLayer(name="pre_logits")(x)
        else:
            dense = nn.Dense(self.representation_size, dtype=self.dtype, name="pre_logits")
            x = layers.IdentityLayer(name="representation")(nn.tanh(dense(x)))  # [..., R]
        x = jnp.asarray(x, jnp.float32)
        if not self.num_classes:
            return x
        if self.head_norm:
            x = layers.BatchNorm(train, HEAD_NORM_EPSILON, affine=False, name="head_norm")(x)
        return layers.head(self.num_classes, self.head_bias_init)(x)


HEAD_NORM_EPSILON = 1e-6
ANY_SHAPE = ("position_grid", "position_resize")  # attributes for images in shapes of their own
BLOCKS = "Transformer/encoderblock"
_BLOCK = rf"{BLOCKS}(?:_(?P<block>\d+))?"
ATTENTION = "MultiHeadDotProductAttention_0"
POSITIONS = "Transformer/posembed_input/pos_embedding"


def attention_rows(prefix: str, depth: str = BLOCK) -> tuple[Row, ...]:
    """Parameters of the attention below `prefix`, and of the MLP and layer norms next to it."""
    attention, mlp = f"{prefix}/{ATTENTION}", f"{prefix}/MlpBlock_0"
    return (
        Row(f"{attention}/(?:query|key|value)/kernel", ("embed", "heads", None), depth),
        Row(f"{attention}/(?:query|key|value)/bias", ("heads", None), depth),
        *family.dense_rows(f"{attention}/out", "heads", None, "embed", depth=depth),
        *family.dense_rows(f"{mlp}/Dense_0", "embed", "mlp", depth=depth),
        *family.dense_rows(f"{mlp}/Dense_1", "mlp", "embed", depth=depth),
        Row(f"{prefix}/LayerNorm_[01]/(?:scale|bias)", ("embed",), depth),
    )


MAP_ROWS = (Row("MAPHead_0/probe", (None, None, "embed"), LAST), *attention_rows("MAPHead_0", LAST))


def infer_blocks(shapes: Shapes, blocks: str, part: str = "") -> dict[str, Any]:
    """What the shapes of the blocks, or of this part of each, determine, see `Family.infer`."""
    return {
        "num_layers": family.count_blocks(shapes, blocks),
        "mlp_dim": family.axis_of(shapes, f"{blocks}_0{part}/MlpBlock_0/Dense_0/kernel", 2, 1),
        "num_heads": family.axis_of(shapes, f"{blocks}_0{part}/{ATTENTION}/query/kernel", 3, 1),
    }


def infer(shapes: Shapes) -> dict[str, Any]:
    """See `Family.infer`."""
    has_pooling = any(name.startswith("MAPHead_0/") for name in shapes)
    return {
        "patch_size": family.patch_size_of(shapes, "embedding/kernel"),
        "hidden_size": family.axis_of(shapes, "embedding/kernel", 4, 3),
        **infer_blocks(shapes, BLOCKS),
        **resnet.infer(shapes, "conv_root/kernel"),
        "resnet_batch_norm": "bn_root/scale" in shapes,
        "representation_size": family.layer_width(shapes, "pre_logits"),
        "head_norm": "head_norm/mean" in shapes,
        "classifier": "token" if "cls" in shapes else "map" if has_pooling else "gap",
        "position_embedding": infer_positions(shapes, "Transformer", BLOCKS),
    }


def check_heads(model: Any) -> None:
    """Raises UserError if the number of heads does not divide the width."""
    if model.hidden_size % model.num_heads:
        raise UserError(
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.num_heads={model.num_heads}; choose a multiple."
        )


def check(model: VisionTransformer) -> None:
    """Raises UserError for incompatible attributes."""
    check_heads(model)
    if model.attention_dropout_rate and model.attention not in ("auto", "reference"):
        raise UserError(
            f"model.attention={model.attention!r} does not support attention dropout; use "
            f"'reference', or model.attention_dropout_rate=0 (given: "
            f"{model.attention_dropout_rate})."
        )
    check_positions(model)


FAMILY = Family(
    module=VisionTransformer,
    title="Vision Transformer (arXiv 2010.11929)",
    acronym="ViT",
    rows=(
        Row("cls", (None, None, "embed"), FIRST, role="token", title="class token"),
        Row("mask_embedding", (None, None, "embed"), FIRST, role="training"),
        Row("embedding/kernel", (None, None, None, "embed"), FIRST, role="patches"),
        Row("embedding/bias", ("embed",), FIRST),
        *position_rows("Transformer", _BLOCK),
        *resnet.ROWS,
        *attention_rows(_BLOCK),
        Row("Transformer/encoder_norm/(?:scale|bias)", ("embed",), LAST),
        *MAP_ROWS,
        *family.dense_rows("pre_logits", "embed", None, depth=LAST, role="pre_logits"),
        Row("head_norm/(?:mean|var)", ("embed",), LAST, role="head", is_statistic=True),
        *HEAD,
    ),
    infer=infer,
    choices={
        "classifier": ("token", "gap", "map")
        + ("unpooled", "token_unpooled", "dense", "token_dense"),
        "position_embedding": POSITION_EMBEDDINGS,
        "position_resize": (None, *POSITION_RESIZES),
        "gelu": ("tanh", "exact"),
        "attention": NAMES,
        "remat": layers.REMAT_POLICIES,
    },
    check=check,
    blocks=BLOCKS,
    attention=ATTENTION,
    tokens="Transformer",
    last_norm=lambda model: BlockConfig.of(model).norm("encoder_norm"),
    sequence=(POSITIONS, 1),
    any_shape=True,
    conventions=("position_embedding", "gelu", "layer_norm_epsilon", *ANY_SHAPE),
    head_conventions=("classifier",),
)
