"""Meshes, and the sharding of every parameter.

Model families name the logical axes of their parameters (`Family.rows`), and a single table
here maps logical axes to mesh axes. Models do not know about meshes. Mesh axes: `data` replicates
parameters, `fsdp` shards parameters and batch, `tensor` shards heads, MLP width, classes and
vocabularies.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError
from vit_jax.hardware.devices import (
    all_devices,
    arrange_devices,
    device_groups,
    mesh_sizes,
    split_sizes,
)
from vit_jax.parameters.table import ParameterTable
from vit_jax.trees import flatten_names, path_name

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

LOGICAL_TO_MESH: dict[str | None, str | None] = {
    "embed": "fsdp",
    "features": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "classes": "tensor",
    "vocabulary": "tensor",
    None: None,
}


def create_mesh(
    *, data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh with axes (data, fsdp, tensor); -1 takes the remaining devices.

    `fsdp` and `tensor` stay within a slice (TPU) or a host (GPU) as far as possible, and `data`
    spans several. A warning is logged if parameters have to cross. UserError: see `mesh_sizes` and
    `all_devices`.

    Args:
      data, fsdp, tensor: devices along each axis. `fsdp=0` takes the rest of one slice or host
        after `tensor`, so that the same config is hybrid on any number of them.
      devices: default: all.
    """
    devices = all_devices() if devices is None else devices
    kind, groups = device_groups(devices)
    group_size = len(groups[0])
    sizes = mesh_sizes(data, fsdp, tensor, len(devices), group_size, kind)
    (_, *across), _ = split_sizes(sizes, group_size)
    if math.prod(across) > 1:
        logging.warning(
            f"mesh.fsdp={sizes[1]} x mesh.tensor={sizes[2]} do not fit into the {group_size} "
            f"devices of one {kind}: in every step parameters cross the slower network between "
            f"the {len(groups)} of them. mesh.data=-1 with mesh.fsdp=0 keeps them within one, if "
            "the model fits there."
        )
    # Auto axes: linen's layers do not declare the shardings that Explicit axes require.
    return Mesh(arrange_devices(devices, sizes), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """XLA options of `jax.jit` for updates and evaluations."""
    platform = mesh.devices.flat[0].platform
    if platform == "gpu":
        # XLA would compare its own kernels for products with cuBLAS, without what cuBLAS adds to a
        # product for nothing: biases, GELU. B/16 on an H100 is 6 % faster so. And it would join
        # products of the same tokens whose results have less than 64 MiB, for which it copies.
        return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    if platform != "tpu":
        return {}
    # XLA would split a product with a sharded kernel into one per device ("windowed einsum"), to
    # overlap with the transfer of the next shard. These are too small for the matrix unit: B/16 on
    # fsdp=4 takes 100 Mcycles of a v5e so and 80 with gathered kernels, scanned 193 and 108.
    return {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a batch [B, ...]: B is split over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def check_batch_size(key: str, batch_size: int, mesh: Mesh, accumulation_steps: int = 1) -> None:
    """Raises UserError unless devices and accumulation steps divide the batch."""
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    unit = shards * accumulation_steps
    if batch_size % unit:
        below = batch_size // unit * unit
        fitting = f"{below} or {below + unit}" if below > 0 else f"{unit}"
        raise UserError(
            f"{key}={batch_size} is not divisible by mesh.data x mesh.fsdp = {shards} devices "
            f"x train_step.accumulation_steps = {accumulation_steps}; use {fitting}."
        )


def parameter_axes(name: str, ndim: int, table: ParameterTable) -> tuple[str | None, ...]:
    """Logical axes, as ("embed", "classes") of `head/kernel`; ValueError: no row, or not `ndim`."""
    parameter = table.find(name)
    axes = (None, *parameter.row.axes) if parameter.is_stacked else parameter.row.axes
    if len(axes) != ndim:
        raise ValueError(f"parameter {name!r} has {ndim} axes, but its row has {axes}.")
    return axes


def parameter_spec(
    name: str, shape: tuple[int, ...], mesh: Mesh, table: ParameterTable
) -> PartitionSpec:
    """Mesh axis of each dimension; dropped if it does not divide the dimension.

    `fsdp` then moves to the largest free dimension that it divides: which one matters little, as
    parameters are gathered before use. Never to the scan form's layer axis: one iteration would
    need what only a single device holds.
    """
    axes = [LOGICAL_TO_MESH[logical] for logical in parameter_axes(name, len(shape), table)]
    spec = [
        axis if axis is None or size % mesh.shape[axis] == 0 else None
        for size, axis in zip(shape, axes, strict=True)
    ]
    if "fsdp" in axes and "fsdp" not in spec:
        first = 1 if table.is_stacked(name) else 0
        others = [i for i in range(first, len(shape)) if shape[i] % mesh.shape["fsdp"] == 0]
        others = [i for i in others if (used := spec[i]) is None or mesh.shape[used] == 1]
        if others:
            spec[max(others, key=lambda i: shape[i])] = "fsdp"
    return PartitionSpec(*spec)


def parameter_shardings(abstract_params: Any, mesh: Mesh, table: ParameterTable) -> Any:
    """A NamedSharding for each leaf of a parameter tree, by its name."""

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, parameter_spec(path_name(path), leaf.shape, mesh, table))

    return jax.tree_util.tree_map_with_path(sharding, abstract_params)


def state_shardings(abstract_state: Any, mesh: Mesh, table: ParameterTable) -> Any:
    """A NamedSharding for each leaf of a train state; logs what the mesh cannot shard.

    A leaf outside of `params` belongs to the parameter whose name ends its path. Moments and
    averages are sharded like the parameter; factored moments, which lack one dimension, like the
    remaining dimensions. The rest (counters) is replicated.
    """
    params = {
        name: (leaf.shape, parameter_spec(name, leaf.shape, mesh, table))
        for name, leaf in flatten_names(abstract_state.params).items()
    }

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        shape, spec = params.get(path_name(path), ((), PartitionSpec()))
        return NamedSharding(mesh, _moment_spec(leaf.shape, shape, spec))

    shardings = jax.tree_util.tree_map_with_path(sharding, abstract_state)
    _log_fallbacks(abstract_state.params, shardings.params, mesh, table)
    return shardings


def _moment_spec(
    shape: tuple[int, ...], param_shape: tuple[int, ...], spec: PartitionSpec
) -> PartitionSpec:
    """The parameter's spec, for a factored moment without the averaged dimension."""
    if shape == param_shape:
        return spec
    without = (i for i in range(len(spec)) if param_shape[:i] + param_shape[i + 1 :] == shape)
    specs = [PartitionSpec(*spec[:i], *spec[i + 1 :]) for i in without]
    # In a square matrix rows and columns look the same: prefer to shard.
    return max(specs, key=lambda s: sum(axis is not None for axis in s), default=PartitionSpec())


def _log_fallbacks(abstract_params: Any, shardings: Any, mesh: Mesh, table: ParameterTable) -> None:
    """Logs a line per mesh axis and undivided size; a warning if it costs memory."""
    leaves, placed = flatten_names(abstract_params), flatten_names(shardings)
    local = {name: math.prod(placed[name].shard_shape(leaf.shape)) for name, leaf in leaves.items()}
    undivided: dict[tuple[str, int], list[str]] = {}
    for name, leaf in leaves.items():
        for size, logical in zip(leaf.shape, parameter_axes(name, leaf.ndim, table), strict=True):
            axis = LOGICAL_TO_MESH[logical]
            if axis is not None and size % mesh.shape[axis]:
                undivided.setdefault((axis, size), []).append(name)
    for (axis, size), names in undivided.items():
        whole = [name for name in names if axis not in placed[name].spec]
        cost = sum(local[name] for name in whole) / sum(local.values())
        example = max(whole or names, key=lambda name: math.prod(leaves[name].shape))
        divisor = math.gcd(size, mesh.shape[axis])
        logging.log(
            logging.WARNING if cost > 0.01 else logging.INFO,
            f"mesh.{axis}={mesh.shape[axis]} does not divide dimension {size} of {len(names)} "
            f"parameters, such as {example} {leaves[example].shape}: {len(names) - len(whole)} of "
            f"them are split along another dimension, {len(whole)} stay whole, {cost:.0%} of the "
            "parameters on a device."
            + (f" mesh.{axis}={divisor} would divide it." if divisor > 1 else ""),
        )


def keep_batch_sharding() -> AbstractContextManager[None]:
    """A context that maps the logical axes of the models' activations to the mesh.

    Use it wherever a model is traced for a mesh. Otherwise the compiler, which sees `fsdp` shard
    both the batch and the width of parameters, chooses the width in the body of a scan:
    every device then computes on the whole batch, with several times the memory
    (tests/test_layouts.py). No effect without `jax.set_mesh`.
    """
    return nn.logical_axis_rules((("batch", BATCH_AXES), ("heads", "tensor")))


def with_shardings(abstract_tree: Any, shardings: Any) -> Any:
    """Adds shardings to abstract arrays."""
    return jax.tree.map(lambda leaf, at: leaf.update(sharding=at), abstract_tree, shardings)


def to_host(tree: Any) -> Any:
    """Arrays with any sharding, on any number of processes -> numpy arrays on every process.

    One leaf at a time, so that no device holds more than one whole array.
    """

    def fetch(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            whole = replicated(leaf.sharding.mesh)  # type: ignore[attr-defined]
            leaf = jax.jit(lambda x: x, out_shardings=whole)(leaf)
        return np.asarray(jax.device_get(leaf))

    return jax.tree.map(fetch, tree)
