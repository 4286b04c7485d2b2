"""The subject of a plan: the run that training would build, on devices that are not here."""

import collections
import dataclasses
import math
from collections.abc import Collection
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from vit_jax.command_line import importing_recipes
from vit_jax.data.class_names import LABELS, wordnet_ids
from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.preprocess import parse
from vit_jax.data.sources import Source, resolve_split
from vit_jax.errors import UserError
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.parameters.sharding import create_mesh
from vit_jax.parameters.table import ParameterTable
from vit_jax.plan.topology import Topology, topology_devices
from vit_jax.run import Run, create_run
from vit_jax.trees import flatten_names


def planned_run(
    config: ConfigDict,
    topology: Topology,
    *,
    num_examples: int | None = None,
    num_classes: int | None = None,
) -> tuple[Run, str]:
    """The run of a config on a mesh over the whole topology, and the source of its data.

    Data that are not available, or whose size is given, are planned by their sizes: the given ones,
    else those in the recipes; UserError if they are unknown.
    """
    with importing_recipes():
        from configs.pretrain import DATASETS
    origin = "here"
    several = OBJECTIVES[config.objective.name].several_labels

    def open_dataset(*, name: str, split: str, preprocess: str, **options: Any) -> Dataset:
        nonlocal origin
        missing = "not opened, as a size is given."
        if not (num_examples or num_classes):
            try:
                return create_dataset(name=name, split=split, preprocess=preprocess, **options)
            except UserError as error:
                missing = str(error).removeprefix(f"dataset.name={name!r}: ")
        key = name.partition(":")[0]
        known = DATASETS.get(key)
        count, classes = num_examples, num_classes or (known and known.num_classes)
        if known and not count:
            parts = resolve_split(split, known.splits, known.splits.__getitem__)
            count = sum(part.stop - part.start for part in parts)
        if not (count and classes) or "target" in options["needs"]:
            raise UserError(
                f"dataset.name={name!r}: {missing} To plan without the data give --num_examples "
                "and --num_classes."
            )
        origin = f"sizes from the flags or configs/pretrain.py ({missing})"
        # A teacher's classes are matched by name.
        named = wordnet_ids(key) if LABELS.get(key) == classes else map(str, range(classes))
        chain = parse(preprocess)
        label = np.zeros(classes, np.uint8) if several else 0
        noise = Noise(count, label, chain.columns, options["needs"])
        return Dataset(name, split, noise, chain, tuple(named))

    if "class_weights" in config.objective:  # costs nothing, and may read all labels
        config = config.copy_and_resolve_references()
        config.objective.class_weights = ""
    mesh = create_mesh(**config.mesh, devices=topology_devices(topology))
    return create_run(config, mesh, open_dataset), origin


@dataclasses.dataclass(frozen=True)
class Noise(Source):
    """Replaces stored examples: random pixels in the usual size of a photo."""

    num_examples: int
    label: Any  # of every example
    columns: tuple[str, ...] = ()
    needs: Collection[str] = ()

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = np.random.default_rng(index).integers(0, 256, (375, 500, 3), np.uint8)
        types = {"label_map": np.uint8, "value_map": np.float32}
        needed = {k: np.zeros(pixels.shape[:2], types[k]) for k in types if k in self.needs}
        return {"image": pixels, "label": self.label, **needed, **dict.fromkeys(self.columns, "0")}


@dataclasses.dataclass(frozen=True)
class Row:
    """Parameters of one name and shape; a row includes those of all equal layers."""

    name: str  # with * for the layer number
    shape: tuple[int, ...]
    spec: str  # mesh axis of each dimension, "-" if it is not split
    split: int  # number of devices that each is split over; 1: not split
    copies: int  # layers

    @property
    def size(self) -> int:
        """Number of scalars in all copies."""
        return self.copies * math.prod(self.shape)


def parameter_rows(params: Any, table: ParameterTable) -> list[Row]:
    """Rows in the order of the names, from `ShapeDtypeStruct`s with shardings."""
    rows: collections.Counter[tuple[str, tuple[int, ...], str, int]] = collections.Counter()
    for name, leaf in flatten_names(params).items():
        spec = ", ".join(axis or "-" for axis in leaf.sharding.spec)
        split = leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape))
        rows[table.find(name).general, leaf.shape, spec, split] += 1
    return [Row(*key, copies) for key, copies in rows.items()]
