"""One page about a training run."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import math
import shlex
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from vit_jax.command_line import ROOT, get_config
from vit_jax.errors import UserError, counted
from vit_jax.files.paths import full_path, to_path, write_atomically
from vit_jax.report.model import inside, load_subject, predictions
from vit_jax.report.page import Html, details, figure_picture, note, page, table, tag
from vit_jax.report.plot import choose_panels, draw
from vit_jax.report.runs import HOUSEKEEPING, Run, read_run

_MOST_ROWS = 300  # of training, in the table of numbers


def write_report(workdir: str, *, output: str = "", max_examples: int = 2000) -> Path:
    """Writes a self-contained HTML page about a run, finished or not; returns the file.

    What the run does not have is said in a sentence in its place.

    Args:
      workdir: of the run, here or at gs://.
      output: file to write; "" is `WORKDIR/report.html`.
      max_examples: of the evaluation data that the model is asked about; 0: none.

    Raises:
      UserError: it is no work directory, or one of another version of the code.
    """
    run = read_run(workdir)
    subject = functools.cache(lambda: load_subject(run, max_examples))

    def of_model(build: Callable[..., list[Html]], *arguments: Any) -> list[Html]:
        try:
            return build(*arguments, *subject())
        except UserError as error:
            return [note(f"Not shown. {error}")]

    try:
        sections = [
            ("results", "Results", results(run)),
            ("curves", "Curves", curves(run)),
            ("time", "Where the time went", time(run)),
            ("predictions", "Predictions", of_model(predictions, run)),
            ("inside", "Inside the model", of_model(inside)),
            ("settings", "Settings", settings(run)),
            ("provenance", "Provenance", provenance(run)),
        ]
        text = page(full_path(workdir).name, summary(run), sections)
    except KeyError as error:
        message = f"{workdir} has no {error}: another version of the code has written it."
        raise UserError(message) from error
    path = to_path(output or f"{workdir}/report.html")
    write_atomically(path, text)
    return path


def summary(run: Run) -> str:
    """One line: model, data, how far, how good, when, on what."""
    model, data = run.config["model"], run.config["dataset"]
    sizes = [f"{key} {n}" for key, n in model.items() if type(n) in (int, list)]
    parts = [
        f"{model['name']} ({', '.join(sizes)})",
        f"{run.config['objective']['name']} on {data['name']} {data['split']}",
        f"step {run.step:,} of {run.length}" + ("" if run.results else ", not ended"),
    ]
    if (name := run.main_metric) in run.evaluations:
        parts.append(f"{name} {value_text(name, run.evaluations[name][1])}")
    if run.starts:
        day = run.starts[0]["time"].replace("T", " ")[:16]
        parts.append(f"begun {day} UTC on {_devices(run.starts[-1])}")
    return " · ".join(parts)


def results(run: Run) -> list[Html]:
    """A row per evaluator; a published number in that of the main metric."""
    evaluators, data = run.config["evaluators"], run.config["dataset"]
    if not evaluators:
        return [note("The config has no evaluators.")]
    found, published = run.evaluations, run.config["sweep"]["published"]
    metrics = list(dict.fromkeys(name.partition("/")[2] for name in found))
    rows = []
    for key, each in evaluators.items():
        steps = [step for name, (step, _) in found.items() if name.startswith(f"{key}/")]
        names = [f"{key}/{metric}" for metric in metrics]
        values = [value_text(name, found[name][1]) if name in found else "" for name in names]
        is_main = run.main_metric.startswith(f"{key}/")
        source = f"{each['dataset'] or data['name']} {each['split']}"
        step = f"{steps[0]:,}" if steps else "not yet"
        rows.append([key, *values, step, source, published if is_main else ""])
    columns = ["evaluator", *metrics, "step", "data", "published"]
    content = [table(columns, rows, label="Results", kind="numbers results")]
    if not run.results:
        content.append(note("The run has not ended: these are its last evaluations so far."))
    if not published:
        content.append(note("The recipe states no published number to compare with."))
    return content


def curves(run: Run) -> list[Html]:
    """A picture per metric, of training and of all evaluators, and the numbers."""
    if not run.curves:
        return [note("No numbers have been logged yet.")]
    content = []
    for panel in choose_panels([run], ()):
        shown = run.curves_of(panel).items()
        ends = ", ".join(f"{name} {value_text(name, each.values[-1])}" for name, each in shown)
        try:
            figure = draw([run], [panel], x="step", smooth=0.02)
        except UserError as error:
            return [note(f"Not drawn. {error}"), _numbers(run)]
        figure.set_size_inches(4.4, 3.1)  # as wide as a phone
        alt = f"{panel} over the steps; at the end {ends}"
        content.append(figure_picture(figure, alt=alt, caption=f"At the end {ends}."))
    return [tag("div", *content, class_="grid-of"), _numbers(run)]


def _numbers(run: Run) -> Html:
    every = math.ceil(len(run.rows) / _MOST_ROWS)
    rows = [
        (row["step"], *(value_text(name, row[name]) if name in row else "" for name in run.curves))
        for i, row in enumerate(run.rows)
        if i % every == 0 or any("/" in name for name in row)
    ]
    label = "Metrics by step"
    return details("Numbers", table(["step", *run.curves], rows, label=label, kind="numbers"))


def value_text(name: str, value: float) -> str:
    """A metric's value: `93.00 %`, `0.3143`, `300`."""
    shares = ("accuracy", "mAP", "calibration", "goodput", "mfu")
    if any(part in name for part in shares):
        return f"{100 * value:.2f} %"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def time(run: Run) -> list[Html]:
    """Where the wall time went, and how fast the training was."""
    times = run.time
    if not times:
        return [note("No times have been logged yet.")]
    elapsed = times["elapsed_seconds"]
    parts = {"training": times["goodput"] * elapsed}
    for key, seconds in times.items():
        if key.endswith("_seconds") and key != "elapsed_seconds":
            parts[key.removesuffix("_seconds").replace("_", " ")] = seconds
    rows = [(kind, f"{each:,.1f}", f"{each / elapsed:.1%}") for kind, each in parts.items()]
    duration = datetime.timedelta(seconds=round(elapsed))
    text = f"{duration} in all; {times['goodput']:.1%} of it trained (goodput)."
    medians = {name: statistics.median(curve.values) for name, curve in run.curves.items()}
    if speed := medians.get("images_per_second"):
        text += f" Training went at {speed:,.0f} images per second (median)."
    if mfu := medians.get("mfu"):
        text += f" Of the chips' peak it used {mfu:.1%} (mfu)."
    columns, label = ["spent on", "seconds", "share"], "Where the time went"
    return [tag("p", text), table(columns, rows, label=label, kind="numbers")]


