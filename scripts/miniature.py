"""Repeats the paper's experiments at laptop scale, and says which of its claims show there.

    python scripts/miniature.py --workdir=runs/miniature
    python scripts/miniature.py --workdir=runs/miniature --experiments=data,task --dry_run

The fastest on two cores is a process on each, which share the work:

    for i in 0 1; do taskset -c $i python scripts/miniature.py --workdir=runs/miniature \\
        --num_tasks=2 --task=$i & done; wait

configs/miniature.py has the experiments and their runs. Runs of several experiments are trained
once. Writes WORKDIR/miniature.md and a picture per experiment, of what is finished; the same
command resumes, and runs what is missing. --config.KEY=VALUE applies to all runs.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from vit_jax import ROOT, launch
from vit_jax.arguments import add_share, at_least, create_parser, names, split_overrides

sys.path.insert(0, str(ROOT))  # for the recipes

METRICS = {  # percent: the run and its metric
    "digits, fine-tuned": ("digits", "test/accuracy"),
    "digits, 5-shot": ("pretrain", "digits/accuracy_5shot"),
    "letters, fine-tuned": ("letters", "test/accuracy"),
    "letters, 5-shot": ("pretrain", "letters/accuracy_5shot"),
}
DISTANCE = "mean distance, pixels"
MARGIN = 2.0  # points within which variants are alike; in distances, pixels
LOOKS = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"))  # as in vit_jax/report/plot.py
SECONDS = {"pretrain": 25, "digits": 6, "letters": 7}  # of a run on a core, measured

# Of a variant and metric, one per seed: `values["vit"]["accuracy"] == [91.2, 90.4, 91.0]`.
Values = dict[str, dict[str, list[float]]]


def parser() -> argparse.ArgumentParser:
    created = create_parser(__doc__)
    add = created.add_argument
    add("--workdir", required=True, metavar="DIR", help="all runs; if it exists, resumes")
    add("--experiments", type=names, default=[], metavar="A,B", help="of configs/miniature.py")
    add("--seeds", type=at_least(1), default=3, help="of each variant (default 3)")
    add_share(created)
    add("--dry_run", action="store_true", help="print what is missing, and about how long it takes")
    return created


def plan(variant: str, seed: int, folder: Path, overrides: list[str]) -> list[Any]:
    """The runs of a variant, as of a sweep, in their order."""
    from configs import miniature
    from vit_jax.command_line import override
    from vit_jax.sweep.run import SweepRun

    planned, runs = [], miniature.runs(variant, seed)
    for name in runs:
        config, stage = miniature.get_config(name), name.partition("/")[0]
        if stage != "pretrain" and runs[0].startswith("pretrain/"):
            config.pretrained.source = str(folder / runs[0])
        config = override(config, overrides)
        metric = next(metric for of, metric in METRICS.values() if of == stage)
        planned.append(SweepRun(name, config, metric))
    return planned


def train_all(mine: list[tuple[int, str]], folder: Path, overrides: list[str]) -> None:
    from vit_jax.sweep.run import run_missing
    from vit_jax.train import train_and_evaluate

    for seed, variant in mine:
        for run in plan(variant, seed, folder, overrides):
            source = run.config.pretrained.source
            if not source or Path(source, "params.npz").exists():  # it may have diverged
                run_missing([run], folder, train=train_and_evaluate)


def collect(variants: list[str], seeds: int, folder: Path) -> Values:
    """By variant and metric: percent for each seed that is finished."""
    from vit_jax.files.paths import read_object

    values: Values = {}
    for variant in variants:
        of_variant = values.setdefault(variant, {})
        for title, (stage, metric) in METRICS.items():
            paths = [folder / f"{stage}/{variant}_seed{i}/results.json" for i in range(seeds)]
            results = [read_object(path, **{metric: float}) for path in paths if path.exists()]
            of_variant[title] = [100 * result[metric] for result in results]
    return values


def distances(variants: list[str], seeds: int, folder: Path) -> Values:
    """By VARIANT/LAYER: the mean over heads, after fine-tuning on digits."""
    from vit_jax.files.paths import write_json
    from vit_jax.inference.load import load_model
    from vit_jax.inference.visualize import head_distances

    values: Values = {}
    for variant, seed in itertools.product(variants, range(seeds)):
        path = folder / f"digits/{variant}_seed{seed}/attention_distance.json"
        if not path.exists() and (path.parent / "params.npz").exists():
            model = load_model(str(path.parent))
            source = model.open_dataset(name="digits", split="test[:128]").source
            images = [source[index]["image"] for index in range(len(source))]
            write_json(path, head_distances(model, images, len(images))[0].tolist())
        if path.exists():
            for layer, heads in enumerate(json.loads(path.read_text()), start=1):
                of_layer = values.setdefault(f"{variant}/{layer}", {DISTANCE: []})
                of_layer[DISTANCE].append(sum(heads) / len(heads))
    return values


def difference95(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Difference of the means and half of its 95 % interval (Welch's t), of two or more values."""
    import numpy as np
    from scipy.special import stdtrit

    errors = np.array([np.var(values, ddof=1) / len(values) for values in (first, second)])
    weights = errors**2 / (len(first) - 1, len(second) - 1)
    freedom = errors.sum() ** 2 / max(weights.sum(), np.finfo(float).tiny)
    half = stdtrit(freedom, 0.975) * np.sqrt(errors.sum()) if errors.any() else 0.0
    return fmean(first) - fmean(second), float(half)


