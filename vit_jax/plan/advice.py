"""What to change if a run does not fit, tried out until it does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from ml_collections import ConfigDict

from vit_jax.plan.topology import Topology

Changes = dict[str, object]

ACCUMULATION_STEPS = (2, 4, 8, 16, 32, 64)


def remedies(config: ConfigDict, topology: Topology) -> Iterator[tuple[Changes, str]]:
    """Changes of config keys, each with those before it, and the price; the cheapest first.

    Those that are in force already are left out.
    """
    changes: Changes = {}
    model, mesh = config.model, config.mesh
    if model.name != "bit" and model.num_layers and (model.remat != "full" or not model.scan):
        changes |= {"model.scan": True, "model.remat": "full"}
        yield dict(changes), "a third more arithmetic"
    fsdp = topology.num_devices // topology.slices // mesh.tensor
    if mesh.fsdp not in (0, fsdp) and fsdp > 1:
        changes |= {"mesh.data": -1, "mesh.fsdp": 0}
        yield dict(changes), "parameters are gathered layer by layer"
    shards = topology.num_devices // mesh.tensor
    for steps in ACCUMULATION_STEPS:
        if steps <= config.train_step.accumulation_steps:
            continue
        if config.dataset.batch_size % (shards * steps):
            break
        changes |= {"train_step.accumulation_steps": steps}
        yield dict(changes), "parameters are gathered in every part"
    if config.optimizer.momentum_dtype != "bfloat16":
        changes |= {"optimizer.momentum_dtype": "bfloat16"}
        yield dict(changes), "the first moment is rounded"


def changed(config: ConfigDict, changes: Changes) -> ConfigDict:
    """A copy of the config with other values."""
    copy = config.copy_and_resolve_references()
    for key, value in changes.items():
        section, name = key.rsplit(".", 1)
        node = copy
        for part in section.split("."):
            node = node[part]
        node[name] = value
    return copy


def first_that_fits(
    config: ConfigDict, topology: Topology, fits: Callable[[ConfigDict], bool]
) -> tuple[Changes, str] | None:
    """Compiles one remedy after the other; None where all of them together are not enough."""
    for changes, price in remedies(config, topology):
        logging.info("It does not fit; trying %s.", flags(changes))
        if fits(changed(config, changes)):
            return changes, price
    return None


def flags(changes: Changes) -> str:
    """As they are given to the scripts."""
    return " ".join(f"--config.{key}={value}" for key, value in changes.items())
