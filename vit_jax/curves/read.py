"""Runs as curves: what their `metrics.jsonl` hold, what tells them apart."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from vit_jax.errors import UserError
from vit_jax.files.atomic import read_json
from vit_jax.workdir.metrics import METRICS_FILE, read_metrics

X_AXES = ("step", "images", "hours")
# Differences in these rarely say why one curve is above another; they are named last.
_HOUSEKEEPING = (
    "checkpoint.",
    "dataset.data_dir",
    "evaluators.",
    "loader.",
    "log.",
    "processes.",
    "sweep.",
)
_ABSENT = "(absent)"


@dataclasses.dataclass(frozen=True)
class Curve:
    """Values of one metric in the order of training; all three arrays are [N] float64."""

    steps: np.ndarray
    hours: np.ndarray  # since the start of the run; NaN where the line does not say
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class RunCurves:
    """One run: `config` has dotted keys, `curves` the names of `metrics.jsonl`."""

    workdir: Path
    config: dict[str, Any]
    curves: dict[str, Curve]
    last_step: int
    finished: bool

    def along(self, curve: Curve, x: str) -> np.ndarray:
        """Positions [N] of a curve's values on one of `X_AXES`.

        Raises:
          UserError: the run does not tell its batch size (`images`) or its times (`hours`).
        """
        if x == "hours":
            if not np.isfinite(curve.hours).any():
                raise UserError(f"--x=hours: {self.workdir} has no elapsed_seconds in its metrics.")
            return curve.hours
        if x == "step":
            return curve.steps
        key = "dataset.batch_size"
        if key not in self.config or not isinstance(self.config[key], int):
            raise UserError(f"--x=images: {self.workdir}/config.json has no {key}.")
        return curve.steps * self.config[key]


def read_run(workdir: str | Path) -> RunCurves:
    """Reads a work directory; the run may still be going on.

    Raises:
      UserError: it is no work directory, or nothing has been logged in it yet.
    """
    folder = Path(workdir)
    if not (folder / METRICS_FILE).is_file():
        below = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))[:8]
        found = f"Runs below it: {', '.join(below)}." if below else "It is no --workdir of a run."
        raise UserError(f"{workdir} holds no {METRICS_FILE}. {found}")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder / 'config.json'} holds no config, but {config!r:.60}.")
    config = traverse_util.flatten_dict(config, sep=".")
    rows = read_metrics(folder)
    if not rows:
        raise UserError(f"{folder / METRICS_FILE} has no finished line yet; try again later.")
    points: dict[str, list[tuple[float, float, float]]] = collections.defaultdict(list)
    for row in rows:
        step = row.pop("step")
        seconds = row.pop("elapsed_seconds", None)
        hours = seconds / 3600 if _is_number(seconds) else math.nan
        for name, value in row.items():
            if _is_number(value):
                points[name].append((step, hours, value))
    curves = {name: Curve(*np.array(points[name], np.float64).T) for name in points}
    return RunCurves(
        workdir=folder,
        config=config,
        curves=curves,
        last_step=int(max(curve.steps[-1] for curve in curves.values())) if curves else 0,
        finished=(folder / "results.json").exists(),  # the last file that the loop writes
    )


def _is_number(value: Any) -> bool:
    """Whether it can be drawn: NaN, from evaluations of a run that diverged, cannot."""
    return isinstance(value, int | float) and abs(value) < 1e300


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same in all configs, the most telling first.

    Those with the most different values come first, so that a sweep is labelled by what it sweeps.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    texts = {key: {value_text(config, key) for config in configs} for key in keys}
    differing = [key for key in keys if len(texts[key]) > 1]

    def rank(key: str) -> tuple[bool, int]:
        new = _ABSENT in texts[key]  # in the code, since the oldest of these runs
        return new or key.startswith(_HOUSEKEEPING), -len(texts[key])

    return sorted(differing, key=rank)


def value_text(values: Mapping[str, Any], key: str) -> str:
    """A value as a legend shows it; keys that other versions of the code did not have differ."""
    value = values.get(key, _ABSENT)
    return f"{value:g}" if isinstance(value, float) else str(value)


def legend_labels(runs: Sequence[RunCurves], *, max_keys: int = 3) -> list[str]:
    """One label per run: `folder: learning_rate=0.003 batch_size=512, to step 12000`."""
    names = [run.workdir.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = ["/".join(run.workdir.resolve().parts[-2:]) for run in runs]
    keys = differing_keys([run.config for run in runs])
    shown = keys[:max_keys]
    last_parts = [key.rpartition(".")[2] for key in shown]
    labels = []
    for name, run in zip(names, runs, strict=True):
        parts = []
        for key, last in zip(shown, last_parts, strict=True):
            text = value_text(run.config, key)
            text = text if len(text) <= 32 else f"{text[:15]}…{text[-15:]}"
            parts.append(f"{last if last_parts.count(last) == 1 else key}={text}")
        label = f"{name}: {'  '.join(parts)}" if parts else name
        labels.append(label if run.finished else f"{label}  (at step {run.last_step:,})")
    return labels


def smoothed(x: np.ndarray, y: np.ndarray, width: float) -> np.ndarray:
    """Mean over the window of `width` around each position; x [N] rising, y [N] -> [N].

    At the start, where curves are steep, the window shrinks to both sides alike; at the end it is
    cut off, so that the last value is an average, too.
    """
    half = np.minimum(width / 2, x - x[0])
    first = np.searchsorted(x, x - half, side="left")
    last = np.searchsorted(x, x + half, side="right")
    sums = np.concatenate([[0.0], np.cumsum(y)])
    return (sums[last] - sums[first]) / (last - first)
