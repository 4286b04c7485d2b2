"""What is planned: the update that training would make, for devices that are not there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.preprocess import parse
from vit_jax.data.sources import resolve_split
from vit_jax.errors import UserError
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.parameters import sharding
from vit_jax.plan.topology import Topology, topology_devices
from vit_jax.pretrained.zoo.class_names import LABELS, wordnet_ids
from vit_jax.run import create_run


@dataclasses.dataclass(frozen=True)
class Subject:
    """An update, and what a plan says of the training it belongs to."""

    mesh: Mesh
    make_update: Callable[[], Any]  # jitted; anew, for another trace
    arguments: tuple[Any, ...]  # shapes of state, constants and batch, with shardings
    batch_size: int
    total_steps: int
    num_examples: int
    flops_per_image: float  # see `hardware.flops.train_flops`
    data: str  # what is trained on, and where its sizes are from


def plan_subject(
    config: ConfigDict,
    topology: Topology,
    *,
    num_examples: int | None = None,
    num_classes: int | None = None,
) -> Subject:
    """The update of a config on a mesh over the whole topology.

    Data that are not here, or of which a size is given, are planned by their sizes: those given,
    else those that the recipes know.

    Raises:
      UserError: what training would raise; the data are not here and their sizes unknown.
    """
    mesh = sharding.create_mesh(**config.mesh, devices=topology_devices(topology))
    origins: list[str] = []

    def open_dataset(*, name: str, split: str, preprocess: str, **options: Any) -> Dataset:
        missing = "not looked for, as a size is given."
        if not (num_examples or num_classes):
            try:
                return create_dataset(name=name, split=split, preprocess=preprocess, **options)
            except UserError as error:
                missing = str(error)
        origins.append(f"sizes from the flags or configs/pretrain.py ({missing})")
        count, class_names = _sizes(name, split, num_examples, num_classes, missing)
        several = OBJECTIVES[config.objective.name].several_labels
        noise = Noise(count, np.zeros(len(class_names), np.uint8) if several else 0)
        return Dataset(name, split, noise, parse(preprocess), class_names)

    run = create_run(config, mesh, open_dataset)
    state = run.abstract_state
    state = sharding.with_shardings(state, sharding.state_shardings(state, mesh))
    constants, spec = run.abstract_constants(), run.dataset.element_spec
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding.batch_sharding(mesh))
    label = spec["label"].shape
    batch = {
        "image": shape((run.batch_size, *spec["image"].shape), spec["image"].dtype),
        "label": shape((run.batch_size, *label), np.uint8 if label else np.int32),
        "mask": shape((run.batch_size,), np.float32),
    }
    count, pixels = run.dataset.num_examples, "x".join(map(str, run.image_shape))
    origin = origins[0] if origins else "here"
    return Subject(
        mesh=mesh,
        make_update=lambda: run.train_step(state, constants),
        arguments=(state, constants, {k: batch[k] for k in (*run.objective.example_keys, "mask")}),
        batch_size=run.batch_size,
        total_steps=run.total_steps,
        num_examples=count,
        flops_per_image=run.train_flops_per_image(),
        data=f"{count:,} images of {pixels} in {run.dataset.num_classes:,} classes: {origin}",
    )


def _sizes(
    name: str, split: str, num_examples: int | None, num_classes: int | None, missing: str
) -> tuple[int, tuple[str, ...]]:
    """Number of examples and names of the classes of data that are not here."""
    from configs.pretrain import DATASETS

    key = name.partition(":")[0]
    known = DATASETS.get(key)
    classes = num_classes or (known and known.num_classes)
    if known and not num_examples:
        parts = resolve_split(split, known.splits, known.splits.__getitem__)
        num_examples = sum(part.stop - part.start for part in parts)
    if not (num_examples and classes):
        raise UserError(
            f"dataset.name={name!r}: {missing} To plan without the data give --num_examples "
            "and --num_classes."
        )
    # A teacher's classes are found by their names.
    named = wordnet_ids(key) if LABELS.get(key) == classes else map(str, range(classes))
    return num_examples, tuple(named)


@dataclasses.dataclass(frozen=True)
class Noise:
    """Stands in for stored examples: random pixels in a photo's usual size."""

    num_examples: int
    label: Any  # of every example

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = np.random.default_rng(index).integers(0, 256, (375, 500, 3), np.uint8)
        return {"image": pixels, "label": self.label}
