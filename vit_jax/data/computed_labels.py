"""Labels of TFDS sets: a stored class, or one computed from other features as VTAB (1910.04867).

As in google-research/task_adaptation; intervals of distances are open below and closed above.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# Thresholds between the classes: CLEVR in its own units, KITTI in meters.
CLEVR_DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0, 100.0)
KITTI_DISTANCES = (-100.0, 8.0, 20.0, 999.0)
NO_VEHICLE = 1000.0
VEHICLES = (0, 1, 2)  # Car, Van and Truck of `objects/type`

Features = Mapping[str, Any]  # of a tf.train.Example


@dataclasses.dataclass(frozen=True)
class Label:
    """Computes a class number from an example's features."""

    class_names: tuple[str, ...]
    compute: Callable[[Features], int]  # out of range if not annotated
    dataset: str = ""  # the TFDS set a computed label belongs to
    brightness: int = 1  # factor on pixel values (dSprites are stored as 0 and 1)


def stored(features: Features, key: str) -> int:
    return features[key].int64_list.value[0]


def _nearest(features: Features, key: str, bounds: tuple[float, ...], kept: Any, far: float) -> int:
    """Interval of the smallest z of points x, y, z, x, y, z, ...; -1 if below all bounds."""
    distances = np.asarray(features[key].float_list.value, np.float32)[2::3][kept]
    return int(np.searchsorted(bounds, distances.min(initial=far), side="left")) - 1


def _clevr_count(features: Features) -> int:
    return len(features["objects/size"].int64_list.value) - 3


def _clevr_distance(features: Features) -> int:
    return _nearest(features, "objects/pixel_coords", CLEVR_DISTANCES, slice(None), np.inf)


def _kitti_distance(features: Features) -> int:
    vehicles = np.isin(np.asarray(features["objects/type"].int64_list.value), VEHICLES)
    return _nearest(features, "objects/location", KITTI_DISTANCES, vehicles, NO_VEHICLE)


def _merged(features: Features, key: str, num_values: int) -> int:
    """Groups neighbouring values into 16 classes."""
    return stored(features, key) * 16 // num_values


def _dsprites(key: str, num_values: int, what: str) -> Label:
    names = tuple(f"{what} {i} of 16" for i in range(16))
    compute = functools.partial(_merged, key=key, num_values=num_values)
    return Label(names, compute, "dsprites", brightness=255)


def _intervals(bounds: tuple[float, ...], unit: str = "") -> tuple[str, ...]:
    return tuple(f"{low:g} to {high:g}{unit}" for low, high in itertools.pairwise(bounds))


_KITTI_NAMES = (*_intervals((0.0, *KITTI_DISTANCES[1:3]), " m"), "above 20 m", "no vehicle")

COMPUTED_LABELS: dict[str, Label] = {
    "vtab_clevr_count": Label(tuple(f"{n} objects" for n in range(3, 11)), _clevr_count, "clevr"),
    "vtab_clevr_distance": Label(_intervals(CLEVR_DISTANCES), _clevr_distance, "clevr"),
    "vtab_dsprites_location": _dsprites("label_x_position", 32, "x"),
    "vtab_dsprites_orientation": _dsprites("label_orientation", 40, "orientation"),
    "vtab_kitti_distance": Label(_KITTI_NAMES, _kitti_distance, "kitti"),
}
