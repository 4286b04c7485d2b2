"""Choosing the learning rate on held-out data, then training on all of it (paper, B.1.1).

A sweep is a work directory of work directories: `grid/lr_0.01` for each candidate, trained on
`sweep.train_split` and scored on `sweep.validation_split`; then `final/lr_0.01_seed_0` and so on,
trained on `dataset.split` at the best rate and scored on the test set. What is finished is read
back, so a sweep can be killed, continued, and shared out over processes and array jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.errors import UserError
from vit_jax.files.atomic import write_atomically, write_json
from vit_jax.files.paths import make_folder, to_path
from vit_jax.multihost.first_process import run_on_first_process
from vit_jax.sweep.plan import (
    DIVERGED_FILE,
    Outcome,
    SweepRun,
    best_learning_rate,
    plan_final,
    plan_grid,
    plan_rates,
    read_outcome,
)
from vit_jax.sweep.report import summarize, table
from vit_jax.train import train_and_evaluate
from vit_jax.training.session import TrainingDivergedError


def run_sweep(
    config: ConfigDict,
    workdir: str,
    *,
    seeds: int = 3,
    num_tasks: int = 1,
    task: int = 0,
    resume: str = "auto",
) -> dict[str, Any]:
    """Does this task's share of the sweep, and reports on all of it (`sweep.json`, `sweep.txt`).

    The final runs start when every candidate has finished or diverged, whoever ran it.

    Args:
      config: a recipe with `config.sweep`; with one learning rate there is no grid to run.
      workdir: folder of the sweep, the same for all tasks.
      seeds: final runs, from `config.seed` on.
      num_tasks, task: every num_tasks-th run of each stage is done, from number `task` on.
      resume: see `train_and_evaluate`.

    Returns:
      What `sweep.json` holds, see `summarize`.

    Raises:
      UserError: a mistake in the config, or every rate diverged.
    """
    folder = to_path(workdir)

    def complete(runs: list[SweepRun]) -> list[Outcome]:  # of all, with our part done
        def read() -> list[Outcome]:
            return [read_outcome(run, folder, resume) for run in runs]

        found = run_on_first_process(read)
        mine = range(task, len(runs), num_tasks)
        left = [runs[i] for i in mine if found[i]["state"] == "missing"]
        for number, run in enumerate(left, start=1):
            logging.info("Sweep, run %d of %d: %s", number, len(left), run.name)
            execute(run, folder, resume)
        return run_on_first_process(read)

    planned = plan_grid(config)
    grid = complete(planned)
    learning_rate = None if planned else plan_rates(config)[0]
    if planned and all(outcome["state"] != "missing" for outcome in grid):
        learning_rate = best_learning_rate(grid)
    runs = [] if learning_rate is None else plan_final(config, learning_rate, seeds)
    summary = summarize(config, grid, learning_rate, complete(runs))
    if jax.process_index() == 0:
        _report(summary, folder)
    return summary


def _report(summary: dict[str, Any], folder: Path) -> None:
    text = table(summary)
    print(text)
    make_folder(folder)
    write_json(folder / "sweep.json", summary)
    write_atomically(folder / "sweep.txt", text + "\n")


def execute(run: SweepRun, workdir: Path, resume: str = "auto") -> None:
    """Trains one run to its end; that it diverged is an outcome too, and is written down."""
    diverged = workdir / run.name / DIVERGED_FILE
    run_on_first_process(lambda: diverged.unlink(missing_ok=True))
    try:
        train_and_evaluate(run.config, str(workdir / run.name), resume=resume)
    except TrainingDivergedError as error:
        message = str(error)
        logging.warning("%s diverged: %s", run.name, message)
        run_on_first_process(lambda: write_json(diverged, {"message": message}))


def task_number(task: int | None, num_tasks: int, environ: Mapping[str, str]) -> int:
    """--task, or where it is not given the number that Slurm gave this job of its array."""
    # With one task, an array is one over something else, such as datasets.
    if task is None and num_tasks > 1:
        task = int(environ.get("SLURM_ARRAY_TASK_ID", "0"))
    if not 0 <= (task or 0) < num_tasks:
        raise UserError(f"--task={task} must be from 0 to {num_tasks - 1}.")
    return task or 0
