"""Meshes, and the one table that says how every parameter is sharded.

Models know nothing of this. A parameter's name selects its logical axes (`PARAMETER_AXES`), and a
logical axis selects a mesh axis (`LOGICAL_TO_MESH`). Mesh axes: `data` replicates parameters,
`fsdp` splits parameters and batch, `tensor` splits heads, MLP width and classes.
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.errors import UserError

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

LOGICAL_TO_MESH: dict[str | None, str | None] = {
    "embed": "fsdp",
    "features": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "classes": "tensor",
    None: None,
}

_ATTENTION = r"(?:Transformer/encoderblock(?:_\d+)?|MAPHead_0)/MultiHeadDotProductAttention_0"
_MLP = r"(?:Transformer/encoderblock(?:_\d+)?|MAPHead_0)/MlpBlock_0"
_NORM = (
    r"(?:Transformer/(?:encoderblock(?:_\d+)?/LayerNorm_[01]|encoder_norm)|MAPHead_0/LayerNorm_0)"
)

# Every parameter of every model matches exactly one row (tests/test_sharding.py).
PARAMETER_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"cls|dist", (None, None, "embed")),
    (r"MAPHead_0/probe", (None, None, "embed")),
    (r"Transformer/posembed_input/pos_embedding", (None, None, "embed")),
    (r"embedding/kernel", (None, None, None, "embed")),
    (r"embedding/bias", ("embed",)),
    (_ATTENTION + r"/(?:query|key|value)/kernel", ("embed", "heads", None)),
    (_ATTENTION + r"/(?:query|key|value)/bias", ("heads", None)),
    (_ATTENTION + r"/out/kernel", ("heads", None, "embed")),
    (_ATTENTION + r"/out/bias", ("embed",)),
    (_MLP + r"/Dense_0/kernel", ("embed", "mlp")),
    (_MLP + r"/Dense_0/bias", ("mlp",)),
    (_MLP + r"/Dense_1/kernel", ("mlp", "embed")),
    (_MLP + r"/Dense_1/bias", ("embed",)),
    (_NORM + r"/(?:scale|bias)", ("embed",)),
    (r"pre_logits/kernel", ("embed", None)),
    (r"pre_logits/bias", (None,)),
    (r"head(?:_dist)?/kernel", ("embed", "classes")),
    (r"head(?:_dist)?/bias", ("classes",)),
    (r"(?:conv_root|block\d+/unit\d+/conv(?:[123]|_proj))/kernel", (None, None, None, "features")),
    (r"(?:gn_root|block\d+/unit\d+/gn(?:[123]|_proj))/(?:scale|bias)", ("features",)),
)


def create_mesh(*, data: int = -1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh over all devices with axes (data, fsdp, tensor); -1 takes what the others leave.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    num_devices = jax.device_count()
    free = [axis for axis, size in sizes.items() if size == -1]
    text = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise UserError(f"{text}: sizes must be positive, and at most one of them -1 (the rest).")
    known = math.prod(size for size in sizes.values() if size != -1)
    if free:
        sizes[free[0]] = num_devices // known
    if math.prod(sizes.values()) != num_devices:
        raise UserError(
            f"{text} does not fit the {num_devices} devices there are: the sizes must multiply to "
            f"{num_devices} (-1 for one of them takes the rest)."
        )
    # Auto axes: linen's layers do not state the shardings that Explicit axes would ask for.
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """How a batch [B, ...] lies on the mesh: B is split over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def check_batch_size(key: str, batch_size: int, mesh: Mesh, accumulation_steps: int = 1) -> None:
    """Raises UserError unless the batch splits evenly over devices and accumulation steps."""
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if accumulation_steps < 1:
        raise UserError(f"train_step.accumulation_steps={accumulation_steps} must be at least 1.")
    unit = shards * accumulation_steps
    if batch_size < 1 or batch_size % unit:
        below = batch_size // unit * unit
        fitting = f"{below} or {below + unit}" if below > 0 else f"{unit}"
        raise UserError(
            f"{key}={batch_size} does not divide over mesh.data x mesh.fsdp = {shards} devices "
            f"x train_step.accumulation_steps = {accumulation_steps}; use {fitting}."
        )


def parameter_axes(name: str, ndim: int) -> tuple[str | None, ...]:
    """Logical axes of the parameter called `name`, such as `head/kernel` -> ("embed", "classes").

    Raises:
      ValueError: no row, or more than one, matches; add a row to `PARAMETER_AXES`.
    """
    matches = [axes for pattern, axes in PARAMETER_AXES if re.fullmatch(pattern, name)]
    if len(matches) != 1:
        raise ValueError(
            f"parameter {name!r} matches {len(matches)} rows of sharding.PARAMETER_AXES, not one."
        )
    axes = matches[0]
    if "encoderblock/" in name:  # scan form: a leading axis of layers
        axes = (None, *axes)
    if len(axes) != ndim:
        raise ValueError(
            f"parameter {name!r} has {ndim} axes, sharding.PARAMETER_AXES says {axes}."
        )
    return axes


def parameter_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Mesh axes per dimension; one that does not divide its dimension is dropped, and logged."""
    spec: list[str | None] = []
    for size, logical in zip(shape, parameter_axes(name, len(shape)), strict=True):
        axis = LOGICAL_TO_MESH[logical]
        if axis is not None and size % mesh.shape[axis]:
            logging.info(
                "%s %s: dimension %d is not divisible by mesh.%s=%d and stays whole",
                *(name, shape, size, axis, mesh.shape[axis]),
            )
            axis = None
        spec.append(axis)
    return PartitionSpec(*spec)


def state_shardings(abstract_state: Any, mesh: Mesh) -> Any:
    """A NamedSharding per leaf of a train state.

    Leaves below `params` follow the table. Any other leaf (optimizer moments, averages) follows
    the parameter whose name ends its own path, if the shapes agree, and is replicated otherwise
    (counters, factored second moments).

    Args:
      abstract_state: `TrainState` of ShapeDtypeStructs.
      mesh: from `create_mesh`.
    """
    params = {
        _dict_keys(path): (leaf.shape, parameter_spec(_dict_keys(path), leaf.shape, mesh))
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_state.params)
    }

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        shape, spec = params.get(_dict_keys(path), (None, None))
        return NamedSharding(
            mesh, spec if spec is not None and shape == leaf.shape else PartitionSpec()
        )

    return jax.tree_util.tree_map_with_path(sharding, abstract_state)


def _dict_keys(path: Any) -> str:
    keys = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return "/".join(str(key) for key in keys)


def to_host(tree: Any) -> Any:
    """Arrays on any sharding and any number of processes -> numpy arrays on every process.

    One leaf at a time, so that no device ever holds more than one whole array.
    """

    def fetch(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            whole = replicated(leaf.sharding.mesh)  # type: ignore[attr-defined]
            leaf = jax.jit(lambda x: x, out_shardings=whole)(leaf)
        return np.asarray(jax.device_get(leaf))

    return jax.tree.map(fetch, tree)
