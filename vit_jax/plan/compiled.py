"""The update, compiled for a topology, and what the compiler says of it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax

from vit_jax.hardware.chips import find_chip
from vit_jax.hardware.flops import jaxpr_flops
from vit_jax.plan.collectives import Traffic, collective_traffic
from vit_jax.plan.cycles import compiler_cycles, kernel_cycles
from vit_jax.plan.hbm_traffic import hbm_bytes
from vit_jax.plan.hlo import parse_program
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


class TooLargeError(Exception):
    """The compiler found no way to run the program in the memory of a device."""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What one update costs; bytes are per device.

    Attributes:
      memory: `arguments` (train state, constants and batch), `outputs`, `aliased` (outputs in the
        place of arguments), `temporaries`, `peak` (most that is alive at a time), and `total`, what
        has to be there: with the gaps that allocation leaves it is more than the peak.
      executed_flops: in products of the whole update over all devices, what remat repeats included;
        what an attention kernel pads and repeats is not.
      hbm_bytes: read from and written to the device's memory.
      traffic: collectives by kind.
      cycles: of a device as the TPU compiler expects, kernels not included; 0 for other platforms.
      kernel_cycles: see `cycles.kernel_cycles`.
    """

    memory: dict[str, int]
    executed_flops: float
    hbm_bytes: float
    traffic: dict[str, Traffic]
    cycles: float
    kernel_cycles: float


def compile_step(
    run: Run, arguments: Sequence[Any], *, full: bool, update: Any = None
) -> CompiledStep:
    """Compiles the update of a run for its mesh, whose devices need not be there.

    Args:
      run: from `planned_run`.
      arguments: from `step_arguments`.
      full: with all optimization, as the training does; else fast.
      update: another jitted function to compile for this mesh, with these arguments.

    Raises:
      TooLargeError: see there.
    """
    mesh, platform = run.mesh, run.mesh.devices.flat[0].platform
    options: Any = GPU if platform == "gpu" else FAST if platform == "tpu" and not full else None
    with jax.set_mesh(mesh):
        step: Any = update or run.train_step(*arguments[:2])
        traced = step.trace(*arguments)
        lowered = traced.lower()
        logging.info("Traced; compiling for %d devices.", mesh.size)
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            message = str(error).splitlines()[0]
            if "RESOURCE_EXHAUSTED" not in message:
                raise
            raise TooLargeError(message) from error
    stats = compiled.memory_analysis()
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
    }
    total = sum(memory.values()) - 2 * memory["aliased"]
    program = parse_program(compiled.as_text())
    group = "process_index" if platform == "gpu" else "slice_index"  # a node, or a slice
    groups_of = [getattr(device, group, None) or 0 for device in mesh.devices.flat]
    jaxpr, chip = traced.jaxpr.jaxpr, find_chip(mesh.devices.flat[0].device_kind)
    of_kernels = kernel_cycles(jaxpr, chip, mesh.size) if chip else 0.0
    if of_kernels and not update:
        with jax.set_mesh(mesh), contextlib.nullcontext():
            step = run.train_step(*arguments[:2])
            jaxpr = step.trace(*arguments).jaxpr.jaxpr
    return CompiledStep(
        memory=memory | {"peak": stats.peak_memory_in_bytes, "total": total},
        executed_flops=jaxpr_flops(jaxpr),
        hbm_bytes=hbm_bytes(program),
        traffic=collective_traffic(program, groups_of),
        cycles=compiler_cycles(program),
        kernel_cycles=of_kernels,
    )
