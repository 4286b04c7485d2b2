"""RegNetY ("Designing Network Design Spaces", arXiv 2003.13678): the teacher of DeiT.

Stages of residual bottlenecks with grouped convolutions and squeeze-and-excitation. B: batch, C:
channels, g: channels per group.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models.family import FIRST, HEAD, Family, ModelBase, Row, Shapes, axis_of, dense_rows
from vit_jax.models.layers import IdentityLayer, head
from vit_jax.models.resnet import ResidualUnit, ResNetLayers, units_of_stages

STEM_WIDTH = 32


class SqueezeExcite(nn.Module):
    """x * sigmoid(relu(mean(x) W1 + b1) W2 + b2), the mean over places: [B, H, W, C], same shape.

    1709.01507; W1 is [C, features], W2 [features, C].
    """

    features: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(self.dtype)  # [B, C]
        y = nn.relu(nn.Dense(self.features, dtype=self.dtype, name="reduce")(y))  # [B, features]
        y = nn.sigmoid(nn.Dense(x.shape[-1], dtype=self.dtype, name="expand")(y))  # [B, C]
        return x * y[:, None, None]


class Block(ResidualUnit):
    """X block with squeeze-and-excitation: [B, H, W, C] -> [B, H/s, W/s, features] for stride s.

    y = bn3(conv3(se(relu(bn2(conv2(relu(bn1(conv1(x)))))))), conv2 3x3 in groups, the others 1x1;
    out = relu(y + shortcut), which is x, or bn(conv(x)) if the shape changes.
    """

    groups: int
    squeezed: int  # features between the layers of the squeeze-and-excitation

    expansion = 1
    last_scale = 1.0

    def _mix(self, y: jax.Array) -> jax.Array:
        y = self.layers.conv(self.features, 3, self.stride, "conv2", self.groups)(y)
        y = nn.relu(self.layers.norm("2")(y))  # [B, H/s, W/s, F]
        return SqueezeExcite(self.squeezed, self.layers.dtype, name="se")(y)


class RegNet(ModelBase):
    """Images to logits, [B, H, W, C] -> [B, num_classes] float32; images of any size.

    Attributes:
      stage_layers: blocks per stage.
      stage_widths: channels of each stage.
      group_width: channels per group of the 3x3 convolutions; divides each width.
      frozen_norms: training keeps the statistics of the batch norms as they are and uses them, as
        is usual where batches are small.
      remat: `none`, or `full`, which recomputes each block in the backward pass.
    """

    num_classes: int
    stage_layers: tuple[int, ...]
    stage_widths: tuple[int, ...]
    group_width: int
    head_bias_init: float = 0.0
    frozen_norms: bool = False
    remat: str = "none"
    dtype: Any = jnp.float32

    kind = "regnet"

    @property
    def stem(self) -> tuple[Any, Any]:
        return None, self.stage_layers

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Normalised images [B, H, W, C] -> logits [B, K] float32."""
        layers = ResNetLayers(True, train and not self.frozen_norms, self.dtype, symmetric=True)
        x = jnp.asarray(images, self.dtype)
        x = layers.conv(STEM_WIDTH, 3, 2, "conv_stem")(x)  # [B, H/2, W/2, 32]
        x = nn.relu(layers.norm("_stem")(x))
        block = nn.remat(Block) if self.remat == "full" else Block
        stages = zip(self.stage_layers, self.stage_widths, strict=True)
        for stage, (num_blocks, width) in enumerate(stages, start=1):
            for i in range(num_blocks):
                name, stride = f"stage{stage}_block{i + 1}", 1 if i else 2
                sizes = width // self.group_width, round(x.shape[-1] / 4)
                x = block(width, layers, stride, *sizes, name=name)(x)
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)  # [B, D]
        x = IdentityLayer(name="pre_logits")(x)
        return head(self.num_classes, self.head_bias_init)(x) if self.num_classes else x


def check(model: RegNet) -> None:
    """Raises UserError for stages that do not fit each other or the groups."""
    layers, widths, group = model.stage_layers, model.stage_widths, model.group_width
    for key, values in (("stage_layers", layers), ("stage_widths", widths)):
        if not len(values) == len(layers) > 0 or min(values) < 1:
            raise UserError(
                f"model.{key}={values!r} must be a number for each stage of model.name='regnet', "
                "such as stage_layers=(2, 4, 11, 1) and stage_widths=(224, 448, 1232, 3024)."
            )
    if any(width % group for width in widths):
        raise UserError(f"model.group_width={group} does not divide model.stage_widths={widths}.")


def infer(shapes: Shapes) -> dict[str, Any]:
    """See `Family.infer`."""
    blocks = units_of_stages(shapes, r"stage(\d+)_block(\d+)/")
    widths = [axis_of(shapes, f"stage{stage}_block1/conv1/kernel", 4, 3) for stage in blocks]
    return {
        "stage_layers": tuple(blocks.values()) or None,
        "stage_widths": tuple(widths) if all(widths) else None,
        "group_width": axis_of(shapes, "stage1_block1/conv2/kernel", 4, 2),
    }


_BLOCK = r"stage\d+_block(?P<unit>\d+)"
FAMILY = Family(
    module=RegNet,
    title="RegNetY (arXiv 2003.13678)",
    acronym="RegNetY",
    rows=(
        Row("conv_stem/kernel", (None, None, None, "features"), FIRST, role="image"),
        Row("bn_stem/(?:scale|bias)", ("features",), FIRST),
        Row("bn_stem/(?:mean|var)", ("features",), FIRST, is_statistic=True),
        Row(rf"{_BLOCK}/conv(?:[123]|_proj)/kernel", (None, None, None, "features"), FIRST),
        Row(rf"{_BLOCK}/bn(?:[123]|_proj)/(?:scale|bias)", ("features",), FIRST),
        Row(rf"{_BLOCK}/bn(?:[123]|_proj)/(?:mean|var)", ("features",), FIRST, is_statistic=True),
        *dense_rows(f"{_BLOCK}/se/reduce", "features", None, depth=FIRST),
        *dense_rows(f"{_BLOCK}/se/expand", None, "features", depth=FIRST),
        *HEAD,
    ),
    infer=infer,
    # The Transformer's other policies save nothing of a convolution.
    choices={"remat": ("none", "full")},
    check=check,
    scale=lambda _: 0,
)
