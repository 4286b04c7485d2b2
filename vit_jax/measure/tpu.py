"""The update compiled for a TPU that is not here: ours and that of other projects."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from vit_jax.config import section
from vit_jax.errors import UserError
from vit_jax.measure.fit import largest_per_device
from vit_jax.measure.peers import JAX_PEERS, check_peer, jax_peer, train_step, update_rule
from vit_jax.measure.turns import Case
from vit_jax.models.variants import get_variant
from vit_jax.parameters.sharding import batch_sharding, replicated, with_shardings
from vit_jax.plan.compiled import CompiledStep, TooLargeError, compile_step
from vit_jax.plan.cycles import CLOCK_HZ
from vit_jax.plan.subject import planned_run, step_arguments
from vit_jax.plan.topology import Topology
from vit_jax.run import Run

_NUM_EXAMPLES, _NUM_CLASSES = 1_281_167, 1000


def benchmark_tpu(
    config: ConfigDict, topology: Topology, *, against: Sequence[str], clones: str = ""
) -> list[Case]:
    """Cycles, bytes moved to and from HBM, and peak memory of our update and of the peers'.

    Cycles are the compiler's estimate plus `plan.cycles.kernel_cycles`. All are compiled with full
    optimization, which takes a minute or more each.

    Args:
      config: as of `configs/benchmark.py:tpu`; parameters of the peers are replicated.
      topology: TPUs.
      against: some of `peers.JAX_PEERS`, or `reference`.
      clones: folder with clones of the peers' repositories.

    Raises:
      UserError: a peer is not here, or runs on no TPU.
    """
    if topology.chip is None or not topology.chip.name.startswith("v"):
        raise UserError("--topology must name TPUs, such as v5e:2x2.")
    for peer in against:
        if peer not in (*JAX_PEERS, "reference"):
            raise UserError(f"--against={peer}: it cannot be compiled for a TPU here.")
        check_peer(peer, config.model, clones)
    run, arguments = _planned(config, topology)
    ours = _figures(compile_step(run, arguments, full=True))
    name = f"update, {config.model.dtype}, {run.batch_size // run.mesh.size} images a device"
    if config.model.dropout_rate:
        name += f", dropout {config.model.dropout_rate}"
    cases = []
    for peer in against:
        if peer == "reference":
            other = config.copy_and_resolve_references()
            other.model.attention = "reference"
            compiled = compile_step(*_planned(other, topology), full=True)
        else:
            update, theirs = peer_update(peer, run, arguments, _NUM_CLASSES, clones)
            compiled = compile_step(run, theirs, full=True, update=update)
        found = _figures(compiled)
        cases += [Case(name, peer, [ours[unit]], [found[unit]], unit) for unit in found]
    return cases


def benchmark_sizes(
    config: ConfigDict, topology: Topology, *, variants: Sequence[str], resolutions: Sequence[int]
) -> list[dict[str, Any]]:
    """Figures 12 and 13 of the paper for a TPU that is not here, while training.

    Returns:
      Per variant and resolution: `model`, `pixels`; `fit`, the images a device that fit (a power of
      two, or one and a half of one; by the fast compile, whose memory is up to 10 % off);
      `images_per_second` a device at the paper's batch of 4,096 over 64 devices, or at `fit` if
      that is less, by the cycles of `benchmark_tpu`.
    """
    rows = []
    for variant in variants:
        for pixels in resolutions:
            trial = config.copy_and_resolve_references()
            trial.model = section("model", **get_variant(variant), dtype=config.model.dtype)
            trial.dataset.preprocess = f"official_train({pixels})"
            trial.dataset.eval_preprocess = f"official_eval({pixels})"
            fit = _largest_batch(trial, topology)
            row = {"model": variant, "pixels": pixels, "fit": fit, "images_per_second": 0.0}
            if fit:
                trial.dataset.batch_size = min(fit, 64) * topology.num_devices
                step = compile_step(*_planned(trial, topology), full=True)
                seconds = (step.cycles + step.kernel_cycles) / CLOCK_HZ
                row["images_per_second"] = float(min(fit, 64) / seconds)
            logging.info("%s", row)
            rows.append(row)
    return rows


def _largest_batch(config: ConfigDict, topology: Topology) -> int:
    """Images per device; 0 if not even one fits."""

    def fits(per_device: int) -> bool:
        trial = config.copy_and_resolve_references()
        trial.dataset.batch_size = per_device * topology.num_devices
        try:
            compile_step(*_planned(trial, topology), full=False)
        except TooLargeError:
            return False
        return True

    return largest_per_device(fits)


def _figures(step: CompiledStep) -> dict[str, float]:
    """By unit."""
    kernels = step.kernel_cycles / 1e6
    logging.info("%.1f Mcycles by the compiler, %.1f of kernels.", step.cycles / 1e6, kernels)
    return {
        "Mcycles": step.cycles / 1e6 + kernels,
        "GB": step.hbm_bytes / 1e9,
        "GiB": step.memory["peak"] / 2**30,
    }


def _planned(config: ConfigDict, topology: Topology) -> tuple[Run, tuple[Any, ...]]:
    run, _ = planned_run(config, topology, num_examples=_NUM_EXAMPLES, num_classes=_NUM_CLASSES)
    return run, step_arguments(run)


def peer_update(
    peer: str, run: Run, arguments: tuple[Any, ...], num_classes: int, clones: str
) -> tuple[Any, tuple[Any, ...]]:
    """A peer's jitted update, and shapes of what it takes, on the mesh of our run."""
    init, forward = jax_peer(peer, run.config.model, num_classes, clones)
    tx = update_rule(run.config.optimizer)
    images, labels = (arguments[2][key] for key in ("image", "label"))
    key = jax.eval_shape(lambda: jax.random.key(0))
    one = jax.ShapeDtypeStruct((1, *images.shape[1:]), images.dtype)
    params = jax.eval_shape(init, key, one)
    state = (params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((), jnp.int32))
    whole = replicated(run.mesh)
    shardings: Any = jax.tree.map(lambda _: whole, state)
    update = jax.jit(
        train_step(forward, tx),
        in_shardings=(shardings, batch_sharding(run.mesh), batch_sharding(run.mesh)),
        out_shardings=(shardings, NamedSharding(run.mesh, whole.spec)),
        donate_argnums=0,
    )
    return update, (with_shardings(state, shardings), images, labels)
