"""The ResNet of the hybrid models (paper, sections 3.1 "Hybrid architecture" and 4.1).

A post-activation ResNet with group normalisation and standardised convolutions, as in the
official code, or with batch normalisation; that of BiT (`bit.py`) is pre-activation.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.family import FIRST, Row, Shapes, axis_of
from vit_jax.models.layers import BatchNorm

GROUP_NORM_EPSILON = 1e-6
WEIGHT_STANDARDIZATION_EPSILON = 1e-5

STEM_WIDTH = 64  # channels of the stem, and of the first stage's bottleneck, at width factor 1

_UNIT = r"block\d+/unit(?P<unit>\d+)"
UNIT_ROWS = (  # BiT uses the same names
    Row(f"{_UNIT}/conv(?:[123]|_proj)/kernel", (None, None, None, "features"), FIRST),
    Row(f"{_UNIT}/[gb]n(?:[123]|_proj)/(?:scale|bias)", ("features",), FIRST),
    Row(f"{_UNIT}/bn(?:[123]|_proj)/(?:mean|var)", ("features",), FIRST, is_statistic=True),
)
ROWS = (
    Row("conv_root/kernel", (None, None, None, "features"), FIRST, role="image"),
    Row("[gb]n_root/(?:scale|bias)", ("features",), FIRST),
    Row("bn_root/(?:mean|var)", ("features",), FIRST, is_statistic=True),
    *UNIT_ROWS,
)


def weight_standardize(kernel: jax.Array) -> jax.Array:
    """Zero mean and unit standard deviation per output channel: [kh, kw, Cin, Cout], same shape.

    Epsilon is added to the standard deviation, outside the square root (Qiao et al., 1903.10520,
    as in the official code).
    """
    axes = tuple(range(kernel.ndim - 1))
    centred = kernel - jnp.mean(kernel, axis=axes, keepdims=True)
    return centred / (jnp.std(centred, axis=axes, keepdims=True) + WEIGHT_STANDARDIZATION_EPSILON)


class StdConv(nn.Conv):
    """Convolution whose kernel is standardised on every call: [B, H, W, Cin] -> [B, h, w, Cout].

    Attributes:
      standardize: applied to the kernel; BiT has its own form.
    """

    standardize: Callable[[jax.Array], jax.Array] = weight_standardize

    def param(self, name: str, *args: Any, **kwargs: Any) -> Any:
        value = super().param(name, *args, **kwargs)
        return self.standardize(value) if name == "kernel" else value


@dataclasses.dataclass(frozen=True)
class ResNetLayers:
    """Convolutions without bias and norms: standardised and of groups, or plain and of batches."""

    batch_norm: bool
    train: bool
    dtype: Any
    standardize: Callable[[jax.Array], jax.Array] = weight_standardize
    epsilon: float = GROUP_NORM_EPSILON
    symmetric: bool = False  # the same padding on both sides, as in PyTorch

    def conv(self, features: int, size: int, stride: int, name: str, groups: int = 1) -> nn.Module:
        standardized = functools.partial(StdConv, standardize=self.standardize)
        kind = nn.Conv if self.batch_norm else standardized
        padding: Any = ((size // 2, size // 2),) * 2 if self.symmetric else "SAME"
        sizes = (size, size), (stride, stride), padding
        options = {"feature_group_count": groups, "use_bias": False, "dtype": self.dtype}
        return kind(features, *sizes, **options, name=name)

    def norm(self, part: str, **kwargs: Any) -> nn.Module:
        """`gn1` or `bn1` for the part `1`."""
        if self.batch_norm:
            return BatchNorm(self.train, dtype=self.dtype, name=f"bn{part}", **kwargs)
        return nn.GroupNorm(epsilon=self.epsilon, dtype=self.dtype, name=f"gn{part}", **kwargs)


class ResidualUnit(nn.Module):
    """Bottleneck unit: [B, H, W, C] -> [B, H/s, W/s, expansion * features] for stride s.

    y = norm3(conv3(relu(norm2(conv2(relu(norm1(conv1(x)))))))); out = relu(y + shortcut(x)).
    """

    features: int
    layers: ResNetLayers
    stride: int

    expansion = 4
    last_scale = 0.0  # at initialisation the unit is its shortcut

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv, norm = self.layers.conv, self.layers.norm
        features_out = self.expansion * self.features  # F'
        shortcut = x
        if x.shape[-1] != features_out or self.stride != 1:
            shortcut = conv(features_out, 1, self.stride, "conv_proj")(x)
            shortcut = norm("_proj")(shortcut)  # [B, H/s, W/s, F']

        y = conv(self.features, 1, 1, "conv1")(x)
        y = self._mix(nn.relu(norm("1")(y)))  # [B, H/s, W/s, F]
        y = conv(features_out, 1, 1, "conv3")(y)
        y = norm("3", scale_init=nn.initializers.constant(self.last_scale))(y)  # [B, H/s, W/s, F']
        return nn.relu(y + shortcut)

    def _mix(self, y: jax.Array) -> jax.Array:
        """The step that sees other places: [B, H, W, F] -> [B, H/s, W/s, F]."""
        y = self.layers.conv(self.features, 3, self.stride, "conv2")(y)
        return nn.relu(self.layers.norm("2")(y))


class Stage(nn.Module):
    """Residual units, the first with a stride: [B, H, W, C] -> [B, H/s, W/s, C']."""

    create_unit: Callable[..., nn.Module]  # of a stride and a name
    num_units: int
    stride: int
    digits: int  # of a unit's number in its name

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.num_units):
            name = f"unit{i + 1:0{self.digits}}"
            x = self.create_unit(stride=1 if i else self.stride, name=name)(x)
        return x


