"""Labels that no feature of a TFDS set holds, and that VTAB (1910.04867) computes from others.

Each is a value of `dataset.label_key`. Definitions follow the benchmark's code
(google-research/task_adaptation); the class of a distance is the interval that it falls into, open
below and closed above.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vit_jax.data.decode import decode_image

# Thresholds between the classes: CLEVR in its own units, KITTI in meters.
CLEVR_DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_DISTANCES = (-100.0, 8.0, 20.0, 999.0)
NO_VEHICLE = 1000.0
VEHICLES = (0, 1, 2)  # Car, Van and Truck of `objects/type`

Features = Mapping[str, Any]  # of a tf.train.Example


@dataclasses.dataclass(frozen=True)
class ComputedLabel:
    """A class number out of other features.

    Attributes:
      dataset: the TFDS set that has them.
      features: top-level features that are read.
      class_names: one per class.
      compute: features of a serialized example -> class number; one outside of the classes where
        the example has no annotation.
      brightness: pixels are multiplied by it (dSprites are stored as 0 and 1).
    """

    dataset: str
    features: tuple[str, ...]
    class_names: tuple[str, ...]
    compute: Callable[[Features], int]
    brightness: int = 1

    def image(self, data: bytes) -> bytes | np.ndarray:
        """The image as a source gives it: encoded, or uint8 [H, W, C] where it has to change."""
        if self.brightness == 1:
            return data
        return decode_image(data, channels=1, exif=False) * np.uint8(self.brightness)


def _interval(value: float, bounds: tuple[float, ...]) -> int:
    """Index of the last bound below `value`; -1 below all of them."""
    return int(np.searchsorted(bounds, value, side="left")) - 1


def _third_coordinates(features: Features, key: str) -> np.ndarray:
    """z of a sequence of points, stored as x, y, z, x, y, z, ...: [N]."""
    return np.asarray(features[key].float_list.value, np.float32)[2::3]


def _clevr_count(features: Features) -> int:
    return len(features["objects/size"].int64_list.value) - 3


def _clevr_distance(features: Features) -> int:
    distances = _third_coordinates(features, "objects/pixel_coords")
    return _interval(distances.min(initial=np.inf), CLEVR_DISTANCES)


def _kitti_distance(features: Features) -> int:
    vehicles = np.isin(np.asarray(features["objects/type"].int64_list.value), VEHICLES)
    distances = _third_coordinates(features, "objects/location")[vehicles]
    return _interval(distances.min(initial=NO_VEHICLE), KITTI_DISTANCES)


def _merged(features: Features, key: str, num_values: int, num_classes: int) -> int:
    """Neighbouring values share a class."""
    return features[key].int64_list.value[0] * num_classes // num_values


def _intervals(bounds: tuple[float, ...], unit: str) -> tuple[str, ...]:
    return tuple(f"{low:g} to {high:g}{unit}" for low, high in itertools.pairwise(bounds))


COMPUTED_LABELS: dict[str, ComputedLabel] = {
    "vtab_clevr_count": ComputedLabel(
        dataset="clevr",
        features=("objects",),
        class_names=tuple(f"{count} objects" for count in range(3, 11)),
        compute=_clevr_count,
    ),
    "vtab_clevr_distance": ComputedLabel(
        dataset="clevr",
        features=("objects",),
        class_names=_intervals(CLEVR_DISTANCES, ""),
        compute=_clevr_distance,
    ),
    "vtab_dsprites_location": ComputedLabel(
        dataset="dsprites",
        features=("label_x_position",),
        class_names=tuple(f"x {i} of 16" for i in range(16)),
        compute=functools.partial(_merged, key="label_x_position", num_values=32, num_classes=16),
        brightness=255,
    ),
    "vtab_dsprites_orientation": ComputedLabel(
        dataset="dsprites",
        features=("label_orientation",),
        class_names=tuple(f"orientation {i} of 16" for i in range(16)),
        compute=functools.partial(_merged, key="label_orientation", num_values=40, num_classes=16),
        brightness=255,
    ),
    "vtab_kitti_distance": ComputedLabel(
        dataset="kitti",
        features=("objects",),
        class_names=(*_intervals((0.0, *KITTI_DISTANCES[1:3]), " m"), "above 20 m", "no vehicle"),
        compute=_kitti_distance,
    ),
}
