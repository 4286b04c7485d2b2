"""What one update costs by the compiler, and how long it takes by a model of the hardware.

The published figures that the model rests on, and is held against, stand here too.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import Mesh

from vit_jax.hardware.chips import CHIPS, Chip, find_chip
from vit_jax.hardware.flops import jaxpr_flops
from vit_jax.models.variants import VARIANTS
from vit_jax.plan.program import Computation, executions, parse_program
from vit_jax.plan.topology import Topology
from vit_jax.plan.traffic import Traffic, collective_traffic, hbm_bytes
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
      kernel_cycles: see `kernel_cycles`; 0 likewise.
    """

    memory: dict[str, int]
    executed_flops: float
    hbm_bytes: float
    traffic: dict[str, Traffic]
    cycles: float
    kernel_cycles: float


def compile_step(mesh: Mesh, update: Any, arguments: Sequence[Any], *, full: bool) -> CompiledStep:
    """Compiles an update for a mesh, whose devices need not be there.

    Args:
      mesh: of the update.
      update: jitted.
      arguments: shapes with shardings, see `subject.step_arguments`.
      full: with all optimization, as the training does; else fast.

    Raises:
      TooLargeError: see there.
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
    stats, program = compiled.memory_analysis(), parse_program(compiled.as_text())
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
    }
    total = sum(memory.values()) - 2 * memory["aliased"]
    group = "process_index" if platform == "gpu" else "slice_index"  # a node, or a slice
    groups_of = [getattr(device, group, None) or 0 for device in mesh.devices.flat]
    jaxpr, chip = traced.jaxpr.jaxpr, find_chip(mesh.devices.flat[0].device_kind)
    return CompiledStep(
        memory=memory | {"peak": stats.peak_memory_in_bytes, "total": total},
        executed_flops=jaxpr_flops(jaxpr),
        hbm_bytes=hbm_bytes(program),
        traffic=collective_traffic(program, groups_of),
        cycles=compiler_cycles(program),
        kernel_cycles=kernel_cycles(jaxpr, chip, mesh.size) if chip else 0.0,
    )


CLOCK_HZ = 1.5e9  # in whose cycles times are told: that of v5e
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')


def compiler_cycles(program: Computation) -> float:
    """Sum of the TPU compiler's estimates over all instructions, loops by their turns."""
    return sum(
        times * int(match[1])
        for each, times, fused in executions(program)
        if not fused and (match := _ESTIMATE.search(each.text))
    )


def kernel_cycles(jaxpr: Jaxpr, chip: Chip, num_devices: int) -> float:
    """Of the kernels in a traced update, on each device; the compiler's estimate leaves them out.

    Their products, all padding included, at the chip's peak, plus their bytes at the bandwidth of
    its memory, as if neither overlapped with the other.
    """
    flops, num_bytes = _kernel_costs(jaxpr) / num_devices * chip.devices
    return CLOCK_HZ * (flops / (chip.tflops * 1e12) + num_bytes / (chip.hbm_gb_s * 1e9))


def _kernel_costs(jaxpr: Jaxpr) -> np.ndarray:
    """Operations and bytes over all devices."""
    total = np.zeros(2)
    for eqn in jaxpr.eqns:
        inner = jaxprs_in_params(eqn.params)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        times *= eqn.params["mesh"].size if eqn.primitive.name == "shard_map" else 1
        if eqn.primitive.name == "pallas_call":
            mapping, stated = eqn.params["grid_mapping"], eqn.params["cost_estimate"]
            blocks = [each.transformed_block_aval.inner_aval for each in mapping.block_mappings]
            moved = sum(each.size * each.dtype.itemsize for each in blocks)  # or more than it moves
            turns = math.prod(mapping.grid)
            flops = turns * sum(map(jaxpr_flops, inner))
            total += flops, stated.bytes_accessed if stated else turns * moved
        else:
            total += times * sum(map(_kernel_costs, inner), np.zeros(2))
    return total


