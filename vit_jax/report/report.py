"""An HTML page about a training run."""

import contextlib
import functools
import json
import math
import shlex
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from vit_jax import ROOT
from vit_jax.command_line import get_config
from vit_jax.console import format_seconds
from vit_jax.errors import UserError
from vit_jax.files.paths import reading, to_path, write_atomically
from vit_jax.report.model import inside, load_subject, predictions
from vit_jax.report.page import Html, bar, chart, details, note, page, table, tag
from vit_jax.report.plot import choose_panels, draw
from vit_jax.report.runs import HOUSEKEEPING, Run, metric_title, percent, read_run, value_text
from vit_jax.report.summary import devices_text, header, result, results, title
from vit_jax.wording import counted

_MOST_ROWS = 300  # of training metrics, in the table of numbers
_KINDS = {"compile": "compilation", "data_wait": "waiting for data", "lost": "repeated updates"}


def write_report(
    workdir: str,
    *,
    output: str = "",
    max_examples: int | None = None,
    recipe: str = "",
    against: Mapping[str, float] | None = None,
) -> Path:
    """Writes a self-contained HTML page about a run, finished or not; returns the file.

    A sentence replaces whatever the run does not have.

    Args:
      workdir: of the run, local or at gs://.
      output: file to write; "" is `WORKDIR/report.html`.
      max_examples: evaluation examples to predict; 0: none. By default 2,000, but none of data at
        a path, which somebody else may have chosen: a number asks for them.
      recipe: the recipe to compare with, `configs/x.py:argument`; "" is the one in the command.
      against: accuracies of other models on the examples of the main evaluation, by name.

    UserError: not a work directory, or one from another version of the code.
    """
    run = read_run(workdir)
    subject = functools.cache(lambda: load_subject(run, max_examples))

    def of_model(build: Callable[..., list[Html]], *arguments: Any) -> list[Html]:
        try:
            return build(*arguments, *subject())
        except UserError as error:
            return [note(f"Not shown. {error}")]

    with reading(workdir, "is damaged or from another version of the code"):
        sections = [
            ("results", "Results", results(run, against or {})),
            ("curves", "Curves", curves(run)),
            ("time", "Where the time went", time(run)),
            ("predictions", "Predictions", of_model(predictions, run)),
            ("inside", "Inside the model", of_model(inside)),
            ("settings", "Settings", settings(run, recipe)),
            ("provenance", "Provenance", provenance(run)),
        ]
        text = page(": ".join(filter(None, [title(run), result(run)])), header(run), sections)
    path = to_path(output or f"{workdir}/report.html")
    write_atomically(path, text)
    return path


def curves(run: Run) -> list[Html]:
    """A figure per metric, of training and of all evaluators, and the numbers."""
    if not run.curves:
        return [note("No numbers have been logged yet.")]
    content = []
    for panel in choose_panels([run], ()):
        last = {k: value_text(panel, c.values[-1]) for k, c in run.curves_of(panel).items()}
        named = (f"{k.rpartition('/')[0] or 'training'} {text}" for k, text in last.items())
        ends = ", ".join(named if len(last) > 1 else last.values())
        try:
            figure = draw([run], [panel], x="step", smooth=0.02)
        except UserError as error:
            return [note(f"Not drawn. {error}"), _numbers(run)]
        figure.set_size_inches(4.4, 3.1)  # as wide as a phone
        alt = f"{metric_title(panel)} by step; last: {ends}"
        content.append(chart(figure, alt=alt, caption=f"Last: {ends}"))
    return [tag("div", *content, class_="charts"), _numbers(run)]


def _numbers(run: Run) -> Html:
    every = math.ceil(len(run.rows) / _MOST_ROWS)
    rows = [
        (row["step"], *(value_text(name, row[name]) if name in row else "" for name in run.curves))
        for i, row in enumerate(run.rows)
        if i % every == 0 or any("/" in name for name in row)
    ]
    columns = ["Step", *map(metric_title, run.curves)]
    return details("Numbers", table(columns, rows, label="Metrics by step", kind="numbers"))


