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
            (r["tokens"], r["percent"], *r["bars"]) for r in rows if r["model"] == source
        )
        tokens, percent, *bars = zip(*of_model, strict=True)
        axis.errorbar(tokens, percent, bars, fmt="o-", capsize=3, label=source)
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
        has_folder = os.path.isdir(os.path.dirname(output) or ".")
        if not has_folder or not output.endswith((".png", ".svg")):
            raise UserError(f"--output={output!r} must be a .png or .svg in an existing folder.")
    tries = [(source, {"patch_size": int(n), "image_size": image_size}) for n in sizes]
    rows: list[dict[str, Any]] = []
    for model, size in [*tries, *((other, {}) for other in others)]:
        results = evaluate(model, **options, **size)
        if "accuracy" not in results:
            raise UserError(f"{model} has no accuracy: it does not tell classes of whole images.")
        percent = 100 * results["accuracy"]
        low, high = (100 * x for x in wilson_interval(results["accuracy"], results["num_examples"]))
        bars = percent - low, high - percent
        rows.append({**results, "model": model, "percent": percent, "bars": bars})
    print(f"{'model':40} {'patch':>5} {'tokens':>6} accuracy, %")
    for row in rows:
        percent, (below, above) = row["percent"], row["bars"]
        accuracy = f"{percent:.2f} ({percent - below:.2f} to {percent + above:.2f})"
        patch = str(row.get("patch_size", "-"))
        print(f"{row['model']:40} {patch:>5} {row['tokens']:6} {accuracy}")
    if output:
        draw(rows, output)


if __name__ == "__main__":
    launch.start_logging()
    with launch.one_line_errors():
        main()
