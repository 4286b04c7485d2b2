"""What has been measured on weights, as far as it is written down where they come from."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.files.json import read_json
from vit_jax.pretrained.fit.report import LoadReport
from vit_jax.pretrained.formats.description import Description
from vit_jax.pretrained.zoo.entry import ZooEntry

UNKNOWN = "unknown"
# Of a work directory.
_FILES = ("model.json", "results.json", "config.json")


@dataclasses.dataclass(frozen=True)
class Result:
    """A measured value.

    Attributes:
      metric: such as `accuracy`.
      value: as measured; fractions, not percent.
      dataset, split: what it was measured on.
      origin: who measured it.
    """

    metric: str
    value: float
    dataset: str
    split: str
    origin: str


def find_results(
    source: str, description: Description, report: LoadReport | None, entry: ZooEntry | None
) -> list[Result]:
    """What is known of unchanged weights."""
    if report is not None and (report.adapted or report.reset):
        return []
    if not description.model["num_classes"]:
        return []
    if entry is not None:
        if (entry.resolution, entry.resolution) != description.image_shape[:2]:
            return []
        return [
            Result("accuracy", row.percent / 100, row.dataset, UNKNOWN, row.source)
            for row in entry.accuracy
        ]
    return workdir_results(source, description)


def workdir_results(source: str, description: Description) -> list[Result]:
    """The last evaluations of a run that has ended; none where `source` is no such folder, or the
    model that it trained is not the one described.
    """
    folder = Path(source)
    files = [folder / name for name in _FILES]
    try:
        if not all(file.is_file() for file in files):
            return []
        trained, results, config = (read_json(file) for file in files)
        found = Description.from_json(trained)
        if (found.image_shape, found.class_names) != (
            description.image_shape,
            description.class_names,
        ):
            return []
        dataset = config["dataset"]["name"]
        dataset = Path(dataset).name if os.path.isabs(dataset) else dataset
        return [
            Result(metric, float(results[key]), dataset, evaluator["split"], "the run that trained")
            for name, evaluator in config["evaluators"].items()
            for key in results
            for prefix, _, metric in [key.partition("/")]
            if prefix == name and metric != "num_examples"
        ]
    except (UserError, KeyError, TypeError, ValueError):
        return []  # a card is no place to complain of a damaged work directory
