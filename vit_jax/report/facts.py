"""What a work directory tells about its run, whatever state the run is in."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from vit_jax.curves.read import RunCurves, read_run
from vit_jax.errors import UserError
from vit_jax.evaluators.create import OF_FEATURES
from vit_jax.files.atomic import read_object
from vit_jax.objectives.create import OBJECTIVES
from vit_jax.training.length import to_steps
from vit_jax.workdir.description import RESULTS_FILE
from vit_jax.workdir.metrics import read_metrics
from vit_jax.workdir.provenance import PROVENANCE_FILE

# Which metric stands for a run: the first of these that an evaluator has, else any.
_MAIN = ("accuracy", "mAP", "loss")


@dataclasses.dataclass(frozen=True)
class Facts:
    """A run, finished or not.

    Attributes:
      folder: its work directory.
      config: nested.
      rows: of `metrics.jsonl`.
      run: the same as curves.
      results: of `results.json`; {} while the run has not ended.
      starts: of `provenance.jsonl`, the first one first.
    """

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    run: RunCurves
    results: dict[str, Any]
    starts: list[dict[str, Any]]

    @property
    def step(self) -> int:
        """Finished updates, as far as they are known."""
        return int(
            self.results["step"] if self.results else max([0, *(row["step"] for row in self.rows)])
        )

    @property
    def length(self) -> str:
        """How long the run is to be: `250`, or `90 epochs` where only the data could tell."""
        duration = self.config["duration"]
        if duration["steps"] is None and duration["examples"] is None:
            return f"{self.step:,}" if self.results else f"{duration['epochs']:g} epochs"
        batch_size = self.config["dataset"]["batch_size"]
        return f"{to_steps(**duration, num_examples=0, batch_size=batch_size):,}"

    @property
    def evaluations(self) -> dict[str, tuple[int, float]]:
        """The last value of each `NAME/METRIC`, and its step."""
        found = {
            name: (int(curve.steps[-1]), float(curve.values[-1]))
            for name, curve in self.run.curves.items()
            if "/" in name
        }
        return found | {
            name: (self.step, value) for name, value in self.results.items() if "/" in name
        }

    @property
    def main_metric(self) -> str:
        """`NAME/METRIC` of the evaluation that stands for the run; "" without any."""
        if best := self.config["checkpoint"]["best_metric"]:
            return str(best)
        names = sorted(self.evaluations, key=lambda name: not name.startswith("test/"))
        of_metric = {name.partition("/")[2]: name for name in reversed(names)}
        found = [of_metric[metric] for metric in _MAIN if metric in of_metric]
        return next(iter(found + names), "")

    @property
    def time(self) -> dict[str, float]:
        """`elapsed_seconds`, `goodput` and seconds by kind; {} where none were logged."""
        if self.results:
            return {**self.results, "elapsed_seconds": self.results["seconds"]}
        return next((row for row in reversed(self.rows) if "elapsed_seconds" in row), {})

    @property
    def own_evaluator(self) -> str:
        """The evaluator whose data say most about the model's own outputs.

        Raises:
          UserError: there is none.
        """
        own = [
            k for k, each in self.config["evaluators"].items() if each["name"] not in OF_FEATURES
        ]
        main = self.main_metric.partition("/")[0]
        if not own:
            raise UserError("The config has no evaluator that reads images for this model.")
        return main if main in own else own[0]

    @property
    def objective(self) -> Any:
        """The class of the objective."""
        return OBJECTIVES[self.config["objective"]["name"]]


def read_facts(workdir: str) -> Facts:
    """Reads all but the parameters.

    Raises:
      UserError: it is no work directory, or a file is missing or damaged.
    """
    run = read_run(workdir)
    folder, results = run.workdir, run.workdir / RESULTS_FILE
    return Facts(
        folder=folder,
        config=read_object(folder / "config.json"),
        rows=read_metrics(folder),
        run=run,
        results=read_object(results) if results.exists() else {},
        starts=_read_starts(folder / PROVENANCE_FILE),
    )


def _read_starts(path: Path) -> list[dict[str, Any]]:
    """The whole lines: a killed run may have left part of one."""
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found
