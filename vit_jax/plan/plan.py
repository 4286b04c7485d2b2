"""`make_plan`: what a training would cost on machines that are not here."""

from __future__ import annotations

import dataclasses
import math
import os

import jax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.hardware.chips import GIB
from vit_jax.parameters.sharding import create_mesh
from vit_jax.plan.advice import Changes, first_that_fits
from vit_jax.plan.compiled import (
    FAST_SHARE,
    CompiledStep,
    TooLargeError,
    argument_bytes,
    compile_step,
)
from vit_jax.plan.devices import topology_devices
from vit_jax.plan.estimate import Recipe, StepTime, step_time, variant_of, whole_recipe
from vit_jax.plan.parameters import Row, parameter_rows
from vit_jax.plan.subject import Subject, create_subject
from vit_jax.plan.topology import Topology


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
      remedy: config keys to change so that it fits, and the price; None: not needed or none found.
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
    time: StepTime | None
    recipe: Recipe
    remedy: tuple[Changes, str] | None = None

    @property
    def sure_share(self) -> float:
        """The part of the memory up to which a compiled program is sure to fit."""
        return FAST_SHARE if self.topology.kind == "tpu" and not self.full_compile else 1.0

    @property
    def fits(self) -> bool:
        """True only where the figures leave no doubt; see `too_close`."""
        return self._fits_into(self.sure_share)

    @property
    def too_large(self) -> bool:
        """Whether it takes more than there is, by the compile that was made."""
        return not self._fits_into(1.0)

    @property
    def too_close(self) -> bool:
        """Whether the fast compile, about 10 % off at worst, may be wrong about `fits`."""
        share = self.sure_share
        if share == 1 or self.needed_bytes is None or self.available_bytes is None:
            return False
        return share < self.needed_bytes / self.available_bytes <= 2 - share

    def _fits_into(self, share: float) -> bool:
        """Whether the program takes at most this share of the memory, if that is known."""
        if self.step is None or self.available_bytes is None:
            return self.step is not None
        return self.step.memory.total <= share * self.available_bytes


def make_plan(
    config: ConfigDict,
    topology: Topology,
    *,
    full_compile: bool = False,
    num_examples: int | None = None,
    num_classes: int | None = None,
    hbm_gib: float | None = None,
    try_remedies: bool = True,
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

    Raises:
      UserError: whatever training would raise before it compiles; unknown sizes of the data; a
        topology that cannot be compiled for.
    """
    given = {"num_examples": num_examples, "num_classes": num_classes, "hbm_gib": hbm_gib}
    for flag, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{flag}={value} must be positive.")
    subject = build_subject(config, topology, num_examples=num_examples, num_classes=num_classes)
    run = subject.run
    arguments = argument_bytes(subject)
    step, time, refusal = None, None, ""
    flops = run.train_flops_per_image()
    try:
        step = compile_step(subject, full=full_compile)
        needed: int | None = step.memory.total
        time = step_time(step, topology, flops * run.batch_size)
    except TooLargeError as error:
        refusal, needed = str(error), error.needed_bytes(arguments)
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
        time=time,
        recipe=whole_recipe(
            steps=run.total_steps,
            batch_size=run.batch_size,
            num_examples=run.dataset.num_examples,
            flops_per_image=flops,
            seconds=time.predicted if time else None,
            topology=topology,
            variant=variant_of(dict(config.model)),
            dataset=config.dataset.name,
        ),
    )
    if plan.too_large and try_remedies:

        def fits(other: ConfigDict) -> bool:
            try:
                return make_plan(
                    other,
                    topology,
                    num_examples=num_examples,
                    num_classes=num_classes,
                    hbm_gib=hbm_gib,
                    try_remedies=False,
                ).fits
            except UserError:  # what could not be run at all
                return False
            finally:
                jax.clear_caches()

        plan.remedy = first_that_fits(config, topology, fits)
    return plan


def build_subject(
    config: ConfigDict,
    topology: Topology,
    *,
    num_examples: int | None = None,
    num_classes: int | None = None,
) -> Subject:
    """The run of `config` on a mesh over the whole topology."""
    mesh = create_mesh(**config.mesh, devices=topology_devices(topology))
    return create_subject(config, mesh, num_examples=num_examples, num_classes=num_classes)


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
