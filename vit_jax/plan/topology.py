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

from vit_jax.errors import UserError, nearest
from vit_jax.hardware.chips import CHIPS, Chip

# Product name -> shape in chips, from the pages named in hardware/chips.py. The number in a name
# counts cores for v2, v3, v4, v5p (two per chip), and chips for v5e and v6e.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CORES_2D = {8: "2x2", 32: "4x4", 128: "8x8", 256: "8x16", 512: "16x16"}
_CORES_3D = {
    8: "2x2x1",
    16: "2x2x2",
    32: "2x2x4",
    64: "2x4x4",
    128: "4x4x4",
    256: "4x4x8",
    512: "4x8x8",
    1024: "8x8x8",
    2048: "8x8x16",
    4096: "8x16x16",
}
SHAPES: dict[str, dict[int, str]] = {
    "v2": _CORES_2D,
    "v3": {**_CORES_2D, 64: "4x8", 1024: "16x32", 2048: "32x32"},
    "v4": _CORES_3D,
    "v5e": _FLAT,
    "v5p": {**_CORES_3D, 8192: "16x16x16", 12288: "16x16x24"},
    "v6e": _FLAT,
}
ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v6litepod": "v6e"}

# Largest slice in chips, and the number of axes of its shape.
_LARGEST = {
    "v2": (256, 2),
    "v3": (1024, 2),
    "v4": (4096, 3),
    "v5e": (256, 2),
    "v5p": (6144, 3),
    "v6e": (256, 2),
    "tpu7x": (9216, 3),
}
_BY_NAME = {name.lower(): chip for name, chip in CHIPS.items()}
_TEXT = re.compile(
    r"(?:(?P<slices>\d+) ?x ?)?(?P<name>[a-z]\w*(?:-(?:\d+gb|pcie))?)"
    r"(?:-(?P<size>\d+)|:(?P<shape>\d+(?:x\d+)*))"
)
MAX_VIRTUAL_DEVICES = 1024  # each is a few threads of this machine
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
    def num_cores(self) -> int:
        return self.num_chips * (self.chip.cores if self.chip else 1)

    @property
    def name(self) -> str:
        """As `parse_topology` reads it."""
        shape = "x".join(map(str, self.shape))
        if self.kind == "cpu":
            return f"cpu:{shape}"
        assert self.chip is not None
        if self.kind == "gpu":
            return f"{self.chip.name}:" + (f"{self.slices}x{shape}" if self.slices > 1 else shape)
        return (f"{self.slices}x" if self.slices > 1 else "") + f"{self.chip.name}:{shape}"

    def __str__(self) -> str:
        if self.kind == "cpu":
            return f"{self.name} ({self.num_devices} virtual devices of this machine's processor)"
        chips, groups = ("chips", "slices") if self.kind == "tpu" else ("GPUs", "nodes")
        cores = f", {self.num_cores} cores" if self.num_cores != self.num_chips else ""
        parts = f" in {self.slices} {groups}" if self.slices > 1 else ""
        return f"{self.name} ({self.num_chips} {chips}{parts}{cores})"


def parse_topology(text: str) -> Topology:
    """Reads a name of the module's docstring; upper or lower case.

    Raises:
      UserError: unknown, or a shape that the hardware does not come in.
    """
    match = _TEXT.fullmatch(text.strip().lower())
    if match is None:
        raise UserError(f"--topology={text!r} cannot be read; write it as {EXAMPLES}.")
    slices, size = int(match["slices"] or 1), int(match["size"] or 0)
    shape = tuple(map(int, match["shape"].split("x"))) if match["shape"] else ()

    def refused(reason: str) -> UserError:
        return UserError(f"--topology={text!r}: {reason}")

    if slices < 1 or 0 in shape:
        raise refused("there is a 0 in it.")
    if match["name"] == "cpu":
        if len(shape) != 1 or slices != 1:
            raise refused("virtual devices have no shape; write cpu:8.")
        if shape[0] > MAX_VIRTUAL_DEVICES:
            raise refused(f"at most cpu:{MAX_VIRTUAL_DEVICES} can be made.")
        return Topology("cpu", None, shape)
    name = ALIASES.get(match["name"], match["name"])
    if name not in _BY_NAME:
        near = nearest(name, _BY_NAME)
        raise refused(f"there is no chip {name!r}.{near} Known: {', '.join(CHIPS)}, cpu.")
    chip = _BY_NAME[name]
    if name not in _LARGEST:
        if len(shape) not in (1, 2) or (slices > 1 and len(shape) > 1):
            raise refused(f"write {chip.name}:8, or {chip.name}:NODESx8.")
        return Topology("gpu", chip, shape[-1:], shape[0] if len(shape) == 2 else slices)
    largest, rank = _LARGEST[name]
    if size:
        sizes = SHAPES.get(name, {})
        if size not in sizes:
            known = ", ".join(f"{name}-{number}" for number in sorted(sizes)) or "by shape only"
            raise refused(f"{name} does not come so. It comes: {known}.")
        shape = tuple(map(int, sizes[size].split("x")))
    if len(shape) != rank:
        example = "x".join(["4"] * rank)
        raise refused(f"a shape of {name} has {rank} axes, such as {name}:{example}.")
    if math.prod(shape) > largest:
        raise refused(f"{math.prod(shape)} chips; the largest slice of {name} has {largest}.")
    if slices > 1 and not chip.network_gb_s:
        raise refused(f"{name} has no network between slices.")
    return Topology("tpu", chip, shape, slices)
