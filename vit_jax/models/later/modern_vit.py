"""Today's plain Vision Transformers: CLIP, DINOv2 and v3, EVA-02, BEiT, DeiT III and their kin.

One model whose parts are attributes, off by default; `variants.py` has which are on in which
published model. Different from `vit.py`, and common to all: positions are those of the patches
alone, class token and registers join them afterwards; kernels start normal with deviation 0.02 and
zero biases, as in timm and in DeiT III's `models_v2.py`. Parameters have the names of `vit.py`
where they are the same. B: batch, N: tokens, P: tokens before the patches, D: hidden size.
"""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models import layers, vit
from vit_jax.models.family import FIRST, HEAD, LAST, Family, ModelBase, Row, Shapes, axis_of
from vit_jax.models.interpolation import POSITION_RESIZES
from vit_jax.models.kernels.attention import BIASED, NAMES
from vit_jax.models.later.modern_block import INIT, ModernConfig, ModernEncoder
from vit_jax.models.later.rotary import ROPES, axial_angles
from vit_jax.models.positions import AddPositionEmbs
from vit_jax.models.vit import BLOCKS
from vit_jax.patches import Layout, Patches

# PyTorch's for convolutions: uniform within 1 / sqrt(inputs).
_PATCH_INIT = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class ModernVisionTransformer(ModelBase):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32.

    Attributes:
      hidden_size, num_layers, mlp_dim, num_heads: as in table 1 of the paper (2010.11929).
      class_token: whether there is one.
      num_registers: further learned tokens ("Vision Transformers Need Registers", 2309.16588).
      position_embedding: `learned`, or `none`.
      position_grid, position_resize: as in `VisionTransformer`.
      relative_bias: BEiT's of the scores (2106.08254).
      rope: rotary positions, of the table in `rotary.py`.
      rope_base, rope_grid, rope_offset: of their frequencies and coordinates, see there.
      rope_jitter: training scales all coordinates by a common factor in [1 / jitter, jitter]
        (DINOv3, section 3.2: 2); None: it does not.
      patch_bias: whether the patch embedding has a bias (CLIP: no).
      patch_norm: a norm of the patches, before their positions (AIMv2, 2411.14402).
      pre_norm: a norm before the first block (CLIP, 2103.00020).
      norm_kind: `layer`, `layer_without_bias`, `rms` (AIMv2).
      norm_after: norms follow the branches instead of preceding them (EVA-02-CLIP-E).
      final_norm: of `tokens` after the last block, after `pooled` (BEiT; timm's fc_norm), `none`.
      qkv_bias: biases of queries, keys and values: `qkv`, `qv` (BEiT, EVA), `none`.
      dense_bias: whether all other layers of a block have biases (AIMv2: no).
      qk_norm: norms of queries and keys (ViT-22B, 2302.05442).
      attention_norm, mlp_norm: norms within both branches (sub-LN: BEiT-3, EVA-02).
      mlp: `mlp`, or `swiglu` (DINOv2 g, EVA-02), whose width is `mlp_dim`, too.
      gelu: `tanh`, `exact`, or `quick` (OpenAI's CLIP).
      layer_scale_init: initial factor of LayerScale; None: no LayerScale. DeiT III: 1e-4 in every
        size. Of weights of others, only whether there is one is known.
      classifier: the head's input: `token` (class token), `gap` (mean over patches), `token_gap`
        (both, [B, 2 D]; DINOv2's linear head), `map` (attention pooling of the patches); `dense`:
        every patch, whose logits are interpolated to [B, H, W, num_classes].
      head_norm: a batch norm without scale and bias in front of the head.
      pool_prefix: the tokens before the patches take part in `gap` and `map`, too.
      map_num_heads, map_mlp_dim: of the attention pooling; None: those of the blocks.
      stochastic_depth_rate: probability of dropping a branch in training.
      stochastic_depth_shape: `linear`: from 0 for the first block to the rate for the last, as in
        timm; `constant`: the rate for all, as in DeiT III (`models_v2.py`).
    """

    num_classes: int
    patch_size: int | tuple[int, int]
    hidden_size: int
    num_layers: int
    mlp_dim: int
    num_heads: int
    class_token: bool = True
    num_registers: int | None = None
    position_embedding: str = "learned"
    position_grid: tuple[int, int] | None = None
    position_resize: str | None = None
    relative_bias: bool = False
    rope: str = "none"
    rope_base: float = 100.0
    rope_grid: tuple[int, int] | None = None
    rope_offset: float = 0.0
    rope_jitter: float | None = None
    patch_bias: bool = True
    patch_norm: bool = False
    pre_norm: bool = False
    norm_kind: str = "layer"
    norm_after: bool = False
    final_norm: str = "tokens"
    qkv_bias: str = "qkv"
    dense_bias: bool = True
    qk_norm: bool = False
    attention_norm: bool = False
    mlp_norm: bool = False
    mlp: str = "mlp"
    gelu: str = "tanh"
    layer_scale_init: float | None = None
    classifier: str = "token"
    pool_prefix: bool = False
    map_num_heads: int | None = None
    map_mlp_dim: int | None = None
    head_norm: bool = False
    stochastic_depth_rate: float = 0.0
    stochastic_depth_shape: str = "linear"
    head_bias_init: float = 0.0
    layer_norm_epsilon: float = 1e-6
    attention: str = "auto"
    remat: str = "none"
    scan: bool = False
    dtype: Any = jnp.float32

    kind = "modern_vit"

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        """What precedes the grid of tokens: the class token and all registers, if any."""
        registers = range(self.num_registers or 0)
        return ("cls",) * self.class_token + tuple(f"register_{i}" for i in registers)

    @property
    def outputs_per(self) -> str:
        return "pixel" if self.classifier == "dense" else "image"

    @nn.compact
    def __call__(
        self,
        images: jax.Array | Patches,
        *,
        train: bool,
        corruption: dict[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Scaled images [B, H, W, C] -> float32 logits [B, K], or [B, H, W, K].

        `corruption`: see `vit.corrupt`.
        """
        options = {"use_bias": self.patch_bias, "kernel_init": _PATCH_INIT}
        x, grid, layout = layers.embed_tokens(self, images, **options)  # [B, h*w, D]
        config = ModernConfig.of(self, grid=grid)
        if corruption is not None:
            x = vit.corrupt(self, x, **corruption)
        if self.patch_norm:
            x = config.norm("patch_norm")(x)
        if self.position_embedding == "learned":
            add = AddPositionEmbs(
                dtype=self.dtype, grid=grid, resize=self.position_resize, name="posembed_patches"
            )
            x = add(x, layout)
        for name, count in (("registers", self.num_registers or 0), ("cls", int(self.class_token))):
            if count:
                token = self.param(name, INIT, (1, count, self.hidden_size))
                tokens = jnp.tile(jnp.asarray(token, self.dtype), (x.shape[0], 1, 1))
                x = jnp.concatenate([tokens, x], axis=1)  # [B, N, D]
        blocks = functools.partial(layers.apply_blocks, **layers.loop_of(self))
        encoder = ModernEncoder(config, blocks, name="Transformer")
        x = encoder(x, self._angles(grid, config, layout, train), layout, train=train)
        x = self._pool(x, config, layout, train=train)
        if self.final_norm == "pooled":
            x = config.norm("pooled_norm")(x[:, None])[:, 0]  # [B, D]
        x = jnp.asarray(layers.IdentityLayer(name="pre_logits")(x), jnp.float32)
        if not self.num_classes:
            return x
        if self.head_norm:
            x = layers.BatchNorm(train, vit.HEAD_NORM_EPSILON, affine=False, name="head_norm")(x)
        bias = nn.initializers.constant(self.head_bias_init)
        x = nn.Dense(self.num_classes, kernel_init=INIT, bias_init=bias, name="head")(x)
        return layers.per_pixel(self, x, images)

    def _angles(
        self, grid: tuple[int, int], config: ModernConfig, layout: Layout | None, train: bool
    ) -> jax.Array | None:
        """Of rotary positions, [B or 1, h*w, 1, d / 2], if all blocks share them."""
        if self.rope not in ("grid", "centered"):
            return None
        angles = jnp.asarray(axial_angles(grid, self.hidden_size // self.num_heads, config, layout))
        if train and self.rope_jitter and not self.is_initializing():
            limit = math.log(self.rope_jitter)
            draw = jax.random.uniform(self.make_rng("dropout"), minval=-limit, maxval=limit)
            angles = angles * jnp.exp(draw)
        return angles

    def _pool(
        self, x: jax.Array, config: ModernConfig, layout: Layout | None, *, train: bool
    ) -> jax.Array:
        """[B, N, D] -> [B, D], [B, 2 D] for `token_gap`, [B, P, D] for `dense`."""
        patches = x if self.pool_prefix else x[:, len(self.prefix_tokens) :]
        if self.classifier == "map":
            heads, width = self.map_num_heads, self.map_mlp_dim
            config = dataclasses.replace(
                config, num_heads=heads or self.num_heads, mlp_dim=width or self.mlp_dim
            )
            lengths = layout and layout.lengths(patches.shape[1])
            return vit.MAPHead(config)(patches, lengths, train=train)
        if self.classifier == "token":
            return x[:, 0]
        if self.classifier == "dense":
            return x[:, len(self.prefix_tokens) :]
        mean = layers.token_mean(patches, layout)
        if self.classifier == "gap":
            return mean
        return jnp.concatenate([x[:, 0], mean], axis=-1)  # [B, 2 D]


_BLOCK = rf"{BLOCKS}(?:_(?P<block>\d+))?"
_MSA = f"{_BLOCK}/{vit.ATTENTION}"
POSITIONS = "posembed_patches/pos_embedding"
_ROPE = ("rope", "rope_base", "rope_grid", "rope_offset")
_ATTENTION = f"{BLOCKS}_0/{vit.ATTENTION}"


def infer(shapes: Shapes) -> dict[str, Any]:
    """See `Family.infer`."""
    plain = vit.infer(shapes)
    common = ("patch_size", "hidden_size", "num_layers", "mlp_dim", "num_heads")
    biases = "".join(n[0] for n in ("query", "key", "value") if f"{_ATTENTION}/{n}/bias" in shapes)
    pooling = "MAPHead_0" if any(name.startswith("MAPHead_0/") for name in shapes) else ""
    map_heads = axis_of(shapes, f"{pooling}/{vit.ATTENTION}/query/kernel", 3, 1)
    map_width = axis_of(shapes, f"{pooling}/MlpBlock_0/Dense_0/kernel", 2, 1)
    norm = "layer" if f"{BLOCKS}_0/LayerNorm_0/bias" in shapes else "layer_without_bias"
    final = {"tokens": "Transformer/encoder_norm/scale", "pooled": "pooled_norm/scale"}
    return {
        **{key: plain[key] for key in common},
        "class_token": "cls" in shapes,
        "num_registers": axis_of(shapes, "registers", 3, 1),
        "position_embedding": "learned" if POSITIONS in shapes else "none",
        "relative_bias": f"{_ATTENTION}/relative_bias/offsets" in shapes,
        "rope": "mixed" if f"{_ATTENTION}/rope/frequencies" in shapes else "none",
        "patch_bias": "embedding/bias" in shapes,
        "patch_norm": "patch_norm/scale" in shapes,
        "pre_norm": "Transformer/pre_norm/scale" in shapes,
        "norm_kind": "rms" if f"{BLOCKS}_0/RMSNorm_0/scale" in shapes else norm,
        "final_norm": next((kind for kind, name in final.items() if name in shapes), "none"),
        "qkv_bias": biases or "none",
        "dense_bias": f"{_ATTENTION}/out/bias" in shapes,
        "qk_norm": f"{_ATTENTION}/query_norm/scale" in shapes,
        "attention_norm": f"{_ATTENTION}/norm/scale" in shapes,
        "mlp_norm": f"{BLOCKS}_0/MlpBlock_0/norm/scale" in shapes,
        "mlp": "swiglu" if f"{BLOCKS}_0/MlpBlock_0/gate/kernel" in shapes else "mlp",
        "layer_scale_init": 1e-4 if f"{BLOCKS}_0/LayerScale_0/gamma" in shapes else None,
        "classifier": "map" if pooling else "token" if "cls" in shapes else "gap",
        "map_num_heads": None if map_heads == plain["num_heads"] else map_heads,
        "map_mlp_dim": None if map_width == plain["mlp_dim"] else map_width,
        "head_norm": plain["head_norm"],
    }


def check(model: ModernVisionTransformer) -> None:
    """Raises UserError for incompatible attributes."""
    vit.check_heads(model)
    init = model.layer_scale_init
    if init is not None and not 0.0 < init < math.inf:
        raise UserError(f"model.layer_scale_init={init} must be positive, or None (no LayerScale).")
    if not 0.0 < model.rope_base < math.inf:
        raise UserError(f"model.rope_base={model.rope_base} must be positive.")
    if model.rope_jitter is not None and not 1.0 <= model.rope_jitter < math.inf:
        raise UserError(f"model.rope_jitter={model.rope_jitter} must be at least 1, or None.")
    if model.classifier in ("token", "token_gap") and not model.class_token:
        raise UserError(
            f"model.classifier={model.classifier!r} needs model.class_token=True; or use 'gap'."
        )
    if model.classifier in ("token_gap", "dense") and model.final_norm == "pooled":
        key = f"model.classifier={model.classifier!r}"
        raise UserError(f"{key} needs model.final_norm='tokens' or 'none'.")
    if model.relative_bias and model.attention not in BIASED:
        raise UserError(
            f"model.attention={model.attention!r} does not support model.relative_bias=True; use "
            f"{', '.join(map(repr, BIASED))}."
        )
    head_dim = model.hidden_size // model.num_heads
    if model.rope != "none" and head_dim % 4:
        raise UserError(
            f"model.rope={model.rope!r} needs heads whose width is divisible by 4, not "
            f"{head_dim}; change model.hidden_size or model.num_heads."
        )


FAMILY = Family(
    module=ModernVisionTransformer,
    title="Vision Transformer of today (LayerScale, registers, RoPE, ...)",
    acronym="ViT",
    rows=(
        Row("cls", (None, None, "embed"), FIRST, role="token", title="class token"),
        Row("registers", (None, None, "embed"), FIRST, role="token", title="registers"),
        Row("embedding/kernel", (None, None, None, "embed"), FIRST, role="patches"),
        Row("embedding/bias", ("embed",), FIRST),
        Row(POSITIONS, (None, None, "embed"), FIRST, role="positions", of_tokens=False),
        Row("mask_embedding", (None, None, "embed"), FIRST, role="training"),
        Row("(?:patch_norm|Transformer/pre_norm)/(?:scale|bias)", ("embed",), FIRST),
        *vit.attention_rows(_BLOCK),
        Row(f"{_BLOCK}/RMSNorm_[01]/scale", ("embed",)),
        Row(f"{_BLOCK}/LayerScale_[01]/gamma", ("embed",)),
        Row(f"{_MSA}/(?:query|key)_norm/(?:scale|bias)", (None,)),
        Row(f"{_MSA}/norm/(?:scale|bias)", ("embed",)),
        Row(f"{_MSA}/rope/frequencies", (None, "heads", None)),
        Row(f"{_MSA}/relative_bias/offsets", (None, None, "heads"), role="offset_grid"),
        Row(f"{_MSA}/relative_bias/tokens", (None, "heads")),
        Row(f"{_BLOCK}/MlpBlock_0/gate/kernel", ("embed", "mlp")),
        Row(f"{_BLOCK}/MlpBlock_0/gate/bias", ("mlp",)),
        Row(f"{_BLOCK}/MlpBlock_0/norm/(?:scale|bias)", ("mlp",)),
        Row("Transformer/encoder_norm/(?:scale|bias)", ("embed",), LAST),
        *vit.MAP_ROWS,
        Row("MAPHead_0/RMSNorm_0/scale", ("embed",), LAST),
        Row("pooled_norm/(?:scale|bias)", ("embed",), LAST),
        Row("head_norm/(?:mean|var)", ("embed",), LAST, role="head", is_statistic=True),
        *HEAD,
    ),
    infer=infer,
    choices={
        "position_embedding": ("learned", "none"),
        "position_resize": (None, *POSITION_RESIZES),
        "rope": ROPES,
        "norm_kind": ("layer", "layer_without_bias", "rms"),
        "final_norm": ("tokens", "pooled", "none"),
        "qkv_bias": ("qkv", "qv", "none"),
        "mlp": ("mlp", "swiglu"),
        "gelu": ("tanh", "exact", "quick"),
        "classifier": ("token", "gap", "token_gap", "map", "dense"),
        "stochastic_depth_shape": ("linear", "constant"),
        "attention": NAMES,
        "remat": layers.REMAT_POLICIES,
    },
    check=check,
    blocks=BLOCKS,
    attention=vit.ATTENTION,
    tokens="Transformer",
    last_norm=lambda model: (
        ModernConfig.of(model).norm("encoder_norm") if model.final_norm == "tokens" else None
    ),
    sequence=(POSITIONS, 1),
    any_shape=True,
    conventions=("gelu", "layer_norm_epsilon", "norm_after", *_ROPE, *vit.ANY_SHAPE),
    head_conventions=("classifier", "pool_prefix"),
)
