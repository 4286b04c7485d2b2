"""Time of a compiled TPU program by libtpu's final code; no TPU is needed.

libtpu writes the code of every instruction, of XLA's and of kernels alike, as text. An instruction
takes the longest of what it asks of the core (a bundle a cycle, times the iterations of its loops),
of the matrix unit, of the memory (padded bytes at full bandwidth) and of the links; a step is the
sum. Waits within an instruction are not in it: latencies, and a unit that stands still for another.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from vit_jax.errors import UserError
from vit_jax.hardware.chips import Chip, find_chip
from vit_jax.plan.cost import CompiledStep, compile_update, groups_of, step_costs
from vit_jax.plan.program import (
    FREE,
    Computation,
    Instruction,
    collective_traffic,
    executions,
    moved_bytes,
    parse_program,
)

# GHz at which the matrix units of `jax._src.pallas.mosaic.tpu_info` reach the peak with a row of a
# product in each cycle; on v6e with two, as the compiler spaces products.
GHZ = {"v3": 0.94, "v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75}
_ROWS_PER_CYCLE = {"v6e": 2}

_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+\s+(?:[A-Z]{2})?\s*: >*\s*\{")
_DEFINITION = re.compile(r"%(\w+) = (scmp|sadd|sphi|smov)([^;}]*)")
_END = re.compile(r"\.ge\.[su]32\.totalorder %(\w+), (\d+)")
_NEXT = re.compile(r"\.s32 (\d+), %(\w+)")
_START = re.compile(r" (?:\(!?%\w+\), )?(\d+)")
_REGION = re.compile(r"Start region (\d+)")
_BRANCH = re.compile(r"sbr\.rel \(!%(\w+)\) target = \$region(\d+)")
_STAGE = re.compile(r"iteration index, stage = (\d+)")
_PRODUCT = re.compile(r"= vmatmul\.(?:(?:\S*)\.(?P<half>\d+)|(?P<whole>\S*))\.mxu(?P<unit>\d)")
_LAST_STAGE = 2  # of a pipeline that reads, computes and writes
_DELAY = 4  # bundles behind a branch that run before it is taken


@functools.cache
def folder() -> Path:
    """Where libtpu writes the code; it is removed at the end of the process."""
    path = Path(tempfile.mkdtemp(prefix="final_code_"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def write_final_code() -> None:
    """Has libtpu write the code. To be called before it is loaded: only then it reads flags."""
    flags = [f"--xla_jf_dump_to={folder()}", "--xla_jf_dump_llo_text=true"]
    flags += ["--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"]
    os.environ["LIBTPU_INIT_ARGS"] = " ".join([os.environ.get("LIBTPU_INIT_ARGS", ""), *flags])


@dataclasses.dataclass(frozen=True)
class Cycles:
    """Of one execution of an instruction."""

    core: float  # bundles
    matrix_unit: float  # rows of the products on the busiest one
    unknown_loops: int  # of unknown length, which count as one iteration


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of all executions of an instruction in a step: seconds of one device."""

    name: str
    op_name: str  # JAX's: modules and operation
    core: float
    matrix_unit: float
    memory: float
    links: float
    overlapped: bool  # runs beside the others
    parsed: bool  # False: `core` is too low, for a loop of unknown length or want of code

    @property
    def seconds(self) -> float:
        return max(self.core, self.matrix_unit, self.memory, self.links)


@dataclasses.dataclass(frozen=True)
class FinalCode:
    """A step, instruction by instruction."""

    costs: list[Cost]
    estimated_cycles: float  # see `estimated_cycles`

    @property
    def seconds(self) -> float:
        """The sum of those that do not overlap, and no less than all bytes take."""
        total = sum(cost.seconds for cost in self.costs if not cost.overlapped)
        memory = sum(cost.memory for cost in self.costs)
        return max(total, memory, sum(cost.links for cost in self.costs))

    @property
    def unparsed(self) -> list[Cost]:
        """Instructions whose core time is too low."""
        return [cost for cost in self.costs if not cost.parsed]


def clear_final_code() -> None:
    """Removes the code of what was compiled before: of a large model hundreds of MB."""
    for path in folder().iterdir():
        path.unlink()


def compile_timed(
    mesh: Mesh, update: Any, arguments: Sequence[Any]
) -> tuple[CompiledStep, FinalCode]:
    """Compiles a jitted update as for training, see `plan.cost.compile_update`; also its code.

    Raises:
      UserError: see `read_final_code`.
    """
    clear_final_code()
    traced, compiled = compile_update(mesh, update, arguments, full=True)
    chip = find_chip(mesh.devices.flat[0].device_kind)
    code = read_final_code(parse_program(compiled.as_text()), chip, groups_of(mesh))
    return step_costs(mesh, traced, compiled), code


def read_final_code(program: Computation, chip: Chip | None, slices_of: Sequence[int]) -> FinalCode:
    """The code of the program that libtpu compiled last. `slices_of`: slice of every device.

    Raises:
      UserError: libtpu wrote no code, or the clock of the chip is not known.
    """
    files = {m[1]: path for path in folder().iterdir() if (m := _FILE.match(path.name))}
    if not files or chip is None or chip.name not in GHZ:
        raise UserError(
            "There is no final code to time: unset JAX_COMPILATION_CACHE_DIR, and take v3 to v6e."
        )
    executed = list(_executed(program))
    # Equal instructions, such as those of other layers, share their code.
    code = {}
    for instruction, _, _ in executed:
        if instruction.name in files:
            with files[instruction.name].open(encoding="utf-8", errors="replace") as lines:
                code[_signature(instruction)] = count_cycles(lines)
    hz, costs = GHZ[chip.name] * 1e9, []
    for instruction, times, overlapped in executed:
        cycles = code.get(_signature(instruction))
        # Scalars have no code of their own, nor what only names the parts of an array.
        parsed = not cycles.unknown_loops if cycles else overlapped or instruction.hbm_bytes <= 512
        cycles = cycles or Cycles(0, 0, 0)
        traffic = collective_traffic([instruction], slices_of).values()
        op_name = re.search(r'op_name="([^"]*)"', instruction.text)
        cost = Cost(
            name=instruction.name,
            op_name=op_name[1] if op_name else "",
            core=times * cycles.core / hz,
            matrix_unit=times * cycles.matrix_unit / hz / _ROWS_PER_CYCLE.get(chip.name, 1),
            memory=times * moved_bytes(instruction) * chip.devices / chip.hbm_gb_s / 1e9,
            links=times * sum(t.sent_bytes for t in traffic) * chip.devices / chip.link_gb_s / 1e9,
            overlapped=overlapped,
            parsed=parsed,
        )
        costs.append(cost)
    return FinalCode(costs, estimated_cycles(program))


