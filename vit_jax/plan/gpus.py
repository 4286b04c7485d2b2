"""GPUs as the compiler wants them described, which then needs none: NVIDIA's data sheets.

Shared memory and registers follow from the compute capability (CUDA programming guide, "technical
specifications per compute capability").
"""

from __future__ import annotations

import dataclasses

from vit_jax.hardware.chips import CHIPS, MIB

KIB = 2**10


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Of a whole GPU; memory and bandwidth stand in `hardware.CHIPS`.

    Attributes:
      capability: compute capability.
      multiprocessors: how many.
      fp32_units: of a multiprocessor.
      l2_bytes: cache shared by all of them.
      clock_ghz: boost.
      shared_kib: memory of a multiprocessor; a block gets 1 KiB less.
    """

    capability: tuple[int, int]
    multiprocessors: int
    fp32_units: int
    l2_bytes: int
    clock_ghz: float
    shared_kib: int


# By `Chip.name`.
GPUS: dict[str, Gpu] = {
    "A100-40GB": Gpu((8, 0), 108, 64, 40 * MIB, 1.41, 164),
    "A100-80GB": Gpu((8, 0), 108, 64, 40 * MIB, 1.41, 164),
    "H100": Gpu((9, 0), 132, 128, 50 * MIB, 1.98, 228),
    "H100-PCIe": Gpu((9, 0), 114, 128, 50 * MIB, 1.755, 228),
    "H200": Gpu((9, 0), 132, 128, 50 * MIB, 1.98, 228),
}


def target_description(name: str) -> str:
    """The text form of XLA's GpuTargetConfigProto for a chip of `GPUS`."""
    gpu = GPUS[name]
    [chip] = [each for each in CHIPS if each.name == name]
    hopper = "ACCELERATED_FEATURES" if gpu.capability[0] >= 9 else "NONE"
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: {48 * KIB}
          shared_memory_per_core: {gpu.shared_kib * KIB}
          shared_memory_per_block_optin: {(gpu.shared_kib - 1) * KIB}
          threads_per_core_limit: 2048
          core_count: {gpu.multiprocessors}
          fpus_per_core: {gpu.fp32_units}
          block_dim_limit_x: {2**31 - 1}
          block_dim_limit_y: {2**16 - 1}
          block_dim_limit_z: {2**16 - 1}
          thread_dim_limit_x: 1024
          thread_dim_limit_y: 1024
          thread_dim_limit_z: 64
          registers_per_core_limit: {2**16}
          registers_per_block_limit: {2**16}
          memory_bandwidth: {round(chip.hbm_bandwidth)}
          device_memory_size: {chip.hbm_bytes}
          l2_cache_size: {gpu.l2_bytes}
          clock_rate_ghz: {gpu.clock_ghz}
          cuda_compute_capability {{
            major: {gpu.capability[0]}
            minor: {gpu.capability[1]}
            feature_extension: {hopper}
          }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{chip.device_kinds[0]}"
        """
