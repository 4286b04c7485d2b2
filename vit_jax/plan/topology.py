"""The machines a plan is made for: names, chips and their arrangement. Does not import JAX.

v5e:16x16  v4:4x4x4  v5p:2x2x4     a TPU slice by generation and shape in chips
v5e-256  v3-8  v5p-16              the same by its product name
2xv5e:16x16  4xv5litepod-16        several slices, joined by the data centre's network
H100:8  H100:8x8                   GPUs of one node; nodes x GPUs
cpu:8                              virtual devices of this machine
"""

from __future__ import annotations

import dataclasses
import math
import re

from vit_jax.errors import UserError, check_known
from vit_jax.hardware.chips import CHIPS, Chip

_FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16"
_PRODUCTS = {  # shapes in chips, from the pages named in hardware/chips.py
    "v2": "2x2 4x4 8x8 8x16 16x16",
    "v3": "2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
    "v4": _CUBES,
    "v5e": _FLAT,
    "v5p": f"{_CUBES} 16x16x16 16x16x24",
    "v6e": _FLAT,
}
# {chip: {number in the product name: shape}}. The number counts cores, of which v2, v3, v4 and v5p
# have two per chip.
SHAPES: dict[str, dict[int, str]] = {
    name: {CHIPS[name].cores * math.prod(map(int, s.split("x"))): s for s in shapes.split()}
    for name, shapes in _PRODUCTS.items()
}
_LARGEST = {
    "v2": (16, 16),
    "v3": (32, 32),
    "v4": (16, 16, 16),
    "v5e": (16, 16),
    "v5p": (16, 16, 24),
    "v6e": (16, 16),
    "tpu7x": (16, 24, 24),
}
ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v6litepod": "v6e"}
_TEXT = re.compile(
    r"(?:(?P<slices>[1-9]\d*) ?x ?)?(?P<name>[a-z]\w*(?:-(?:\d+gb|pcie))?)"
    r"(?:-(?P<size>\d+)|:(?P<shape>[1-9]\d*(?:x[1-9]\d*)*))"
)
EXAMPLES = "v5e:16x16, v4:4x4x4, v5e-256, v3-8, 2xv5e:16x16, H100:8, H100:2x8, cpu:8"


@dataclasses.dataclass(frozen=True)
class Topology:
    """What a plan compiles for.

    Attributes:
      kind: "tpu", "gpu" or "cpu".
      chip: None for "cpu".
      shape: chips along each axis of one slice; (GPUs,) of a node; (devices,) of "cpu".
      slices: how many slices, or nodes of GPUs.
    """

    kind: str
    chip: Chip | None
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def num_chips(self) -> int:
        return self.slices * math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """JAX devices: chips, or cores of v2, v3 and tpu7x."""
        return self.num_chips * (self.chip.devices if self.chip else 1)

    @property
    def name(self) -> str:
        """As `parse_topology` reads it."""
        chip, shape = self.chip.name if self.chip else "cpu", "x".join(map(str, self.shape))
        slices = f"{self.slices}x" if self.slices > 1 else ""
        return f"{slices}{chip}:{shape}" if self.kind == "tpu" else f"{chip}:{slices}{shape}"

    def __str__(self) -> str:
        units = {"tpu": "chips", "gpu": "GPUs", "cpu": "virtual devices of this machine"}
        more = f", {self.num_devices} devices" if self.num_devices != self.num_chips else ""
        return f"{self.name} ({self.num_chips} {units[self.kind]}{more})"


def parse_topology(text: str) -> Topology:
    """Reads a name of the module's docstring; upper or lower case.

    Raises:
      UserError: unknown, or a shape that the hardware does not come in.
    """
    match = _TEXT.fullmatch(text.strip().lower())
    if match is None:
        raise UserError(f"--topology={text!r} cannot be read; write it as {EXAMPLES}.")
    name = ALIASES.get(match["name"], match["name"])
    chips = {each.lower(): chip for each, chip in CHIPS.items()}
    check_known(f"--topology={text!r}: the chip", name, [*chips, "cpu"])
    sizes = SHAPES.get(name, {})
    shape_text = match["shape"] or sizes.get(int(match["size"]))
    if shape_text is None:
        known = ", ".join(f"{name}-{size}" for size in sizes) or f"{name}:SHAPE only"
        raise UserError(f"--topology={text!r} is not made. Known: {known}.")
    slices, shape = int(match["slices"] or 1), tuple(map(int, shape_text.split("x")))
    if name == "cpu":
        return Topology("cpu", None, (slices * math.prod(shape),))
    chip, largest = chips[name], _LARGEST.get(name)
    if largest is None:
        *nodes, gpus = shape
        return Topology("gpu", chip, (gpus,), slices * math.prod(nodes))
    if len(shape) != len(largest) or math.prod(shape) > math.prod(largest):
        limit = "x".join(map(str, largest))
        raise UserError(f"--topology={text!r}: slices of {name} go up to {name}:{limit}.")
    if slices > 1 and not chip.network_gb_s:
        raise UserError(f"--topology={text!r}: {name} has no network between slices.")
    return Topology("tpu", chip, shape, slices)
