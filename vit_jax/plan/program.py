"""Analysis of a compiled program's text: its instructions and how often each one runs, bytes
between memory and cores, and data sent to other devices.

XLA's own cost analysis counts the body of a loop once.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

_HEADER = re.compile(r"(?:ENTRY )?%?(\S+) \(.*\{\s*$")
# Shapes have no lower-case word before a parenthesis: T(8,128) and S(1) belong to layouts.
_LINE = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>\S+) = (?P<shape>.*?) (?P<opcode>[a-z][\w\-]*)\((?P<text>.*)"
)
_ARRAY = re.compile(
    r"(?:pred|[a-z]+(?P<bits>\d+))\w*\[(?P<sizes>[\d,]*)\]"
    r"(?:\{(?P<order>[\d,]*)(?::T\((?P<tile>[\d,]+)\))?[^}]*\})?"
)
# Computations that run as part of the program; a reduce also has `to_apply`, but per element.
_CALLING = ("call", "while", "conditional", "fusion", "custom-call", "async")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|\w+_computation|branch_computations)=(\{[^}]*\}|[^\s,)}]+)"
)


@dataclasses.dataclass(eq=False)
class Instruction:
    """One line of a program."""

    name: str
    opcode: str
    shape: str  # of its result
    text: str  # after the opcode's parenthesis: operands and attributes, or a constant's value
    root: bool
    computation: str  # name of its computation
    operands: list[Instruction]
    called: list[Computation]  # that it runs; for a loop the body
    trips: int  # iterations of a loop; 1 for all others
    # Of its result, and as which operand.
    users: list[tuple[Instruction, int]] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def arrays(self) -> list[tuple[int, bool]]:
        """Bytes of each array of its result, and whether it is in HBM, not in a TPU's VMEM.

        A TPU stores whole tiles: the last axes of its layout are padded.
        """
        arrays = []
        for match in _ARRAY.finditer(self.shape):
            sizes, order, tile = (_integers(match[key]) for key in ("sizes", "order", "tile"))
            for axis, multiple in zip(order, reversed(tile), strict=False):
                sizes[axis] = -(-sizes[axis] // multiple) * multiple
            num_bytes = math.prod(sizes) * int(match["bits"] or 8) // 8
            arrays.append((num_bytes, "S(" not in match[0]))
        if self.opcode.endswith("-start") and len(arrays) > 1:
            # It lists operands, their targets (a copy's first), and what the device waits for.
            first = sum(len(operand.arrays) for operand in self.operands)
            return arrays[:1] if self.opcode == "copy-start" else arrays[first : 2 * first]
        return arrays

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for num_bytes, _ in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        return sum(num_bytes for num_bytes, in_hbm in self.arrays if in_hbm)


Computation = list[Instruction]


def _integers(text: str | None) -> list[int]:
    return [int(number) for number in (text or "").split(",") if number]


def parse_program(text: str) -> Computation:
    """The entry computation of `compiled.as_text()`, the last one; it refers to all others."""
    computations: dict[str, Computation] = {}
    known: dict[str, Instruction] = {}  # of the current computation
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, known = header[1], {}
            computations[name] = []
        elif match := _LINE.match(line):
            _, label, shape, opcode, arguments = match.groups()
            names = re.findall(r"%([^\s,()]+)", arguments.partition("), ")[0])
            calling = opcode.removesuffix("-start") in _CALLING
            called = " ".join(_CALLED.findall(arguments)) if calling else ""
            instruction = Instruction(
                name=label,
                opcode=opcode,
                shape=shape,
                text=arguments,
                root=bool(match["root"]),
                computation=name,
                operands=[known[operand] for operand in names],
                called=[computations[callee] for callee in re.findall(r"[^\s,{}%]+", called)],
                trips=_trips(arguments, computations) if opcode == "while" else 1,
            )
            for position, operand in enumerate(instruction.operands):
                operand.users.append((instruction, position))
            known[label] = instruction
            computations[name].append(instruction)
    return computations[name]


def _trips(loop: str, computations: dict[str, Computation]) -> int:
    """From XLA's annotation, or from the condition (counter < constant); 1 if neither is known."""
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop):
        return int(noted[1])
    [condition] = re.findall(r"\bcondition=%?([^\s,]+)", loop)
    lines = [f"{line.opcode} {line.text}" for line in computations[condition]]
    limits = [match[1] for line in lines if (match := re.match(r"constant (\d+)\)", line))]
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in lines[-1] else 1


def executions(
    computation: Computation, times: int = 1, fused: bool = False
) -> Iterator[tuple[Instruction, int, bool]]:
    """All executed instructions: (instruction, how often, whether inside a fusion)."""
    for instruction in computation:
        yield instruction, times, fused
        inside = fused or instruction.opcode in _FUSIONS
        for called in instruction.called:
            yield from executions(called, times * instruction.trips, inside)


# Aliases of existing arrays, or control flow.
FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|while|conditional|call|after-all"
    "|partition-id|replica-id|opt-barrier|domain|async-start|.*-done"
)
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATE = "dynamic-update-slice"
_FUSIONS = ("fusion", "fusion-start")  # the second one beside what follows, as of JAX 0.11
_RENAMES = ("bitcast", "reshape", "copy", "convert", "transpose")