def settings(run: Run) -> list[Html]:
    """What differs from the recipe, or from the defaults; the whole config on demand."""
    ours = flatten_dict(run.config, sep=".")
    basis, theirs = _basis(run)
    keys = [key for key in {**ours, **theirs} if _json(ours, key) != _json(theirs, key)]
    keys.sort(key=lambda key: key.startswith(HOUSEKEEPING))
    content = [tag("p", f"What differs from {basis}:" if keys else f"The same as {basis}.")]
    if keys:
        rows = [(key, _json(ours, key), _json(theirs, key)) for key in keys]
        columns = ["key", "this run", "recipe" if basis.startswith("configs/") else "default"]
        content.append(table(columns, rows, label="Differing settings", kind="settings"))
    text = json.dumps(run.config, indent=2, ensure_ascii=False)
    return [*content, details("The whole config", tag("pre", text, tabindex=0))]


def provenance(run: Run) -> list[Html]:
    """Each start of the run: when, from where, with what."""
    if not run.starts:
        return [note("The work directory has no provenance.jsonl.")]
    keys = ("time", "start_step", "commit", "uncommitted_changes", "num_processes", "host")
    rows = [
        [*("unknown" if each[key] is None else each[key] for key in keys), _devices(each)]
        for each in run.starts
    ]
    columns = [*(key.replace("_", " ") for key in keys), "devices"]
    versions = {"python": run.starts[-1]["python"], **run.starts[-1]["packages"]}
    return [
        tag("p", f"The run was started {counted(len(rows), 'time')}."),
        table(columns, rows, label="Starts"),
        *(tag("pre", each, tabindex=0) for each in dict.fromkeys(x["command"] for x in run.starts)),
        details("Versions", table(["package", "version"], versions.items(), label="Versions")),
    ]


def _devices(start: dict[str, Any]) -> str:
    return f"{start['num_devices']} x {', '.join(start['devices'])}"


def _basis(run: Run) -> tuple[str, dict[str, Any]]:
    """What the config is compared with, and its values by dotted keys."""
    command = run.starts[-1]["command"] if run.starts else ""
    words = shlex.split(command.replace("--config ", "--config="))
    spec = next((each for each in words if each.startswith("--config=")), "")
    path, separator, argument = spec.removeprefix("--config=").partition(":")
    recipe = f"configs/{Path(path).name}"
    # Only recipes of this clone: a command of someone else's is not run.
    if Path(path).parent.name == "configs" and (ROOT / recipe).is_file():
        recipe += separator + argument
        with contextlib.suppress(UserError):  # of another version, or its data are not here
            return recipe, flatten_dict(get_config(f"{ROOT}/{recipe}").to_dict(), sep=".")
    return "the defaults of vit_jax/config.py", flatten_dict(get_config().to_dict(), sep=".")


def _json(values: dict[str, Any], key: str) -> str:
    """A value as config.json spells it, so that tuples are lists."""
    return json.dumps(values[key], ensure_ascii=False) if key in values else "absent"
