"""Evaluates a model as in papers, and compares with their numbers.

    python scripts/evaluate_paper.py MODEL --suite=fewshot --workdir=runs/paper
    python scripts/evaluate_paper.py MODEL --suite=vtab --workdir=runs/paper --seeds=1

MODEL is a work directory, a weights file or folder of any known format, https://, hf://owner/name,
or a name from scripts/zoo.py list. The suites (configs/suites.py) are

  fewshot   1, 5, 10 and 25 images per class, least squares on frozen features, on seven data sets
  imagenet  an ImageNet classifier, on ImageNet, V2, -A and -R
  transfer  fine-tuning on the five data sets of table 5, the learning rate chosen on held-out data
  vtab      fine-tuning on the 19 tasks of VTAB-1k, with the means of their groups

Tasks whose data are missing, or that fail, are skipped; the table says why, and the exit status
is 2. Prints the table and writes it to WORKDIR/SUITE/suite.md and suite.json. Each task has a file
NAME.json there, or a folder NAME with its fine-tuning sweep: the same command resumes, and several
tasks of a cluster can share the work. Fine-tuning takes --config.KEY=VALUE, as
--config.dataset.batch_size=64 for a small GPU.
"""

import argparse
import hashlib
import logging
import math
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax import ROOT, launch
from vit_jax.arguments import add_share, at_least, create_parser, names, split_overrides
from vit_jax.command_line import override
from vit_jax.errors import TransientError, UserError
from vit_jax.evaluators.few_shot import confidence95
from vit_jax.files.paths import read_object, reading, write_atomically, write_json
from vit_jax.inference.evaluate import evaluate
from vit_jax.inference.load import load_model
from vit_jax.inference.probe import probe
from vit_jax.sweep.run import percents_of, run_sweep, task_number
from vit_jax.train import train_and_evaluate

sys.path.insert(0, str(ROOT))  # for the recipes

from configs import suites

# See configs/suites.py: `name`, `group`, `published`, `kind` (`few_shot`, `evaluate`, `fine_tune`),
# and `settings`: arguments of `probe` or `evaluate`, or the `config` of a sweep.
Task = Mapping[str, Any]


class Row(NamedTuple):
    """A line of the table."""

    group: str
    task: str
    metric: str = ""
    ours: float | None = None  # percent
    ci95: float | None = None  # half of the 95 % interval
    of: str = ""  # what the interval is over
    published: str = ""
    state: str = "finished"  # or "missing", "diverged", or why the task was skipped


def evaluate_suite(
    model: Any,
    tasks: Sequence[Task],
    workdir: str,
    *,
    seeds: int = 3,
    data_dir: str = "",
    batch_size: int = 128,
    num_tasks: int = 1,
    task: int = 0,
) -> list[Row]:
    """Runs every `num_tasks`-th task from number `task` on, and reports on all.

    A task that cannot run, usually because its data are missing, is skipped; its row says why.

    Args:
      model: see `load_model`; fine-tuning loads its `source` again.
      workdir: a local folder of this suite; `suite.md` and `suite.json` go there. UserError
        if it belongs to another model.
      seeds: for fine-tuning, and for the choice of few-shot images.
      data_dir: where TFDS sets are prepared; "" for TFDS's default.
      batch_size: for `few_shot` and `evaluate`.
    """
    folder = Path(workdir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, model)

    def measure(kind: str, settings: Mapping[str, Any], path: Path) -> None:
        if kind == "fine_tune":
            config = settings["config"].copy_and_resolve_references()
            config.pretrained.source = model.source
            config.dataset.data_dir = data_dir or config.dataset.data_dir
            run_sweep(config, str(path.parent), train=train_and_evaluate, seeds=seeds)
            return
        options: dict[str, Any] = {"data_dir": data_dir, "batch_size": batch_size, **settings}
        if kind == "few_shot":
            results = probe(model.source, kinds=["few_shot"], seeds=seeds, **options)
        else:
            results = evaluate(model.source, **options)
        write_json(path, {"settings": {"kind": kind, **settings, "seeds": seeds}, **results})

    mine, failed = tasks[task::num_tasks], dict[str, str]()
    for number, my_task in enumerate(mine, start=1):
        if _read(my_task, folder, seeds) is None:
            name = my_task["name"]
            logging.info("Task %d of %d: %s", number, len(mine), name)
            try:
                measure(my_task["kind"], my_task["settings"], _path(my_task, folder))
            except TransientError:
                raise
            except UserError as error:
                failed[name] = str(error)
                logging.info("Skipped: %s: %s", name, error)
            _report(tasks, folder, seeds, failed, model.source)
    return _report(tasks, folder, seeds, failed, model.source)