def verdict(first: Sequence[float], relation: str, second: Sequence[float], margin: float) -> str:
    """`shows`, `not at this scale` or `undecided`, and the difference with its interval.

    `>` shows if the whole interval is above 0, and does not if it is below; `=` shows if it is
    within +-margin, and does not if it is outside.
    """
    if min(len(first), len(second)) < 2:
        return "-"
    difference, half = difference95(first, second)
    low, high = difference - half, difference + half
    shows, fails = low > 0, high < 0
    if relation == "=":
        shows, fails = -margin < low and high < margin, low > margin or high < -margin
    answer = "shows" if shows else "not at this scale" if fails else "undecided"
    return f"{answer} ({difference:+.1f} ± {half:.1f})"


def interval(values: Sequence[float]) -> str:
    """The mean ± half of its 95 % interval (Student's t)."""
    from vit_jax.evaluators.few_shot import confidence95

    half = confidence95(values)
    return (f"{fmean(values):.1f}" if values else "-") + ("" if half is None else f" ± {half:.1f}")


def draw(
    lines: dict[str, dict[str, float]], metrics: Sequence[str], values: Values, x_title: str
) -> Any:
    """The figure: a panel per metric, a line per kind of variants with their x.

    Without `x_title` x are places, labelled with the variants' names.
    """
    import numpy as np

    from vit_jax.errors import import_extra
    from vit_jax.evaluators.few_shot import confidence95

    import_extra("a plot", "matplotlib", "embedded")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.3 * len(metrics) + 0.5, 3.4), dpi=80, layout="constrained")
    for axis, metric in zip(np.ravel(figure.subplots(1, len(metrics))), metrics, strict=True):
        for (name, at), (color, marker) in zip(lines.items(), LOOKS, strict=False):
            seeds = {x: values[variant].get(metric) for variant, x in at.items()}
            shown = {x: of_seeds for x, of_seeds in seeds.items() if of_seeds}
            bars = [confidence95(of_seeds) or 0.0 for of_seeds in shown.values()]
            look: Any = {"fmt": f"{marker}-" if x_title else marker, "color": color, "capsize": 3}
            axis.errorbar(list(shown), [*map(np.mean, shown.values())], bars, label=name, **look)
            if not x_title:
                axis.set_xticks([*at.values()], [*at], rotation=60, ha="right")
            elif max(at.values()) > 10 * min(at.values()):
                axis.set_xscale("log")
        axis.margins(x=0.12)
        axis.set_xlabel(x_title)
        axis.set_title(metric, loc="left", fontsize=10)
        axis.grid(color="0.5", alpha=0.2)
        if len(lines) > 1:
            axis.legend(fontsize=8, frameon=False)
    return figure


