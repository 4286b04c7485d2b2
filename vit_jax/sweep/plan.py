"""Which runs a sweep consists of, and what has become of them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flax import traverse_util
from ml_collections import ConfigDict

from vit_jax.errors import UserError, check_known
from vit_jax.files.atomic import read_object
from vit_jax.train import RESULTS_FILE, RUNTIME_KEYS

DIVERGED_FILE = "diverged.json"

# `run`, `learning_rate`, `seed` and `state`: "finished" (with `accuracy`), "diverged" (with
# `message`) or "missing".
Outcome = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One training of a sweep: its folder below the sweep's, and what it is scored by."""

    name: str
    config: ConfigDict
    metric: str


def plan_rates(config: ConfigDict) -> list[float]:
    """The candidates in rising order.

    Raises:
      UserError: there are none, or some are not different positive numbers.
    """
    rates = config.sweep.learning_rates
    positive = all(isinstance(rate, int | float) and 0 < rate < math.inf for rate in rates)
    if not rates or not positive or len(set(rates)) < len(rates):
        raise UserError(
            f"sweep.learning_rates={rates} must be different positive numbers, as in "
            "--config.sweep.learning_rates=0.01,0.03."
        )
    return sorted(map(float, rates))


def plan_grid(config: ConfigDict) -> list[SweepRun]:
    """One run per learning rate on a part of train; none where there is no choice.

    Raises:
      UserError: see `plan_rates`; no evaluator `test`; no held-out part to choose on.
    """
    rates, sweep = plan_rates(config), config.sweep
    check_known("a sweep reports the evaluator", "test", config.evaluators)
    if len(rates) == 1:
        return []
    if not (sweep.train_split and sweep.validation_split):
        raise UserError(
            "choosing a learning rate needs a held-out part of train, as sweep.train_split="
            "'train[:90%]' and sweep.validation_split='train[90%:]'."
        )
    runs = []
    for rate in rates:
        planned = _copy(config, rate)
        planned.dataset.split = sweep.train_split
        validation = config.evaluators.test.copy_and_resolve_references()
        validation.update(split=sweep.validation_split, every_steps=0, at_start=False)
        with planned.unlocked():  # the test set is not looked at before the choice is made
            planned.evaluators = ConfigDict({"validation": validation})
        planned.checkpoint.best_metric = ""
        runs.append(SweepRun(f"grid/lr_{rate!r}", planned, f"validation/{metric(config)}"))
    return runs


def metric(config: ConfigDict) -> str:
    """What runs are scored by.

    Raises:
      UserError: the evaluator `test` does not measure it.
    """
    objective, evaluator = config.objective.name, config.evaluators.test.name
    if (objective == "multi_label") != (evaluator == "average_precision"):
        raise UserError(
            f"a sweep of objective.name={objective!r} is not scored by evaluators.test.name="
            f"{evaluator!r}; 'average_precision' goes with 'multi_label'."
        )
    return "mAP" if config.evaluators.test.name == "average_precision" else "accuracy"


def plan_final(config: ConfigDict, learning_rate: float, seeds: int) -> list[SweepRun]:
    """The runs on all of train, one per seed from `config.seed` on."""
    runs = []
    for seed in range(config.seed, config.seed + seeds):
        planned = _copy(config, learning_rate)
        planned.seed = seed
        runs.append(
            SweepRun(f"final/lr_{learning_rate!r}_seed_{seed}", planned, f"test/{metric(config)}")
        )
    return runs


def _copy(config: ConfigDict, learning_rate: float) -> ConfigDict:
    planned = config.copy_and_resolve_references()
    planned.optimizer.learning_rate = learning_rate
    return planned


def read_outcome(run: SweepRun, workdir: Path, resume: str = "auto") -> Outcome:
    """What its folder says has become of a run.

    Raises:
      UserError: the folder belongs to a run of another config, and `resume` is not "force".
    """
    folder = workdir / run.name
    rate, seed = run.config.optimizer.learning_rate, run.config.seed
    outcome: Outcome = {"run": run.name, "learning_rate": rate, "seed": seed, "state": "missing"}
    files = [name for name in (RESULTS_FILE, DIVERGED_FILE) if (folder / name).exists()]
    if not files:
        return outcome
    planned = json.loads(json.dumps(run.config.to_dict()))  # tuples become lists, as in the file
    if _identity(read_object(folder / "config.json")) != _identity(planned):
        if resume == "force":
            return outcome
        raise UserError(
            f"{folder} is of a sweep with another config. Choose another --workdir, or "
            "--resume=force to run it again."
        )
    found = read_object(folder / files[0])
    if files[0] == DIVERGED_FILE:
        return {**outcome, "state": "diverged", "message": found["message"]}
    return {**outcome, "state": "finished", "accuracy": found[run.metric]}


def _identity(values: dict[str, Any]) -> dict[str, Any]:
    """A config without what may differ between two starts of the same run."""
    flat = traverse_util.flatten_dict(values, sep=".")
    return {key: value for key, value in flat.items() if not key.startswith(RUNTIME_KEYS)}


def best_learning_rate(candidates: Sequence[Mapping[str, Any]]) -> float:
    """Of the most accurate candidate; the smaller rate where two are equal; diverged is worst.

    Raises:
      UserError: all diverged.
    """
    finished = [each for each in candidates if each["state"] == "finished"]
    if not finished:
        raise UserError("every learning rate diverged; try smaller sweep.learning_rates.")
    best = min(finished, key=lambda each: (-each["accuracy"], each["learning_rate"]))
    return best["learning_rate"]
