"""Chooses the learning rate on held-out data, then trains on all of it (paper, B.1.1).

A sweep is a work directory of work directories: `grid/lr_0.01` for each candidate, trained on
`sweep.train_split` and evaluated on `sweep.validation_split`; then `final/lr_0.01_seed_0` and so
on, trained on `dataset.split` at the best rate and evaluated on the test set. Finished runs are
reused, so a sweep can be killed, resumed, and split over processes and array jobs.
"""

import functools
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from vit_jax.errors import TrainingDivergedError, UserError
from vit_jax.files.paths import make_folder, read_object, to_path, write_atomically, write_json
from vit_jax.kinds import check_known
from vit_jax.multihost.agreement import run_on_first_process
from vit_jax.run import complete_config, to_plain
from vit_jax.workdir.claim import RUNTIME_KEYS, another_run
from vit_jax.workdir.description import RESULTS_FILE

DIVERGED_FILE = "diverged.json"

# `run`, `learning_rate`, `seed` and `state`: "finished" (with `accuracy`), "diverged" (with
# `message`) or "missing".
Outcome = dict[str, Any]


class SweepRun(NamedTuple):
    """One training of a sweep: its folder below the sweep's, and its metric."""

    name: str
    config: ConfigDict
    metric: str


def run_sweep(
    config: ConfigDict,
    workdir: str,
    *,
    train: Callable[..., Any],
    seeds: int = 3,
    num_tasks: int = 1,
    task: int = 0,
    resume: str = "auto",
) -> dict[str, Any]:
    """Runs this task's share of the sweep, and reports on all of it (`sweep.json`, `sweep.txt`).

    The final runs start when every candidate has finished or diverged, whichever task ran it; with
    a single learning rate at once.

    Args:
      workdir: folder of the sweep, the same for all tasks.
      train: `train.train_and_evaluate`, which takes `resume`.
      seeds: final runs, from `config.seed` on.
      num_tasks, task: this task runs every num_tasks-th run of each stage, starting at `task`.

    Returns the contents of `sweep.json`, see `summarize`; UserError if every rate diverged.
    """
    folder = to_path(workdir)

    def complete(runs: list[SweepRun]) -> list[Outcome]:  # of all, after our share
        run_missing(runs[task::num_tasks], folder, train=train, resume=resume)
        return read_outcomes(runs, folder, resume)

    grid, final, rate = complete(plan_grid(config)), list[Outcome](), None
    if all(outcome["state"] != "missing" for outcome in grid):
        rate = best_learning_rate(grid) if grid else plan_rates(config)[0]
        final = complete(plan_final(config, rate, seeds))
    summary = summarize(config, grid, rate, final)
    if jax.process_index() == 0:
        text = table(summary)
        print(text)
        make_folder(folder)
        write_json(folder / "sweep.json", summary)
        write_atomically(folder / "sweep.txt", text + "\n")
    return summary


def run_missing(
    runs: Sequence[SweepRun], folder: Path, *, train: Callable[..., Any], resume: str = "auto"
) -> None:
    """Trains those of the runs that have neither finished nor diverged, in their order."""
    pairs = zip(runs, read_outcomes(runs, folder, resume), strict=True)
    missing = [run for run, outcome in pairs if outcome["state"] == "missing"]
    for number, run in enumerate(missing, start=1):
        logging.info("Sweep, run %d of %d: %s", number, len(missing), run.name)
        diverged = folder / run.name / DIVERGED_FILE
        run_on_first_process(functools.partial(diverged.unlink, missing_ok=True))
        try:
            train(run.config, str(diverged.parent), resume=resume)
        except TrainingDivergedError as error:  # an outcome too
            logging.warning("%s diverged: %s", run.name, error)
            run_on_first_process(functools.partial(write_json, diverged, {"message": str(error)}))


def plan_rates(config: ConfigDict) -> list[float]:
    """The candidates in ascending order; UserError unless they are distinct positive numbers."""
    rates = config.sweep.learning_rates
    positive = all(isinstance(rate, int | float) and 0 < rate < math.inf for rate in rates)
    if not rates or not positive or len(set(rates)) < len(rates):
        text = f"sweep.learning_rates={rates} must be distinct positive numbers"
        raise UserError(f"{text}, as in --config.sweep.learning_rates=0.01,0.03.")
    return sorted(map(float, rates))


def plan_grid(config: ConfigDict) -> list[SweepRun]:
    """A run per learning rate on a part of train; none if there is no choice."""
    rates, sweep = plan_rates(config), config.sweep
    check_known("a sweep reports the evaluator", "test", config.evaluators)
    if len(rates) == 1:
        return []
    if not (sweep.train_split and sweep.validation_split):
        example = "sweep.train_split='train[:90%]' and sweep.validation_split='train[90%:]'"
        raise UserError(f"choosing a learning rate needs a held-out part of train; set {example}.")
    runs = []
    for rate in rates:
        planned = config.copy_and_resolve_references()
        planned.schedule.learning_rate, planned.dataset.split = rate, sweep.train_split
        validation = config.evaluators.test.copy_and_resolve_references()
        validation.update(split=sweep.validation_split, every_steps=0, at_start=False)
        planned.evaluators = ConfigDict({"validation": validation})  # no test set before the choice
        planned.checkpoint.best_metric = ""
        runs.append(SweepRun(f"grid/lr_{rate!r}", planned, f"validation/{metric(config)}"))
    return runs


