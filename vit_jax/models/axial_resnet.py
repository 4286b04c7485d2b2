"""Axial-ResNet, the other model of appendix D.6 of 2010.11929.

The ResNet-50 of "Axial-DeepLab" (2003.07853), as its authors' JAX code (scenic's
`axial_resnet.py`) simplifies it: the 3x3 convolution of a bottleneck becomes attention along the
height, then along the width, with learned embeddings of the offset. Norms and activations follow
the convolutions, which are standardised as BiT's. In the last of the three scores scenic takes the
key of the query's own cell; here it is that of the other cell, as in the paper's equation.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models import bit, resnet
from vit_jax.models.family import FIRST, HEAD, Family, Row
from vit_jax.models.kernels.products import product
from vit_jax.models.layers import IdentityLayer, head
from vit_jax.models.resnet import STEM_WIDTH, StdConv, apply_stages

STEM = "conv_root/kernel"
_ATTENTION = r"block\d+/unit(?P<unit>\d+)/(?:height|width)"

NUM_HEADS = 8

_Conv = functools.partial(StdConv, use_bias=False, standardize=bit.weight_standardize)
_Norm = functools.partial(nn.GroupNorm, epsilon=1e-4)


class AxialAttention(nn.Module):
    """Attention along an axis of a feature map (2003.07853, equation 4): [B, H, W, C], same shape.

    y_o = sum_p softmax_p(q_o k_p + q_o r^q_(p-o) + k_p r^k_(p-o)) (v_p + r^v_(p-o)), where the
    heads of q and k are half as wide as those of v, C / NUM_HEADS. Norms stand for the scaling.
    """

    axis: int  # 1: along the height, 2: along the width
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, self.axis, 2)  # [B, M, L, C]: M lines of L cells
        length, channels = x.shape[2:]
        width = channels // NUM_HEADS
        init = nn.initializers.normal(1 / channels)
        dense = nn.Dense(2 * channels, False, self.dtype, kernel_init=init, name="qkv")
        qkv = dense(jnp.reshape(x, (-1, length, channels)))  # [B*M, L, 2C]
        qkv = _Norm(dtype=self.dtype, name="gn_qkv")(qkv)
        qkv = jnp.reshape(qkv, (-1, length, NUM_HEADS, 2 * width))  # [B*M, L, h, 2d]
        init = nn.initializers.normal(1 / width)
        embedding = self.param("relative_embedding", init, (2 * length - 1, 2 * width))
        index = np.arange(length)
        relative = jnp.asarray(embedding, self.dtype)[index - index[:, None] + length - 1]
        parts = slice(0, width // 2), slice(width // 2, width), slice(width, None)
        query, key, value = (qkv[..., part] for part in parts)
        for_query, for_key, for_value = (relative[..., part] for part in parts)  # [L, L, d or d/2]
        scores = product("bohd,bphd->bhop", query, key)  # [B*M, h, L, L]
        scores = scores + product("bohd,opd->bhop", query, for_query)
        scores = scores + product("bphd,opd->bhop", key, for_key)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(self.dtype)
        out = product("bhop,bphd->bohd", weights, value)
        out = out + product("bhop,opd->bohd", weights, for_value)  # [B*M, L, h, d]
        out = jnp.reshape(out.astype(self.dtype), (-1, length, channels))
        out = _Norm(dtype=self.dtype, name="gn_out")(out)
        return jnp.moveaxis(jnp.reshape(out, x.shape), 2, self.axis)  # [B, H, W, C]


class ResidualUnit(nn.Module):
    """Axial bottleneck: [B, H, W, C] -> [B, H/s, W/s, 4 * features] for stride s.

    y = gn3(conv3(relu(pool(width(height(relu(gn1(conv1(x)))))))); out = relu(y + shortcut(x)).
    """

    features: int
    stride: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stride, features_out = (self.stride, self.stride), 4 * self.features
        conv, norm = (functools.partial(layer, dtype=self.dtype) for layer in (_Conv, _Norm))
        shortcut = x
        if x.shape[-1] != features_out or self.stride != 1:
            shortcut = conv(features_out, (1, 1), stride, name="conv_proj")(x)
            shortcut = norm(name="gn_proj")(shortcut)  # [B, H/s, W/s, 4F]
        y = conv(self.features, (1, 1), name="conv1")(x)
        y = nn.relu(norm(name="gn1")(y))  # [B, H, W, F]
        y = AxialAttention(1, self.dtype, name="height")(y)
        y = AxialAttention(2, self.dtype, name="width")(y)
        if self.stride != 1:
            y = nn.avg_pool(y, (2, 2), stride, "SAME")  # [B, H/s, W/s, F]
        y = conv(features_out, (1, 1), name="conv3")(nn.relu(y))
        # Scale 0: at initialisation the unit is its shortcut.
        y = norm(scale_init=nn.initializers.zeros_init(), name="gn3")(y)  # [B, H/s, W/s, 4F]
        return nn.relu(y + shortcut)


class AxialResNet(bit.BiTResNet):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32.

    Attributes are those of `BiTResNet`.
    """

    kind = "axial_resnet"

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Images in [-1, 1], [B, H, W, C] -> logits [B, K] float32; `train` has no effect."""
        del train
        width = STEM_WIDTH * self.resnet_width_factor
        x = jnp.asarray(images, self.dtype)
        x = _Conv(width, (7, 7), (2, 2), dtype=self.dtype, name="conv_root")(x)
        x = nn.relu(_Norm(dtype=self.dtype, name="gn_root")(x))  # [B, H/2, W/2, width]
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")  # [B, H/4, W/4, width]
        options: dict[str, Any] = {"remat": self.remat, "dtype": self.dtype}
        x = apply_stages(x, self.resnet_layers, width, ResidualUnit, **options)
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)  # [B, D]
        x = IdentityLayer(name="pre_logits")(x)
        return head(self.num_classes, self.head_bias_init)(x) if self.num_classes else x


FAMILY = Family(
    module=AxialResNet,
    title="Axial-ResNet (arXiv 2003.07853)",
    acronym="Axial-R",
    rows=(
        Row(STEM, (None, None, None, "features"), FIRST, role="image"),
        Row("gn_root/(?:scale|bias)", ("features",), FIRST),
        *resnet.UNIT_ROWS,
        Row(f"{_ATTENTION}/qkv/kernel", (None, "features"), FIRST),
        Row(f"{_ATTENTION}/gn_(?:qkv|out)/(?:scale|bias)", ("features",), FIRST),
        Row(f"{_ATTENTION}/relative_embedding", (None, None), FIRST, role="axis_positions"),
        *HEAD,
    ),
    infer=functools.partial(resnet.infer, stem=STEM),
    choices={
        **bit.FAMILY.choices,
        # BiT's variants of its stem and kernels; published Axial-ResNets have none.
        "max_pool_padding": ("-inf",),
        "standardization_epsilon": (bit.WEIGHT_STANDARDIZATION_EPSILON,),
    },
    check=bit.check,
    scale=lambda _: 0,
)
