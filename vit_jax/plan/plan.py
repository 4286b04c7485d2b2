"""`make_plan`: what a training would cost on machines that are not here."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.hardware.chips import GIB
from vit_jax.plan.advice import Changes, changed, flags, remedies
from vit_jax.plan.compiled import FAST_SHARE, CompiledStep, TooLargeError, compile_step
from vit_jax.plan.estimate import StepTime, step_time, whole_recipe
from vit_jax.plan.parameters import Row, parameter_rows
from vit_jax.plan.subject import planned_run, step_arguments
from vit_jax.plan.topology import Topology
from vit_jax.run import Run


@dataclasses.dataclass
class Plan:
    """Everything that the report and plan.json say."""

    topology: Topology
    full_compile: bool  # optimized as for training
    mesh: dict[str, int]
    batch_size: int
    data: str  # what is trained on, and where its sizes are from
    rows: list[Row]
    available_bytes: int | None  # of a device; None for virtual devices without --hbm_gib
    step: CompiledStep | None  # None where the compiler found no way to fit it into the memory
    refusal: str  # the compiler's words then
    model_flops_per_image: float  # products of forward and backward pass
    time: StepTime | None
    recipe: dict[str, float | None]
    remedy: tuple[Changes, str] | None = None  # what to change so that it fits, and its price

    @property
    def sure_share(self) -> float:
        """The part of the memory up to which a compiled program is sure to fit."""
        return FAST_SHARE if self.topology.kind == "tpu" and not self.full_compile else 1.0

    @property
    def filled(self) -> float:
        """The share of the memory that it needs; 0 where what there is is unknown."""
        if self.step is None:
            return math.inf
        return self.step.memory["total"] / (self.available_bytes or math.inf)

    @property
    def fits(self) -> bool:
        """True only where the figures leave no doubt; see `too_close`."""
        return self.filled <= self.sure_share

    @property
    def too_close(self) -> bool:
        """Whether the fast compile, about 10 % off at worst, may be wrong about `fits`."""
        return self.sure_share < self.filled <= 2 - self.sure_share


def make_plan(
    config: ConfigDict,
    topology: Topology,
    *,
    full_compile: bool = False,
    hbm_gib: float | None = None,
    try_remedies: bool = True,
    **sizes: int | None,
) -> Plan:
    """Builds and compiles the update of `config` for `topology`, and adds up what it costs.

    Args:
      config: as for training.
      topology: see `parse_topology`.
      full_compile: optimize as for training: minutes instead of seconds.
      hbm_gib: memory of a device, if not that of the chip.
      try_remedies: where it does not fit, compile with changes until it does.
      **sizes: `num_examples` and `num_classes` of data that are not here.

    Raises:
      UserError: whatever training would raise before it compiles; unknown sizes of the data; a
        topology that cannot be compiled for.
    """
    run, origin = planned_run(config, topology, **sizes)
    arguments, flops = step_arguments(run), run.train_flops_per_image()
    step, time, refusal = None, None, ""
    try:
        step = compile_step(run, arguments, full=full_compile)
        time = step_time(step, topology, flops * run.batch_size)
    except TooLargeError as error:
        refusal = str(error)
    plan = Plan(
        topology=topology,
        full_compile=full_compile,
        mesh=dict(run.mesh.shape),
        batch_size=run.batch_size,
        data=f"{_data(run)}: {origin}",
        rows=parameter_rows(arguments[0].params),
        available_bytes=available_bytes(topology, hbm_gib),
        step=step,
        refusal=refusal,
        model_flops_per_image=flops,
        time=time,
        recipe=whole_recipe(run, flops, time, topology),
    )

    def fits(changes: Changes) -> bool:
        logging.info("It does not fit; trying %s.", flags(changes))
        options: Any = {"hbm_gib": hbm_gib, "try_remedies": False, **sizes}
        try:
            return make_plan(changed(config, changes), topology, **options).fits
        except UserError:  # what could not be run at all
            return False
        finally:
            jax.clear_caches()

    if plan.filled > 1 and try_remedies:
        found = (each for each in remedies(config, topology) if fits(each[0]))
        plan.remedy = next(found, None)
    return plan


def _data(run: Run) -> str:
    shape, dataset = "x".join(map(str, run.image_shape)), run.dataset
    return f"{dataset.num_examples:,} images of {shape} in {dataset.num_classes:,} classes"


def available_bytes(topology: Topology, hbm_gib: float | None = None) -> int | None:
    """Memory that programs can use on one JAX device; of a GPU the part that JAX takes."""
    if hbm_gib is not None:
        return round(hbm_gib * GIB)
    if topology.chip is None:
        return None
    share = gpu_share() if topology.kind == "gpu" else 1.0
    return round(share * topology.chip.device_hbm_bytes)


def gpu_share() -> float:
    """The part of a GPU's memory that JAX takes when it starts."""
    return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
