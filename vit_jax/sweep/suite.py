"""What a paper reports of a model, in one table: few-shot, classification, fine-tuning.

`evaluated_model.json` says which model a folder is about; each task has a file `NAME.json`, or a
folder `NAME` with the sweep of its fine-tuning. What is finished is read back, so that the same
command resumes, and several tasks share the work.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from ml_collections import ConfigDict

from vit_jax import command_line
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError, as_user_error
from vit_jax.evaluators.few_shot import confidence95
from vit_jax.files.atomic import read_object, write_json
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.probe import probe
from vit_jax.parameters.names import flatten_names
from vit_jax.sweep.run import run_sweep
from vit_jax.sweep.suite_table import Row, means, write_report

MODEL_FILE = "evaluated_model.json"
_CLASSIFICATION = ("accuracy", "accuracy_top5", "calibration_error")


@dataclasses.dataclass(frozen=True)
class SuiteTask:
    """One thing to measure.

    Attributes:
      name: in the table, and of its file; its data set for short.
      kind: a key of `KINDS`.
      settings: of the kind: arguments of `probe` or `evaluate`, or the `config` of a sweep.
      group: of tasks whose mean is reported too.
      published: the number of a paper with its source, or "".
    """

    name: str
    kind: str
    settings: Mapping[str, Any]
    group: str = ""
    published: str = ""


def evaluate_suite(
    model: Any,
    tasks: Sequence[SuiteTask],
    workdir: str,
    *,
    seeds: int = 3,
    data_dir: str = "",
    batch_size: int = 128,
    num_tasks: int = 1,
    task: int = 0,
) -> list[Row]:
    """Does every `num_tasks`-th task from number `task` on, and reports on all.

    A task whose data is not there is left out; the table says what prepares it.

    Args:
      model: see `load_model`; fine-tuning reads its `source` again.
      workdir: a local folder of this suite; `suite.md`, `suite.csv` and `suite.json` go there.
      seeds: of fine-tuning, and choices of the images for few-shot.
      data_dir: where TFDS sets are prepared; "" for TFDS's default.
      batch_size: of `few_shot` and `evaluate`.

    Raises:
      UserError: the folder is about another model, or no task's data is there.
    """
    if seeds < 1:
        raise UserError(f"--seeds={seeds} must be 1 or more.")
    folder = Path(workdir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, model)
    shared = {"data_dir": data_dir, "batch_size": batch_size, "seeds": seeds}
    absent = {each.name: error for each in tasks if (error := _absence(each, data_dir))}
    for name, error in absent.items():
        logging.info("Left out: %s: %s", name, error)
    if len(absent) == len(tasks):
        raise UserError(
            f"no data set of the suite is there; the first: {next(iter(absent.values()))}"
        )
    mine = [each for i, each in enumerate(tasks) if i % num_tasks == task]
    for number, each in enumerate(mine, start=1):
        if each.name in absent or _read(each, folder, shared) is not None:
            continue
        logging.info("Task %d of %d: %s", number, len(mine), each.name)
        found = KINDS[each.kind].measure(each, model.source, folder, shared)
        if found is not None:
            write_json(_file(each, folder), {"settings": _identity(each, shared), **found})
        write_report(folder, _rows(tasks, folder, shared, absent), model.source)
    rows = _rows(tasks, folder, shared, absent)
    write_report(folder, rows, model.source)
    return rows


def create_tasks(
    specs: Sequence[Mapping[str, Any]], overrides: Sequence[str] = ()
) -> list[SuiteTask]:
    """Tasks from the attributes of `SuiteTask`, after `--config.KEY=VALUE` of the command line.

    Raises:
      UserError: a mistake in an override, or nothing is trained.
    """
    tasks = []
    for spec in specs:
        task = SuiteTask(**spec)
        if task.kind == "fine_tune":
            flag_values = flags.FlagValues()
            config = command_line.override(task.settings["config"], [*overrides], flag_values)
            task = dataclasses.replace(task, settings={"config": config})
        elif overrides:
            raise UserError(
                f"unexpected arguments: {' '.join(overrides)}; nothing is trained here."
            )
        tasks.append(task)
    return tasks


def _claim(folder: Path, model: Any) -> None:
    """Notes down which model the folder is about, or raises UserError if it is another one."""
    digest = hashlib.sha256()
    for name, array in sorted(flatten_names(model.params).items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    path, mine = folder / MODEL_FILE, {"model": model.source, "sha256": digest.hexdigest()}
    if not path.exists():
        write_json(path, mine)
    elif (found := read_object(path))["sha256"] != mine["sha256"]:
        raise UserError(
            f"{folder} has evaluations of other parameters ({found['model']}). Choose another "
            "--workdir."
        )


def _absence(task: SuiteTask, data_dir: str) -> str:
    """Why the data of a task cannot be read; "" if it can."""
    try:
        for arguments in KINDS[task.kind].data(task.settings, data_dir):
            create_dataset(**arguments)
    except UserError as error:
        return str(error)
    return ""


def _file(task: SuiteTask, folder: Path) -> Path:
    return folder / f"{_safe(task.name)}.json"


def _safe(name: str) -> str:
    """The name of a task, which may be a path, as that of a file."""
    return re.sub(r"[^\w.=-]+", "_", name).strip("_.")


def _identity(task: SuiteTask, shared: Mapping[str, Any]) -> dict[str, Any]:
    """What a result depends on besides the model."""
    return {"kind": task.kind, **task.settings, "seeds": shared["seeds"]}


def _read(task: SuiteTask, folder: Path, shared: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result of a task that is finished with these settings."""
    path = (
        folder / _safe(task.name) / "sweep.json"
        if task.kind == "fine_tune"
        else _file(task, folder)
    )
    if not path.exists():
        return None
    found = read_object(path)
    if task.kind == "fine_tune":  # a sweep checks its config itself
        return found if found["complete"] and len(found["final"]) == shared["seeds"] else None
    return found if found.pop("settings") == _identity(task, shared) else None


