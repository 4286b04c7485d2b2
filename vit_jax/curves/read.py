"""Runs as curves: what their `metrics.jsonl` hold, what tells them apart."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from vit_jax.errors import UserError
from vit_jax.files.atomic import read_object
from vit_jax.files.paths import full_path, to_path
from vit_jax.workdir.metrics import METRICS_FILE, read_metrics

X_AXES = ("step", "images", "hours")
# Differences in these rarely say why one curve is above another; they are named last.
_HOUSEKEEPING = re.compile(
    r"(checkpoint|evaluators|loader|log|processes|sweep)\.|dataset\.data_dir$"
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

    def along(self, curve: Curve, x: str) -> np.ndarray:
        """Positions [N] of a curve's values on one of `X_AXES`."""
        if x == "hours":
            return curve.hours
        return curve.steps * (self.config["dataset.batch_size"] if x == "images" else 1)


def read_run(workdir: str | Path) -> RunCurves:
    """Reads a work directory; the run may still be going on.

    Raises:
      UserError: it is no work directory.
    """
    folder = to_path(workdir)
    if not (folder / METRICS_FILE).is_file():
        below = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))
        found = f"Runs below it: {', '.join(below[:8])}." if below else "It is no run's --workdir."
        raise UserError(f"{workdir} holds no {METRICS_FILE}. {found}")
    config = traverse_util.flatten_dict(read_object(folder / "config.json"), sep=".")
    points: dict[str, list[tuple[float, float, float]]] = collections.defaultdict(list)
    for row in read_metrics(folder):
        step = row.pop("step")
        seconds = row.pop("elapsed_seconds", None)
        hours = math.nan if seconds is None else seconds / 3600
        for name, value in row.items():
            # NaN, from evaluations of a run that diverged, cannot be drawn.
            if isinstance(value, int | float) and math.isfinite(value):
                points[name].append((step, hours, value))
    curves = {name: Curve(*np.array(points[name], np.float64).T) for name in points}
    return RunCurves(folder, config, curves)


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same in all configs, the most telling first.

    Those with the most different values come first, so that a sweep is labelled by what it sweeps.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    texts = {key: {value_text(config, key) for config in configs} for key in keys}

    def rank(key: str) -> tuple[bool, int]:
        new = _ABSENT in texts[key]  # in the code, since the oldest of these runs
        return new or _HOUSEKEEPING.match(key) is not None, -len(texts[key])

    return sorted((key for key in keys if len(texts[key]) > 1), key=rank)


def value_text(values: Mapping[str, Any], key: str) -> str:
    """A value as a legend shows it; keys that other versions of the code did not have differ."""
    value = values.get(key, _ABSENT)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 32 else f"{text[:15]}…{text[-15:]}"


def legend_labels(runs: Sequence[RunCurves], *, max_keys: int = 3) -> list[str]:
    """One label per run: `folder: learning_rate=0.003  batch_size=512`."""
    names = [full_path(run.workdir).name for run in runs]
    if len(set(names)) < len(names):
        names = ["/".join(full_path(run.workdir).parts[-2:]) for run in runs]
    differing = differing_keys([run.config for run in runs])
    keys, more = differing[:max_keys], len(differing) - max_keys
    last = [key.rpartition(".")[2] for key in keys]
    shown = {k: short if last.count(short) == 1 else k for k, short in zip(keys, last, strict=True)}
    labels = []
    for name, run in zip(names, runs, strict=True):
        parts = [f"{text}={value_text(run.config, key)}" for key, text in shown.items()]
        parts += [f"(and {more} more)"] if more > 0 else []
        labels.append(f"{name}: {'  '.join(parts)}" if parts else name)
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