# Share of the peak that training of ViTs reached, and where that was seen.
V3_SHARE = 0.35
_V3 = (
    "published ViT trainings on TPUv3 reached 27 % (S/16, 2205.01580), 32 % (H/14), 37 and 43 % "
    "(L/16; 2010.11929, table 2)"
)
_A100 = (0.44, "NVIDIA's NeMo trains g/14 at 44 % on A100 80GB")
_H100 = (0.29, "NVIDIA's NeMo trains g/14 at 29 % on H100")
UTILIZATION = {
    "v3": (V3_SHARE, _V3),
    **dict.fromkeys(("A100-40GB", "A100-80GB"), _A100),
    **dict.fromkeys(("H100", "H100-PCIe", "H200"), _H100),
}


def utilization(chip: str) -> tuple[float, str]:
    """The share of the peak to expect on the chip of this name, and its origin."""
    other = (V3_SHARE, f"no published figure for this chip, so that of TPUv3: {_V3}")
    return UTILIZATION.get(chip, other)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one update on each device, as if each thing were all it did.

    Attributes:
      compute: executed products at the share of the peak that `utilization` names.
      memory, links: bytes at the full bandwidth.
      predicted: the longest of these, as if they overlapped perfectly. Neither a lower nor an upper
        bound: they never do, but the share of the peak is a middle that some trainings were above.
      bound: the model's products at the whole peak; no program is faster.
    """

    compute: float
    memory: float
    links: float
    predicted: float
    bound: float


def step_time(step: CompiledStep, topology: Topology, model_flops: float) -> StepTime | None:
    """The time of one update; None for virtual devices, of which nothing is known.

    `model_flops`: of one update, without what remat repeats.
    """
    chip = topology.chip
    if chip is None:
        return None
    peak = topology.num_chips * chip.tflops * 1e12
    sent = sum(traffic.sent_bytes for traffic in step.traffic.values())
    network = sum(traffic.network_bytes for traffic in step.traffic.values())
    links = sent * chip.devices / chip.link_gb_s / 1e9
    if network:
        links += network * chip.devices / chip.network_gb_s / 1e9
    compute = step.executed_flops / peak / utilization(chip.name)[0]
    memory = step.hbm_bytes * chip.devices / chip.hbm_gb_s / 1e9
    return StepTime(compute, memory, links, max(compute, memory, links), model_flops / peak)


# 2010.11929, table 2: (variant, dataset, epochs) -> TPUv3-core-days. The epochs of L/16 on
# ImageNet-21k are those of the published checkpoint: table 3 has 30 and 90.
CORE_DAYS: dict[tuple[str, str, int], float] = {
    ("H/14", "jft", 14): 2500,
    ("L/16", "jft", 14): 680,
    ("L/16", "imagenet21k", 90): 230,
}


def whole_recipe(
    run: Run, flops_per_image: float, time: StepTime | None, topology: Topology
) -> dict[str, float | None]:
    """What the whole training costs, without evaluations, checkpoints and interruptions.

    `days` and `chip_days` are None where nothing is known of the devices, `paper_core_days` where
    the paper has no such training. Products are forward and backward, without what remat repeats.
    """
    images = run.total_steps * run.batch_size
    days = None if time is None else time.predicted * run.total_steps / 86_400
    epochs = round(images / run.dataset.num_examples)
    return {
        "steps": run.total_steps,
        "images": images,
        "exaflops": images * flops_per_image / 1e18,
        "days": days,
        "chip_days": days and days * topology.num_chips,
        "v3_core_days": v3_core_days(images * flops_per_image),
        "paper_core_days": paper_core_days(run.description.model, run.dataset.name, epochs),
    }


def v3_core_days(flops: float) -> float:
    """Days of that arithmetic on a TPUv3 core at its published share of the peak."""
    return flops / CHIPS["v3"].device_peak_flops / V3_SHARE / 86_400


def paper_core_days(model: dict[str, Any], dataset: str, epochs: int) -> float | None:
    """Table 2 for a model's config; None where it has no such row."""
    for (variant, name, length), days in CORE_DAYS.items():
        sizes = {"resnet_layers": None, **VARIANTS[variant]}
        if (name, length) == (dataset, epochs) and sizes.items() <= model.items():
            return days
    return None
