"""Evaluates models at several patch sizes: a table, and a plot against tokens (2212.08013).

    python scripts/patch_sizes.py runs/flexi --patch_sizes=8,12,16,24,48
    python scripts/patch_sizes.py runs/flexi --patch_sizes=4,7,14 --others=runs/vit_7,runs/vit_14 \\
        --output=sizes.png

MODEL is of one set of parameters for all sizes (FlexiViT), and as for scripts/evaluate.py; those
of --others are evaluated at their own size.
"""

import argparse
import os
from typing import Any

from vit_jax import arguments, launch


def parser() -> argparse.ArgumentParser:
    created = arguments.create_model_parser(__doc__, source="model of all sizes", batch_size=128)
    add = created.add_argument
    add("--patch_sizes", required=True, type=arguments.names, metavar="N,M", help="in pixels")
    add("--others", type=arguments.names, default=[], metavar="A,B", help="models of one size")
    add("--dataset", default="", help="as for evaluate.py (default: the run's own)")
    add("--split", default="", help="such as validation (default test)")
    arguments.add_dataset(created)
    add("--output", default="", metavar="FILE", help="the plot, .png or .svg")
    return created


def draw(rows: list[dict[str, Any]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.6), dpi=100, layout="constrained")
    axis = figure.subplots()
    for source in dict.fromkeys(row["model"] for row in rows):
        of_model = sorted(
            (row["tokens"], 100 * row["accuracy"], *row["interval"])
            for row in rows
            if row["model"] == source
        )
        tokens, accuracies, low, high = zip(*of_model, strict=True)
        bars = [[y - a for y, a in zip(accuracies, low, strict=True)]]
        bars += [[b - y for y, b in zip(accuracies, high, strict=True)]]
        axis.errorbar(tokens, accuracies, bars, fmt="o-", capsize=3, label=source)
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts := sorted({row["tokens"] for row in rows}), map(str, counts))
    axis.minorticks_off()
    axis.set_xlabel("tokens")
    axis.set_ylabel("accuracy, %")
    axis.grid(color="0.5", alpha=0.2)
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def main() -> None:
    options = vars(parser().parse_args())
    names = ("source", "patch_sizes", "others", "output", "patch_size", "image_size")
    source, sizes, others, output, single, image_size = (options.pop(key) for key in names)
    from vit_jax.console import wilson_interval
    from vit_jax.errors import UserError, import_extra
    from vit_jax.inference.evaluate import evaluate

    if bad := [size for size in sizes if not size.isdigit()] or ([single] if single else []):
        raise UserError(
            f"--patch_sizes must be numbers of pixels, instead of --patch_size: {bad[0]!r}."
        )
    if output:  # fail now if it cannot be drawn
        import_extra("a plot", "matplotlib", "embedded")
        if not output.endswith((".png", ".svg")) or not os.path.isdir(
            os.path.dirname(output) or "."
        ):
            raise UserError(
                f"--output={output!r} must be a .png or .svg in a folder that is there."
            )
    tries = [(source, {"patch_size": int(n), "image_size": image_size}) for n in sizes]
    rows: list[dict[str, Any]] = []
    for model, size in [*tries, *((other, {}) for other in others)]:
        results = evaluate(model, **options, **size)
        if "accuracy" not in results:
            raise UserError(f"{model} has no accuracy: it does not tell classes of whole images.")
        share = wilson_interval(results["accuracy"], results["num_examples"])
        rows.append({**results, "model": model, "interval": [100 * bound for bound in share]})
    print(f"{'model':40} {'patch':>5} {'tokens':>6} {'accuracy, %':>11}")
    for row in rows:
        size, (low, high) = row.get("patch_size", "-"), row["interval"]
        accuracy = f"{100 * row['accuracy']:.2f} ({low:.2f} to {high:.2f})"
        print(f"{row['model']:40} {size!s:>5} {row['tokens']:6} {accuracy:>11}")
    if output:
        draw(rows, output)


if __name__ == "__main__":
    launch.start_logging()
    with launch.one_line_errors():
        main()