def apply_stages(
    x: jax.Array,
    units: Sequence[int],
    width: int,
    unit: type[nn.Module],
    *,
    remat: str = "none",
    digits: int = 1,
    **attributes: Any,
) -> jax.Array:
    """Stages `block1`, ...: [B, H, W, C] -> [B, H/d, W/d, C'], d = 2^(stages - 1).

    Args:
      units: their number in each stage.
      width: `features` of the units of the first stage, which double from stage to stage.
      unit: module with `features`, `stride` and `attributes`.
      remat: `none`, or `full`, which saves only the input of each unit.
    """
    unit = nn.remat(unit) if remat == "full" else unit
    for i, num_units in enumerate(units):
        create_unit = functools.partial(unit, features=width * 2**i, **attributes)
        x = Stage(create_unit, num_units, 2 if i else 1, digits, name=f"block{i + 1}")(x)
    return x


def resnet_features(
    x: jax.Array,
    units: Sequence[int],
    width: int,
    layers: ResNetLayers,
    unit: type[nn.Module] = ResidualUnit,
    remat: str = "none",
) -> jax.Array:
    """Stem and stages: [B, H, W, C] -> [B, H/d, W/d, C'], d = 4 * 2^(stages - 1); 4 for no stage.

    Called in the model's compact `__call__`: parameters are at the root, as in published files.
    """
    x = layers.conv(width, 7, 2, "conv_root")(x)
    x = layers.norm("_root")(x)
    x = nn.relu(x)  # [B, H/2, W/2, width]
    x = nn.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding="SAME")  # [B, H/4, W/4, width]
    return apply_stages(x, units, width, unit, remat=remat, layers=layers)


def units_of_stages(shapes: Shapes, pattern: str) -> dict[int, int]:
    """By stage, the number of units; the groups of `pattern` are the numbers of stage and unit."""
    units: dict[int, int] = {}
    for match in filter(None, (re.match(pattern, name) for name in shapes)):
        stage, unit = int(match[1]), int(match[2])
        # A corrupt name may hold any number.
        units[stage] = min(max(units.get(stage, 0), unit), len(shapes))
    return dict(sorted(units.items()))


def infer(shapes: Shapes, stem: str) -> dict[str, Any]:
    """See `Family.infer`; `stem` is the name of the stem's kernel."""
    layers = tuple(units_of_stages(shapes, r"block(\d+)/unit(\d+)/").values())
    width = axis_of(shapes, stem, 4, 3) or STEM_WIDTH
    return {
        "resnet_layers": layers if stem in shapes else None,
        "resnet_width_factor": width // STEM_WIDTH,
    }
