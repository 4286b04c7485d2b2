"""Devices that are not there: the compiler's own description of them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies

from vit_jax.errors import UserError, check_known, import_extra
from vit_jax.hardware.chips import DEVICE_KINDS, Chip
from vit_jax.plan.topology import Topology

GPU_COMPILERS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

# The TPU compiler asks after a TPU, in vain and loudly where there is none.
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # nobody answers outside of the cloud
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # none is claimed: its lock has no meaning
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}

# What the compiler asks of a GPU beside `Chip`, from NVIDIA's data sheets: a GpuDeviceInfoProto.
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
_HOPPER = f"""{_LIMITS}
  fpus_per_core: 128 l2_cache_size: {50 * 2**20}
  shared_memory_per_core: {228 * 2**10} shared_memory_per_block_optin: {227 * 2**10}
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
"""
GPUS = {  # by `Chip.name`
    "A100-40GB": _A100,
    "A100-80GB": _A100,
    "H100": f"{_HOPPER} core_count: 132 clock_rate_ghz: 1.98",
    "H100-PCIe": f"{_HOPPER} core_count: 114 clock_rate_ghz: 1.755",
    "H200": f"{_HOPPER} core_count: 132 clock_rate_ghz: 1.98",
}


def topology_devices(topology: Topology) -> list[Any]:
    """The devices to compile for.

    Raises:
      UserError: the compiler for them is not installed, or does not know the shape.
    """
    jax.config.update("jax_platforms", "cpu")  # an accelerator that is here is left alone
    chip, count = topology.chip, topology.num_devices
    if chip is None:
        with contextlib.suppress(RuntimeError):  # JAX runs already; what there is has to do
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
    check_known("the GPU of --topology", chip.name, GPUS)
    if not any(map(importlib.util.find_spec, GPU_COMPILERS)):
        raise UserError(
            f"--topology={topology.name} needs the GPU compiler, which runs without a GPU: "
            "pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt (or both of cuda13) in the "
            f"version of jax ({jax.__version__}); or plan for cpu:{topology.num_devices}."
        )
    [device_kind] = [kind for kind, name in DEVICE_KINDS.items() if name == chip.name]
    target_config = f"""
      platform_name: "CUDA" device_description_str: "{device_kind}"
      dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
      gpu_device_info {{
        {GPUS[chip.name]}
        memory_bandwidth: {round(chip.hbm_gb_s * 1e9)} device_memory_size: {chip.device_hbm_bytes}
      }}
    """
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=target_config,
        topology=f"{topology.slices}x1x{topology.shape[0]}",
    ).devices
