"""What to change if a run does not fit."""

from __future__ import annotations

from collections.abc import Iterator

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
    for steps in ACCUMULATION_STEPS:
        if steps <= config.train_step.accumulation_steps:
            continue
        if config.dataset.batch_size % (topology.num_devices // tensor * steps):
            break
        price = "parameters are gathered in every part of a batch"
        yield with_({"train_step.accumulation_steps": steps}, price)
    # Here after the accumulation, which costs a ResNet less.
    if not has_blocks and model.remat != "full":
        yield with_({"model.remat": "full"}, "up to a third more arithmetic")
    if config.optimizer.momentum_dtype != "bfloat16":
        price = "the first moment is rounded"
        yield with_({"optimizer.momentum_dtype": "bfloat16"}, price)


def changed(config: ConfigDict, changes: Changes) -> ConfigDict:
    """A copy of the config with other values."""
    copy = config.copy_and_resolve_references()
    copy.update_from_flattened_dict(changes)
    return copy


def flags(changes: Changes) -> str:
    """As they are given to the scripts."""
    return " ".join(f"--config.{key}={value}" for key, value in changes.items())
