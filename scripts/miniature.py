"""Repeats the paper's experiments at laptop scale, and says which of its claims show there.

    python scripts/miniature.py --workdir=runs/miniature
    python scripts/miniature.py --workdir=runs/miniature --experiments=data,task --dry_run

The fastest on two cores is a process on each, which share the work:

    for i in 0 1; do taskset -c $i python scripts/miniature.py --workdir=runs/miniature \\
        --num_tasks=2 --task=$i & done; wait

configs/miniature.py has the experiments, miniature_fashion.py those on Fashion-MNIST, which must be
named. Runs of several are trained once. Writes WORKDIR/miniature.md and a picture per experiment of
what is finished; the same command resumes. --config.KEY=VALUE applies to all runs.
"""

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from vit_jax import ROOT, launch
from vit_jax.arguments import add_share, at_least, create_parser, names, split_overrides
from vit_jax.errors import UserError

sys.path.insert(0, str(ROOT))  # for the recipes

FOLDER = "/usr/share/datasets/fashion-mnist"
DISTANCE = "mean distance, pixels"
MARGIN = 2.0  # points within which variants are alike; in distances, pixels
LOOKS = [*zip(("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"), "osD^v", strict=True)]
# Milliseconds of a core for an image, about: the first that a run starts with.
COSTS = {"fashion/bit": 0.9, "fashion/hybrid": 1.0, "fashion/vit_patch4": 2.0, "": 0.4}

# Of a variant and metric, one per seed: `values["vit"]["accuracy"] == [91.2, 90.4, 91.0]`.
Values = dict[str, dict[str, list[float]]]
Side = list[list[float]]  # of a comparison, in a metric: [a], or [a, b] for a - b


def parser() -> argparse.ArgumentParser:
    created = create_parser(__doc__)
    add = created.add_argument
    add("--workdir", required=True, metavar="DIR", help="all runs; if it exists, resumes")
    add("--experiments", type=names, metavar="A,B", help="default: all but those of Fashion-MNIST")
    add("--fashion_mnist", default=FOLDER, metavar="DIR", help=f"its images (default {FOLDER})")
    add("--seeds", type=at_least(1), default=3, help="of each variant (default 3)")
    add_share(created)
    add("--dry_run", action="store_true", help="print what is missing, and about how long it takes")
    return created


def recipe_of(run: str) -> Any:
    """The module that has a run, or an experiment."""
    from configs import miniature, miniature_fashion  # which import JAX

    return miniature_fashion if run.startswith(("fashion", "upstream")) else miniature


def plan_chains(experiments: list[str], seeds: int) -> list[list[str]]:
    """Runs that share the first one, in their order; the longest first, so tasks end together."""
    chains: dict[str, dict[str, None]] = {}
    for seed, name in itertools.product(range(seeds), experiments):
        for variant in recipe_of(name).EXPERIMENTS[name].variants.split():
            runs = recipe_of(name).runs(variant, seed)
            chains.setdefault(runs[0], {}).update(dict.fromkeys(runs))
    return sorted(map(list, chains.values()), key=lambda runs: -sum(map(seconds, runs)))


def seconds(run: str) -> float:
    """Of a core, about."""
    config = recipe_of(run).get_config(run)
    cost = next(cost for start, cost in COSTS.items() if run.startswith(start))
    return 5 + config.duration.steps * config.dataset.batch_size * cost / 1000


def train_all(mine: list[list[str]], folder: Path, overrides: list[str], images: str) -> None:
    from vit_jax.command_line import override
    from vit_jax.sweep.run import SweepRun, run_missing
    from vit_jax.train import train_and_evaluate

    for first, run in ((chain[0], run) for chain in mine for run in chain):
        recipe, stage = recipe_of(run), run.partition("/")[0]
        config = recipe.get_config(run if recipe is recipe_of("") else f"{run},{images}")
        if run != first and first.startswith(("pretrain", "upstream")):
            config.pretrained.source = str(folder / first)
        metric = next(metric for of, metric in recipe.METRICS.values() if of == stage)
        planned = SweepRun(run, override(config, overrides), metric)
        source = planned.config.pretrained.source
        if not source or Path(source, "params.npz").exists():  # it may have diverged
            run_missing([planned], folder, train=train_and_evaluate)


def collect(experiment: str, seeds: int, folder: Path) -> Values:
    """By variant and metric: percent for each seed that is finished."""
    from vit_jax.files.paths import read_object

    values: Values = {}
    for variant in recipe_of(experiment).EXPERIMENTS[experiment].variants.split():
        of_variant = values.setdefault(variant, {})
        for title, (stage, metric) in recipe_of(experiment).METRICS.items():
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


def difference95(first: Side, second: Side) -> tuple[float, float]:
    """Difference of the means and half of its 95 % interval (Welch's t), of two or more values."""
    import numpy as np
    from scipy.special import stdtrit

    groups, signs = [*first, *second], [*(1, -1)[: len(first)], *(-1, 1)[: len(second)]]
    errors = np.array([np.var(values, ddof=1) / len(values) for values in groups])
    weights = errors**2 / [len(values) - 1 for values in groups]
    freedom = errors.sum() ** 2 / max(weights.sum(), np.finfo(float).tiny)
    half = stdtrit(freedom, 0.975) * np.sqrt(errors.sum()) if errors.any() else 0.0
    return float(np.dot(signs, [*map(fmean, groups)])), float(half)


