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
from pathlib import Path
from typing import Any

from vit_jax import ROOT, launch
from vit_jax.arguments import add_share, at_least, create_parser, names, split_overrides

sys.path.append(str(ROOT))  # for the recipes

METRICS = {  # percent: the run and its metric
    "digits, fine-tuned": ("digits", "test/accuracy"),
    "digits, 5-shot": ("pretrain", "digits/accuracy_5shot"),
    "letters, fine-tuned": ("letters", "test/accuracy"),
    "letters, 5-shot": ("pretrain", "letters/accuracy_5shot"),
}
DISTANCE = "mean distance, pixels"
MARGIN = 2.0  # points within which variants are alike; in distances, pixels
SECONDS = {"pretrain": 25, "digits": 6, "letters": 7}  # of a run on a core, measured


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


def collect(variants: list[str], seeds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """By variant and metric: percent for each seed that is finished."""
    from vit_jax.files.paths import read_object

    values: dict[str, dict[str, list[float]]] = {}
    for variant in variants:
        found = values.setdefault(variant, {})
        for title, (stage, metric) in METRICS.items():
            paths = [folder / f"{stage}/{variant}_seed{i}/results.json" for i in range(seeds)]
            results = [read_object(path, **{metric: float}) for path in paths if path.exists()]
            found[title] = [100 * each[metric] for each in results]
    return values


def distances(variants: list[str], seeds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """By VARIANT/LAYER: the mean over heads, after fine-tuning on digits."""
    from vit_jax.files.paths import write_json
    from vit_jax.inference.load import load_model
    from vit_jax.inference.visualize import head_distances

    values: dict[str, dict[str, list[float]]] = {}
    for variant, seed in itertools.product(variants, range(seeds)):
        path = folder / f"digits/{variant}_seed{seed}/attention_distance.json"
        if not path.exists() and (path.parent / "params.npz").exists():
            model = load_model(str(path.parent))
            source = model.open_dataset(name="digits", split="test[:128]").source
            images = [source[index]["image"] for index in range(len(source))]
            write_json(path, head_distances(model, images, len(images))[0].tolist())
        if path.exists():
            for layer, heads in enumerate(json.loads(path.read_text()), start=1):
                found = values.setdefault(f"{variant}/{layer}", {DISTANCE: []})[DISTANCE]
                found.append(sum(heads) / len(heads))
    return values


def report(experiments: list[str], seeds: int, folder: Path) -> str:
    """Markdown: a table, a picture and the verdicts of each experiment."""
    from configs.miniature import EXPERIMENTS, examples, operations
    from vit_jax.report.comparison import draw, interval, verdict

    parts = []
    for name in experiments:
        each, variants, x_title = EXPERIMENTS[name], EXPERIMENTS[name].variants.split(), ""
        at = {variant: float(number) for number, variant in enumerate(variants)}
        values = collect(variants, seeds, folder)
        compared = [m for m in METRICS if sum(bool(values[v][m]) for v in variants) > 1]
        metrics = compared or list(METRICS)
        if name == "distance":
            metrics, x_title = [DISTANCE], "layer"
            values = distances(variants, seeds, folder)
            at = {layer: float(layer.partition("/")[2]) for layer in values}
        elif each.x == "examples":
            x_title, at = "images", {key: float(examples(key)) for key in at}
        elif each.x == "operations":
            x_title, at = "GFLOP", {key: operations(key) / 1e9 for key in at}
        kinds = ("vit", "bit", "hybrid") if x_title else ("",)
        lines = {kind: {k: x for k, x in at.items() if k.startswith(kind)} for kind in kinds}
        lines = {kind: line for kind, line in lines.items() if line}
        draw(lines, metrics, values, x_title).savefig(folder / f"{name}.png")
        rows = [["variant", *metrics], ["---"] * (len(metrics) + 1)]
        for key, x in at.items():
            title = f"{key}, {x:,.0f} {x_title}" if each.x else key
            rows.append([title, *(interval(values[key].get(metric, [])) for metric in metrics)])
        claims = [["claim", *metrics], rows[1]]
        for claim in map(str.strip, each.claims.splitlines()):
            first, relation, second = claim.partition(":")[0].split()
            a, b = values.get(first, {}), values.get(second, {})
            found = (verdict(a.get(m, []), relation, b.get(m, []), MARGIN) for m in metrics)
            claims.append([claim, *found])
        tables = ["\n".join(f"| {' | '.join(row)} |" for row in table) for table in (rows, claims)]
        parts += [f"## {each.title}", tables[0], f"![{each.title}]({name}.png)", tables[1]]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    overrides, arguments = split_overrides(sys.argv[1:])
    given = parser().parse_args(arguments)
    folder = Path(given.workdir).expanduser().absolute()
    # Before JAX starts: seeds of a variant compile the same programs.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    from configs import miniature
    from vit_jax.files.paths import read_object, write_atomically
    from vit_jax.kinds import check_known
    from vit_jax.sweep.run import task_number

    experiments = given.experiments or list(miniature.EXPERIMENTS)
    for name in experiments:
        check_known("--experiments", name, miniature.EXPERIMENTS)
    wanted = " ".join(miniature.EXPERIMENTS[name].variants for name in experiments)
    groups: dict[str, list[str]] = {}  # of variants that start from the same runs
    for variant in dict.fromkeys(wanted.split()):
        groups.setdefault(variant.partition("_px")[0], []).append(variant)
    task = task_number(given.task, given.num_tasks, os.environ)
    chains = list(itertools.product(range(given.seeds), groups.values()))[task :: given.num_tasks]
    mine = [(seed, variant) for seed, group in chains for variant in group]
    if given.dry_run:
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
    text += report(experiments, given.seeds, folder)
    write_atomically(folder / "miniature.md", text)
    print(text)


if __name__ == "__main__":
    launch.start_logging()
    with launch.one_line_errors(resumes=True):
        main()
