"""Bytes that one step moves between a device's memory and its cores, from the compiled program.

Every instruction outside a fusion reads its operands and writes its result; inside, values stay on
the chip. Of a stack of layers a loop reads, or writes, only the slice of this turn.
"""

from __future__ import annotations

import re

from vit_jax.plan.hlo import Computation, Instruction, Program, executions, root

# Names for what is there already, or control.
_FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|while|conditional|call|after-all"
    "|partition-id|replica-id|opt-barrier|domain|async-start|.*-done"
)
_SLICES = ("dynamic-slice", "slice", "gather")
_RENAMES = ("bitcast", "reshape", "copy", "convert", "transpose")


def hbm_bytes(program: Program) -> float:
    """Bytes read and written by one execution on one device."""
    total = 0.0
    for name, instruction, times, fused in executions(program):
        if not fused and not _FREE.fullmatch(instruction.opcode):
            total += times * _moved(program, program.computations[name], instruction)
    return total


def _moved(program: Program, computation: Computation, instruction: Instruction) -> int:
    written = instruction.hbm_bytes
    operands = [computation[name] for name in instruction.operands]
    opcode = instruction.opcode.removesuffix("-start")
    if opcode != instruction.opcode and opcode != "all-reduce":
        return _started(instruction, operands)
    if opcode in _SLICES:
        return 2 * written
    if opcode == "dynamic-update-slice":
        return 2 * operands[1].hbm_bytes
    if opcode != "fusion" or instruction.called not in program.computations:
        return written + sum(each.hbm_bytes for each in operands)
    fused = program.computations[instruction.called]
    read = sum(min(each.hbm_bytes, _read(program, fused, i)) for i, each in enumerate(operands))
    return read + min(written, _written(fused))


def _started(instruction: Instruction, operands: list[Instruction]) -> int:
    """Bytes of an asynchronous instruction, of which one end may be another memory.

    The result names operands, targets and what the device waits for.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in (*_SLICES, "dynamic-update-slice"):
        return instruction.hbm_bytes
    target = instruction.arrays[sum(len(operand.arrays) for operand in operands)]
    # What is taken of an operand, or put into it, has the size of the target, or of the update.
    moved = operands[1] if opcode == "dynamic-update-slice" else target
    return moved.num_bytes * (operands[0].arrays[0].in_hbm + target.in_hbm)


def _read(program: Program, fused: Computation, number: int) -> int:
    """Bytes that a fusion reads of its operand `number`: all of it, or the slices it takes."""
    parameters = (each for each in fused.values() if each.opcode == "parameter")
    value = next(each for each in parameters if each.attributes == str(number))
    return _used(program, fused, value)


def _used(program: Program, fused: Computation, value: Instruction) -> int:
    total = 0
    for user in fused.values():
        for position, name in enumerate(user.operands):
            if name != value.name:
                continue
            if user.opcode in _SLICES and position == 0:
                total += user.num_bytes
            elif user.opcode == "dynamic-update-slice" and position == 0:
                continue  # written in place
            elif user.opcode == "bitcast":
                total += _used(program, fused, user)
            elif user.opcode == "fusion" and user.called in program.computations:
                total += _read(program, program.computations[user.called], position)
            else:
                return value.num_bytes
    return min(total, value.num_bytes)


def _written(fused: Computation) -> int:
    """Bytes that a fusion writes: its results, or the slices that it updates in place."""
    result = root(fused)
    results = [fused[name] for name in result.operands] if result.opcode == "tuple" else [result]
    total = 0
    for result in results:
        source = result
        while source.opcode in _RENAMES and source.operands:
            source = fused[source.operands[0]]
        updates = source.opcode == "dynamic-update-slice"
        total += (fused[source.operands[1]] if updates else result).num_bytes
    return total
