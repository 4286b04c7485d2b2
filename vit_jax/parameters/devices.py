"""Where each device stands in a mesh: axes that communicate most get the fastest links."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from vit_jax.errors import PassingError, UserError

# Another process still holds the device, or its driver is not up yet.
_DEVICE_MAY_COME = re.compile(r"(ABORTED|DEADLINE_EXCEEDED|UNAVAILABLE): ")


def all_devices() -> list[Any]:
    """All devices of the run; the first call starts them.

    Raises:
      UserError: they do not start, or JAX_PLATFORMS asks for some that are not here.
      PassingError: the same, but another start may find them.
    """
    devices: list[Any] = []
    try:
        with contextlib.suppress(AssertionError):  # JAX found no devices
            devices = jax.devices()
    except RuntimeError as error:
        message = f"The devices do not start: {' '.join(str(error).split())}"
        kind = PassingError if _DEVICE_MAY_COME.search(message) else UserError
        raise kind(message) from error
    asked = os.environ.get("JAX_PLATFORMS", "")
    first = asked.partition(",")[0]
    # Given "cuda,cpu", JAX falls back to the CPU when a GPU has no driver.
    if not devices or (first in ("cuda", "gpu") and devices[0].platform != "gpu"):
        raise UserError(
            f"JAX_PLATFORMS={asked}: there is no such device here. Check the driver (nvidia-smi) "
            "and that JAX was installed for it (pip install '.[cuda13]' or '.[cuda12]'), or unset "
            "JAX_PLATFORMS."
        )
    return devices


def device_groups(devices: Sequence[Any]) -> tuple[str, list[list[Any]]]:
    """What the fast links join: the slices of TPUs, the hosts of GPUs.

    JAX numbers both as `slice_index`, for any number of hosts in a slice or processes on a host.
    Devices without that number are grouped by process, except TPUs: only a single slice has
    none. A mesh cannot be cut along groups of different sizes: they count as one.

    Returns:
      `slice` or `host`, and the groups in order, each with its devices in the order given.
    """
    numbered = all(getattr(device, "slice_index", None) is not None for device in devices)
    attribute = "slice_index" if numbered else "process_index"
    kind = "slice" if devices[0].platform == "tpu" else "host"
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(getattr(device, attribute), []).append(device)
    ordered = [groups[key] for key in sorted(groups)]
    single = kind == "slice" and not numbered
    if single or len({len(group) for group in ordered}) > 1:
        ordered = [[device for group in ordered for device in group]]
    return kind, ordered


def mesh_sizes(
    data: int, fsdp: int, tensor: int, num_devices: int, group_size: int, kind: str
) -> tuple[int, int, int]:
    """Sizes of the axes with 0 and -1 replaced by numbers, see `sharding.create_mesh`.

    Raises:
      UserError: they do not multiply to `num_devices`.
    """
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    text = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    if fsdp == 0:
        if tensor < 1 or group_size % tensor:
            raise UserError(
                f"{text}: mesh.fsdp=0 is what mesh.tensor leaves of the {group_size} devices of "
                f"one {kind}; mesh.tensor must divide them."
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
            f"{text} does not fit the {num_devices} devices there are: the sizes must multiply to "
            f"{num_devices} (-1 for one of them takes the rest)."
        )
    return sizes["data"], sizes["fsdp"], sizes["tensor"]


def split_sizes(sizes: tuple[int, ...], group_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of a mesh -> (between groups, within a group), whose products axis by axis are `sizes`.

    The last axes communicate most and get as much of a group as divides them. The product of the
    sizes must be a multiple of `group_size`.
    """
    inner: list[int] = []
    for size in reversed(sizes):
        inner.append(math.gcd(size, group_size // math.prod(inner)))
    inner.reverse()
    return tuple(s // i for s, i in zip(sizes, inner, strict=True)), tuple(inner)


def arrange_devices(devices: Sequence[Any], sizes: tuple[int, ...]) -> np.ndarray:
    """Devices as an array of these sizes, of which the last axes lie within groups.

    Within a group JAX orders them by its physical topology. `jax.make_mesh` does this for one
    group and refuses several.
    """
    _, groups = device_groups(devices)
    outer, inner = split_sizes(sizes, len(groups[0]))
    create = functools.partial(mesh_utils.create_device_mesh, allow_split_physical_axes=True)
    blocks = np.stack([create(inner, group) for group in groups])  # [groups, *inner]
    blocks = blocks.reshape(*outer, *inner)
    pairs = [axis for i in range(len(sizes)) for axis in (i, i + len(sizes))]
    return blocks.transpose(pairs).reshape(sizes)
