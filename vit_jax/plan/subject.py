"""The run that is planned: the one that training would build, on devices that are not there."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.data.preprocess import parse
from vit_jax.data.sources import resolve_split
from vit_jax.errors import UserError
from vit_jax.parameters.sharding import batch_sharding
from vit_jax.run import Run, create_run
from vit_jax.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Noise:
    """Stands in for stored examples: random pixels in a photo's usual size."""

    num_examples: int

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = np.random.default_rng(index).integers(0, 256, (375, 500, 3), np.uint8)
        return {"image": pixels, "label": 0}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is known of data that are not here.

    Attributes:
      splits: examples of every stored split; of any split, if it is a number.
      num_classes: of the head.
      origin: where the numbers are from, for the report.
    """

    splits: dict[str, int] | int
    num_classes: int
    origin: str

    def open_dataset(self, *, name: str, split: str, preprocess: str, **_: Any) -> Dataset:
        """A dataset of these sizes; its examples are noise, for their shapes.

        Raises:
          UserError: there is no such split, or the preprocessing cannot be read.
        """
        splits = self.splits
        if isinstance(splits, int):
            num_examples = splits
        else:
            parts = resolve_split(split, splits, lambda each: splits[each])
            num_examples = sum(part.stop - part.start for part in parts)
        class_names = tuple(map(str, range(self.num_classes)))
        return Dataset(name, split, Noise(num_examples), parse(preprocess), class_names)


def known_sizes(name: str, num_examples: int | None, num_classes: int | None) -> Sizes | None:
    """Sizes from the flags, else those that the recipes know; None for data nobody knows."""
    from configs.pretrain import DATASETS

    if num_examples and num_classes:
        return Sizes(num_examples, num_classes, "--num_examples and --num_classes")
    row = DATASETS.get(name.partition(":")[0])
    if row is None:
        return None
    return Sizes(
        num_examples or row.splits,
        num_classes or row.num_classes,
        "the table in configs/pretrain.py",
    )


@dataclasses.dataclass(frozen=True)
class Subject:
    """A run to be planned.

    Attributes:
      run: as the training builds it, but for its data perhaps.
      data_note: "" where the data are here, else where their sizes are from, and what was missing.
    """

    run: Run
    data_note: str = ""

    @functools.cached_property
    def state(self) -> TrainState:
        """Shapes of the train state, with the shardings that training gives it.

        To be asked for outside of `jax.set_mesh`: it draws a key, for which there must be a device.
        """
        return self.run.sharded_state()

    @functools.cached_property
    def constants(self) -> Any:
        """Shapes of what the objective uses but does not learn."""
        return self.run.abstract_constants()

    @functools.cached_property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of one training batch, on the run's mesh."""
        image = self.run.dataset.element_spec["image"]
        examples = self.run.batch_size
        shape = functools.partial(jax.ShapeDtypeStruct, sharding=batch_sharding(self.run.mesh))
        arrays = {
            "image": shape((examples, *image.shape), image.dtype),
            "label": shape((examples,), np.int32),
            "mask": shape((examples,), np.float32),
        }
        return {key: arrays[key] for key in (*self.run.objective.example_keys, "mask")}


def is_here(name: str, data_dir: str) -> bool:
    """Whether there is anything of that name, sound or damaged: then no sizes replace it.

    Args:
      name, data_dir: see `create_dataset`.
    """
    drawn = name.partition("(")[0].strip() in ("digits", "glyphs")
    if not name or drawn or os.path.exists(os.path.expanduser(name)):
        return True
    from vit_jax.data.tfds_reader import find_prepared

    try:
        return bool(find_prepared(name, data_dir))
    except UserError:
        return False


def create_subject(
    config: ConfigDict, mesh: Mesh, *, num_examples: int | None, num_classes: int | None
) -> Subject:
    """Builds the run of a config, with the data if they are here and `num_examples` is not given.

    Their files are opened, but not all read: training does that when it starts.

    Raises:
      UserError: what training would raise, on data that are here but damaged too; the data are
        not here and their sizes unknown; `num_classes` alone that contradicts the data.
    """
    name = config.dataset.name
    missing = "not looked for, as --num_examples is given"
    if not num_examples:
        try:
            run = create_run(config, mesh, create_dataset)
        except UserError as error:
            if is_here(name, config.dataset.data_dir):
                raise
            missing = str(error)
        else:
            if num_classes not in (None, run.dataset.num_classes):
                raise UserError(
                    f"--num_classes={num_classes}: the data are here and have "
                    f"{run.dataset.num_classes}; leave it out, or give --num_examples as well to "
                    "plan for other data."
                )
            return Subject(run)
    sizes = known_sizes(name, num_examples, num_classes)
    if sizes is None and num_examples:
        raise UserError(
            f"--num_examples={num_examples}: no recipe knows the classes of dataset.name={name!r}; "
            "give --num_classes as well."
        )
    if sizes is None:
        raise UserError(
            f"{missing} To plan without the data give --num_examples and --num_classes."
        )
    note = f"not here; sizes from {sizes.origin} ({missing})"
    return Subject(create_run(config, mesh, sizes.open_dataset), note)


def planned_step(subject: Subject) -> Any:
    """The jitted update, exactly as `vit_jax.train.train` makes it."""
    return subject.run.train_step(subject.state, subject.constants)
