"""The machines to plan for: their names, and devices as the compiler describes them.

v5e:16x16  v4:4x4x4  v5p:2x2x4     a TPU slice by generation and shape in chips
v5e-256  v3-8  v5p-16              the same by its product name
2xv5e:16x16  4xv5litepod-16        several slices, joined by the data centre's network
H100:8  H100:8x8                   GPUs of one node; nodes x GPUs
cpu:8                              virtual devices of this machine
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from vit_jax.errors import UserError, import_extra
from vit_jax.hardware.chips import CHIPS, DEVICE_KINDS, Chip
from vit_jax.hardware.devices import NO_TPU
from vit_jax.kinds import check_known

_FLAT = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16"
# Cores per chip, which product names count; shapes in chips of the products, from the pages named
# in hardware/chips.py; the largest shape.
_SLICES = {
    "v2": (2, "2x2 4x4 8x8 8x16 16x16", "16x16"),
    "v3": (2, "2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32", "32x32"),
    "v4": (2, _CUBES, "16x16x16"),
    "v5e": (1, _FLAT, "16x16"),
    "v5p": (2, f"{_CUBES} 16x16x16 16x16x24", "16x16x24"),
    "v6e": (1, _FLAT, "16x16"),
    "tpu7x": (2, "", "16x24x24"),
}
# {chip: {number in the product name: shape}}
SHAPES: dict[str, dict[int, str]] = {
    name: {cores * math.prod(map(int, shape.split("x"))): shape for shape in products.split()}
    for name, (cores, products, _) in _SLICES.items()
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "v6litepod": "v6e", "v7x": "tpu7x"}
_TEXT = re.compile(
    r"(?:(?P<slices>[1-9]\d*) ?x ?)?(?P<name>[a-z]\w*(?:-(?:\d+gb|pcie))?)"
    r"(?:-(?P<size>\d+)|:(?P<shape>[1-9]\d*(?:x[1-9]\d*)*))"
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """The machine to compile for."""

    kind: str  # "tpu", "gpu" or "cpu"
    chip: Chip | None  # None for "cpu"
    shape: tuple[int, ...]  # of a slice, in chips; (GPUs,) of a node; (devices,) of "cpu"
    slices: int = 1  # or nodes of GPUs

    @property
    def num_chips(self) -> int:
        return self.slices * math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """JAX devices: chips, or cores of v2, v3 and tpu7x."""
        return self.num_chips * (self.chip.devices if self.chip else 1)

    @property
    def name(self) -> str:
        """In the syntax of `parse_topology`."""
        chip, shape = self.chip.name if self.chip else "cpu", "x".join(map(str, self.shape))
        slices = f"{self.slices}x" if self.slices > 1 else ""
        return f"{slices}{chip}:{shape}" if self.kind == "tpu" else f"{chip}:{slices}{shape}"

    def __str__(self) -> str:
        units = {"tpu": "chips", "gpu": "GPUs", "cpu": "virtual devices of this machine"}
        more = f", {self.num_devices} devices" if self.num_devices != self.num_chips else ""
        return f"{self.name} ({self.num_chips} {units[self.kind]}{more})"


def parse_topology(text: str) -> Topology:
    """Parses a name as in the module's docstring, ignoring case; UserError if it does not exist."""
    match = _TEXT.fullmatch(text.strip().lower())
    if match is None:
        examples = "v5e:16x16, v4:4x4x4, v5e-256, v3-8, 2xv5e:16x16, H100:8, H100:2x8, cpu:8"
        raise UserError(f"--topology={text!r} is invalid; use a name such as {examples}.")
    name = _ALIASES.get(match["name"], match["name"])
    chips = {key.lower(): chip for key, chip in CHIPS.items()}
    check_known(f"--topology={text!r}: the chip", name, [*chips, "cpu"])
    products = SHAPES.get(name, {})
    shape_text = match["shape"] or products.get(int(match["size"]))
    if shape_text is None:
        known = ", ".join(f"{name}-{size}" for size in products) or f"{name}:SHAPE only"
        raise UserError(f"--topology={text!r} does not exist. Known: {known}.")
    slices, shape = int(match["slices"] or 1), tuple(map(int, shape_text.split("x")))
    if name == "cpu":
        return Topology("cpu", None, (slices * math.prod(shape),))
    if name not in SHAPES:
        *nodes, gpus = shape
        return Topology("gpu", chips[name], (gpus,), slices * math.prod(nodes))
    limit = _SLICES[name][2]
    largest = [int(side) for side in limit.split("x")]
    if len(shape) != len(largest):
        problem = f"--topology={text!r}: a slice of {name} has {len(largest)} sides, in chips"
        raise UserError(f"{problem}, such as {name}:{'x'.join(['2'] * len(largest))}.")
    if math.prod(shape) > math.prod(largest):
        raise UserError(f"--topology={text!r}: slices of {name} go up to {name}:{limit}.")
    if slices > 1 and not chips[name].network_gb_s:
        raise UserError(f"--topology={text!r}: {name} has no network between slices.")
    return Topology("tpu", chips[name], shape, slices)


