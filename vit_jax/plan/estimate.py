"""How long an update and the whole recipe take: a model of the hardware, not a measurement."""

from __future__ import annotations

import dataclasses

from vit_jax.hardware.chips import Chip, find_chip
from vit_jax.plan.compiled import CompiledStep
from vit_jax.plan.published import CORE_DAYS, EXAFLOPS, Utilization, utilization
from vit_jax.plan.topology import Topology

SECONDS_PER_DAY = 86_400

# Clock of the cores in Hz; it follows from the peak and the size of the matrix units.
CLOCK_HZ = {"v2": 0.7e9, "v3": 0.94e9, "v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one update on each device, as if each thing were all it did.

    Attributes:
      compute: executed products at the share of the peak that `assumed` names.
      bound: the model's products at the whole peak; no program is faster.
      memory: bytes of HBM at the full bandwidth.
      links: collectives at the full bandwidth of the interconnect and the network.
      assumed: share of the peak, and where it was seen.
      compiler: the compiler's estimate for the instructions without collectives; None where it
        makes none, or was not asked to optimize.
    """

    compute: float
    bound: float
    memory: float
    links: float
    assumed: Utilization
    compiler: float | None

    @property
    def predicted(self) -> float:
        """The longest of the three, as if they overlapped perfectly.

        Neither a lower nor an upper bound: overlap is never perfect, but the share of the peak in
        `compute` is a middle that single trainings were above. `bound` is the lower bound.
        """
        return max(self.compute, self.memory, self.links)


def step_time(
    step: CompiledStep, topology: Topology, *, model_flops: float, full_compile: bool
) -> StepTime | None:
    """The time of one update; None for virtual devices, of which nothing is known.

    Args:
      step: from `compile_step`.
      topology: what it was compiled for.
      model_flops: of one update, without what remat repeats.
      full_compile: whether it was optimized; else the compiler's estimate is of another program,
        about five times slower (B/16 on v5e: 0.73 s against 0.16 s).
    """
    chip = topology.chip
    if chip is None:
        return None
    peak = topology.num_chips * chip.peak_flops
    assumed = utilization(chip.name)
    sent = sum(traffic.sent_bytes for traffic in step.traffic.values())
    network = sum(traffic.network_bytes for traffic in step.traffic.values())
    links = sent * chip.devices / chip.link_bandwidth
    if network:
        links += network * chip.devices / chip.network_bandwidth
    compiler = None
    if full_compile and step.estimated_cycles and chip.name in CLOCK_HZ:
        compiler = step.estimated_cycles / CLOCK_HZ[chip.name]
    return StepTime(
        compute=step.executed_flops / peak / assumed.share,
        bound=model_flops / peak,
        memory=step.hbm_bytes * chip.devices / chip.hbm_bandwidth,
        links=links,
        assumed=assumed,
        compiler=compiler,
    )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the whole training costs.

    Attributes:
      steps: updates.
      images: batch size x steps.
      exaflops: products, forward and backward, without what remat repeats.
      days: of wall time, without evaluations, checkpoints, compilation and interruptions.
      chip_days: chips x days.
      core_days: cores x days.
      v3_core_days: of the same arithmetic on TPUv3 cores at their published share of the peak.
      paper_core_days: TPUv3-core-days in table 2; None where it has no such row.
      paper_exaflops: of table 6; None likewise.
    """

    steps: int
    images: int
    exaflops: float
    days: float | None
    chip_days: float | None
    core_days: float | None
    v3_core_days: float
    paper_core_days: float | None
    paper_exaflops: float | None


def whole_recipe(
    *,
    steps: int,
    batch_size: int,
    flops_per_image: float,
    seconds: float | None,
    topology: Topology,
    variant: str | None,
    dataset: str,
    epochs: float,
) -> Recipe:
    """Adds it up; `seconds` per update, None where nothing is known of the devices."""
    images = steps * batch_size
    days = None if seconds is None else seconds * steps / SECONDS_PER_DAY
    v3 = find_chip("TPU v3")
    assert isinstance(v3, Chip)
    rate = v3.device_peak_flops * utilization("v3").share
    row = (variant or "", dataset, round(epochs))
    table_6 = (variant or "", round(epochs))
    return Recipe(
        steps=steps,
        images=images,
        exaflops=images * flops_per_image / 1e18,
        days=days,
        chip_days=None if days is None else days * topology.num_chips,
        core_days=None if days is None else days * topology.num_cores,
        v3_core_days=images * flops_per_image / rate / SECONDS_PER_DAY,
        paper_core_days=CORE_DAYS.get(row),
        paper_exaflops=EXAFLOPS.get(table_6) if dataset == "jft" else None,
    )
