"""`make_plan`: what a training would cost on machines that are not here, and what makes it fit."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.hardware.chips import GIB
from vit_jax.models.create import MODELS
from vit_jax.parameters.devices import mesh_sizes
from vit_jax.plan.cost import (
    FAST_SHARE,
    CompiledStep,
    StepTime,
    TooLargeError,
    compile_step,
    step_time,
    whole_recipe,
)
from vit_jax.plan.subject import Row, parameter_rows, planned_run, step_arguments
from vit_jax.plan.topology import Topology

Changes = dict[str, object]


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
        step = compile_step(run.mesh, run.jit_train_step(), arguments, full=full_compile)
        time = step_time(step, topology, flops * run.batch_size)
    except TooLargeError as error:
        refusal = str(error)
    data, pixels = run.dataset, "x".join(map(str, run.dataset.image_shape))
    images = f"{data.num_examples:,} images of {pixels} in {data.num_classes:,} classes"
    plan = Plan(
        topology=topology,
        full_compile=full_compile,
        mesh=dict(run.mesh.shape),
        batch_size=run.batch_size,
        data=f"{images}: {origin}",
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
        plan.remedy = next((each for each in remedies(config, topology) if fits(each[0])), None)
    return plan


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


def remedies(config: ConfigDict, topology: Topology) -> Iterator[tuple[Changes, str]]:
    """Changes of config keys and their price, each with those before it; the cheapest first.

    Those that are in force already are left out.

    Raises:
      UserError: the config's mesh does not fit the topology.
    """
    changes: Changes = {}
    prices: dict[str, None] = {}  # each once, in order

    def with_(more: Changes, *costs: str) -> tuple[Changes, str]:
        changes.update(more)
        prices.update(dict.fromkeys(costs))
        return dict(changes), "; ".join(prices)

    model, mesh = config.model, config.mesh
    has_blocks = hasattr(MODELS[model.name], "scan")  # all alike; those of a ResNet are not
    if has_blocks and (model.remat != "full" or not model.scan):
        costs = ["about a quarter more arithmetic"] if model.remat != "full" else []
        if not model.scan:
            costs.append("other initial values and dropout masks from the same seed")
        yield with_({"model.scan": True, "model.remat": "full"}, *costs)
    group = topology.num_devices // topology.slices
    _, fsdp, tensor = mesh_sizes(
        **mesh, num_devices=topology.num_devices, group_size=group, kind="slice"
    )
    if group % tensor == 0 and fsdp != group // tensor:
        # mesh.fsdp=0 asks for a number where mesh.tensor is -1.
        split = {"mesh.tensor": tensor} if mesh.tensor != tensor else {}
        price = "parameters are gathered layer by layer"
        yield with_({"mesh.data": -1, "mesh.fsdp": 0, **split}, price)
    steps, rows = 2, config.dataset.batch_size // (topology.num_devices // tensor)
    while steps <= 64 and rows % steps == 0:
        if steps > config.train_step.accumulation_steps:
            price = "parameters are gathered in every part of a batch"
            yield with_({"train_step.accumulation_steps": steps}, price)
        steps *= 2
    # Here after the accumulation, which costs a ResNet less.
    if not has_blocks and model.remat != "full":
        yield with_({"model.remat": "full"}, "up to a third more arithmetic")
    if config.optimizer.momentum_dtype != "bfloat16":
        yield with_({"optimizer.momentum_dtype": "bfloat16"}, "the first moment is rounded")


def changed(config: ConfigDict, changes: Changes) -> ConfigDict:
    """A copy of the config with other values."""
    copy = config.copy_and_resolve_references()
    copy.update_from_flattened_dict(changes)
    return copy


def flags(changes: Changes) -> str:
    """As they are given to the scripts."""
    return " ".join(f"--config.{key}={value}" for key, value in changes.items())
