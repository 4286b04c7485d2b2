"""The ResNet baselines of the paper: "Big Transfer" (BiT, arXiv 1912.11370).

Pre-activation ResNets with group normalisation and standardised convolutions (paper, section 4.1,
"ResNet (BiT)"). Parameter names and defaults are those of big_vision's `bit_paper`; two attributes
make it compute what BiT's own code and timm compute. In the hybrids' ResNet (`resnet.py`) norms and
activations follow the convolutions; epsilons and padding differ.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import resnet
from vit_jax.models.family import FIRST, HEAD, LAST, Family, ModelBase, Row
from vit_jax.models.layers import IdentityLayer, head

GROUP_NORM_EPSILON = 1e-5
WEIGHT_STANDARDIZATION_EPSILON = 1e-10
STEM = "root_block/conv_root/kernel"


def weight_standardize(
    kernel: jax.Array, epsilon: float = WEIGHT_STANDARDIZATION_EPSILON
) -> jax.Array:
    """Zero mean and unit variance per output channel: [kh, kw, Cin, Cout] -> the same shape.

    Epsilon is added to the variance, inside the square root.
    """
    axes = tuple(range(kernel.ndim - 1))
    centred = kernel - jnp.mean(kernel, axis=axes, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=axes, keepdims=True)
    return centred / jnp.sqrt(variance + epsilon)


def _zeros_at_border(before: tuple[int, ...], after: tuple[int, ...], dtype: Any) -> jax.Array:
    """[1, h, w, 1]: 0 where a window of the max-pooling reaches into the padding, else -inf.

    Not as padding of its own: ONNX Runtime 1.31 merges that into the pooling, as minus infinity.
    """
    reaches = []
    for size, num_windows in zip(before, after, strict=True):
        first = 2 * np.arange(num_windows) - 1
        reaches.append((first < 0) | (first + 2 >= size))
    border = reaches[0][:, None] | reaches[1][None]  # [h, w]
    return jnp.asarray(np.where(border, 0.0, -np.inf)[None, :, :, None], dtype)


class RootBlock(nn.Module):
    """The stem, without norm or activation: [B, H, W, C] -> [B, H/4, W/4, features]."""

    features: int
    max_pool_padding: str
    layers: resnet.ResNetLayers

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.layers.conv(self.features, 7, 2, "conv_root")(x)  # [B, H/2, W/2, features]
        y = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))  # [B, H/4, W/4, features]
        if self.max_pool_padding == "zero":
            y = jnp.maximum(y, _zeros_at_border(x.shape[1:3], y.shape[1:3], y.dtype))
        return y


class ResidualUnit(nn.Module):
    """Pre-activation bottleneck: [B, H, W, C] -> [B, H/s, W/s, 4 * features] for stride s.

    a = relu(gn1(x)); out = shortcut + conv3(relu(gn3(conv2(relu(gn2(conv1(a))))))), where the
    shortcut is x, or a projection of a if the shape changes.
    """

    features: int
    layers: resnet.ResNetLayers
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv, norm = self.layers.conv, self.layers.norm
        features_out = 4 * self.features
        y = nn.relu(norm("1")(x))  # [B, H, W, C]
        shortcut = x
        if x.shape[-1] != features_out or self.stride != 1:
            shortcut = conv(features_out, 1, self.stride, "conv_proj")(y)  # [B, H/s, W/s, 4F]
        y = conv(self.features, 1, 1, "conv1")(y)  # [B, H, W, F]
        y = nn.relu(norm("2")(y))
        y = conv(self.features, 3, self.stride, "conv2")(y)  # [B, H/s, W/s, F]
        y = nn.relu(norm("3")(y))
        y = conv(features_out, 1, 1, "conv3")(y)  # [B, H/s, W/s, 4F]
        return shortcut + y


class BiTResNet(ModelBase):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32; images of any size.

    Attributes:
      resnet_layers: units per stage, such as (3, 4, 6, 3) of an R50.
      resnet_width_factor: multiplies all channels: the 3 in R50x3.
      max_pool_padding: `-inf` as in big_vision, or `zero` as in BiT's own code and timm.
      standardization_epsilon: added to a kernel's variance; 1e-8 in timm.
      remat: `none`, or `full`, which recomputes each unit in the backward pass.
    """

    num_classes: int
    resnet_layers: tuple[int, ...]
    resnet_width_factor: int = 1
    head_bias_init: float = 0.0
    max_pool_padding: str = "-inf"
    standardization_epsilon: float = WEIGHT_STANDARDIZATION_EPSILON
    remat: str = "none"
    dtype: Any = jnp.float32

    kind = "bit"

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Images in [-1, 1], [B, H, W, C] -> logits [B, K] float32; `train` has no effect."""
        del train
        x = jnp.asarray(images, self.dtype)
        x = self._features(x, resnet.STEM_WIDTH * self.resnet_width_factor)  # [B, h, w, D]
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)  # [B, D]
        x = IdentityLayer(name="pre_logits")(x)
        return head(self.num_classes, self.head_bias_init)(x) if self.num_classes else x

    def _features(self, x: jax.Array, width: int) -> jax.Array:
        """[B, H, W, C] -> [B, H/d, W/d, D], d = 4 * 2^(stages - 1); `width` of the stem."""
        standardize = functools.partial(weight_standardize, epsilon=self.standardization_epsilon)
        layers = resnet.ResNetLayers(
            False, False, self.dtype, standardize, GROUP_NORM_EPSILON, symmetric=True
        )
        x = RootBlock(width, self.max_pool_padding, layers, name="root_block")(x)
        x = resnet.apply_stages(
            x, self.resnet_layers, width, ResidualUnit, remat=self.remat, digits=2, layers=layers
        )
        norm = nn.GroupNorm(epsilon=GROUP_NORM_EPSILON, dtype=self.dtype, name="norm-pre-head")
        return nn.relu(norm(x))


def check(model: BiTResNet) -> None:
    """Raises UserError for invalid units per stage."""
    if min(model.resnet_layers, default=0) < 1:
        raise UserError(
            f"model.resnet_layers={model.resnet_layers} must be the number of units of each "
            "stage, such as (3, 4, 6, 3) for an R50."
        )


FAMILY = Family(
    module=BiTResNet,
    title="pre-activation ResNet (BiT, arXiv 1912.11370)",
    acronym="BiT",
    rows=(
        Row(STEM, (None, None, None, "features"), FIRST, role="image"),
        *resnet.UNIT_ROWS,
        Row("norm-pre-head/(?:scale|bias)", ("features",), LAST),
        *HEAD,
    ),
    infer=functools.partial(resnet.infer, stem=STEM),
    # The Transformer's other policies save nothing of a convolution.
    choices={"remat": ("none", "full"), "max_pool_padding": ("-inf", "zero")},
    check=check,
    conventions=("max_pool_padding", "standardization_epsilon"),
    scale=lambda model: 2 if model["resnet_width_factor"] >= 3 else 0,
)