def verdict(first: Side, relation: str, second: Side, margin: float) -> str:
    """`shows`, `not at this scale` or `undecided`, and the difference with its interval.

    `>` shows if the whole interval is above 0, and does not if it is below; `=` shows if it is
    within +-margin, and does not if it is outside. `-` if a variant has less than two seeds.
    """
    if min(map(len, first + second)) < 2:
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
    for axis, metric in zip(
        np.ravel(figure.subplots(1, len(metrics), sharex=True)), metrics, strict=True
    ):
        for (name, at), (color, marker) in zip(lines.items(), LOOKS, strict=False):
            seeds = {x: values[variant].get(metric) for variant, x in at.items()}
            shown = {x: of_seeds for x, of_seeds in seeds.items() if of_seeds}
            bars = [confidence95(of_seeds) or 0.0 for of_seeds in shown.values()]
            look: Any = {"fmt": f"{marker}-" if x_title else marker, "color": color, "capsize": 3}
            means = [*map(np.mean, shown.values())]
            if shown:
                axis.errorbar(list(shown), means, bars, label=name, **look)
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
    sections = []
    for name in experiments:
        recipe, x_title = recipe_of(name), ""
        experiment = recipe.EXPERIMENTS[name]
        at = {variant: float(i) for i, variant in enumerate(experiment.variants.split())}
        values, metrics = collect(name, seeds, folder), list(recipe.METRICS)
        metrics = [m for m in metrics if sum(bool(values[v][m]) for v in at) > 1] or metrics
        if name == "distance":
            metrics, x_title = [DISTANCE], "layer"
            values = distances(list(at), seeds, folder)
            at = {layer: float(layer.partition("/")[2]) for layer in values}
        elif experiment.x == "examples":
            x_title, at = "images", {v: float(v.partition("_n")[2] or recipe.EXAMPLES) for v in at}
        elif experiment.x == "operations":
            x_title, at = "GFLOP", {key: recipe.operations(key) / 1e9 for key in at}
        lines: dict[str, dict[str, float]] = {}
        for key, x in at.items():
            kind = key.partition("_n" if x_title == "images" else "_")[0] if x_title else ""
            lines.setdefault(kind, {})[key] = x
        draw(lines, metrics, values, x_title).savefig(folder / f"{name}.png")
        rows = [["variant", *metrics], ["---"] * (len(metrics) + 1)]
        for key, x in at.items():
            title = f"{key}, {x:,.0f} {x_title}" if experiment.x else key
            rows.append([title, *(interval(values[key].get(metric, [])) for metric in metrics)])
        claims = [["claim", *metrics], rows[1]]
        for claim in map(str.strip, experiment.claims.splitlines()):
            parts = re.split(" ([>=]) ", claim.partition(":")[0])
            claims.append(row := [claim])
            for m in metrics:
                a, b = ([values.get(v, {}).get(m, []) for v in s.split(" - ")] for s in parts[::2])
                row.append(verdict(a, parts[1], b, MARGIN))
        tables = ["\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, claims)]
        title = experiment.title
        sections += [f"## {title}", tables[0], f"![{title}]({name}.png)", tables[1]]
    return "\n\n".join(sections) + "\n"


def main() -> None:
    overrides, others = split_overrides(sys.argv[1:])
    arguments = parser().parse_args(others)
    folder = Path(arguments.workdir).expanduser().absolute()
    images = os.path.abspath(os.path.expanduser(arguments.fashion_mnist))
    # Before JAX starts: seeds of a variant compile the same programs.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    from vit_jax.data.datasets import create_dataset
    from vit_jax.data.idx import find_idx
    from vit_jax.files.paths import read_object, write_atomically
    from vit_jax.kinds import check_known
    from vit_jax.sweep.run import task_number

    embedded, fashion = (recipe_of(name).EXPERIMENTS for name in ("", "fashion"))
    experiments = arguments.experiments or list(embedded)
    for name in experiments:
        check_known("--experiments", name, {**embedded, **fashion})
    if fashion.keys() & experiments:
        found = find_idx(images) and create_dataset(name=images, split="test", preprocess="decode")
        if not found or "Sandal" not in found.class_names:
            how = "install Debian's dataset-fashion-mnist, or name a folder; see docs/data.md"
            raise UserError(f"--fashion_mnist={images} has no Fashion-MNIST: {how}.")
    task = task_number(arguments.task, arguments.num_tasks, os.environ)
    mine = plan_chains(experiments, arguments.seeds)[task :: arguments.num_tasks]
    if arguments.dry_run:
        total = 0.0
        for runs in mine:
            left = [run for run in runs if not (folder / run / "results.json").exists()]
            total += sum(map(seconds, left))
            print(f"{runs[0]:28}{len(left):3} of {len(runs)} runs, {sum(map(seconds, left)):.0f} s")
        print(f"This task: {total / 60:.0f} minutes on a core.")
        return
    train_all(mine, folder, overrides, images)
    took = [read_object(path, seconds=float)["seconds"] for path in folder.glob("*/*/results.json")]
    text = f"{len(took)} runs, {sum(took) / 60:.0f} minutes.\n\n"
    text += report(experiments, arguments.seeds, folder)
    write_atomically(folder / "miniature.md", text)
    print(text)


if __name__ == "__main__":
    launch.start_logging()
    with launch.one_line_errors(resumes=True):
        main()
