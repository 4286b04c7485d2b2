"""Reads the text of a compiled program: its instructions, and how often each one runs.

XLA's own cost analysis counts the body of a loop once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = re.compile(r"(?:ENTRY )?%?(\S+) \(.*\{\s*$")
# Shapes hold no lower-case word before a parenthesis: T(8,128) and S(1) belong to layouts.
_LINE = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>\S+) = (?P<shape>.*?) (?P<opcode>[a-z][\w\-]*)\((?P<text>.*)"
)
_ARRAY = re.compile(r"(?:pred|[a-z]+(?P<bits>\d+))\w*\[(?P<sizes>[\d,]*)\](?:\{[^}]*\})?")
# What runs as a part of the program; a reduce calls `to_apply` too, but per element.
_CALLING = ("call", "while", "conditional", "fusion", "custom-call", "async-start")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|\w+_computation|branch_computations)=(\{[^}]*\}|[^\s,)}]+)"
)


class Array(NamedTuple):
    num_bytes: int  # without padding
    in_hbm: bool  # or in another memory, as its layout says (VMEM of a TPU)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a program."""

    opcode: str
    shape: str  # of its result
    text: str  # behind the opcode's parenthesis: operands and attributes, or a constant's value
    root: bool
    computation: str  # name of that in which it stands
    operands: list[Instruction]
    called: list[Computation]  # that it runs; of a loop the body
    trips: int  # how often a loop runs it; 1 for all others
    # Of its result, and as which operand.
    users: list[tuple[Instruction, int]] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """The arrays of its result; tokens are none."""
        arrays = []
        for match in _ARRAY.finditer(self.shape):
            size = math.prod(int(each) for each in match["sizes"].split(",") if each)
            arrays.append(Array(size * int(match["bits"] or 8) // 8, "S(" not in match[0]))
        if self.opcode.endswith("-start") and len(arrays) > 1:
            # It names operands, as many targets (a copy's first), and what the device waits for.
            first = sum(len(each.arrays) for each in self.operands)
            return arrays[:1] if self.opcode == "copy-start" else arrays[first : 2 * first]
        return arrays

    @property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays if array.in_hbm)


Computation = list[Instruction]


def parse_program(text: str) -> Computation:
    """The entry of `compiled.as_text()`, which is written last; all that it runs hangs from it."""
    computations: dict[str, Computation] = {}
    known: dict[str, Instruction] = {}  # of the current computation
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, known = header[1], {}
            computations[name] = []
        elif match := _LINE.match(line):
            _, label, shape, opcode, rest = match.groups()
            names = re.findall(r"%([^\s,()]+)", rest.partition("), ")[0])
            called = " ".join(_CALLED.findall(rest)) if opcode in _CALLING else ""
            instruction = Instruction(
                opcode=opcode,
                shape=shape,
                text=rest,
                root=bool(match["root"]),
                computation=name,
                operands=[known[each] for each in names],
                called=[computations[each] for each in re.findall(r"[^\s,{}%]+", called)],
                trips=_trips(rest, computations) if opcode == "while" else 1,
            )
            for position, operand in enumerate(instruction.operands):
                operand.users.append((instruction, position))
            known[label] = instruction
            computations[name].append(instruction)
    return computations[name]


def _trips(loop: str, computations: dict[str, Computation]) -> int:
    """As XLA notes it, or as the condition has it (counter < constant); 1 where neither does."""
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop):
        return int(noted[1])
    [condition] = re.findall(r"\bcondition=%?([^\s,]+)", loop)
    lines = [f"{each.opcode} {each.text}" for each in computations[condition]]
    limits = [match[1] for line in lines if (match := re.match(r"constant (\d+)\)", line))]
    return int(limits[0]) if len(limits) == 1 and "direction=LT" in lines[-1] else 1


def executions(
    computation: Computation, times: int = 1, fused: bool = False
) -> Iterator[tuple[Instruction, int, bool]]:
    """All instructions that run: (instruction, how often, whether inside a fusion).

    The condition of a loop and the function of a reduce are no instructions of their own.
    """
    for each in computation:
        yield each, times, fused
        for called in each.called:
            yield from executions(called, times * each.trips, fused or each.opcode == "fusion")
