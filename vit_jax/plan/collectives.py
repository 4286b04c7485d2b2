"""What the devices tell each other in one step, read from the compiled program."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from vit_jax.plan.hlo import Instruction, Program, executions

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_LAYOUT = r"\[(?P<ids>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
_LISTED = re.compile(r"replica_groups=\{(?P<groups>\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(?P<size>\d+)\]<=" + _LAYOUT)
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    rf"(?:, device_ids=\({_LAYOUT}\))? \{{(?P<named>[^}}]*)\}}"
)
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="([A-Z_]+)"')


@dataclasses.dataclass
class Traffic:
    """Collectives of one kind in one step, per device."""

    count: int = 0
    num_bytes: float = 0.0  # of the whole arrays
    sent_bytes: float = 0.0  # over the links, by the best known (ring) algorithms
    network_bytes: float = 0.0  # to other slices or nodes


def collective_traffic(program: Program, groups_of: Sequence[int]) -> dict[str, Traffic]:
    """Traffic of one execution of the program, for each kind that occurs.

    Between slices of TPUs it is what each device sends to its host, after it was reduced within the
    slice. Between nodes of GPUs a collective is one instruction, of which each device sends its
    share over the network.

    Args:
      program: compiled for `len(groups_of)` devices.
      groups_of: slice, or node, of every device in the order of the mesh.
    """
    found: dict[str, Traffic] = {}
    for computation, instruction, times, fused in executions(program):
        between = _BETWEEN_SLICES.search(instruction.attributes)
        if instruction.opcode == "send" and between:
            traffic = found.setdefault(between[1].lower().replace("_", "-"), Traffic())
            sent = instruction.arrays[0].num_bytes * _sent("all-reduce", len(set(groups_of)))
            traffic.network_bytes += times * sent
            continue
        kind = instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        group = replica_groups(instruction, len(groups_of))[0]
        size, nodes = len(group), len({groups_of[device] for device in group})
        operands = [program.computations[computation][name] for name in instruction.operands]
        num_bytes = times * sum(each.num_bytes for each in operands)
        if kind == "all-gather":
            num_bytes *= size
        # A TPU writes a reduce-scatter as a fusion of an all-reduce and the cut of its own part.
        if fused and "all-reduce-scatter" in computation:
            kind = "reduce-scatter"
        traffic = found.setdefault(kind, Traffic())
        traffic.count += times
        traffic.num_bytes += num_bytes
        traffic.sent_bytes += num_bytes * _sent(kind, size)
        if nodes > 1:
            traffic.network_bytes += num_bytes * _sent(kind, nodes) * nodes / size
    return found


def _sent(kind: str, n: int) -> float:
    """Bytes that each of n devices in a ring sends per byte of the whole array."""
    if kind == "collective-permute":
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (n - 1) / n


def replica_groups(instruction: Instruction, num_devices: int) -> list[list[int]]:
    """Which devices take part together; a program writes it in one of three ways.

    A permutation, which has no groups, counts as one of all devices.
    """
    text = instruction.attributes
    if match := _LISTED.search(text):
        groups = re.findall(r"\{([\d,]+)\}", match["groups"])
        return [[int(device) for device in group.split(",")] for group in groups]
    if match := _IOTA.search(text):
        return _iota(match["ids"], match["order"]).reshape(-1, int(match["size"])).tolist()
    if match := _MESH.search(text):
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match["axes"])}
        named = re.findall(r"'([^']+)'", match["named"])
        names = [axis for axis in axes if axis not in named] + named
        ids = _iota(match["ids"] or str(num_devices), match["order"]).reshape([*axes.values()])
        ids = ids.transpose([list(axes).index(axis) for axis in names])
        return ids.reshape(-1, math.prod(axes[axis] for axis in named)).tolist()
    return [list(range(num_devices))]


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Devices 0, 1, ... laid out in these sizes, and transposed."""
    shape = [int(size) for size in sizes.split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose([int(axis) for axis in order.split(",")]) if order else ids
