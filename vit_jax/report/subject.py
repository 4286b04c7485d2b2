"""The trained model of a run, and examples to ask it about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.errors import UserError
from vit_jax.inference.inputs import example_names
from vit_jax.inference.model import Model, load_model
from vit_jax.inference.visualize import spread
from vit_jax.report.facts import Facts
from vit_jax.workdir.description import PARAMS_FILE


@dataclasses.dataclass(frozen=True)
class Spread:
    """A source of the examples `indices` of another one."""

    source: Any
    indices: list[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[self.indices[index]]


@dataclasses.dataclass(frozen=True)
class Examples:
    """Some of a split.

    Attributes:
      data: with their stored images and labels.
      preprocess: its ops as text.
      names: of the examples.
      of: how many the split has.
    """

    data: Dataset
    preprocess: str
    names: list[str]
    of: int

    def images(self, indices: Iterable[int]) -> list[Any]:
        """As `Model` takes them."""
        return [self.data.source[int(i)]["image"] for i in indices]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A trained model, and examples of its evaluation data, or why there are none."""

    model: Model
    examples: Examples | UserError


def load_subject(facts: Facts, max_examples: int) -> Subject:
    """Loads the parameters, and opens the data of the evaluator that stands for the run.

    Raises:
      UserError: there are no parameters yet, or they cannot be read.
    """
    if not (facts.folder / PARAMS_FILE).exists():
        raise UserError(f"The run has not written {PARAMS_FILE} yet, which comes at its end.")
    model = load_model(str(facts.folder))
    try:
        examples = open_examples(facts, max_examples)
    except UserError as error:
        return Subject(model, error)
    description = dataclasses.replace(model.description, eval_preprocess=examples.preprocess)
    return Subject(dataclasses.replace(model, description=description), examples)


def open_examples(facts: Facts, max_examples: int) -> Examples:
    """Examples of the evaluator's split, evenly spread, `max_examples` at most.

    Raises:
      UserError: none are asked for, there is no evaluator, or its data cannot be read.
    """
    if not max_examples:
        raise UserError("No examples were asked for (--max_examples=0).")
    data, evaluator = facts.config["dataset"], facts.config["evaluators"][facts.own_evaluator]
    preprocess = evaluator["preprocess"] or data["eval_preprocess"]
    opened = create_dataset(
        name=evaluator["dataset"] or data["name"],
        split=evaluator["split"],
        preprocess=preprocess,
        data_dir=evaluator["data_dir"] or data["data_dir"],
        label_key=evaluator["label_key"] or ("" if evaluator["dataset"] else data["label_key"]),
        on_bad_image=data["on_bad_image"],
        needs_label="label" in facts.objective.example_keys,
    )
    if opened.on_bad_image == "skip":  # reads every image
        opened = opened.check()
    indices = spread(range(opened.num_examples), max_examples)
    names = example_names(opened.source, opened.split)
    return Examples(
        data=dataclasses.replace(opened, source=Spread(opened.source, indices)),
        preprocess=preprocess,
        names=[names[i] for i in indices],
        of=opened.num_examples,
    )
