"""Accelerators as one table: what a chip computes, holds and moves at its best.

Sources:
  TPU: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; v2 and v3 from Jouppi et al., "A
    domain-specific supercomputer for training deep neural networks" (CACM 2020), v4 also from
    arXiv 2304.01433. Interconnect: half of the "bidirectional" figure there; DCN per chip. For v4
    no network figure was found: that of v5e stands in.
  TPU memory: what the compiler of libtpu 0.0.42 names as available when a program asks for more
    ("exceeds available HBM (15.75G)"), which is less than the data sheet's size.
  GPU: NVIDIA's data sheets, dense figures without sparsity; memory as the driver reports it;
    network of a DGX node of that generation, per GPU.
"""

from __future__ import annotations

import dataclasses

GIB = 2**30
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator chip. All rates are upper bounds, per chip and not per core.

    Attributes:
      name: as users call it.
      device_kinds: what `jax.Device.device_kind` says of it.
      peak_flops: dense bfloat16 operations per second (V100: float16, it has no bfloat16).
      hbm_bytes: memory that programs can use.
      hbm_bandwidth: bytes per second.
      link_bandwidth: to the other chips of a slice or a node, bytes per second in one direction.
      network_bandwidth: to other slices or nodes, bytes per second; 0 where there is none.
      cores: tensor cores of a TPU; product names of v2, v3, v4 and v5p count them.
      devices: how many JAX devices a chip is; 2 where each core is one.
    """

    name: str
    device_kinds: tuple[str, ...]
    peak_flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    cores: int = 1
    devices: int = 1

    @property
    def device_peak_flops(self) -> float:
        """Operations per second of one JAX device: a chip, or a core of v2, v3, tpu7x."""
        return self.peak_flops / self.devices

    @property
    def device_hbm_bytes(self) -> int:
        """Memory of one JAX device."""
        return self.hbm_bytes // self.devices


def _gib(size: float) -> int:
    return round(size * GIB)


CHIPS: tuple[Chip, ...] = (
    Chip("v2", ("TPU v2",), 46e12, _gib(2 * 7.48), 700e9, 248e9, 0, cores=2, devices=2),
    Chip("v3", ("TPU v3",), 123e12, _gib(2 * 15.48), 900e9, 328e9, 0, cores=2, devices=2),
    Chip("v4", ("TPU v4",), 275e12, _gib(30.75), 1200e9, 300e9, 3.1e9, cores=2),
    Chip("v5e", ("TPU v5 lite", "TPU v5e"), 197e12, _gib(15.75), 819e9, 200e9, 3.1e9),
    Chip("v5p", ("TPU v5", "TPU v5p"), 459e12, _gib(95.74), 2765e9, 600e9, 6.25e9, cores=2),
    Chip("v6e", ("TPU v6 lite", "TPU v6e"), 918e12, _gib(31.25), 1638e9, 400e9, 12.5e9),
    Chip(
        *("tpu7x", ("TPU7x", "TPU v7x"), 2307e12, _gib(2 * 94.75), 7380e9, 600e9, 12.5e9),
        cores=2,
        devices=2,
    ),
    Chip("V100-16GB", ("Tesla V100-SXM2-16GB",), 125e12, 16_160 * MIB, 900e9, 150e9, 6.25e9),
    Chip("V100-32GB", ("Tesla V100-SXM2-32GB",), 125e12, 32_510 * MIB, 900e9, 150e9, 6.25e9),
    Chip(
        *("A100-40GB", ("NVIDIA A100-SXM4-40GB",), 312e12, 40_536 * MIB, 1555e9, 300e9, 25e9),
    ),
    Chip(
        *("A100-80GB", ("NVIDIA A100-SXM4-80GB",), 312e12, 81_251 * MIB, 2039e9, 300e9, 25e9),
    ),
    Chip("H100", ("NVIDIA H100 80GB HBM3",), 989.5e12, 81_559 * MIB, 3350e9, 450e9, 50e9),
    Chip("H100-PCIe", ("NVIDIA H100 PCIe",), 756e12, 81_559 * MIB, 2000e9, 64e9, 50e9),
    Chip("H200", ("NVIDIA H200",), 989.5e12, 143_771 * MIB, 4800e9, 450e9, 50e9),
    Chip("RTX3090", ("NVIDIA GeForce RTX 3090",), 71e12, 24_576 * MIB, 936e9, 32e9, 3.1e9),
    Chip("RTX4090", ("NVIDIA GeForce RTX 4090",), 165e12, 24_564 * MIB, 1008e9, 32e9, 3.1e9),
)


def find_chip(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device_kind`, as "TPU v5 lite"; None for CPUs and the unknown."""
    wanted = device_kind.casefold()
    for chip in CHIPS:
        if wanted in (kind.casefold() for kind in chip.device_kinds):
            return chip
    return None