def hbm_bytes(program: Computation) -> float:
    """Bytes that one execution moves between a device's memory and its cores.

    Every instruction outside a fusion reads its operands and writes its result; inside, values stay
    on the chip. Of a stack of layers a loop reads, or writes, only the slice of the iteration.
    """
    return sum(times * moved_bytes(op) for op, times, fused in executions(program) if not fused)


def moved_bytes(instruction: Instruction) -> int:
    """Bytes that one execution of an instruction moves between the memory and the cores."""
    if FREE.fullmatch(instruction.opcode):
        return 0
    operands = enumerate(instruction.operands)
    read = sum(min(operand.hbm_bytes, _read(instruction, i)) for i, operand in operands)
    return read + min(instruction.hbm_bytes, _written(instruction))


def _read(user: Instruction, position: int) -> int:
    """Bytes that an instruction reads of an operand: all of it, or the slices that it uses."""
    opcode, num_bytes = user.opcode.removesuffix("-start"), user.operands[position].num_bytes
    if opcode in _SLICES and position == 0:
        return user.num_bytes
    if opcode == _UPDATE and position == 0:
        return 0  # written in place
    if opcode == "fusion":
        parameters = (inside for inside in user.called[0] if inside.opcode == "parameter")
        user = next(inside for inside in parameters if inside.text.startswith(f"{position})"))
    elif opcode != "bitcast":
        return num_bytes
    return min(num_bytes, sum(_read(*use) for use in user.users))


def _written(writer: Instruction) -> int:
    """Bytes that an instruction writes: its results, or the slices that it updates in place."""
    if writer.opcode.startswith(_UPDATE):
        return writer.operands[1].num_bytes
    if writer.opcode not in _FUSIONS:
        return writer.num_bytes
    [root] = (inside for inside in writer.called[0] if inside.root)
    total = 0
    for result in root.operands if root.opcode == "tuple" else [root]:
        source = result
        while source.opcode in _RENAMES:
            source = source.operands[0]
        total += (source.operands[1] if source.opcode == _UPDATE else result).num_bytes
    return total


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_IDS = r"\[(?P<ids>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
_MESH = re.compile(
    rf"replica_groups=mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\({_IDS}\))? \{{(?P<named>[^}}]*)\}}"
)
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="([A-Z_]+)"')


@dataclasses.dataclass
class Traffic:
    """Collectives of one kind in a step, per device."""

    count: int = 0
    num_bytes: float = 0.0  # of the whole arrays
    sent_bytes: float = 0.0  # over the links, by the best known (ring) algorithms
    network_bytes: float = 0.0  # to other slices or nodes


def collective_traffic(program: Computation, groups_of: Sequence[int]) -> dict[str, Traffic]:
    """Traffic of one execution of the program, by kind of collective.

    TPU slices send messages through their hosts; between GPU nodes a collective is a single
    instruction, and each device sends its share. `groups_of`: slice, or node, of every device.
    """
    by_kind: dict[str, Traffic] = collections.defaultdict(Traffic)
    for op, times, fused in executions(program):
        if op.opcode == "send" and (between := _BETWEEN_SLICES.search(op.text)):
            num_bytes, _ = op.arrays[0]
            sent = times * num_bytes * _sent("all-reduce", len(set(groups_of)))
            by_kind[between[1].lower().replace("_", "-")].network_bytes += sent
        kind = op.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        group = first_group(op.text, len(groups_of))
        size, nodes = len(group), len({groups_of[device] for device in group})
        num_bytes = times * sum(operand.num_bytes for operand in op.operands)
        if kind == "all-gather":
            num_bytes *= size
        # A TPU writes a reduce-scatter as a fusion of an all-reduce and the slice of its own part.
        if fused and "all-reduce-scatter" in op.computation:
            kind = "reduce-scatter"
        traffic = by_kind[kind]
        traffic.count += times
        traffic.num_bytes += num_bytes
        traffic.sent_bytes += num_bytes * _sent(kind, size)
        if nodes > 1:
            traffic.network_bytes += num_bytes * _sent(kind, nodes) * nodes / size
    return dict(by_kind)


def _sent(kind: str, n: int) -> float:
    """Bytes that each of n devices in a ring sends per byte of the whole array."""
    if kind == "collective-permute":
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (n - 1) / n


def first_group(text: str, num_devices: int) -> list[int]:
    """Devices of a collective's first group, in one of three notations; all for a permutation."""
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return _integers(match[1])
    if match := re.search(rf"replica_groups=\[\d+,(?P<size>\d+)\]<={_IDS}", text):
        return _device_ids(match)[: int(match["size"])].tolist()
    if match := _MESH.search(text):
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match["axes"])}
        ids = _device_ids(match) if match["ids"] else np.arange(num_devices)
        named = tuple(slice(None) if f"'{axis}'" in match["named"] else 0 for axis in axes)
        return ids.reshape([*axes.values()])[named].ravel().tolist()
    return list(range(num_devices))


def _device_ids(match: re.Match[str]) -> np.ndarray:
    """Devices 0, 1, ... reshaped, transposed and flattened."""
    sizes, order = _integers(match["ids"]), _integers(match["order"])
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return (ids.transpose(order) if order else ids).ravel()
