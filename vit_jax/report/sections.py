"""The sections that need no model: results, curves, time, config, provenance."""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics
from pathlib import Path
from typing import Any

from vit_jax import config as schema
from vit_jax.command_line import ROOT, load_recipe
from vit_jax.curves.plot import curves_of
from vit_jax.errors import UserError, counted
from vit_jax.report.charts import Line, line_chart, share_bar, swatch, value_text
from vit_jax.report.facts import Facts
from vit_jax.report.page import Html, cell, details, join, note, table, tag
from vit_jax.training.clock import KINDS, format_seconds

_ABSENT = "absent"
_SIZES = {
    "num_layers": "{} blocks",
    "hidden_size": "width {}",
    "num_heads": "{} heads",
    "patch_size": "patch {}",
    "resnet_layers": "ResNet {}",
}
_HOUSEKEEPING = ("checkpoint.", "loader.", "log.", "processes.", "sweep.")


def summary(facts: Facts) -> str:
    """One line: model, data, how far, how good, when, on what."""
    model, data = facts.config["model"], facts.config["dataset"]
    sizes = [text.format(model[key]) for key, text in _SIZES.items() if model.get(key)]
    parts = [
        f"{model['name']} ({', '.join(sizes)})" if sizes else str(model["name"]),
        f"{facts.config['objective']['name']} on {data['name']} {data['split']}",
        f"step {facts.step:,} of {facts.length}" + ("" if facts.results else ", not ended"),
    ]
    if (name := facts.main_metric) in facts.evaluations:
        parts.append(f"{name} {value_text(name, facts.evaluations[name][1])}")
    if facts.starts:
        first, last = facts.starts[0], facts.starts[-1]
        parts.append(
            f"begun {_day(first)} UTC on {last['num_devices']} x {', '.join(last['devices'])}"
        )
    return " · ".join(parts)


def results(facts: Facts) -> list[Html]:
    """A row per evaluator; a published number in that of the main metric."""
    evaluators, data = facts.config["evaluators"], facts.config["dataset"]
    if not evaluators:
        return [note("The config has no evaluators.")]
    found, published = facts.evaluations, facts.config["sweep"]["published"]
    metrics = list(dict.fromkeys(name.partition("/")[2] for name in found))
    rows = []
    for key, each in evaluators.items():
        steps = [step for name, (step, _) in found.items() if name.startswith(f"{key}/")]
        names = [f"{key}/{metric}" for metric in metrics]
        values = [value_text(name, found[name][1]) if name in found else "" for name in names]
        source = f"{each['dataset'] or data['name']} {each['split']}"
        row = [key, *values, f"{steps[0]:,}" if steps else "not yet", cell(source, class_="words")]
        if published:
            is_main = facts.main_metric.startswith(f"{key}/")
            row.append(cell(published if is_main else "", class_="words"))
        rows.append(row)
    words = ["data", "published"] if published else ["data"]
    columns = [*metrics, "step", *(tag("span", each, class_="words") for each in words)]
    content = [table(["evaluator", *columns], rows, label="Results", kind="numbers")]
    if not facts.results:
        content.append(note("The run has not ended: these are its last evaluations so far."))
    if not published:
        content.append(note("The recipe states no published number to compare with."))
    return content


def curves(facts: Facts) -> list[Html]:
    """A chart per metric: that of training and of all evaluators in one."""
    evaluated = [name.partition("/")[2] for name in facts.run.curves if "/" in name]
    asked = ["loss", "accuracy", *evaluated, "learning_rate", "grad_norm"]
    charts = [_chart(facts, panel) for panel in dict.fromkeys(asked) if panel != "num_examples"]
    found = [each for each in charts if each]
    if not found:
        return [note("No numbers have been logged yet.")]
    return [tag("div", *found, class_="grid-of")]


def time(facts: Facts) -> list[Html]:
    """Where the wall time went, and how fast the training was."""
    times = facts.time
    if not times:
        return [note("No times have been logged yet.")]
    elapsed = times["elapsed_seconds"]
    parts = [("training", times["goodput"] * elapsed)]
    parts += [(kind.replace("_", " "), times[f"{kind}_seconds"]) for kind in KINDS]
    rows = [
        (join([swatch(i), label]), f"{seconds:,.1f}", f"{seconds / elapsed:.1%}")
        for i, (label, seconds) in enumerate(parts)
    ]
    speeds = [row["images_per_second"] for row in facts.rows if "images_per_second" in row]
    text = f"{format_seconds(elapsed)} in all; {times['goodput']:.1%} of it trained (goodput)."
    if speeds:
        text += f" Training went at {statistics.median(speeds):,.0f} images per second (median)."
    if utilised := [row["mfu"] for row in facts.rows if "mfu" in row]:
        text += f" Of the chips' peak it used {statistics.median(utilised):.1%} (mfu)."
    numbers = table(
        ["spent on", "seconds", "share"], rows, label="Where the time went", kind="numbers"
    )
    charts = [each for each in (_chart(facts, "images_per_second"),) if each]
    bar = share_bar(parts, "Where the time went")
    return [tag("p", text), bar, tag("div", tag("div", numbers), *charts, class_="grid-of")]


