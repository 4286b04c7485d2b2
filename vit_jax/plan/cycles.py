"""What the TPU compiler expects a program to take, and a model of kernels, which it leaves out."""

from __future__ import annotations

import re
from typing import Any

from jax.extend import core

from vit_jax.hardware.chips import Chip
from vit_jax.hardware.flops import inner_jaxprs
from vit_jax.models.attention_tpu import executed_flops
from vit_jax.plan.hlo import Program, executions

CLOCK_HZ = 1.5e9  # in whose cycles times are told: that of v5e
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')


def compiler_cycles(program: Program) -> float:
    """Sum of the compiler's estimates over all instructions, loops by their turns."""
    total = 0.0
    for _, instruction, times, fused in executions(program):
        if not fused and (match := _ESTIMATE.search(instruction.attributes)):
            total += int(match[1]) * times
    return total


def kernel_cycles(jaxpr: core.Jaxpr, chip: Chip, num_devices: int) -> float:
    """Of the attention kernels in a traced update, on each device.

    Their products, all padding included, at the chip's peak, plus their bytes at the bandwidth of
    its memory, as if neither overlapped with the other.
    """
    flops, num_bytes = _kernel_costs(jaxpr)
    seconds = flops / (chip.tflops * 1e12) + num_bytes / (chip.hbm_gb_s * 1e9)
    return seconds / num_devices * chip.devices * CLOCK_HZ


def _kernel_costs(jaxpr: core.Jaxpr) -> tuple[float, float]:
    """Operations and bytes over all devices."""
    flops = num_bytes = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            found = _kernel_cost(eqn)
        else:
            inner = [_kernel_costs(each) for each in inner_jaxprs(eqn)]
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            times *= eqn.params["mesh"].size if eqn.primitive.name == "shard_map" else 1
            found = (times * sum(f for f, _ in inner), times * sum(b for _, b in inner))
        flops, num_bytes = flops + found[0], num_bytes + found[1]
    return flops, num_bytes


def _kernel_cost(eqn: Any) -> tuple[float, float]:
    batch_size, num_tokens, width = eqn.invars[0].aval.shape
    estimate = eqn.params["cost_estimate"]
    head_dim = batch_size * num_tokens**2 * width // estimate.transcendentals
    backward = len(eqn.outvars) > 1
    per_image = executed_flops(num_tokens, head_dim, width, backward=backward)
    return batch_size * per_image, estimate.bytes_accessed