def report(experiments: list[str], seeds: int, folder: Path) -> str:
    """Markdown: a table, a picture and the verdicts of each experiment."""
    from configs.miniature import EXPERIMENTS, examples, operations

    parts = []
    for name in experiments:
        experiment, x_title = EXPERIMENTS[name], ""
        variants = experiment.variants.split()
        at = {variant: float(number) for number, variant in enumerate(variants)}
        values = collect(variants, seeds, folder)
        compared = [m for m in METRICS if sum(bool(values[v][m]) for v in variants) > 1]
        metrics = compared or list(METRICS)
        if name == "distance":
            metrics, x_title = [DISTANCE], "layer"
            values = distances(variants, seeds, folder)
            at = {layer: float(layer.partition("/")[2]) for layer in values}
        elif experiment.x == "examples":
            x_title, at = "images", {key: float(examples(key)) for key in at}
        elif experiment.x == "operations":
            x_title, at = "GFLOP", {key: operations(key) / 1e9 for key in at}
        kinds = ("vit", "bit", "hybrid") if x_title else ("",)
        lines = {kind: {k: x for k, x in at.items() if k.startswith(kind)} for kind in kinds}
        lines = {kind: line for kind, line in lines.items() if line}
        draw(lines, metrics, values, x_title).savefig(folder / f"{name}.png")
        rows = [["variant", *metrics], ["---"] * (len(metrics) + 1)]
        for key, x in at.items():
            title = f"{key}, {x:,.0f} {x_title}" if experiment.x else key
            rows.append([title, *(interval(values[key].get(metric, [])) for metric in metrics)])
        claims = [["claim", *metrics], rows[1]]
        for claim in map(str.strip, experiment.claims.splitlines()):
            first, relation, second = claim.partition(":")[0].split()
            a, b = values.get(first, {}), values.get(second, {})
            verdicts = (verdict(a.get(m, []), relation, b.get(m, []), MARGIN) for m in metrics)
            claims.append([claim, *verdicts])
        tables = ["\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, claims)]
        parts += [
            f"## {experiment.title}",
            tables[0],
            f"![{experiment.title}]({name}.png)",
            tables[1],
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    overrides, others = split_overrides(sys.argv[1:])
    arguments = parser().parse_args(others)
    folder = Path(arguments.workdir).expanduser().absolute()
    # Before JAX starts: seeds of a variant compile the same programs.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    from configs import miniature
    from vit_jax.files.paths import read_object, write_atomically
    from vit_jax.kinds import check_known
    from vit_jax.sweep.run import task_number

    experiments = arguments.experiments or list(miniature.EXPERIMENTS)
    for name in experiments:
        check_known("--experiments", name, miniature.EXPERIMENTS)
    wanted = " ".join(miniature.EXPERIMENTS[name].variants for name in experiments)
    groups: dict[str, list[str]] = {}  # of variants that start from the same runs
    for variant in dict.fromkeys(wanted.split()):
        groups.setdefault(variant.partition("_px")[0], []).append(variant)
    task = task_number(arguments.task, arguments.num_tasks, os.environ)
    chains = list(itertools.product(range(arguments.seeds), groups.values()))[
        task :: arguments.num_tasks
    ]
    mine = [(seed, variant) for seed, group in chains for variant in group]
    if arguments.dry_run:
        total = 0
        for seed, variant in mine:
            runs = miniature.runs(variant, seed)
            left = [run for run in runs if not (folder / run / "results.json").exists()]
            seconds = sum(SECONDS[run.partition("/")[0]] for run in left)
            total += seconds
            print(f"{variant:13} seed {seed}{len(left):3} of {len(runs)} runs, {seconds} s")
        print(f"This task: {total / 60:.0f} minutes on a core.")
        return
    train_all(mine, folder, overrides)
    took = [read_object(path, seconds=float)["seconds"] for path in folder.glob("*/*/results.json")]
    text = f"{len(took)} runs, {sum(took) / 60:.0f} minutes.\n\n"
    text += report(experiments, arguments.seeds, folder)
    write_atomically(folder / "miniature.md", text)
    print(text)


if __name__ == "__main__":
    launch.start_logging()
    with launch.one_line_errors(resumes=True):
        main()
