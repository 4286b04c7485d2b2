"""One page about a training run."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vit_jax import config as schema
from vit_jax.command_line import ROOT, load_recipe
from vit_jax.errors import UserError, counted
from vit_jax.files.paths import full_path, to_path, write_atomically
from vit_jax.report.charts import line_chart, share_bar, swatch, value_text
from vit_jax.report.model import inside, load_subject, predictions
from vit_jax.report.page import Html, details, note, page, table, tag
from vit_jax.report.runs import HOUSEKEEPING, Run, read_run
from vit_jax.training.clock import KINDS, format_seconds

OUTPUT = "report.html"
_SIZES = {
    "num_layers": "{} blocks",
    "hidden_size": "width {}",
    "num_heads": "{} heads",
    "patch_size": "patch {}",
    "resnet_layers": "ResNet {}",
}


def write_report(workdir: str, *, output: str = "", max_examples: int = 2000) -> Path:
    """Writes a self-contained HTML page about a run, finished or not.

    What the run does not have is said in a sentence in its place.

    Args:
      workdir: of the run, here or at gs://.
      output: file to write; "" is `WORKDIR/report.html`.
      max_examples: of the evaluation data that the model is asked about; 0: none.

    Returns:
      The file.

    Raises:
      UserError: it is no work directory, or one of another version of the code.
    """
    run = read_run(workdir)
    subject = functools.cache(lambda: load_subject(run, max_examples))
    try:
        sections = [
            ("results", "Results", results(run)),
            ("curves", "Curves", curves(run)),
            ("time", "Where the time went", time(run)),
            ("predictions", "Predictions", _of_model(lambda: predictions(run, subject()))),
            ("inside", "Inside the model", _of_model(lambda: inside(subject()))),
            ("settings", "Settings", settings(run)),
            ("provenance", "Provenance", provenance(run)),
        ]
        text = page(full_path(workdir).name, summary(run), sections)
    except KeyError as error:
        message = f"{workdir} has no {error}: another version of the code has written it."
        raise UserError(message) from error
    path = to_path(output or f"{workdir}/{OUTPUT}")
    write_atomically(path, text)
    return path


def _of_model(content: Callable[[], list[Html]]) -> list[Html]:
    """A section, or a sentence that says why there is none."""
    try:
        return content()
    except UserError as error:
        return [note(f"Not shown. {error}")]


def summary(run: Run) -> str:
    """One line: model, data, how far, how good, when, on what."""
    model, data = run.config["model"], run.config["dataset"]
    sizes = [text.format(model[key]) for key, text in _SIZES.items() if model.get(key)]
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
    """A chart per metric: that of training and of all evaluators in one."""
    evaluated = [name.partition("/")[2] for name in run.curves if "/" in name]
    panels = dict.fromkeys(["loss", "accuracy", *evaluated, "learning_rate", "grad_norm"])
    shown = {panel: run.curves_of(panel) for panel in panels if panel != "num_examples"}
    found = [line_chart(panel, each) for panel, each in shown.items() if each]
    if not found:
        return [note("No numbers have been logged yet.")]
    return [tag("div", *found, class_="grid-of")]


def time(run: Run) -> list[Html]:
    """Where the wall time went, and how fast the training was."""
    times = run.time
    if not times:
        return [note("No times have been logged yet.")]
    elapsed = times["elapsed_seconds"]
    parts = {"training": times["goodput"] * elapsed}
    parts |= {kind.replace("_", " "): times[f"{kind}_seconds"] for kind in KINDS}
    rows = [
        (tag("span", swatch(i), label), f"{seconds:,.1f}", f"{seconds / elapsed:.1%}")
        for i, (label, seconds) in enumerate(parts.items())
    ]
    title = "Where the time went"
    numbers = table(["spent on", "seconds", "share"], rows, label=title, kind="numbers")
    text = f"{format_seconds(elapsed)} in all; {times['goodput']:.1%} of it trained (goodput)."
    side_by_side = [tag("div", numbers)]
    if speed := run.curves_of("images_per_second"):
        median = statistics.median(speed["images_per_second"].values)
        text += f" Training went at {median:,.0f} images per second (median)."
        side_by_side.append(line_chart("images_per_second", speed))
    if mfu := run.curves.get("mfu"):
        text += f" Of the chips' peak it used {statistics.median(mfu.values):.1%} (mfu)."
    return [tag("p", text), share_bar(parts, title), tag("div", *side_by_side, class_="grid-of")]


def settings(run: Run) -> list[Html]:
    """What differs from the recipe, or from the defaults; the whole config on demand."""
    ours = schema.flatten(run.config)
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
    rows = [
        (
            each["time"],
            f"{each['start_step']:,}",
            tag("code", each["commit"] or "unknown"),
            "yes" if each["uncommitted_changes"] else "no",
            _devices(each),
            each["num_processes"],
            each["host"],
        )
        for each in run.starts
    ]
    last = run.starts[-1]
    columns = ["time", "from step", "commit", "own changes", "devices", "processes", "host"]
    versions = {"python": last["python"], **last["packages"]}
    commands = dict.fromkeys(each["command"] for each in run.starts)
    return [
        tag("p", f"The run was started {counted(len(rows), 'time')}."),
        table(columns, rows, label="Starts"),
        *(tag("pre", command, tabindex=0) for command in commands),
        details(
            "Versions at the last start",
            table(["package", "version"], versions.items(), label="Versions"),
        ),
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
            return recipe, schema.flatten(load_recipe(f"{ROOT}/{recipe}"))
    return "the defaults of vit_jax/config.py", schema.flatten(schema.get_config())


def _json(values: dict[str, Any], key: str) -> str:
    """A value as config.json spells it, so that tuples are lists."""
    return json.dumps(values[key], ensure_ascii=False) if key in values else "absent"
