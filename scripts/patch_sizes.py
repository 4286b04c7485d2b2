"""Evaluates models at several patch sizes: a table, and a plot against tokens (2212.08013).

    python scripts/patch_sizes.py runs/flexi --patch_sizes=8,12,16,24,48 --image_size=240
    python scripts/patch_sizes.py runs/flexi --patch_sizes=4,7,14 --others=runs/vit_7,runs/vit_14 \\
        --output=sizes.png

MODEL is of one set of parameters for all sizes (FlexiViT), and as for scripts/evaluate.py; those
of --others are evaluated at their own size.
"""

import argparse
from typing import Any

from vit_jax import arguments, launch


def parser() -> argparse.ArgumentParser:
    created = arguments.create_parser(__doc__)
    add = created.add_argument
    add("source", metavar="MODEL", help="model of all sizes")
    add("--patch_sizes", required=True, type=arguments.names, metavar="N,M", help="in pixels")
    add("--image_size", type=arguments.pair, metavar="N[,M]", help="that all sizes divide")
    add("--others", type=arguments.names, default=[], metavar="A,B", help="models of one size")
    add("--dataset", default="", help="as for evaluate.py (default: the run's own)")
    add("--split", default="", help="such as validation (default test)")
    add("--data_dir", default="", metavar="DIR", help="where TFDS sets are prepared")
    add("--batch_size", type=int, default=128, help="in total (default 128)")
    add("--output", default="", metavar="FILE", help="the plot, .png or .svg")
    return created


def draw(rows: list[dict[str, Any]], path: str) -> None:
    from vit_jax.errors import import_extra

    import_extra("a plot", "matplotlib", "embedded")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.6), dpi=100, layout="constrained")
    axis = figure.subplots()
    for source in dict.fromkeys(row["model"] for row in rows):
        of_model = sorted(
            (row["tokens"], row["accuracy"]) for row in rows if row["model"] == source
        )
        tokens, accuracies = zip(*of_model, strict=True)
        axis.plot(tokens, [100 * x for x in accuracies], "o-", label=source)
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
    sizes, others, output = (options.pop(key) for key in ("patch_sizes", "others", "output"))
    image_size, source = options.pop("image_size"), options.pop("source")
    if bad := [size for size in sizes if not size.isdigit() or not int(size)]:
        from vit_jax.errors import UserError

        raise UserError(f"--patch_sizes: {bad[0]!r} is no number of pixels.")
    from vit_jax.console import wilson_interval
    from vit_jax.inference.evaluate import evaluate

    tries = [(source, {"patch_size": int(n), "image_size": image_size}) for n in sizes]
    rows: list[dict[str, Any]] = []
    for model, options_of_model in [*tries, *((other, {}) for other in others)]:
        results = evaluate(model, **options, **options_of_model)
        rows.append({**results, "model": model})
    print(f"{'model':40} {'patch':>5} {'tokens':>6} {'accuracy, %':>11}")
    for row in rows:
        low, high = wilson_interval(row["accuracy"], row["num_examples"])
        size = row.get("patch_size", "-")
        accuracy = f"{100 * row['accuracy']:.2f} ({100 * low:.2f} to {100 * high:.2f})"
        print(f"{row['model']:40} {size!s:>5} {row['tokens']:6} {accuracy:>11}")
    if output:
        draw(rows, output)


if __name__ == "__main__":
    launch.start_logging()
    with launch.one_line_errors():
        main()
