"""Maps the classes of a dataset to the outputs of a model."""

import collections
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.data.class_names import LABELS, class_names, wordnet_ids
from vit_jax.data.datasets import Dataset
from vit_jax.data.labelled import class_numbers
from vit_jax.data.ops import Op
from vit_jax.data.preprocess import Chain
from vit_jax.errors import UserError
from vit_jax.wording import list_names


def match_classes(
    dataset_names: Sequence[str],
    model_names: Sequence[str],
    num_outputs: int,
    *,
    ignore_names: bool = False,
    hint: str = "--ignore_class_names uses label i as output i",
) -> np.ndarray:
    """The model's output for each label of the dataset, int32 [number of labels].

    Classes are matched by name. WordNet ids, the names of ImageNet's folders, map to the names
    in `pretrained/labels`, and to those of Hugging Face, which add synonyms.

    Args:
      dataset_names: in the order of the labels.
      model_names: in the order of the outputs; empty if unknown.
      ignore_names: label i is output i; if class names are numbers, they are the outputs.
      hint: the end of an error message.

    Raises:
      UserError: more labels than outputs, a class that the model does not have, or no names to
        compare and different numbers of classes.
    """
    num_labels = len(dataset_names)
    in_order = np.arange(num_labels, dtype=np.int32)
    numbers = class_numbers(dataset_names)
    if num_labels > num_outputs:
        raise UserError(
            f"the dataset has {num_labels} classes, but the model only {num_outputs} outputs."
        )
    if not model_names:  # ImageNet's names, if the data are ImageNet's
        for key, count in LABELS.items():
            if count == num_outputs and set(dataset_names) <= set(wordnet_ids(key)):
                model_names = class_names(key)
        if not model_names and num_labels != num_outputs and not ignore_names:
            raise UserError(
                f"the model has {num_outputs} outputs with unknown names, the dataset {num_labels} "
                f"classes; {hint}."
            )
    if ignore_names or not model_names:
        if numbers and max(numbers) < num_outputs:
            logging.info("Class names are numbers: using class n as output n.")
            return np.array(numbers, np.int32)
        logging.info("Ignoring class names: using label i as output i.")
        return in_order
    if tuple(dataset_names) == tuple(model_names):
        return in_order
    if numbers and (theirs := class_numbers(model_names)):  # 3, 003 and 3.0 are the same
        dataset_names, model_names = [*map(str, numbers)], [*map(str, theirs)]
    outputs = _outputs_by_name(model_names)
    unknown = [repr(name) for name in dataset_names if name not in outputs]
    if unknown:
        raise UserError(
            f"{len(unknown)} of the dataset's {num_labels} classes are not among the model's "
            f"{num_outputs}: {list_names(unknown, 3)} (the model's: "
            f"{list_names(map(repr, model_names), 3)}); {hint}."
        )
    matched = np.array([outputs[name] for name in dataset_names], np.int32)
    moved = np.flatnonzero(matched != in_order)
    logging.info(
        f"Matched classes by name: {len(moved)} of {num_labels} labels have another index in "
        f"the model, which has {num_outputs - num_labels} more classes."
    )
    return matched


@dataclasses.dataclass(frozen=True)
class _Relabel(Op):
    """A final op that replaces a dataset's labels by the model's outputs."""

    outputs: tuple[int, ...]
    num_outputs: int

    def __call__(self, example: dict[str, Any], _rng: np.random.Generator) -> dict[str, Any]:
        if (pixels := example.get("label_map")) is not None:  # 255, no class, stays
            numbers = np.arange(256, dtype=np.uint8)
            numbers[: len(self.outputs)] = self.outputs
            return {**example, "label_map": numbers[pixels]}
        label = example["label"]
        if not np.ndim(label):
            return {**example, "label": self.outputs[label]}
        moved = np.zeros(self.num_outputs, label.dtype)
        moved[list(self.outputs)] = label
        return {**example, "label": moved}


def relabel(dataset: Dataset, outputs: np.ndarray, num_outputs: int) -> Dataset:
    """The same examples with the output `outputs[label]` as their label."""
    op = _Relabel(tuple(int(output) for output in outputs), num_outputs)
    return dataclasses.replace(dataset, preprocess=Chain((*dataset.preprocess.ops, op)))


def _outputs_by_name(model_names: Sequence[str]) -> dict[str, int]:
    """Names that belong to exactly one output."""
    names = list(enumerate(model_names))
    for key, count in LABELS.items():
        if count == len(model_names) and _are_published(model_names, class_names(key)):
            names += enumerate(wordnet_ids(key))
    counts = collections.Counter(name for _, name in names)
    return {name: number for number, name in names if counts[name] == 1}


def _are_published(model_names: Sequence[str], published: Sequence[str]) -> bool:
    """Whether nearly all names are ImageNet's, in its order, with or without synonyms."""
    first = [name.split(",")[0].strip().lower() for name in model_names]
    same = [a == b.split(",")[0].lower() for a, b in zip(first, published, strict=True)]
    return sum(same) > 0.8 * len(same)
