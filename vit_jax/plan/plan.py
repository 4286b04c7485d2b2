"""`make_plan`: the cost of a training on machines that are not here, and how to make it fit."""

import dataclasses
import logging
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.hardware.chips import CHIPS, GIB
from vit_jax.models.create import MODELS
from vit_jax.plan import cost
from vit_jax.plan.subject import Row, parameter_rows, planned_run
from vit_jax.plan.topology import Topology
from vit_jax.run import Run
from vit_jax.trees import merge_trees

Changes = dict[str, object]


@dataclasses.dataclass
class Plan:
    """The contents of the report and of plan.json."""

    topology: Topology
    full_compile: bool  # optimized as for training
    mesh: dict[str, int]
    batch_size: int
    data: str  # the training data, and the source of their sizes
    rows: list[Row]
    available_bytes: int | None  # per device; None for virtual devices without --hbm_gib
    step: cost.CompiledStep | None  # None if the compiler could not fit it into the memory
    refusal: str  # the compiler's error in that case
    model_flops_per_image: float  # products of all forward and backward passes
    time: cost.StepTime | None
    recipe: dict[str, float | None]
    remedy: Changes | None = None  # changes that make it fit

    @property
    def filled(self) -> float:
        """The share of the memory that it needs; 0 if the memory is unknown."""
        if self.step is None:
            return math.inf
        return self.step.memory["total"] / (self.available_bytes or math.inf)

    @property
    def fits(self) -> bool:
        """True only if it is certain; see `too_close`."""
        return self.filled <= 1 and not self.too_close

    @property
    def too_close(self) -> bool:
        """Whether the fast compile for TPUs, up to about 10 % off, may be wrong about it."""
        fast = self.topology.kind == "tpu" and not self.full_compile
        return fast and cost.FAST_SHARE < self.filled <= 2 - cost.FAST_SHARE


def make_plan(
    config: ConfigDict,
    topology: Topology,
    *,
    full_compile: bool = False,
    hbm_gib: float | None = None,
    try_remedies: bool = True,
    **sizes: int | None,
) -> Plan:
    """Builds and compiles the update of `config` for `topology`, and sums its costs.

    Args:
      full_compile: optimize as for training: minutes instead of seconds.
      hbm_gib: memory of a device, if not the chip's.
      try_remedies: if it does not fit, compile with changes until it does.
      **sizes: `num_examples` and `num_classes` of data that are not available.

    UserError: as in training before compilation, or as in `planned_run`.
    """
    run, origin = planned_run(config, topology, **sizes)
    arguments, flops = run.step_arguments(), run.train_flops_per_image()
    state = run.abstract_state
    step, time, refusal = None, None, ""
    try:
        compiled = cost.compile_update(run.mesh, run.jit_train_step(), arguments, full=full_compile)
        step = cost.step_costs(run.mesh, *compiled)
        time = cost.step_time(step, topology)
    except cost.TooLargeError as error:
        refusal = str(error)
    data, pixels = run.dataset, "x".join(map(str, run.dataset.image_shape))
    images = f"{data.num_examples:,} images of {pixels} in {data.num_classes:,} classes"
    plan = Plan(
        topology=topology,
        full_compile=full_compile,
        mesh=dict(run.mesh.shape),
        batch_size=run.batch_size,
        data=f"{images}: {origin}",
        rows=parameter_rows(merge_trees(state.params, state.buffers), run.start.table),
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
        except UserError:  # an invalid combination
            return False
        finally:
            jax.clear_caches()

    if plan.filled > 1 and try_remedies:
        plan.remedy = next(filter(fits, remedies(config, topology)), None)
    return plan


def available_bytes(topology: Topology, hbm_gib: float | None = None) -> int | None:
    """Memory available to programs on a JAX device; of a GPU the part that JAX allocates."""
    if hbm_gib is not None:
        return round(hbm_gib * GIB)
    share = gpu_share() if topology.kind == "gpu" else 1.0
    return round(share * topology.chip.device_hbm_bytes) if topology.chip else None


def gpu_share() -> float:
    """The part of a GPU's memory that JAX allocates at the start."""
    return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))


def remedies(config: ConfigDict, topology: Topology) -> Iterator[Changes]:
    """Changes of config keys, each including those before it; the cheapest first.

    Settings already in effect are skipped. Full remat adds up to a third of arithmetic; a scan
    draws other values from the same seed; with `fsdp` parameters are gathered layer by layer, with
    accumulation in each part of a batch.
    """
    tensor, batch_size = config.mesh.tensor, config.dataset.batch_size
    keys = MODELS[config.model.name].keys
    wanted: Changes = {"model.scan": True, "model.remat": "full"}
    remat: Changes = {key: value for key, value in wanted.items() if key.partition(".")[2] in keys}
    # With mesh.tensor=-1, mesh.fsdp=0 has no meaning.
    split: Changes = {} if tensor == -1 else {"mesh.data": -1, "mesh.fsdp": 0}
    rows = batch_size // (topology.num_devices // max(tensor, 1))  # per device
    parts: list[Changes] = [
        {"train_step.accumulation_steps": steps}
        for steps in (2, 4, 8, 16, 32, 64)
        if rows % steps == 0 and steps > config.train_step.accumulation_steps
    ]
    # If blocks are not all equal (a ResNet), accumulation costs less than remat.
    order: list[Changes] = [remat, split, *parts] if "scan" in keys else [split, *parts, remat]
    changes: Changes = {}
    momentum: Changes = {"optimizer.momentum_dtype": "bfloat16"}
    for more in (*order, momentum):
        if changed(config, more).to_dict() != config.to_dict():
            changes |= more
            yield dict(changes)


def changed(config: ConfigDict, changes: Changes) -> ConfigDict:
    """A copy of the config with changed values."""
    copy = config.copy_and_resolve_references()
    copy.update_from_flattened_dict(changes)
    return copy


def flags(changes: Changes) -> str:
    """As flags of the scripts."""
    return " ".join(f"--config.{key}={value}" for key, value in changes.items())


def whole_recipe(
    run: Run, flops_per_image: float, time: cost.StepTime | None, topology: Topology
) -> dict[str, float | None]:
    """Cost of the whole training, without evaluations, checkpoints and interruptions.

    `v3_core_days` are for the model's products on a TPUv3 core at its published share of the peak.
    """
    images = run.total_steps * run.batch_size
    flops = images * flops_per_image
    days = None if time is None else time.predicted * run.total_steps / 86_400
    return {
        "steps": run.total_steps,
        "images": images,
        "exaflops": flops / 1e18,
        "days": days,
        "chip_days": days and days * topology.num_chips,
        "v3_core_days": flops / CHIPS["v3"].device_peak_flops / cost.V3_SHARE / 86_400,
    }
