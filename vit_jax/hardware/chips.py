"""A table of accelerators: peak compute, memory and bandwidth of each chip.

Sources:
  TPU: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}; v2 and v3 from Jouppi et al., "A
    domain-specific supercomputer for training deep neural networks" (CACM 2020), v4 also from
    arXiv 2304.01433. Interconnect: half of the "bidirectional" figure; DCN per chip; v4's is not
    published, v5e's is used. Memory: the libtpu 0.0.42 compiler's limit ("exceeds available HBM
    (15.75G)"), which is less than the data sheet's size.
  GPU: NVIDIA's data sheets, dense figures without sparsity; memory as reported by the driver, for
    B200 its bandwidth too (pytorch/ao, pull request 4002); network of a DGX node of that
    generation, per GPU.
"""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator chip. All rates are upper bounds, per chip and not per core."""

    name: str  # as used on the command line
    _: dataclasses.KW_ONLY
    tflops: float  # dense bfloat16, 1e12 per second (V100: float16, as it lacks bfloat16)
    hbm_gib: float  # memory available to programs
    hbm_gb_s: float  # its bandwidth, 1e9 bytes per second
    link_gb_s: float  # to the other chips of a slice or node, in one direction
    network_gb_s: float = 0.0  # to other slices or nodes
    devices: int = 1  # JAX devices; 2 if each core is one

    @property
    def device_peak_flops(self) -> float:
        """Operations per second of one JAX device: a chip, or a core of v2, v3, tpu7x."""
        return self.tflops * 1e12 / self.devices

    @property
    def device_hbm_bytes(self) -> int:
        """Memory of one JAX device."""
        return round(self.hbm_gib * GIB) // self.devices


_TABLE = (
    Chip("v2", tflops=46, hbm_gib=14.96, hbm_gb_s=700, link_gb_s=248, devices=2),
    Chip("v3", tflops=123, hbm_gib=30.96, hbm_gb_s=900, link_gb_s=328, devices=2),
    Chip("v4", tflops=275, hbm_gib=30.75, hbm_gb_s=1200, link_gb_s=300, network_gb_s=3.1),
    Chip("v5e", tflops=197, hbm_gib=15.75, hbm_gb_s=819, link_gb_s=200, network_gb_s=3.1),
    Chip("v5p", tflops=459, hbm_gib=95.74, hbm_gb_s=2765, link_gb_s=600, network_gb_s=6.25),
    Chip("v6e", tflops=918, hbm_gib=31.25, hbm_gb_s=1638, link_gb_s=400, network_gb_s=12.5),
    Chip(
        "tpu7x",
        tflops=2307,
        hbm_gib=189.5,
        hbm_gb_s=7380,
        link_gb_s=600,
        network_gb_s=12.5,
        devices=2,
    ),
    Chip("V100-16GB", tflops=125, hbm_gib=15.781, hbm_gb_s=900, link_gb_s=150, network_gb_s=6.25),
    Chip("V100-32GB", tflops=125, hbm_gib=31.748, hbm_gb_s=900, link_gb_s=150, network_gb_s=6.25),
    Chip("A100-40GB", tflops=312, hbm_gib=39.586, hbm_gb_s=1555, link_gb_s=300, network_gb_s=25),
    Chip("A100-80GB", tflops=312, hbm_gib=79.347, hbm_gb_s=2039, link_gb_s=300, network_gb_s=25),
    Chip("H100", tflops=989.5, hbm_gib=79.648, hbm_gb_s=3350, link_gb_s=450, network_gb_s=50),
    Chip("H100-PCIe", tflops=756, hbm_gib=79.648, hbm_gb_s=2000, link_gb_s=64, network_gb_s=50),
    Chip("H200", tflops=989.5, hbm_gib=140.401, hbm_gb_s=4800, link_gb_s=450, network_gb_s=50),
    Chip("B200", tflops=2250, hbm_gib=178.35, hbm_gb_s=7672, link_gb_s=900, network_gb_s=50),
    Chip("RTX3090", tflops=71, hbm_gib=24, hbm_gb_s=936, link_gb_s=32, network_gb_s=3.1),
    Chip("RTX4090", tflops=165, hbm_gib=23.988, hbm_gb_s=1008, link_gb_s=32, network_gb_s=3.1),
)
CHIPS = {chip.name: chip for chip in _TABLE}

# `jax.Device.device_kind` -> name of the chip.
DEVICE_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "TPU v7x": "tpu7x",
    "Tesla V100-SXM2-16GB": "V100-16GB",
    "Tesla V100-SXM2-32GB": "V100-32GB",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA GeForce RTX 3090": "RTX3090",
    "NVIDIA GeForce RTX 4090": "RTX4090",
}


def find_chip(device_kind: str) -> Chip | None:
    """The chip with this `device_kind`, such as "TPU v5 lite"; None for CPUs and unknown ones."""
    names = {kind.lower(): name for kind, name in DEVICE_KINDS.items()}  # drivers differ in case
    return CHIPS.get(names.get(device_kind.lower(), ""))
