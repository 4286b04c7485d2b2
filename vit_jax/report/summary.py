"""What a run is and how good it has become: the top of its page."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from vit_jax.errors import UserError, counted
from vit_jax.files.paths import full_path
from vit_jax.report.page import Html, bar, facts, note, table, tag
from vit_jax.report.runs import (
    Run,
    data_title,
    is_share,
    metric_title,
    percent,
    read_run,
    tail,
    value_text,
)
from vit_jax.workdir.description import model_name, read_parameter_count


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """95 % score interval of a share of `count` examples (Wilson, 1927), both in [0, 1]."""
    z2 = 1.959964**2 / count
    middle, half = share + z2 / 2, math.sqrt(z2 * (share * (1 - share) + z2 / 4))
    return max(0.0, (middle - half) / (1 + z2)), min(1.0, (middle + half) / (1 + z2))


def title(run: Run) -> str:
    """`ViT-Ti/16 on photos`."""
    return f"{model_name(run.config['model'])} on {data_title(run.config['dataset']['name'])}"


def result(run: Run) -> str:
    """The number that stands for the run: `93.0 %`, `loss 0.31`; "" before any evaluation."""
    name = run.main_metric
    if name not in run.evaluations:
        return ""
    value = value_text(name, run.evaluations[name][1], digits=1)
    return value if is_share(name) else f"{_metric_of(name)} {value}"


def header(run: Run) -> list[Html]:
    """Title, result and facts."""
    done = f"step {run.step:,} of {run.length}, not finished"
    status = f"Training report: {'finished' if run.results else done}"
    content = [tag("p", status, class_="status"), tag("h1", title(run))]
    name, found = run.main_metric, run.evaluations
    if name in found:
        key, count = name.partition("/")[0], found.get(_count_of(name), (0, 0.0))[1]
        about = _metric_of(name)
        about += f" on {counted(int(count), 'example')}" if count else ""
        about += f" of {_data_of(run, key)}" if key in run.config["evaluators"] else ""
        if ends := _interval(run, found[name][1]):
            about += f", 95\N{NO-BREAK SPACE}% interval {_range_text(ends)}"
        value = value_text(name, found[name][1], digits=1)
        content.append(tag("p", tag("strong", value), tag("span", about), class_="headline"))
    return [*content, facts(_facts(run))]


def _facts(run: Run) -> list[tuple[str, object]]:
    config, count = run.config, read_parameter_count(run.folder)
    model, data, name = config["model"], config["dataset"], model_name(config["model"])
    parts = [name, *([f"{_short(count)} parameters"] if count else ())]
    if "-" not in name and "num_layers" in model:  # a variant's name says its sizes
        parts += [counted(model["num_layers"], "layer"), f"hidden size {model['hidden_size']}"]
    rows: list[tuple[str, object]] = [
        ("Model", ", ".join(parts)),
        ("Data", f"{data_title(data['name'])}, trained on {data['split']}"),
        ("Weights", _weights(run)),
    ]
    if config["objective"]["name"] != "classification":
        rows.append(("Objective", config["objective"]["name"].replace("_", " ")))
    length = f"{run.length} steps" if run.length[-1].isdigit() else run.length
    training = [f"{length} of {counted(data['batch_size'], 'example')}"]
    if run.time:
        training.append(duration_text(run.time["elapsed_seconds"]))
    if run.starts:
        training += [devices_text(run.starts[-1]), f"started {run.starts[0]['time'][:10]}"]
    return [*rows, ("Training", ", ".join(training)), ("Run", tail(full_path(run.folder)))]


def _weights(run: Run) -> str:
    """Where the training started from."""
    source = run.config["pretrained"]["source"]
    if not source:
        return f"random, seed {run.config['seed']}"
    text = f"fine-tuned from {tail(source)}"
    with contextlib.suppress(UserError, KeyError, TypeError):  # it need be no run of ours
        text += f", trained on {data_title(read_run(source).config['dataset']['name'])}"
    return text


def results(run: Run, against: Mapping[str, float]) -> list[Html]:
    """The comparison, if any, and a row per evaluator."""
    evaluators, found = run.config["evaluators"], run.evaluations
    if not evaluators:
        return [note("The config has no evaluators.")]
    published = run.config["sweep"]["published"]
    metrics = list(dict.fromkeys(name.partition("/")[2] for name in found))
    rows = []
    for key in evaluators:
        steps = [step for name, (step, _) in found.items() if name.startswith(f"{key}/")]
        names = [f"{key}/{metric}" for metric in metrics]
        values = [value_text(name, found[name][1]) if name in found else "" for name in names]
        is_main = run.main_metric.startswith(f"{key}/")
        texts = [_data_of(run, key), *([published if is_main else ""] if published else ())]
        step = f"{steps[0]:,}" if steps else "not yet"
        rows.append([key, *values, step, *(tag("td", each, class_="words") for each in texts)])
    words = [tag("th", each, scope="col", class_="words") for each in ("Data", "Published")]
    columns = ["Evaluator", *map(metric_title, metrics), "Step", *words[: 1 + bool(published)]]
    content = _comparison(run, against)
    content.append(table(columns, rows, label="Results", kind="numbers"))
    if not run.results:
        content.append(note("The run has not finished: these are its latest evaluations."))
    return content


def _comparison(run: Run, against: Mapping[str, float]) -> list[Html]:
    """Bars of this run's accuracy and of others on the same examples."""
    name, found = run.main_metric, run.evaluations
    if not against or name not in found or not _interval(run, found[name][1]):
        return []
    rows = []
    for label, value in {f"This run: {_weights(run)}": found[name][1], **against}.items():
        ends = _interval(run, value)
        rows.append((label, value_text(name, value, digits=1), _range_text(ends), bar(value, ends)))
    columns = ["Model", metric_title(name.rpartition("/")[2]), "95 % interval", "0 to 100 %"]
    count = counted(int(found[_count_of(name)][1]), "example")
    text = f"All on the same {count}; the whiskers are 95 % Wilson intervals."
    return [table(columns, rows, label="Comparison", kind="bars compared"), note(text)]


def _metric_of(name: str) -> str:
    """A metric within a sentence: `accuracy`, `top-5 accuracy`."""
    text = metric_title(name.rpartition("/")[2])
    return text if text[:2].isupper() else text[0].lower() + text[1:]


def _data_of(run: Run, key: str) -> str:
    """What an evaluator measures on: `digits test`."""
    data, each = run.config["dataset"], run.config["evaluators"][key]
    return f"{data_title(each['dataset'] or data['name'])} {each['split']}"


def _count_of(name: str) -> str:
    """Where the number of examples of a metric is."""
    return f"{name.rpartition('/')[0]}/num_examples"


def _interval(run: Run, value: float) -> tuple[float, float] | None:
    """Of a value of the main metric, if that is a share of examples."""
    name = run.main_metric
    _, count = run.evaluations.get(_count_of(name), (0, 0.0))
    if "accuracy" not in name or count < 1 or not 0 <= value <= 1:
        return None
    return wilson_interval(value, int(count))


def _range_text(ends: tuple[float, float] | None) -> str:
    if ends is None:
        return ""
    return f"{100 * ends[0]:.1f} to {percent(ends[1])}"


def _short(count: int) -> str:
    """`5.7 M`, `548 k`."""
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"


def duration_text(seconds: float) -> str:
    """`45 s`, `4 min 32 s`, `2 h 10 min`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def devices_text(start: dict[str, Any]) -> str:
    """`8 x TPU v4` of a line of `provenance.jsonl`."""
    return f"{start['num_devices']} x {', '.join(start['devices'])}"