def settings(facts: Facts) -> list[Html]:
    """What differs from the recipe, or from the defaults; the whole config on demand."""
    ours = schema.flatten(facts.config)
    basis, theirs = _basis(facts)
    keys = [key for key in {**ours, **theirs} if _json(ours, key) != _json(theirs, key)]
    keys.sort(key=lambda key: key.startswith(_HOUSEKEEPING))
    content = [tag("p", f"What differs from {basis}:" if keys else f"The same as {basis}.")]
    if keys:
        rows = [(key, _json(ours, key), _json(theirs, key)) for key in keys]
        columns = ["key", "this run", "recipe" if basis.startswith("configs/") else "default"]
        content.append(table(columns, rows, label="Differing settings", kind="settings"))
    text = json.dumps(facts.config, indent=2, ensure_ascii=False)
    return [*content, details("The whole config", tag("pre", text, tabindex=0))]


def provenance(facts: Facts) -> list[Html]:
    """Each start of the run: when, from where, with what."""
    if not facts.starts:
        return [note("The work directory has no provenance.jsonl.")]
    rows = [
        (
            each["time"],
            f"{each['start_step']:,}",
            tag("code", each["commit"] or "unknown"),
            "yes" if each["uncommitted_changes"] else "no",
            f"{each['num_devices']} x {', '.join(each['devices'])}",
            each["num_processes"],
            each["host"],
        )
        for each in facts.starts
    ]
    last = facts.starts[-1]
    columns = ["time", "from step", "commit", "own changes", "devices", "processes", "host"]
    versions = {"python": last["python"], **last["packages"]}
    commands = dict.fromkeys(each["command"] for each in facts.starts)
    return [
        tag("p", f"The run was started {counted(len(rows), 'time')}."),
        table(columns, rows, label="Starts"),
        *(tag("pre", command, tabindex=0) for command in commands),
        details(
            "Versions at the last start",
            table(["package", "version"], versions.items(), label="Versions"),
        ),
    ]


def _chart(facts: Facts, panel: str) -> Html | None:
    lines = []
    for name in curves_of(facts.run, panel):
        curve, key = facts.run.curves[name], name.rpartition("/")[0]
        lines.append(Line(key or "training", curve.steps, curve.values, marked=bool(key)))
    return line_chart(panel, lines) if lines else None


def _basis(facts: Facts) -> tuple[str, dict[str, Any]]:
    """What the config is compared with, and its values by dotted keys."""
    spec = _recipe(facts.starts[-1]["command"]) if facts.starts else ""
    path, separator, argument = spec.partition(":")
    # Only recipes of this clone: a command of someone else's is not run.
    name = Path(path).name
    if spec and Path(path).parent.name == "configs" and (ROOT / "configs" / name).is_file():
        try:
            recipe = load_recipe(f"{ROOT / 'configs' / name}{separator}{argument}")
            return f"configs/{name}{separator}{argument}", schema.flatten(recipe)
        except UserError:  # of another version, or its data are not here
            pass
    return "the defaults of vit_jax/config.py", _defaults(facts.config)


def _recipe(command: str) -> str:
    """`PATH[:ARGUMENT]` that a command line gives; "" if it gives none."""
    words = shlex.split(command)
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, _, value = word.partition("=")
        if flag in ("--config", "-config"):
            return value or following
    return ""


def _defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Default values by dotted keys, for the kinds that `config` has."""
    nodes = {key: (key, config[key]) for key in schema.KINDS if key in config}
    nodes |= {f"evaluators.{k}": ("evaluators.*", node) for k, node in config["evaluators"].items()}
    plain = schema.flatten(schema.get_config()).items()
    found = {k: v for k, v in plain if k.partition(".")[0] not in (*nodes, "evaluators")}
    for section, (kind, node) in nodes.items():
        found[f"{section}.name"] = node["name"]
        keys = schema.kind_keys(kind, node["name"])
        values = {key: value for key, (_, value, _) in keys.items()}
        found |= {f"{section}.{k}": v for k, v in values.items() if v is not dataclasses.MISSING}
    return found


def _json(values: dict[str, Any], key: str) -> str:
    """A value as config.json spells it, so that tuples are lists."""
    return json.dumps(values[key], ensure_ascii=False) if key in values else _ABSENT


def _day(start: dict[str, Any]) -> str:
    return str(start["time"]).replace("T", " ")[:16]
