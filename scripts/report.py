"""Writes an HTML page about a training run: result, curves, time, mistakes, attention, settings.

    python scripts/report.py runs/flowers
    python scripts/report.py runs/flowers --output=flowers.html --max_examples=10000

The page is one file: it opens offline and can be sent by mail. Unfinished runs have one, too;
the page says what is missing. Mistakes are from up to --max_examples evaluation images, evenly
spaced in the split.
"""

import argparse

from vit_jax import launch

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("workdir", metavar="WORKDIR", help="folder of a run, local or at gs://")
    add("--output", default="", metavar="FILE", help="default WORKDIR/report.html")
    add(
        "--max_examples",
        type=int,
        default=2000,
        metavar="N",
        help="maximum number of evaluation images (default 2000; 0 skips them)",
    )
    arguments = vars(parser.parse_args())
    launch.start_logging()
    with launch.one_line_errors():
        from vit_jax.report.report import write_report

        print(f"Wrote {write_report(**arguments)}.")
