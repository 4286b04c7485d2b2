"""Reads the text of a compiled XLA program: instructions, and how often each one runs.

XLA's own cost analysis counts the body of a loop once. Here every instruction comes with its number
of executions, which is what makes the sums over a scanned model or accumulation steps right.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>\S+) = (?P<rest>.*)$")
# Shapes hold no lower-case word before a parenthesis: T(8,128) and S(1) belong to layouts.
_OPCODE = re.compile(r"(?:^|\s)([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"(?P<kind>pred|f8|[a-z]+(?P<bits>\d+))\w*\[(?P<sizes>[\d,]*)\](\{[^}]*\})?")
_OPERAND = re.compile(r"%([^\s,()]+)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([^\s,)}]+)")
# `{%a, %b}`, or `true_computation=%a, false_computation=%b` where a predicate chooses.
_BRANCHES = re.compile(r"(?:branch|true|false)_computations?=(\{[^}]*\}|%[^\s,]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

# Opcodes whose `calls` or `to_apply` run as a part of the program, not per element.
_CALLING = ("call", "async-start", "fusion", "custom-call")


class Array(NamedTuple):
    """One array of a shape."""

    num_bytes: int  # without padding
    in_hbm: bool  # or in another memory, as its layout says (VMEM of a TPU)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program; `attributes` is what follows the operands."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """The arrays of its result; tokens are none."""
        arrays = []
        for match in _ARRAY.finditer(self.shape):
            bits = 8 if match["kind"] in ("pred", "f8") else int(match["bits"])
            size = math.prod(int(each) for each in match["sizes"].split(",") if each)
            arrays.append(Array(size * bits // 8, in_hbm="S(" not in match[0]))
        return arrays

    @property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays if array.in_hbm)

    @functools.cached_property
    def called(self) -> str:
        """The computation that it calls; "" for most."""
        match = _CALLED.search(self.attributes)
        return match[1] if match else ""

    def computation(self, key: str) -> str:
        """The computation in the attribute `key`."""
        [name] = re.findall(rf"\b{key}=%?([^\s,]+)", self.attributes)
        return name


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Program:
    computations: dict[str, Computation]
    entry: str


def parse_program(text: str) -> Program:
    """`compiled.as_text()` as computations of instructions, in the order of the text."""
    computations: dict[str, Computation] = {}
    entry = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            computations[header["name"]] = {}
            entry = header["name"] if header["entry"] else entry
        elif (match := _LINE.match(line)) and (opcode := _OPCODE.search(match["rest"])):
            inside, _, attributes = match["rest"][opcode.end() :].partition("), ")
            if opcode[1] in ("constant", "parameter"):  # their value, their number
                attributes = inside.rstrip(")")
            next(reversed(computations.values()))[match["name"]] = Instruction(
                name=match["name"],
                opcode=opcode[1],
                shape=match["rest"][: opcode.start()],
                operands=tuple(_OPERAND.findall(inside)),
                attributes=attributes,
                root=bool(match["root"]),
            )
    return Program(computations, entry)


def root(computation: Computation) -> Instruction:
    return next(each for each in computation.values() if each.root)


def executions(
    program: Program, name: str = "", times: int = 1, fused: bool = False
) -> Iterator[tuple[str, Instruction, int, bool]]:
    """All instructions that run: (computation, instruction, how often, whether inside a fusion).

    From the entry on, or as a part of the computation `name`, which itself runs so often. The
    comparison and the reduction of a loop or a reduce are no instructions of their own. A loop
    whose number of turns is not in the text counts once.
    """
    name = name or program.entry
    for instruction in program.computations[name].values():
        yield name, instruction, times, fused
        if instruction.opcode == "while":
            turns = times * trip_count(program, instruction)
            yield from executions(program, instruction.computation("body"), turns, fused)
        elif instruction.opcode == "conditional":
            branches = " ".join(_BRANCHES.findall(instruction.attributes))
            for branch in re.findall(r"%([^\s,}]+)", branches):
                yield from executions(program, branch, times, fused)
        elif instruction.opcode in _CALLING and instruction.called in program.computations:
            inside = fused or instruction.opcode == "fusion"
            yield from executions(program, instruction.called, times, inside)


def trip_count(program: Program, loop: Instruction) -> int:
    """How often a loop's body runs: as XLA notes it, or as its condition (counter < constant)."""
    if known := _TRIPS.search(loop.attributes):
        return int(known[1])
    condition = program.computations[loop.computation("condition")]
    compare = root(condition)
    if compare.opcode == "compare" and "direction=LT" in compare.attributes:
        for operand in compare.operands:
            if condition[operand].opcode == "constant":
                return int(condition[operand].attributes)
    return 1
