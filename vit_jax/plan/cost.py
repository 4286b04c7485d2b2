"""Cost of an update according to the compiler, and its time by a model of the hardware."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from vit_jax.models.flops import jaxpr_flops
from vit_jax.plan.program import Traffic, collective_traffic, hbm_bytes, parse_program
from vit_jax.plan.topology import Topology

# Seconds instead of minutes; in the pairs compared, memory differed by up to 10 %, so
# more than FAST_SHARE of a device is too close to call.
FAST: dict[str, Any] = (
    {"exec_time_optimization_effort": -1.0}
    if hasattr(jax.config, "jax_exec_time_optimization_effort")  # removed in JAX 0.12
    else {"optimization_level": "O0"}
)
FAST_SHARE = 0.9

# Without a GPU nothing can be timed, so kernels are not autotuned.
GPU = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_shard_autotuning": False,
    "xla_gpu_enable_triton_gemm": False,
}


class TooLargeError(Exception):
    """The compiler could not fit the program into the memory of a device."""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """Cost of an update; bytes are per device.

    `memory` has `arguments` (state, constants, batch), `outputs`, `aliased` (outputs that reuse
    arguments), `temporaries`, `peak`, and `total`: including fragmentation.
    """

    memory: dict[str, int]
    executed_flops: float  # in products, over all devices, with remat's, without kernel padding
    hbm_bytes: float  # read from and written to the device's memory
    traffic: dict[str, Traffic]  # by kind of collective


def compile_update(
    mesh: Mesh, update: Any, arguments: Sequence[Any], *, full: bool
) -> tuple[Any, Any]:
    """Compiles a jitted update for a mesh of possibly absent devices: JAX's `Traced`, `Compiled`.

    As for training if `full`, else fast. `arguments`: see `Run.step_arguments`. TooLargeError if it
    does not fit into the memory of a device.
    """
    platform = mesh.devices.flat[0].platform
    options: Any = GPU if platform == "gpu" else FAST if platform == "tpu" and not full else None
    with jax.set_mesh(mesh):
        traced = update.trace(*arguments)
        lowered = traced.lower()
        logging.info("Traced; compiling for %d devices.", mesh.size)
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            message = str(error).splitlines()[0]
            if "RESOURCE_EXHAUSTED" not in message:
                raise
            raise TooLargeError(message) from error
    return traced, compiled


def groups_of(mesh: Mesh) -> list[int]:
    """The group of every device: its slice, of a GPU its node."""
    group = "process_index" if mesh.devices.flat[0].platform == "gpu" else "slice_index"
    return [getattr(device, group, None) or 0 for device in mesh.devices.flat]


def step_costs(mesh: Mesh, traced: Any, compiled: Any) -> CompiledStep:
    """The costs of an update, from the results of `compile_update`."""
    stats, program = compiled.memory_analysis(), parse_program(compiled.as_text())
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
    }
    total = sum(memory.values()) - 2 * memory["aliased"]
    return CompiledStep(
        memory=memory | {"peak": stats.peak_memory_in_bytes, "total": total},
        executed_flops=jaxpr_flops(traced.jaxpr.jaxpr),
        hbm_bytes=hbm_bytes(program),
        traffic=collective_traffic(program, groups_of(mesh)),
    )


# Share of the peak reached in ViT training, and its source.
V3_SHARE = 0.35
_V3 = (
    "published ViT trainings on TPUv3 reached 27 % (S/16, 2205.01580), 32 % (H/14), 37 and 43 % "
    "(L/16; 2010.11929, table 2)"
)


def utilization(chip: str) -> tuple[float, str]:
    """The expected share of the peak for the chip of this name, and its source."""
    if chip.startswith("A100"):
        return 0.44, "NVIDIA's NeMo trains g/14 at 44 % on A100 80GB"
    if chip.startswith(("H100", "H200")):
        return 0.40, "H/14, B/16 and L/16 reached 37 to 44 % on one H100, S/16 26 %"
    other = "" if chip == "v3" else "no published figure for this chip, so that of TPUv3: "
    return V3_SHARE, other + _V3


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of an update on each device, for each resource as if it were the only limit."""

    compute: float  # executed products at the share of the peak from `utilization`
    memory: float  # bytes at the full bandwidth
    links: float  # likewise
    predicted: float  # the longest; not a bound, as overlap is never perfect


def step_time(step: CompiledStep, topology: Topology) -> StepTime | None:
    """The time of an update; None for virtual devices, whose speed is unknown."""
    chip = topology.chip
    if chip is None:
        return None
    peak = topology.num_chips * chip.tflops * 1e12
    compute = step.executed_flops / peak / utilization(chip.name)[0]
    memory = step.hbm_bytes * chip.devices / chip.hbm_gb_s / 1e9
    links = sum(kind.sent_bytes for kind in step.traffic.values()) / chip.link_gb_s
    if network := sum(kind.network_bytes for kind in step.traffic.values()):
        links += network / chip.network_gb_s
    links *= chip.devices / 1e9
    return StepTime(compute, memory, links, max(compute, memory, links))