def time(run: Run) -> list[Html]:
    """How the wall time was spent, and the speed of training."""
    times = run.time
    if not times:
        return [note("No times have been logged yet.")]
    elapsed = times["elapsed_seconds"]
    parts = {"training": times["goodput"] * elapsed}
    for key, seconds in times.items():
        kind = key.removesuffix("_seconds")
        if kind not in (key, "elapsed"):
            parts[_KINDS.get(kind, kind)] = seconds
    rows = [
        (kind, f"{seconds:,.1f} s", percent(seconds / elapsed), bar(seconds / elapsed))
        for kind, seconds in sorted(parts.items(), key=lambda part: -part[1])
        if round(seconds, 1)
    ]
    text = f"{format_seconds(elapsed)} in all."
    medians = {name: statistics.median(curve.values) for name, curve in run.curves.items()}
    if speed := medians.get("images_per_second"):
        text += f" Training ran at {speed:,.0f} images per second (median)."
    if mfu := medians.get("mfu"):
        text += f" It used {percent(mfu)} of the peak FLOP/s (MFU)."
    columns, label = ["Spent on", "Time", "Share", "0 to 100 %"], "Where the time went"
    return [tag("p", text), table(columns, rows, label=label, kind="bars")]


def settings(run: Run, recipe: str) -> list[Html]:
    """Differences from the recipe, or from the defaults; the whole config is collapsed."""
    ours = flatten_dict(run.config, sep=".")
    basis, usual = _basis(run, recipe)
    keys = [key for key in {**ours, **usual} if _json(ours, key) != _json(usual, key)]
    keys.sort(key=lambda key: key.startswith(HOUSEKEEPING))
    content = [tag("p", f"Differences from {basis}:" if keys else f"As in {basis}.")]
    if keys:
        rows = [(key, _json(ours, key), _json(usual, key)) for key in keys]
        columns = ["Key", "This run", "Recipe" if basis.startswith("configs/") else "Default"]
        content.append(table(columns, rows, label="Settings that differ", kind="settings"))
    text = json.dumps(run.config, indent=2, ensure_ascii=False)
    return [*content, details("Full config", tag("pre", text, tabindex=0))]


def provenance(run: Run) -> list[Html]:
    """Each start of the run: when, on what, with which command."""
    if not run.starts:
        return [note("The work directory has no provenance.jsonl.")]
    rows = []
    for start in run.starts:
        commit = (start["commit"] or "unknown")[:12]
        commit += " (changed)" if start["uncommitted_changes"] else ""
        at = start["time"][:19].replace("T", " "), f"{start['start_step']:,}"
        rows.append((*at, commit, devices_text(start), start["num_processes"]))
    columns = ["Started (UTC)", "At step", "Commit", "Devices", "Processes"]
    last, commands = run.starts[-1], dict.fromkeys(start["command"] for start in run.starts)
    versions = {"platform": last["host"], "python": last["python"], **last["packages"]}
    return [
        tag("p", f"The run was started {counted(len(rows), 'time')}."),
        table(columns, rows, label="Starts"),
        *(tag("pre", command.replace(" --", " \\\n  --"), tabindex=0) for command in commands),
        details("Versions", table(["Package", "Version"], versions.items(), label="Versions")),
    ]


def _basis(run: Run, recipe: str) -> tuple[str, dict[str, Any]]:
    """What to compare the config with, and its values by dotted keys."""
    command = run.starts[-1]["command"] if run.starts else ""
    words = shlex.split(command.replace("--config ", "--config="))
    spec = next((word for word in words if word.startswith("--config=")), "")
    path, separator, argument = (recipe or spec.removeprefix("--config=")).partition(":")
    path = f"configs/{path}.py" if path.isidentifier() else path  # the short form
    recipe = f"configs/{Path(path).name}"
    # Only recipes of this clone: never run code from someone else's command.
    if Path(path).parent.name == "configs" and (ROOT / recipe).is_file():
        recipe += separator + argument
        with contextlib.suppress(UserError):  # of another version, or its data are missing
            return recipe, flatten_dict(get_config(f"{ROOT}/{recipe}").to_dict(), sep=".")
    return "the defaults of vit_jax/config.py", flatten_dict(get_config().to_dict(), sep=".")


def _json(values: dict[str, Any], key: str) -> str:
    """A value as in config.json, where tuples are lists."""
    return json.dumps(values[key], ensure_ascii=False) if key in values else "absent"