def metric(config: ConfigDict) -> str:
    """The metric of the runs; UserError if the evaluator `test` does not compute it."""
    several = config.objective.name == "multi_label"
    if several != (config.evaluators.test.name == "average_precision"):
        raise UserError(
            f"evaluators.test.name={config.evaluators.test.name!r} has no metric for a sweep of "
            f"objective.name={config.objective.name!r}; 'average_precision' is for 'multi_label'."
        )
    if config.objective.name in ("pixel_regression", "regression"):
        raise UserError(f"a sweep of objective.name={config.objective.name!r} has no accuracy.")
    return {"average_precision": "mAP", "segmentation": "mIoU"}.get(
        config.evaluators.test.name, "accuracy"
    )


def plan_final(config: ConfigDict, learning_rate: float, seeds: int) -> list[SweepRun]:
    """The runs on all of train, one per seed from `config.seed` on."""
    runs = []
    for seed in range(config.seed, config.seed + seeds):
        planned = config.copy_and_resolve_references()
        planned.schedule.learning_rate, planned.seed = learning_rate, seed
        name = f"final/lr_{learning_rate!r}_seed_{seed}"
        runs.append(SweepRun(name, planned, f"test/{metric(config)}"))
    return runs


def read_outcomes(runs: Iterable[SweepRun], folder: Path, resume: str = "auto") -> list[Outcome]:
    """See `read_outcome`; the same in every process."""
    return run_on_first_process(lambda: [read_outcome(run, folder, resume) for run in runs])


def read_outcome(run: SweepRun, workdir: Path, resume: str) -> Outcome:
    """The outcome of a run from its folder; UserError if it belongs to another config."""
    folder = workdir / run.name
    rate, seed = run.config.schedule.learning_rate, run.config.seed
    outcome = {"run": run.name, "learning_rate": rate, "seed": seed, "state": "missing"}
    finished, diverged = folder / RESULTS_FILE, folder / DIVERGED_FILE
    if not finished.exists() and not diverged.exists():
        return outcome
    config = to_plain(complete_config(run.config, str(folder)))
    if problem := another_run(folder / "config.json", config, RUNTIME_KEYS):
        if resume == "force":
            return outcome
        raise UserError(f"{problem} Choose another --workdir, or --resume=force to run it again.")
    if finished.exists():
        results = read_object(finished, **{run.metric: int | float})
        return {**outcome, "state": "finished", "accuracy": results[run.metric]}
    message = read_object(diverged, message=str)["message"]
    return {**outcome, "state": "diverged", "message": message}


def best_learning_rate(candidates: Iterable[Outcome]) -> float:
    """Of the most accurate candidate; the smaller rate in case of a tie."""
    finished = [run for run in candidates if run["state"] == "finished"]
    if not finished:
        raise UserError("every learning rate diverged; try smaller sweep.learning_rates.")
    return max(finished, key=lambda run: (run["accuracy"], -run["learning_rate"]))["learning_rate"]


def summarize(
    config: ConfigDict, grid: list[Outcome], learning_rate: float | None, final: list[Outcome]
) -> dict[str, Any]:
    """A summary of a sweep, finished or not, for JSON.

    `learning_rate` is None until the grid is complete. `mean` and `std` (sample) are in
    percent, over the finished final runs.
    """
    percents = percents_of(final)
    missing = [run["run"] for run in (*grid, *final) if run["state"] == "missing"]
    return {
        "complete": not missing,
        "missing": missing,
        "validation_split": config.sweep.validation_split,
        "grid": grid,
        "learning_rate": learning_rate,
        "metric": metric(config),
        "test_split": config.evaluators.test.split,
        "final": final,
        "mean": statistics.fmean(percents) if percents else None,
        "std": statistics.stdev(percents) if len(percents) > 1 else None,
        "published": config.sweep.published,
    }


def percents_of(outcomes: Iterable[Outcome]) -> list[float]:
    """Accuracies of the finished runs."""
    return [100 * run["accuracy"] for run in outcomes if run["state"] == "finished"]


def table(summary: Mapping[str, Any]) -> str:
    """The summary as text."""
    lines, metric = [], summary["metric"]
    if summary["grid"]:
        lines.append(f"{'learning rate':16}{metric} on {summary['validation_split']}")
    for run in summary["grid"]:
        chosen = "  <- chosen" if run["learning_rate"] == summary["learning_rate"] else ""
        lines.append(f"{run['learning_rate']:<16g}{_result(run)}{chosen}")
    if summary["final"]:
        rate = f"rate {summary['learning_rate']:g}"
        lines.append(f"{rate:16}{metric} on {summary['test_split']}")
    lines += [f"seed {run['seed']:<11}{_result(run)}" for run in summary["final"]]
    if summary["mean"] is not None:
        spread = "" if summary["std"] is None else f" +- {summary['std']:.2f}"
        count = f"{len(percents_of(summary['final']))} of {len(summary['final'])} seeds"
        mean = f"{summary['mean']:.2f}{spread} (mean and standard deviation of {count})"
        lines.append(f"{'this sweep':16}{mean}")
    if summary["published"]:
        lines.append(f"{'published':16}{summary['published']}")
    if missing := ", ".join(summary["missing"]):
        stage = "" if summary["final"] else "; the final runs follow the grid"
        lines.append(f"Not complete; missing: {missing}{stage}. The same command resumes.")
    return "\n".join(lines)


def _result(outcome: Outcome) -> str:
    if outcome["state"] == "finished":
        return f"{100 * outcome['accuracy']:.2f}"
    if outcome["state"] == "diverged":
        return f"diverged at {outcome['message'].partition(';')[0]}"
    return outcome["state"]


def task_number(task: int | None, num_tasks: int, environ: Mapping[str, str]) -> int:
    """--task, or if not given the number of this job in its Slurm array."""
    if task is None:  # with a single task, the array is over something else, such as datasets
        task = int(environ.get("SLURM_ARRAY_TASK_ID", "0")) if num_tasks > 1 else 0
    if not 0 <= task < num_tasks:
        raise UserError(f"--task={task} must be from 0 to {num_tasks - 1}.")
    return task
