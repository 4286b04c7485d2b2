"""Axial-ResNet, the other model of appendix D.6 of 2010.11929.

The ResNet-50 of "Axial-DeepLab" (2003.07853), as its authors' JAX code (scenic's
`axial_resnet.py`) simplifies it: the 3x3 convolution of a bottleneck becomes attention along the
height, then along the width, with learned embeddings of the offset. Norms and activations follow
the convolutions, which are standardised as BiT's. In the last of the three scores scenic takes the
key of the query's own cell; here it is that of the other cell, as in the paper's equation.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models import bit, resnet
from vit_jax.models.family import FIRST, HEAD, Family, Row
from vit_jax.models.kernels.products import product

STEM = "conv_root/kernel"
_ATTENTION = r"block\d+/unit(?P<unit>\d+)/(?:height|width)"
NUM_HEADS = 8
EPSILON = 1e-4


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
        norm = functools.partial(nn.GroupNorm, epsilon=EPSILON, dtype=self.dtype)
        width = channels // NUM_HEADS
        init = nn.initializers.normal(1 / channels)
        dense = nn.Dense(2 * channels, False, self.dtype, kernel_init=init, name="qkv")
        qkv = dense(jnp.reshape(x, (-1, length, channels)))  # [B*M, L, 2C]
        qkv = norm(name="gn_qkv")(qkv)
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
        out = norm(name="gn_out")(out)
        return jnp.moveaxis(jnp.reshape(out, x.shape), 2, self.axis)  # [B, H, W, C]


class AxialUnit(resnet.ResidualUnit):
    """Axial bottleneck: [B, H, W, C] -> [B, H/s, W/s, 4 * features] for stride s.

    y = gn3(conv3(relu(pool(width(height(relu(gn1(conv1(x)))))))); out = relu(y + shortcut(x)).
    """

    def _mix(self, y: jax.Array) -> jax.Array:
        y = AxialAttention(1, self.layers.dtype, name="height")(y)
        y = AxialAttention(2, self.layers.dtype, name="width")(y)
        if self.stride != 1:
            y = nn.avg_pool(y, (2, 2), (self.stride, self.stride), "SAME")  # [B, H/s, W/s, F]
        return nn.relu(y)


class AxialResNet(bit.BiTResNet):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32.

    Attributes are those of `BiTResNet`.
    """

    kind = "axial_resnet"

    def _features(self, x: jax.Array, width: int) -> jax.Array:
        standardize, units = bit.weight_standardize, self.resnet_layers
        layers = resnet.ResNetLayers(False, False, self.dtype, standardize, EPSILON)
        return resnet.resnet_features(x, units, width, layers, AxialUnit, self.remat)


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
