"""What to change if a run does not fit, tried out until it does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from ml_collections import ConfigDict

from vit_jax.models.create import MODELS
from vit_jax.parameters.devices import mesh_sizes
from vit_jax.plan.topology import Topology

Changes = dict[str, object]

ACCUMULATION_STEPS = (2, 4, 8, 16, 32, 64)


def remedies(config: ConfigDict, topology: Topology) -> Iterator[tuple[Changes, str]]:
    """Changes of config keys and their price, each with those before it; the cheapest first.

    Those that are in force already are left out.

    Raises:
      UserError: the config's mesh does not fit the topology.
    """
    changes: Changes = {}
    prices: list[str] = []
    model, mesh = config.model, config.mesh
    has_blocks = hasattr(MODELS[model.name], "scan")  # all alike; those of a ResNet are not
    if has_blocks and (model.remat != "full" or not model.scan):
        changes |= {"model.scan": True, "model.remat": "full"}
        if model.remat != "full":
            prices.append("about a quarter more arithmetic")
        if not model.scan:
            prices.append("other initial values and dropout masks from the same seed")
        yield dict(changes), "; ".join(prices)
    group = topology.num_devices // topology.slices
    _, fsdp, tensor = mesh_sizes(
        **mesh, num_devices=topology.num_devices, group_size=group, kind="slice"
    )
    if group % tensor == 0 and fsdp != group // tensor:
        changes |= {"mesh.data": -1, "mesh.fsdp": 0}
        if mesh.tensor != tensor:  # -1: mesh.fsdp=0 asks for a number
            changes |= {"mesh.tensor": tensor}
        prices.append("parameters are gathered layer by layer")
        yield dict(changes), "; ".join(prices)
    shards = topology.num_devices // tensor
    per_part = "parameters are gathered in every part of a batch"
    for steps in ACCUMULATION_STEPS:
        if steps <= config.train_step.accumulation_steps:
            continue
        if config.dataset.batch_size % (shards * steps):
            break
        changes |= {"train_step.accumulation_steps": steps}
        prices += [per_part] if per_part not in prices else []
        yield dict(changes), "; ".join(prices)
    # Here after the accumulation, which costs a ResNet less.
    if not has_blocks and model.remat != "full":
        changes |= {"model.remat": "full"}
        prices.append("up to a third more arithmetic")
        yield dict(changes), "; ".join(prices)
    if config.optimizer.momentum_dtype != "bfloat16":
        changes |= {"optimizer.momentum_dtype": "bfloat16"}
        yield dict(changes), "; ".join([*prices, "the first moment is rounded"])


def changed(config: ConfigDict, changes: Changes) -> ConfigDict:
    """A copy of the config with other values."""
    copy = config.copy_and_resolve_references()
    copy.update_from_flattened_dict(changes)
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