_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_cycles(program: Computation) -> float:
    """Sum of XLA's estimates of a TPU's instructions, times the iterations of loops.

    A heuristic from before code generation, without kernels and collectives: it charges bfloat16
    elementwise work as float32 and a reduction several times.
    """
    return sum(
        times * float(match[1])
        for instruction, times, fused in executions(program)
        if not fused and (match := _ESTIMATE.search(instruction.text))
    )


def _executed(
    program: Computation, times: int = 1, overlapped: bool = False
) -> Iterator[tuple[Instruction, int, bool]]:
    """Instructions that take time, how often, and whether they run beside others."""
    for instruction in program:
        if instruction.opcode in ("while", "conditional", "call", "async-start"):
            for called in instruction.called:
                beside = overlapped or instruction.opcode == "async-start"
                yield from _executed(called, times * instruction.trips, beside)
        elif not FREE.fullmatch(instruction.opcode):
            yield instruction, times, overlapped or instruction.opcode.endswith("-start")


def _signature(instruction: Instruction) -> tuple[Any, ...]:
    """The same for instructions that compute the same."""
    operands = tuple(operand.shape for operand in instruction.operands)
    return (
        instruction.opcode,
        instruction.shape,
        operands,
        _attributes(instruction),
        *map(_signatures, instruction.called),
    )


def _signatures(computation: Computation) -> tuple[Any, ...]:
    place = {instruction: index for index, instruction in enumerate(computation)}
    return tuple(
        (*_signature(instruction), *(place[operand] for operand in instruction.operands))
        for instruction in computation
    )


def _attributes(instruction: Instruction) -> str:
    """Of a constant or parameter its value or number; without names and where it comes from."""
    if instruction.opcode in ("constant", "parameter"):
        return instruction.text.partition(")")[0]
    text = instruction.text.partition("), ")[2].partition("backend_config=")[0]
    return re.sub(r"metadata=\{[^}]*\}|\S*%\S+", "", text)


def count_cycles(lines: Iterable[str]) -> Cycles:
    """Counts the bundles of an instruction's final code."""
    products: list[list[tuple[int, float]]] = []  # per bundle: matrix unit, rows
    regions: dict[str, tuple[int, int]] = {}  # first bundle, stages of its pipeline
    loops: list[tuple[int, int, int, str]] = []
    defined: dict[tuple[str, str], str] = {}
    for line in lines:
        if not _BUNDLE.match(line):
            continue
        index = len(products)
        products.append(
            [
                # A register has 16 rows of bfloat16 or 8 of float32. Those with a number ("lmr")
                # use half of the unit, which the compiler spaces by half of that many cycles.
                (int(unit), int(half) / 2 if half else 8 if "f32" in whole else 16)
                for half, whole, unit in _PRODUCT.findall(line)
            ]
        )
        stages = max(map(int, _STAGE.findall(line)), default=0)
        for region in _REGION.findall(line):
            regions.setdefault(region, (index, stages))
        for name, operation, operands in _DEFINITION.findall(line):
            defined[name, operation] = operands
        if branch := _BRANCH.search(line):
            end, region = branch.groups()
            first, stages = regions.get(region, (index, 0))
            if first < index:
                loops.append((first, index + _DELAY, stages, end))
    turns, unknown = [1] * len(products), 0
    for first, last, stages, end in loops:
        iterations = _iterations(defined, end, stages)
        unknown += iterations is None
        for index in range(first, min(last + 1, len(turns))):
            turns[index] *= iterations or 1
    busy: dict[int, float] = collections.defaultdict(float)
    for of_bundle, times in zip(products, turns, strict=True):
        for unit, rows in of_bundle:
            busy[unit] += times * rows
    return Cycles(sum(turns), max(busy.values(), default=0), unknown)


def _iterations(defined: dict[tuple[str, str], str], end: str, stages: int) -> int | None:
    """Of a loop that ends by `end`: counter >= a constant; None for all others.

    The `stages` of a pipeline start and end one iteration after the other.
    """
    test = _END.match(defined.get((end, "scmp"), ""))
    step = test and _NEXT.match(defined.get((test[1], "sadd"), ""))
    if not test or not step:
        return None
    phi = re.match(r" %(\w+)", defined.get((step[2], "sphi"), ""))
    start = phi and _START.match(defined.get((phi[1], "smov"), ""))
    if stages:  # of the last one sometimes only a test of the counter is left: counter >= 2
        scmps = (text for (_, name), text in defined.items() if name == "scmp")
        tests = map(_END.match, scmps)
        if any(match and match.groups() == (step[2], str(_LAST_STAGE)) for match in tests):
            stages = max(stages, _LAST_STAGE)
    turns = math.ceil((int(test[2]) - int(start[1] if start else 0)) / int(step[1]))
    return max(turns - stages, 1)
