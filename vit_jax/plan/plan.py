"""`make_plan`: what a training would cost on machines that are not here."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.hardware.chips import GIB
from vit_jax.plan.advice import Changes, first_that_fits
from vit_jax.plan.compiled import (
    FAST_SHARE,
    CompiledStep,
    TooLargeError,
    argument_bytes,
    compile_step,
    xla_flops_per_image,
)
from vit_jax.plan.devices import topology_mesh
from vit_jax.plan.estimate import Recipe, StepTime, step_time, whole_recipe
from vit_jax.plan.parameters import Row, parameter_rows
from vit_jax.plan.picture import save_batch_picture
from vit_jax.plan.published import variant_of
from vit_jax.plan.subject import Subject, create_subject
from vit_jax.plan.topology import Topology
from vit_jax.run import Run


@dataclasses.dataclass
class Plan:
    """Everything that the report and plan.json say.

    Attributes:
      full_compile: whether the update was optimized as for training.
      available_bytes: of a device for programs; None for virtual devices without --hbm_gib.
      argument_bytes: of train state and batch, per device.
      step: None where the compiler found no way to fit it into the memory.
      needed_bytes: what a device would need, as far as is known.
      refusal: the compiler's words, if it refused.
      model_flops_per_image: products of forward and backward pass.
      xla_flops_per_image: XLA's count of the same, which has more than products.
      remedy: config keys to change so that it fits, and the price; None: not needed or none found.
      pictured: how many images `batch.png` shows.
    """

    topology: Topology
    full_compile: bool
    mesh: dict[str, int]
    batch_size: int
    accumulation_steps: int
    data_note: str
    num_examples: int
    num_classes: int
    image_shape: tuple[int, ...]
    rows: list[Row]
    available_bytes: int | None
    argument_bytes: int
    step: CompiledStep | None
    needed_bytes: int | None
    refusal: str
    model_flops_per_image: float
    xla_flops_per_image: float
    time: StepTime | None
    recipe: Recipe
    remedy: tuple[Changes, str] | None = None
    pictured: int = 0

    @property
    def fits(self) -> bool:
        """True only where the figures leave no doubt; see `too_close`."""
        if self.step is None:
            return False
        share = usable_share(self.topology, full_compile=self.full_compile)
        return fits_into(self.step.memory.total, self.available_bytes, share)

    @property
    def too_large(self) -> bool:
        """Whether it takes more than there is, by the compile that was made."""
        if self.step is None:
            return True
        return not fits_into(self.step.memory.total, self.available_bytes, 1.0)

    @property
    def too_close(self) -> bool:
        """Whether the fast compile, about 10 % off at worst, may be wrong about `fits`."""
        share = usable_share(self.topology, full_compile=self.full_compile)
        if share == 1 or self.needed_bytes is None or self.available_bytes is None:
            return False
        return share < self.needed_bytes / self.available_bytes <= 2 - share


def make_plan(
    config: ConfigDict,
    topology: Topology,
    *,
    full_compile: bool = False,
    num_examples: int | None = None,
    num_classes: int | None = None,
    hbm_gib: float | None = None,
    try_remedies: bool = True,
    output: Path | None = None,
) -> Plan:
    """Builds and compiles the update of `config` for `topology`, and adds up what it costs.

    Args:
      config: as for training.
      topology: see `parse_topology`.
      full_compile: optimize as for training: minutes instead of seconds.
      num_examples: of the training split, where the data are not here.
      num_classes: likewise.
      hbm_gib: memory of a device, if not that of the chip.
      try_remedies: where it does not fit, compile with changes until it does.
      output: existing folder for `batch.png`, where the data are here; it is drawn first.

    Raises:
      UserError: whatever training would raise before it compiles; unknown sizes of the data; a
        topology that cannot be compiled for.
    """
    sizes = {"num_examples": num_examples, "num_classes": num_classes}
    for flag, value in {**sizes, "hbm_gib": hbm_gib}.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{flag}={value} must be positive.")
    subject = build_subject(config, topology, **sizes)
    run = subject.run
    pictured = 0
    if output is not None and not subject.data_note:
        pictured = save_batch_picture(run, output / "batch.png")
    arguments = argument_bytes(subject)
    step, refusal, needed = _try_to_compile(subject, arguments, full=full_compile)
    flops = run.train_flops_per_image()
    time = None
    if step is not None:
        model_flops = flops * run.batch_size
        time = step_time(step, topology, model_flops=model_flops, full_compile=full_compile)
    plan = Plan(
        topology=topology,
        full_compile=full_compile,
        mesh=dict(run.mesh.shape),
        batch_size=run.batch_size,
        accumulation_steps=config.train_step.accumulation_steps,
        data_note=subject.data_note,
        num_examples=run.dataset.num_examples,
        num_classes=run.dataset.num_classes,
        image_shape=run.image_shape,
        rows=parameter_rows(subject.state.params, run.mesh),
        available_bytes=available_bytes(topology, hbm_gib),
        argument_bytes=arguments,
        step=step,
        needed_bytes=needed,
        refusal=refusal,
        model_flops_per_image=flops,
        xla_flops_per_image=xla_flops_per_image(run),
        time=time,
        recipe=_recipe(config, run, topology, flops, time),
        pictured=pictured,
    )
    if plan.too_large and try_remedies:
        plan.remedy = first_that_fits(
            *(config, topology, lambda other: _fits(other, topology, plan.available_bytes, sizes))
        )
    return plan


def _try_to_compile(
    subject: Subject, arguments: int, *, full: bool
) -> tuple[CompiledStep | None, str, int | None]:
    """(the program, why there is none, bytes that a device needs as far as is known)."""
    try:
        step = compile_step(subject, full=full)
    except TooLargeError as error:
        return None, str(error), error.needed_bytes(arguments)
    return step, "", step.memory.total


def _recipe(
    config: ConfigDict, run: Run, topology: Topology, flops: float, time: StepTime | None
) -> Recipe:
    """What the whole training costs beside what the paper says."""
    return whole_recipe(
        steps=run.total_steps,
        batch_size=run.batch_size,
        flops_per_image=flops,
        seconds=time.predicted if time else None,
        topology=topology,
        variant=variant_of(dict(config.model)),
        dataset=config.dataset.name,
        epochs=run.total_steps * run.batch_size / run.dataset.num_examples,
    )


def build_subject(config: ConfigDict, topology: Topology, **sizes: Any) -> Subject:
    """The run of `config` on a mesh over the whole topology."""
    mesh = topology_mesh(topology, **config.mesh)
    return create_subject(config, mesh, **sizes)


def available_bytes(topology: Topology, hbm_gib: float | None) -> int | None:
    """Memory that programs can use on one JAX device; of a GPU the part that JAX takes."""
    if hbm_gib is not None:
        return round(hbm_gib * GIB)
    if topology.chip is None:
        return None
    share = gpu_share() if topology.kind == "gpu" else 1.0
    return round(share * topology.chip.device_hbm_bytes)


def usable_share(topology: Topology, *, full_compile: bool) -> float:
    """The part of the memory up to which a compiled program is sure to fit."""
    return FAST_SHARE if topology.kind == "tpu" and not full_compile else 1.0


def fits_into(total: int, available: int | None, share: float) -> bool:
    """Whether a program fits; always, where nothing is known of the memory."""
    return available is None or total <= share * available


def gpu_share() -> float:
    """The part of a GPU's memory that JAX takes when it starts."""
    return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))


def _fits(
    config: ConfigDict, topology: Topology, available: int | None, sizes: dict[str, int | None]
) -> bool:
    """Whether a changed config fits; what the user could not run at all does not."""
    try:
        subject = build_subject(config, topology, **sizes)
        total = compile_step(subject, full=False).memory.total
    except (TooLargeError, UserError):
        return False
    finally:
        jax.clear_caches()
    return fits_into(total, available, usable_share(topology, full_compile=False))
