"""The top of a run's page: what it is and how good it is."""

import contextlib
from collections.abc import Mapping
from typing import Any

from vit_jax.console import format_seconds, is_share, wilson_interval
from vit_jax.errors import UserError
from vit_jax.files.paths import full_path
from vit_jax.report.page import Html, bar, note, table, tag
from vit_jax.report.runs import (
    Run,
    data_title,
    metric_title,
    metric_words,
    percent,
    read_run,
    tail,
    value_text,
)
from vit_jax.wording import counted
from vit_jax.workdir.checkpoints import best_text
from vit_jax.workdir.description import model_name, read_parameter_count


def title(run: Run) -> str:
    """`ViT-Ti/16 on photos`."""
    return f"{model_name(run.config['model'])} on {data_title(run.config['dataset']['name'])}"


def result(run: Run) -> str:
    """The main metric as text: `93.0 %`, `loss 0.31`; "" before any evaluation."""
    name, value, _ = _main(run)
    prefix = "" if is_share(name) else f"{metric_words(name)} "
    return prefix + value_text(name, value, digits=1) if name else ""


def header(run: Run) -> list[Html]:
    """Title, result and facts."""
    done = f"step {run.step:,} of {run.length}, not finished"
    status = f"Training report: {'finished' if run.results else done}"
    content = [tag("p", status, class_="status"), tag("h1", title(run))]
    name, value, count = _main(run)
    if name:
        key, ends = name.partition("/")[0], _interval(name, value, count)
        about = metric_words(name) + (f" on {counted(count, 'example')}" if count else "")
        about += f" of {_data_of(run, key)}" if key in run.config["evaluators"] else ""
        about += f", 95\N{NO-BREAK SPACE}% interval {_range_text(ends)}" if ends else ""
        strong = tag("strong", value_text(name, value, digits=1))
        content.append(tag("p", strong, tag("span", about), class_="headline"))
    rows = (tag("div", tag("dt", k), tag("dd", v)) for k, v in _facts(run).items() if v)
    return [*content, tag("dl", *rows, class_="facts")]


def _facts(run: Run) -> dict[str, str]:
    """Facts by name; "" for those that do not apply."""
    config, count = run.config, read_parameter_count(run.folder)
    model, data, name = config["model"], config["dataset"], model_name(config["model"])
    size = f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"
    parts = [name, *([f"{size} parameters"] if count else ())]
    if "-" not in name and "num_layers" in model:  # variant names imply the sizes
        parts += [counted(model["num_layers"], "layer"), f"hidden size {model['hidden_size']}"]
    length = f"{run.length} steps" if run.length[-1].isdigit() else run.length
    training = [f"{length} of {counted(data['batch_size'], 'example')}"]
    training += [format_seconds(run.time["elapsed_seconds"])] if run.time else []
    training += [devices_text(start) for start in run.starts[-1:]]
    training += [f"started {start['time'][:10]}" for start in run.starts[:1]]
    others = (f", {data_title(row[0])} (weight {row[1]:g})" for row in data.get("mixture", ()))
    return {
        "Model": ", ".join(parts),
        "Data": f"{data_title(data['name'])}, split {data['split']}{''.join(others)}",
        "Weights": _weights(run),
        "Objective": config["objective"]["name"].replace("_", " ").removeprefix("classification"),
        "Training": ", ".join(training),
        "Best": best_text(run.folder)[0].replace(str(run.folder), tail(full_path(run.folder))),
        "Published": config["sweep"]["published"],
        "Run": tail(full_path(run.folder)),
    }


def _weights(run: Run) -> str:
    """The initial weights of the training."""
    source = run.config["pretrained"]["source"]
    if not source:
        return f"random, seed {run.config['seed']}"
    text = f"fine-tuned from {tail(source)}"
    with contextlib.suppress(UserError, OSError, KeyError, TypeError):  # it may not be a run
        if "://" not in source:  # creating a page accesses no network
            text += f", trained on {data_title(read_run(source).config['dataset']['name'])}"
    return text


def results(run: Run, against: Mapping[str, float]) -> list[Html]:
    """The comparison, if any, and a row per evaluator."""
    evaluators, last = run.config["evaluators"], run.evaluations
    if not evaluators:
        return [note("The config has no evaluators.")]
    metrics = list(dict.fromkeys(name.partition("/")[2] for name in last))
    rows = []
    for key in evaluators:
        names = [f"{key}/{metric}" for metric in metrics]
        values = [value_text(name, last[name][1]) if name in last else "" for name in names]
        steps = [f"{last[name][0]:,}" for name in names if name in last]
        rows.append([key, _data_of(run, key), *values, *(steps[:1] or ["not yet"])])
    columns = ["Evaluator", "Data", *map(metric_title, metrics), "Step"]
    content = _comparison(run, against)
    content.append(table(columns, rows, label="Results", kind="numbers results"))
    if not run.results:
        content.append(note("The run has not finished: these are its latest evaluations."))
    return content


def _comparison(run: Run, against: Mapping[str, float]) -> list[Html]:
    """Bars of this run's accuracy and of other models on the same examples."""
    name, value, count = _main(run)
    if not against or not _interval(name, value, count):
        return []
    rows = []
    for label, share in {f"This run: {_weights(run)}": value, **against}.items():
        ends = _interval(name, share, count)
        rows.append((label, value_text(name, share, digits=1), _range_text(ends), bar(share, ends)))
    columns = ["Model", metric_words(name).capitalize(), "95 % interval", "0 to 100 %"]
    same = f"All on the same {counted(count, 'example')}; the whiskers are 95 % Wilson intervals."
    return [table(columns, rows, label="Comparison", kind="bars compared"), note(same)]


def _main(run: Run) -> tuple[str, float, int]:
    """The run's main metric, its value, and the number of examples; ("", 0, 0) before any."""
    name, last = run.main_metric, run.evaluations
    if name not in last:
        return "", 0.0, 0
    _, count = last.get(f"{name.rpartition('/')[0]}/num_examples", (0, 0.0))
    return name, last[name][1], int(count)


def _interval(name: str, value: float, count: int) -> tuple[float, ...]:
    """Of a metric that is a share of `count` examples; () for others."""
    is_known = "accuracy" in name and count > 0 and 0 <= value <= 1
    return wilson_interval(value, count) if is_known else ()


def _range_text(ends: tuple[float, ...]) -> str:
    return f"{100 * ends[0]:.1f} to {percent(ends[1])}" if ends else ""


def _data_of(run: Run, key: str) -> str:
    """The data of an evaluator: `digits test`."""
    evaluator = run.config["evaluators"][key]
    name = evaluator["dataset"] or run.config["dataset"]["name"]
    return f"{data_title(name)} {evaluator['split']}"


def devices_text(start: dict[str, Any]) -> str:
    """`8 x TPU v4` of a line of `provenance.jsonl`."""
    return f"{start['num_devices']} x {', '.join(start['devices'])}"