def _rows(
    tasks: Sequence[SuiteTask], folder: Path, shared: Mapping[str, Any], absent: Mapping[str, str]
) -> list[Row]:
    rows = []
    for task in tasks:
        found = None if task.name in absent else _read(task, folder, shared)
        if found is not None:
            rows += KINDS[task.kind].rows(task, found)
            continue
        state = absent.get(task.name, "missing")
        rows.append(Row(task.group, task.name, "", None, None, "", task.published, state))
    return [*rows, *means(rows)]


def _named_data(settings: Mapping[str, Any], data_dir: str) -> list[dict[str, Any]]:
    splits = [settings[key] for key in ("train_split", "split") if key in settings]
    shared = {"name": settings["dataset"], "data_dir": data_dir, "preprocess": "decode"}
    return [{**shared, "split": split} for split in splits]


def _few_shot(
    task: SuiteTask, source: str, _folder: Path, shared: Mapping[str, Any]
) -> dict[str, Any]:
    return probe(
        source,
        kinds=["few_shot"],
        seeds=shared["seeds"],
        data_dir=shared["data_dir"],
        batch_size=shared["batch_size"],
        **task.settings,
    )


def _few_shot_rows(task: SuiteTask, found: Mapping[str, Any]) -> list[Row]:
    rows, of = [], f"{found['seeds']} seeds"
    for name, value in found.items():
        metric = name.removeprefix("few_shot/accuracy_")
        if metric != name and not metric.endswith("_ci95"):
            ci95 = found.get(f"{name}_ci95")
            spread = None if ci95 is None else 100 * ci95
            rows.append(Row(task.group, task.name, metric, 100 * value, spread, of, task.published))
    return rows


def _evaluate(
    task: SuiteTask, source: str, _folder: Path, shared: Mapping[str, Any]
) -> dict[str, Any]:
    return evaluate(
        source, data_dir=shared["data_dir"], batch_size=shared["batch_size"], **task.settings
    )


def _evaluate_rows(task: SuiteTask, found: Mapping[str, Any]) -> list[Row]:
    rows = []
    for metric in _CLASSIFICATION:
        if metric in found:
            p, n = found[metric], found["num_examples"]
            # The normal approximation of a binomial proportion; the calibration error is none.
            spread = None if metric == "calibration_error" else 196 * math.sqrt(p * (1 - p) / n)
            of = "" if spread is None else f"{n} images"
            published = task.published if metric == "accuracy" else ""
            rows.append(Row(task.group, task.name, metric, 100 * p, spread, of, published))
    return rows


def _fine_tune_data(settings: Mapping[str, Any], data_dir: str) -> list[dict[str, Any]]:
    config: ConfigDict = settings["config"]
    data = config.dataset
    splits = [data.split, config.evaluators.test.split]
    if len(config.sweep.learning_rates) > 1:
        splits += [config.sweep.train_split, config.sweep.validation_split]
    shared = {
        "name": data.name,
        "data_dir": data_dir or data.data_dir,
        "label_key": data.label_key,
        "preprocess": data.eval_preprocess,
    }
    return [{**shared, "split": split} for split in splits]


def _fine_tune(task: SuiteTask, source: str, folder: Path, shared: Mapping[str, Any]) -> None:
    """Leaves its result in the sweep's own folder."""
    config = task.settings["config"].copy_and_resolve_references()
    config.pretrained.source = source
    config.dataset.data_dir = shared["data_dir"] or config.dataset.data_dir
    try:
        run_sweep(config, str(folder / _safe(task.name)), seeds=shared["seeds"])
    except UserError as error:
        raise as_user_error(f"{task.name}: {error}", error) from error


def _fine_tune_rows(task: SuiteTask, found: Mapping[str, Any]) -> list[Row]:
    percents = [100 * each["accuracy"] for each in found["final"] if each["state"] == "finished"]
    if not percents:
        return [Row(task.group, task.name, "", None, None, "", task.published, "diverged")]
    spread, of = confidence95(percents), f"{len(percents)} seeds"
    mean = statistics.fmean(percents)
    return [Row(task.group, task.name, found["metric"], mean, spread, of, task.published)]


@dataclasses.dataclass(frozen=True)
class _Kind:
    """`data`: arguments of `create_dataset` that a task needs; `measure` and `rows`: see above."""

    data: Any
    measure: Any
    rows: Any


KINDS = {
    "few_shot": _Kind(_named_data, _few_shot, _few_shot_rows),
    "evaluate": _Kind(_named_data, _evaluate, _evaluate_rows),
    "fine_tune": _Kind(_fine_tune_data, _fine_tune, _fine_tune_rows),
}