# What the compiler needs of a GPU besides `Chip`, from NVIDIA's data sheets: a GpuDeviceInfoProto.
_LIMITS = """
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 shared_memory_per_block: 49152
"""
_A100 = f"""{_LIMITS}
  core_count: 108 clock_rate_ghz: 1.41 fpus_per_core: 64 l2_cache_size: {40 * 2**20}
  shared_memory_per_core: {164 * 2**10} shared_memory_per_block_optin: {163 * 2**10}
  cuda_compute_capability {{ major: 8 minor: 0 feature_extension: NONE }}
"""
_SINCE_HOPPER = f"""{_LIMITS}
  fpus_per_core: 128
  shared_memory_per_core: {228 * 2**10} shared_memory_per_block_optin: {227 * 2**10}
"""
_HOPPER = f"""{_SINCE_HOPPER} l2_cache_size: {50 * 2**20}
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
"""
_B200 = f"""{_SINCE_HOPPER} l2_cache_size: {126 * 2**20} core_count: 148 clock_rate_ghz: 1.965
  cuda_compute_capability {{ major: 10 minor: 0 feature_extension: ACCELERATED_FEATURES }}
"""
_GPUS = {  # by `Chip.name`
    "A100-40GB": _A100,
    "A100-80GB": _A100,
    "H100": f"{_HOPPER} core_count: 132 clock_rate_ghz: 1.98",
    "H100-PCIe": f"{_HOPPER} core_count: 114 clock_rate_ghz: 1.755",
    "H200": f"{_HOPPER} core_count: 132 clock_rate_ghz: 1.98",
    "B200": _B200,
}


def topology_devices(topology: Topology) -> list[Any]:
    """The devices to compile for; UserError if their compiler is missing or rejects them."""
    jax.config.update("jax_platforms", "cpu")  # does not touch a local accelerator
    chip, count = topology.chip, topology.num_devices
    if chip is None:
        with contextlib.suppress(RuntimeError):  # JAX is already running; use what it has
            jax.config.update("jax_num_cpu_devices", count)
        return jax.devices()[:count]
    if topology.kind == "gpu":
        return _gpus(topology, chip)
    import_extra(f"--topology={topology.name}", "libtpu", "tpu")  # the compiler; no TPU
    options: dict[str, Any] = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if chip.name == "v4":  # two cores that appear as one device, as on Cloud TPU
        options |= {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}
    if topology.num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    os.environ.update({**NO_TPU, **os.environ})
    name = f"{chip.name}:{'x'.join(map(str, topology.shape))}"
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--topology={topology.name}: the TPU compiler says: {reason}") from error


def _gpus(topology: Topology, chip: Chip) -> list[Any]:
    check_known("the GPU of --topology", chip.name, _GPUS)
    if not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        raise UserError(
            f"--topology={topology.name} needs the GPU compiler, which runs without a GPU: "
            "in a separate environment (without a driver it makes every command warn), "
            f"pip install -e . jax=={jax.__version__} && pip install --no-deps "
            f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__} "
            f"nvidia-cudnn-cu13; or plan for cpu:{topology.num_devices}."
        )
    [device_kind] = [kind for kind, name in DEVICE_KINDS.items() if name == chip.name]
    target_config = f"""
      platform_name: "CUDA" device_description_str: "{device_kind}"
      dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
      gpu_device_info {{
        {_GPUS[chip.name]}
        memory_bandwidth: {round(chip.hbm_gb_s * 1e9)} device_memory_size: {chip.device_hbm_bytes}
      }}
    """
    shape = f"{topology.slices}x1x{topology.shape[0]}"
    options = {"topology": shape, "target_config": target_config}
    return topologies.get_topology_desc(platform="cuda", **options).devices