def _claim(folder: Path, model: Any) -> None:
    """Records the model that the folder belongs to, or raises UserError if it is another one."""
    digest = hashlib.sha256()
    for name, array in sorted(flatten_dict(model.params, sep="/").items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    path = folder / "evaluated_model.json"
    mine = {"model": model.source, "sha256": digest.hexdigest()}
    if not path.exists():
        write_json(path, mine)
    if (claim := read_object(path, sha256=str, model=str))["sha256"] != mine["sha256"]:
        other = f"evaluations of other parameters ({claim['model']})"
        raise UserError(f"{folder} has {other}; choose another --workdir.")


def _path(task: Task, folder: Path) -> Path:
    """The result file, named after the task, whose name may be a path."""
    name = re.sub(r"[^\w.=-]+", "_", task["name"]).strip("_.")
    if name != task["name"]:  # `a/b` and `a_b` are different
        name += f"-{hashlib.sha256(task['name'].encode()).hexdigest()[:6]}"
    return folder / name / "sweep.json" if task["kind"] == "fine_tune" else folder / f"{name}.json"


def _read(task: Task, folder: Path, seeds: int) -> dict[str, Any] | None:
    """The result of a task, if it is finished with these settings."""
    if not (path := _path(task, folder)).exists():
        return None
    if task["kind"] == "fine_tune":  # a sweep checks its config itself
        sweep = read_object(path, complete=bool, final=list)
        return sweep if sweep["complete"] and len(sweep["final"]) == seeds else None
    results = read_object(path, settings=dict)
    settings = {"kind": task["kind"], **task["settings"], "seeds": seeds}
    return results if results["settings"] == settings else None


def _report(
    tasks: Sequence[Task], folder: Path, seeds: int, failed: Mapping[str, str], source: str
) -> list[Row]:
    """The rows, which are also written to `suite.md` and `suite.json`."""
    rows = []
    for task in tasks:
        row = Row(task["group"], task["name"], published=task["published"])
        results = _read(task, folder, seeds)
        with reading(str(_path(task, folder))):
            measured = [] if results is None else _measured(row, task["kind"], results)
        state = failed.get(row.task, "missing" if results is None else "diverged")
        rows += measured or [row._replace(state=state)]
    rows += means(rows)
    write_atomically(folder / "suite.md", markdown(rows, source) + "\n")
    write_json(folder / "suite.json", {"model": source, "rows": [row._asdict() for row in rows]})
    return rows


def _measured(row: Row, kind: str, results: Mapping[str, Any]) -> list[Row]:
    """A row per metric, in percent; none if all runs diverged."""
    if kind == "fine_tune":
        percents = percents_of(results["final"])
        of, ci95 = f"{len(percents)} seeds", confidence95(percents)
        row = row._replace(metric=results["metric"], ours=results["mean"], ci95=ci95, of=of)
        return [row] if percents else []
    rows = []
    for name, value in results.items():
        metric, ci95, of = name.removeprefix("few_shot/accuracy_"), None, ""
        if metric in ("accuracy", "accuracy_top5"):
            # The normal approximation of a binomial proportion.
            n = results["num_examples"]
            ci95, of = 196 * math.sqrt(value * (1 - value) / n), f"{n} images"
        elif re.fullmatch(r"\d+shot", metric):
            of = f"{results['seeds']} seeds"
            ci95 = 100 * results[f"{name}_ci95"] if f"{name}_ci95" in results else None
        elif metric != "calibration_error":
            continue
        rows.append(row._replace(metric=metric, ours=100 * value, ci95=ci95, of=of))
    return rows


def means(rows: Sequence[Row]) -> list[Row]:
    """Means over the tasks of each group, and over all, by metric."""
    groups: list[str | None] = list(dict.fromkeys(row.group for row in rows))
    result = []
    for group in [*groups, None] if len(groups) > 1 else groups:
        members = [row for row in rows if group in (None, row.group)]
        count = len({row.task for row in members})
        values: dict[str, list[float]] = {}
        for row in members if count > 1 else ():
            if row.ours is not None and row.metric != "calibration_error":
                values.setdefault(row.metric, []).append(row.ours)
        for metric, percents in values.items():
            of = f"mean of {len(percents)} of {count} tasks"
            name = f"mean {group or ''}".strip()
            result.append(Row("", name, metric, statistics.fmean(percents), of=of))
    return result


def markdown(rows: Sequence[Row], source: str) -> str:
    """The rows as a Markdown table."""
    lines = [
        f"{source}, in percent ± half of the 95 % interval.",
        "",
        "| group | task | metric | ours | over | published | state |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = "" if row.ci95 is None else f" ± {row.ci95:.2f}"
        ours = "-" if row.ours is None else f"{row.ours:.2f}{spread}"
        cells = (row.group, row.task, row.metric, ours, row.of, row.published, row.state)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    created = create_parser(__doc__)
    add = created.add_argument
    add("source", metavar="MODEL", help="model to evaluate")
    add("--suite", required=True, choices=suites.SUITES, help="tasks to evaluate it on")
    add("--workdir", required=True, metavar="DIR", help="results and runs; if it exists, resumes")
    add("--datasets", type=names, default=[], metavar="A,B", help="some of the suite's, or others")
    add("--seeds", type=at_least(1), default=3, help="for fine-tuning and few-shot (default 3)")
    add("--data_dir", default="", metavar="DIR", help="folder of prepared TFDS sets")
    add("--batch_size", type=int, default=128, help="except for fine-tuning (default 128)")
    add("--image_size", type=int, metavar="N", help="for fine-tuning (default 384)")
    add_share(created)
    return created


def main(arguments: argparse.Namespace, overrides: list[str]) -> None:
    model = load_model(arguments.source)
    sizes = model.description.model
    tasks = suites.tasks(arguments.suite, sizes, arguments.datasets, arguments.image_size)
    for settings in (task["settings"] for task in tasks):
        if "config" in settings:
            settings["config"] = override(settings["config"], overrides)
        elif overrides:
            raise UserError(f"--config.{overrides[0]}: this suite trains nothing.")
    rows = evaluate_suite(
        model,
        tasks,
        os.path.join(arguments.workdir, arguments.suite),
        seeds=arguments.seeds,
        data_dir=arguments.data_dir,
        batch_size=arguments.batch_size,
        num_tasks=arguments.num_tasks,
        task=task_number(arguments.task, arguments.num_tasks, os.environ),
    )
    print(markdown(rows, arguments.source))
    failed = [row.task for row in rows if row.state not in ("finished", "missing")]
    if failed:
        raise UserError(f"no result of {', '.join(failed)}; the table says why.")


if __name__ == "__main__":
    overrides, others = split_overrides(sys.argv[1:])
    arguments = parser().parse_args(others)
    launch.start_logging()
    with launch.one_line_errors(resumes=True):
        main(arguments, overrides)
