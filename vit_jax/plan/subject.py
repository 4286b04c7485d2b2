"""The run that is planned: the one that training would build, on devices that are not there."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.preprocess import parse
from vit_jax.data.sources import resolve_split
from vit_jax.errors import UserError
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.parameters.sharding import batch_sharding, create_mesh, state_shardings
from vit_jax.plan.devices import topology_devices
from vit_jax.plan.topology import Topology
from vit_jax.pretrained.zoo.class_names import LABELS, wordnet_ids
from vit_jax.run import Run, create_run, with_shardings
from vit_jax.training.step import TrainState


@dataclasses.dataclass(frozen=True)
class Noise:
    """Stands in for stored examples: random pixels in a photo's usual size."""

    num_examples: int
    label: Any = 0  # of every example

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = np.random.default_rng(index).integers(0, 256, (375, 500, 3), np.uint8)
        return {"image": pixels, "label": self.label}


def step_arguments(run: Run) -> tuple[TrainState, Any, dict[str, jax.ShapeDtypeStruct]]:
    """Shapes of state, constants and batch, with the shardings that training gives them.

    To be called outside of `jax.set_mesh`: it draws a key, for which there must be a device.
    """
    state = with_shardings(run.abstract_state, state_shardings(run.abstract_state, run.mesh))
    image, label = (run.dataset.element_spec[key] for key in ("image", "label"))
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=batch_sharding(run.mesh))
    batch = {
        "image": shape((run.batch_size, *image.shape), image.dtype),
        "label": shape((run.batch_size, *label.shape), np.uint8 if label.shape else np.int32),
        "mask": shape((run.batch_size,), np.float32),
    }
    keys = (*run.objective.example_keys, "mask")
    return state, run.abstract_constants(), {key: batch[key] for key in keys}


def planned_run(
    config: ConfigDict,
    topology: Topology,
    *,
    num_examples: int | None = None,
    num_classes: int | None = None,
) -> tuple[Run, str]:
    """The run of a config on a mesh over the whole topology, and where its data are from.

    Data that are not here, or of which a size is given, are planned by their sizes: those given,
    else those that the recipes know.

    Raises:
      UserError: what training would raise; the data are not here and their sizes unknown.
    """
    from configs.pretrain import DATASETS

    notes: list[str] = []

    def open_dataset(*, name: str, split: str, preprocess: str, **options: Any) -> Dataset:
        missing = "not looked for, as a size is given."
        if not (num_examples or num_classes):
            try:
                return create_dataset(name=name, split=split, preprocess=preprocess, **options)
            except UserError as error:
                missing = str(error)
        key = name.partition(":")[0]
        known = DATASETS.get(key)
        count, classes = num_examples, num_classes or (known and known.num_classes)
        if known and not count:
            parts = resolve_split(split, known.splits, known.splits.__getitem__)
            count = sum(part.stop - part.start for part in parts)
        if not (count and classes):
            raise UserError(
                f"dataset.name={name!r}: {missing} To plan without the data give --num_examples "
                "and --num_classes."
            )
        notes.append(f"sizes from the flags or configs/pretrain.py ({missing})")
        class_names = tuple(map(str, range(classes)))
        if LABELS.get(key) == classes:  # a teacher's classes are found by their names
            class_names = wordnet_ids(key)
        several = OBJECTIVES[config.objective.name].several_labels
        noise = Noise(count, np.zeros(classes, np.uint8) if several else 0)
        return Dataset(name, split, noise, parse(preprocess), class_names)

    mesh = create_mesh(**config.mesh, devices=topology_devices(topology))
    return create_run(config, mesh, open_dataset), notes[0] if notes else "here"
