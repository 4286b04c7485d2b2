"""A run as read from its work directory, in whatever state it is."""

import collections
import contextlib
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vit_jax.console import number_text
from vit_jax.errors import UserError
from vit_jax.files.paths import parse_json, read_file, read_object, to_path
from vit_jax.workdir.claim import RUNTIME_KEYS
from vit_jax.workdir.description import CONFIG_FILE, PROVENANCE_FILE, RESULTS_FILE
from vit_jax.workdir.metrics import METRICS_FILE, read_metrics

# Settings that do not affect the results of a run.
HOUSEKEEPING = (*RUNTIME_KEYS, "evaluators.")
# The main metric of a run: the first of these that an evaluator has, else any.
_MAIN = ("accuracy", "mAP", "mIoU", "delta1", "r2", "loss")

_WORDS = {
    "mAP": "mean average precision",
    "mIoU": "mean IoU",
    "mae": "MAE",
    "rmse": "RMSE",
    "r2": "R2",
    "abs_rel": "relative error",
    "mfu": "MFU",
    "accuracy_top5": "top-5 accuracy",
    "num_examples": "examples",
}


class Curve(NamedTuple):
    """Values of one metric in training order; all three arrays are [N] float64."""

    steps: np.ndarray
    hours: np.ndarray  # since the start of the run; NaN if not logged
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, finished or not: its work directory, its config and the rows of `metrics.jsonl`."""

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]

    @functools.cached_property
    def curves(self) -> dict[str, Curve]:
        """The metrics by name: `loss`, `test/accuracy`. NaN cannot be plotted and is dropped."""
        points: dict[str, list[tuple[float, float, float]]] = collections.defaultdict(list)
        for row in self.rows:
            hours = row.get("elapsed_seconds", math.nan) / 3600
            for name, value in row.items():
                if name not in ("step", "elapsed_seconds") and math.isfinite(value):
                    points[name].append((row["step"], hours, value))
        return {name: Curve(*np.array(points[name], np.float64).T) for name in points}

    @functools.cached_property
    def results(self) -> dict[str, Any]:
        """Contents of `results.json`; {} until the run has finished."""
        path = self.folder / RESULTS_FILE
        if not path.exists():
            return {}
        return read_object(path, step=int, seconds=int | float, goodput=int | float)

    @functools.cached_property
    def starts(self) -> list[dict[str, Any]]:
        """The complete lines of `provenance.jsonl`: a killed run may have left part of one."""
        path, starts = self.folder / PROVENANCE_FILE, []
        for line in read_file(path).splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):
                starts.append(parse_json(line))
        return [start for start in starts if isinstance(start, dict)]

    def curves_of(self, panel: str) -> dict[str, Curve]:
        """The curves of a panel, training first: `accuracy` of all, or only `test/accuracy`."""
        names = [name for name in self.curves if panel in (name, name.rpartition("/")[2])]
        return {name: self.curves[name] for name in sorted(names, key=lambda name: "/" in name)}

    @property
    def step(self) -> int:
        """Completed updates, as far as known."""
        rows = [self.results] if self.results else self.rows
        return max([0, *(int(row["step"]) for row in rows)])

    @property
    def length(self) -> str:
        """Length of the run: `250`, or `90 epochs` if only the data determine the steps."""
        if self.results:
            return f"{self.step:,}"
        duration = self.config["duration"]
        unit = next(key for key in ("steps", "examples", "epochs") if duration[key] is not None)
        value = f"{duration[unit]:,}".removesuffix(".0")
        return value if unit == "steps" else f"{value} {unit}"

    @property
    def evaluations(self) -> dict[str, tuple[int, float]]:
        """The step and value of the last evaluation of each `NAME/METRIC`."""
        last = {name: (int(c.steps[-1]), float(c.values[-1])) for name, c in self.curves.items()}
        last |= {name: (self.step, value) for name, value in self.results.items()}
        return {name: evaluation for name, evaluation in last.items() if "/" in name}

    @property
    def main_metric(self) -> str:
        """`NAME/METRIC` of the run's main evaluation; "" if there is none."""
        if best := self.config["checkpoint"]["best_metric"]:
            return str(best)
        names = sorted(self.evaluations, key=lambda name: not name.startswith("test/"))
        usual = (name for metric in _MAIN for name in names if name.partition("/")[2] == metric)
        return next(usual, names[0] if names else "")

    @property
    def time(self) -> dict[str, float]:
        """`elapsed_seconds`, `goodput` and seconds by category; {} if not logged."""
        if self.results:
            return {**self.results, "elapsed_seconds": self.results["seconds"]}
        return next((row for row in reversed(self.rows) if "elapsed_seconds" in row), {})


def percent(share: float) -> str:
    """`93.0 %`, with a non-breaking space."""
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def value_text(name: str, value: float, digits: int = 2) -> str:
    """A metric's value as text: `93.00 %`, `0.3143`, `300`."""
    return number_text(name, value, digits).replace(" ", "\N{NO-BREAK SPACE}")


def metric_words(name: str) -> str:
    """A metric's name in a sentence: `top-5 accuracy` for `test/accuracy_top5`."""
    metric = name.rpartition("/")[2]
    return _WORDS.get(metric, metric.replace("_", " "))


def metric_title(name: str) -> str:
    """A metric's name as a title: `Top-5 accuracy, test` for `test/accuracy_top5`."""
    text, source = metric_words(name), name.rpartition("/")[0]
    return f"{text[:1].upper()}{text[1:]}" + (f", {source}" if source else "")


def data_title(name: str) -> str:
    """A data set without its folders and options: `photos`, `glyphs`."""
    is_path = name.startswith(("/", ".", "~")) or "://" in name
    return name.rstrip("/").rpartition("/")[2] if is_path else name.partition("(")[0]


def tail(path: str | Path) -> str:
    """The last parts of an absolute path; other paths are returned unchanged."""
    return "/".join(Path(path).parts[-2:]) if str(path).startswith("/") else str(path)


def read_run(workdir: str | Path) -> Run:
    """Reads a work directory, local or at gs://; UserError if it is not one, or damaged."""
    folder = to_path(workdir)
    if not (folder / METRICS_FILE).is_file():
        below = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))
        hint = f"Runs below it: {', '.join(below[:8])}." if below else "Not a run's --workdir."
        raise UserError(f"{workdir} holds no {METRICS_FILE}. {hint}")
    return Run(folder, read_object(folder / CONFIG_FILE), read_metrics(folder))
