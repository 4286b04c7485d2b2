"""The update, compiled for a topology, and what the compiler says of it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

from vit_jax.hardware.flops import jaxpr_flops
from vit_jax.plan.collectives import Traffic, collective_traffic
from vit_jax.plan.hbm_traffic import hbm_bytes
from vit_jax.plan.hlo import parse_program
from vit_jax.plan.subject import Subject, planned_step

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

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TEMPORARIES = re.compile(r"HLO temporaries \(([\d.]+)([KMGT]?)\)")
_TOTAL = re.compile(r"Used ([\d.]+)([KMGT]?) of")  # the program and its arguments


class TooLargeError(Exception):
    """The compiler found no way to run the program in the memory of a device."""

    def needed_bytes(self, argument_bytes: int) -> int | None:
        """Bytes of a device in all; None where the compiler does not say."""
        for pattern, beside in ((_TEMPORARIES, argument_bytes), (_TOTAL, 0)):
            if match := pattern.search(str(self)):
                return round(float(match[1]) * _UNITS[match[2]]) + beside
        return None


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
    total: int


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What one update costs; bytes are per device.

    Attributes:
      executed_flops: in products of the whole update over all devices, what remat repeats included.
      hbm_bytes: read from and written to the device's memory.
      traffic: collectives by kind.
    """

    memory: Memory
    executed_flops: float
    hbm_bytes: float
    traffic: dict[str, Traffic]


def compile_step(subject: Subject, *, full: bool) -> CompiledStep:
    """Compiles the update of a run for its mesh, whose devices need not be there.

    `full`: with all optimization, as the training does; else fast.

    Raises:
      TooLargeError: see there.
    """
    mesh, state = subject.run.mesh, subject.state
    platform = mesh.devices.flat[0].platform
    options: Any = GPU if platform == "gpu" else FAST if platform == "tpu" and not full else None
    with jax.set_mesh(mesh):
        traced = planned_step(subject).trace(state, subject.constants, subject.batch)
        lowered = traced.lower()
        logging.info("Traced; compiling for %d devices.", mesh.size)
        with too_large():
            compiled = lowered.compile(compiler_options=options)
    stats = compiled.memory_analysis()
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    aliased, temporaries = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    program = parse_program(compiled.as_text())
    return CompiledStep(
        memory=Memory(
            arguments=arguments,
            outputs=outputs,
            aliased=aliased,
            temporaries=temporaries,
            peak=stats.peak_memory_in_bytes,
            total=arguments + outputs - aliased + temporaries,
        ),
        executed_flops=jaxpr_flops(traced.jaxpr.jaxpr),
        hbm_bytes=hbm_bytes(program),
        traffic=collective_traffic(program, group_numbers(mesh)),
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
