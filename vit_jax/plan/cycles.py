"""What the TPU compiler expects a program to take, and a model of kernels, which it leaves out."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from jax.extend import core

from vit_jax.hardware.chips import Chip
from vit_jax.hardware.flops import flops_of, inner_jaxprs
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


def _kernel_costs(jaxpr: core.Jaxpr) -> np.ndarray:
    """Operations and bytes over all devices."""
    total = np.zeros(2)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            total += flops_of(eqn), _bytes_moved(eqn)
            continue
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        times *= eqn.params["mesh"].size if eqn.primitive.name == "shard_map" else 1
        total += times * sum(map(_kernel_costs, inner_jaxprs(eqn)), np.zeros(2))
    return total


def _bytes_moved(eqn: Any) -> float:
    """What a kernel says, else its blocks at every step of its grid: more than it moves."""
    if estimate := eqn.params["cost_estimate"]:
        return estimate.bytes_accessed
    mapping = eqn.params["grid_mapping"]
    blocks = [each.transformed_block_aval.inner_aval for each in mapping.block_mappings]
    return math.prod(mapping.grid) * sum(b.size * b.dtype.itemsize for b in blocks)
