"""The update, compiled for a topology, and what the compiler says of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from vit_jax.hardware.chips import GIB
from vit_jax.hardware.flops import jaxpr_flops
from vit_jax.plan.collectives import Traffic, collective_traffic
from vit_jax.plan.hbm_traffic import hbm_bytes
from vit_jax.plan.hlo import Program, executions, parse_program
from vit_jax.plan.subject import Subject, planned_step
from vit_jax.run import Run

# Seconds instead of minutes; in the pairs that were compared the memory differed by up to 10 %, so
# more than FAST_SHARE of a device is too close to call.
FAST: dict[str, Any] = (
    {"exec_time_optimization_effort": -1.0}
    if hasattr(jax.config, "jax_exec_time_optimization_effort")  # gone in JAX 0.12
    else {"optimization_level": "O0"}
)
FAST_SHARE = 0.9

# Nothing can be timed where there is no GPU, so no kernel is chosen by trying it.
GPU = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_shard_autotuning": False,
    "xla_gpu_enable_triton_gemm": False,
}

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
_TEMPORARIES = re.compile(r"HLO temporaries \(([\d.]+)([KMGT]?)\)")
_TOTAL = re.compile(r"Used ([\d.]+)([KMGT]?) of")  # the program and its arguments
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class TooLargeError(Exception):
    """The compiler found no way to run the program in the memory of a device.

    Attributes:
      temporary_bytes: what the program's temporaries need; None where the compiler does not say.
      total_bytes: what they and the arguments need; likewise. It says one of the two, or none.
    """

    def __init__(self, message: str):
        super().__init__(message)
        self.temporary_bytes = _size(_TEMPORARIES, message)
        self.total_bytes = _size(_TOTAL, message)

    def needed_bytes(self, argument_bytes: int) -> int | None:
        """Bytes of a device in all; None where the compiler does not say."""
        if self.temporary_bytes is not None:
            return self.temporary_bytes + argument_bytes
        return self.total_bytes


def _size(pattern: re.Pattern[str], message: str) -> int | None:
    match = pattern.search(message)
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device; the arguments are train state and batch, the state is updated in place.

    Attributes:
      aliased: outputs that take the place of arguments.
      peak: most that is alive at a time.
      total: what has to be there, arguments + outputs - aliased + temporaries: with the gaps that
        allocation leaves it is more than the peak.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What one update costs; bytes and seconds are per device.

    Attributes:
      executed_flops: in products of the whole update over all devices, what remat repeats included.
      hbm_bytes: read from and written to the device's memory.
      traffic: collectives by kind.
      estimated_cycles: sum of the TPU compiler's estimates for the instructions; 0 elsewhere.
      lower_seconds: tracing and lowering here.
      compile_seconds: compiling here.
    """

    memory: Memory
    executed_flops: float
    hbm_bytes: float
    traffic: dict[str, Traffic]
    estimated_cycles: float
    lower_seconds: float
    compile_seconds: float


def compile_step(subject: Subject, *, full: bool) -> CompiledStep:
    """Compiles the update of a run for its mesh.

    Args:
      subject: the mesh of its run may consist of devices that are not there.
      full: with all optimization, as the training does; else fast.

    Raises:
      TooLargeError: see there.
    """
    start = time.monotonic()
    run, state = subject.run, subject.state
    with jax.set_mesh(run.mesh):
        traced = planned_step(subject).trace(state, subject.constants, subject.batch)
        lowered = traced.lower()
        lower_seconds = time.monotonic() - start
        platform = run.mesh.devices.flat[0].platform
        options: Any = (
            GPU if platform == "gpu" else FAST if platform == "tpu" and not full else None
        )
        logging.info("Traced in %.0f s; compiling for %d devices.", lower_seconds, run.mesh.size)
        with too_large():
            compiled = lowered.compile(compiler_options=options)
    compile_seconds = time.monotonic() - start - lower_seconds
    stats = compiled.memory_analysis()
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
    )
    program = parse_program(compiled.as_text())
    return CompiledStep(
        memory=memory,
        executed_flops=jaxpr_flops(traced.jaxpr),
        hbm_bytes=hbm_bytes(program),
        traffic=collective_traffic(program, group_numbers(run.mesh)),
        estimated_cycles=estimated_cycles(program),
        lower_seconds=lower_seconds,
        compile_seconds=compile_seconds,
    )


@contextlib.contextmanager
def too_large() -> Iterator[None]:
    """Turns the compiler's RESOURCE_EXHAUSTED into a TooLargeError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        raise TooLargeError(message) from error


def argument_bytes(subject: Subject) -> int:
    """Bytes of train state and batch on each device, known without compiling."""
    leaves = jax.tree.leaves((subject.state, subject.constants, subject.batch))
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )


def group_numbers(mesh: jax.sharding.Mesh) -> list[int]:
    """The slice (TPU) or the node (GPU) of every device, in the order of the mesh."""
    attribute = "process_index" if mesh.devices.flat[0].platform == "gpu" else "slice_index"
    return [getattr(device, attribute, None) or 0 for device in mesh.devices.flat]


def estimated_cycles(program: Program) -> float:
    """The TPU compiler's estimates for all instructions, loops as often as they run."""
    total = 0.0
    for _, instruction, times, fused in executions(program):
        cycles = None if fused else _CYCLES.search(instruction.attributes)
        total += times * int(cycles[1]) if cycles else 0.0
    return total


def xla_flops_per_image(run: Run) -> float:
    """XLA's own count for one image, forward and backward, before its optimizations.

    It counts a loop's body once, so the blocks are written out here; without remat. Beside products
    it counts what is computed element by element, such as norms and dropout.
    """
    objective = copy.copy(run.objective)
    written_out = {"scan": False, "remat": "none"}
    known = {
        name: value for name, value in written_out.items() if hasattr(run.objective.model, name)
    }
    objective.model = run.objective.model.clone(**known)
    batch = {
        "image": jax.ShapeDtypeStruct(
            (1, *run.image_shape), run.dataset.element_spec["image"].dtype
        ),
        "label": jax.ShapeDtypeStruct((1,), np.int32),
        "mask": jax.ShapeDtypeStruct((1,), np.float32),
    }
    key = jax.eval_shape(jax.random.key, 0)
    params = jax.eval_shape(objective.init, key, batch)

    def loss(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        return objective.loss({**params, **objective.constants}, batch, rng)[0]

    analysis: Any = jax.jit(jax.grad(loss)).lower(params, batch, key).cost_analysis()
    return float(analysis["flops"])
