"""Devices that are not there: the compiler's own description of them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from vit_jax.errors import UserError
from vit_jax.hardware.chips import DEVICE_KINDS, Chip
from vit_jax.parameters.sharding import create_mesh
from vit_jax.plan.topology import Topology

GPU_COMPILERS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

# The TPU compiler asks after a TPU, in vain and loudly where there is none.
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # nobody answers outside of the cloud
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # none is claimed: its lock has no meaning
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """What the compiler asks of a GPU beside `Chip`, from NVIDIA's data sheets.

    Attributes:
      capability: compute capability x.0.
      multiprocessors: how many.
      fp32_units: of a multiprocessor.
      l2_mib: cache shared by all of them.
      clock_ghz: boost.
      shared_kib: memory of a multiprocessor; a block gets 1 KiB less.
    """

    capability: int
    multiprocessors: int
    fp32_units: int
    l2_mib: int
    clock_ghz: float
    shared_kib: int


_A100 = Gpu(
    capability=8, multiprocessors=108, fp32_units=64, l2_mib=40, clock_ghz=1.41, shared_kib=164
)
_H100 = Gpu(
    capability=9, multiprocessors=132, fp32_units=128, l2_mib=50, clock_ghz=1.98, shared_kib=228
)
GPUS = {  # by `Chip.name`
    "A100-40GB": _A100,
    "A100-80GB": _A100,
    "H100": _H100,
    "H100-PCIe": dataclasses.replace(_H100, multiprocessors=114, clock_ghz=1.755),
    "H200": _H100,
}


def topology_mesh(topology: Topology, *, data: int, fsdp: int, tensor: int) -> Mesh:
    """The mesh that `create_mesh` makes of such devices where they are.

    Raises:
      UserError: see `topology_devices` and `create_mesh`.
    """
    return create_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=topology_devices(topology))


def topology_devices(topology: Topology) -> list[Any]:
    """The devices to compile for.

    Raises:
      UserError: the compiler for them is not installed, or does not know the shape.
    """
    jax.config.update("jax_platforms", "cpu")  # an accelerator that is here is left alone
    if topology.kind == "cpu":
        return _virtual_devices(topology.num_devices)
    if topology.kind == "gpu":
        return _gpus(topology)
    options: dict[str, Any] = {"num_slices": topology.slices} if topology.slices > 1 else {}
    assert topology.chip is not None
    if topology.chip.name == "v4":  # two cores that appear as one device, as on Cloud TPU
        options |= {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1)}
    if topology.num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = f"{topology.chip.name}:{'x'.join(map(str, topology.shape))}"
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"--topology={topology.name} needs the TPU compiler, which runs without a TPU: "
            "pip install 'vit_jax[tpu]', if need be in an environment of its own; or plan for "
            f"cpu:{topology.num_devices}."
        )
    for variable, value in NO_TPU.items():
        os.environ.setdefault(variable, value)
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--topology={topology.name}: the TPU compiler says: {reason}") from error
    return list(description.devices)


def _gpus(topology: Topology) -> list[Any]:
    assert topology.chip is not None
    if topology.chip.name not in GPUS:
        raise UserError(
            f"--topology={topology.name}: among GPUs plans are made for {', '.join(GPUS)}."
        )
    if not any(map(importlib.util.find_spec, GPU_COMPILERS)):
        raise UserError(
            f"--topology={topology.name} needs the GPU compiler, which runs without a GPU: "
            "pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt (or both of cuda13) in the "
            f"version of jax ({jax.__version__}); or plan for cpu:{topology.num_devices}."
        )
    return list(
        topologies.get_topology_desc(
            platform="cuda",
            target_config=_target_config(topology.chip),
            topology=f"{topology.slices}x1x{topology.shape[0]}",
        ).devices
    )


def _target_config(chip: Chip) -> str:
    """XLA's GpuTargetConfigProto as text."""
    gpu = GPUS[chip.name]
    [device_kind] = [kind for kind, name in DEVICE_KINDS.items() if name == chip.name]
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: {48 * 1024}
          shared_memory_per_core: {gpu.shared_kib * 1024}
          shared_memory_per_block_optin: {(gpu.shared_kib - 1) * 1024}
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
          memory_bandwidth: {round(chip.hbm_gb_s * 1e9)}
          device_memory_size: {chip.device_hbm_bytes}
          l2_cache_size: {gpu.l2_mib * 2**20}
          clock_rate_ghz: {gpu.clock_ghz}
          cuda_compute_capability {{
            major: {gpu.capability}
            minor: 0
            feature_extension: {"ACCELERATED_FEATURES" if gpu.capability >= 9 else "NONE"}
          }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{device_kind}"
        """


def _virtual_devices(count: int) -> list[Any]:
    with contextlib.suppress(RuntimeError):  # JAX runs already; what there is has to do
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(f"--topology=cpu:{count}: this process has {len(devices)} devices already.")
    return devices[:count]
