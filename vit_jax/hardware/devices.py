"""Device order in a mesh: the axes that communicate most get the fastest links."""

import contextlib
import ctypes
import functools
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from vit_jax.errors import TransientError, UserError
from vit_jax.wording import counted

# Another process still holds the device, or its driver is not up yet.
_RETRYABLE_ERROR = re.compile(r"(ABORTED|DEADLINE_EXCEEDED|UNAVAILABLE): ")
# libtpu queries a TPU, noisily if there is none.
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server outside of the cloud
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no TPU is claimed: its lock has no meaning
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}


def quiet_libtpu() -> None:
    """No warnings where libtpu is installed but no TPU attached; called before devices are used."""
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":  # set by JAX, which looks for the chips
        os.environ.update({**NO_TPU, **os.environ})


def all_devices() -> list[Any]:
    """All devices of the run; the first call initializes them.

    If they are CPUs, this process keeps memory that it has freed, see `keep_freed_memory`.

    Raises:
      UserError: they cannot be initialized, or JAX_PLATFORMS names a platform that is missing.
      TransientError: the same, but another attempt may succeed.
    """
    # A CPU's updates in the main thread, whose memory `keep_freed_memory` keeps.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    quiet_libtpu()
    devices: list[Any] = []
    try:
        with contextlib.suppress(AssertionError):  # JAX found no devices
            devices = jax.devices()
    except RuntimeError as error:
        message = f"cannot initialize the devices: {' '.join(str(error).split())}"
        kind = TransientError if _RETRYABLE_ERROR.search(message) else UserError
        raise kind(message) from error
    asked = os.environ.get("JAX_PLATFORMS", "")
    first = asked.partition(",")[0]
    # With "cuda,cpu", JAX falls back to the CPU if a GPU has no driver.
    if not devices or (first in ("cuda", "gpu") and devices[0].platform != "gpu"):
        raise UserError(
            f"JAX_PLATFORMS={asked}: no such device found. Check the driver (nvidia-smi) "
            "and that JAX was installed for it (pip install '.[cuda13]' or '.[cuda12]'), or unset "
            "JAX_PLATFORMS."
        )
    if devices[0].platform == "cpu":
        keep_freed_memory()
    return devices


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of <malloc.h>


def keep_freed_memory() -> None:
    """Large arrays are allocated from what this process has freed before, not from the kernel.

    On a CPU, XLA allocates the memory of every update and frees it. By glibc's defaults it goes
    back to the kernel, which then clears every page again: a quarter of the processor's time of a
    small ViT (docs/performance.md). Settings of the user's (`GLIBC_TUNABLES`, `MALLOC_*`) are kept.
    """
    if any(name.startswith(("GLIBC_TUNABLES", "MALLOC_")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:  # other C libraries have none
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def device_groups(devices: Sequence[Any]) -> tuple[str, list[list[Any]]]:
    """Devices joined by fast links: TPU slices, GPU hosts.

    JAX numbers both as `slice_index`, for any number of hosts per slice or processes per host.
    Devices without that number are grouped by process, except TPUs: they lack it only in a single
    slice. Groups of different sizes cannot split a mesh: they count as one.

    Returns `slice` or `host`, and the groups in order, each with its devices in the given order.
    """
    numbered = all(getattr(device, "slice_index", None) is not None for device in devices)
    attribute = "slice_index" if numbered else "process_index"
    kind = "slice" if devices[0].platform == "tpu" else "host"
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(getattr(device, attribute), []).append(device)
    ordered = [groups[key] for key in sorted(groups)]
    if (kind == "slice" and not numbered) or len({len(group) for group in ordered}) > 1:
        ordered = [[device for group in ordered for device in group]]
    return kind, ordered


def mesh_sizes(
    data: int, fsdp: int, tensor: int, num_devices: int, group_size: int, kind: str
) -> tuple[int, int, int]:
    """Axis sizes with 0 and -1 replaced by numbers, see `sharding.create_mesh`.

    UserError: their product is not `num_devices`.
    """
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    text = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    if fsdp == 0:
        if tensor < 1 or group_size % tensor:
            raise UserError(
                f"{text}: with mesh.fsdp=0, mesh.tensor must divide the {group_size} devices of "
                f"one {kind}."
            )
        sizes["fsdp"] = group_size // tensor
    free = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1 or known < 1 or min(sizes.values()) < -1:
        raise UserError(
            f"{text}: sizes must be positive, and at most one of them -1 (the rest); mesh.fsdp may "
            f"be 0 (all of one {kind})."
        )
    if free:
        sizes[free[0]] = num_devices // known
    if math.prod(sizes.values()) != num_devices:
        raise UserError(
            f"{text} does not match the {counted(num_devices, 'device')}: the product of the sizes "
            f"must be {num_devices} (-1 for one of them takes the rest)."
        )
    return sizes["data"], sizes["fsdp"], sizes["tensor"]


def split_sizes(sizes: tuple[int, ...], group_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Splits mesh sizes into (between groups, within a group), whose products per axis are `sizes`.

    The last axes communicate most and get the largest part of a group that divides them. The
    product of the sizes must be a multiple of `group_size`.
    """
    inner: list[int] = []
    for size in reversed(sizes):
        inner.append(math.gcd(size, group_size // math.prod(inner)))
    inner.reverse()
    return tuple(s // i for s, i in zip(sizes, inner, strict=True)), tuple(inner)


def arrange_devices(devices: Sequence[Any], sizes: tuple[int, ...]) -> np.ndarray:
    """Arranges devices in an array of these sizes whose last axes lie within groups.

    Within a group JAX orders them by physical topology. `jax.make_mesh` does this for one
    group and rejects several.
    """
    _, groups = device_groups(devices)
    outer, inner = split_sizes(sizes, len(groups[0]))
    create = functools.partial(mesh_utils.create_device_mesh, allow_split_physical_axes=True)
    blocks = np.stack([create(inner, group) for group in groups]).reshape(*outer, *inner)
    pairs = [axis for i in range(len(sizes)) for axis in (i, i + len(sizes))]
    return blocks.transpose(pairs).reshape(sizes)
