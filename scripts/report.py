"""Writes an HTML page about a training run: result, curves, time, mistakes, attention, settings.

    python scripts/report.py runs/flowers
    python scripts/report.py runs/flowers --output=flowers.html --max_examples=10000
    python scripts/report.py runs/flowers --against="linear probe=0.87" --against=scratch=0.71

The page is one file: it opens offline and can be sent by mail. Unfinished runs have one, too;
the page says what is missing. Mistakes are from up to --max_examples evaluation images, evenly
spaced in the split. Data at a path are only opened if --max_examples is given: the config may be
somebody else's.
"""

from vit_jax import launch
from vit_jax.arguments import create_parser


def accuracy(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    if not name or not 0 <= float(value) <= 1:
        raise ValueError
    return name, float(value)


if __name__ == "__main__":
    parser = create_parser(__doc__)
    add = parser.add_argument
    add("workdir", metavar="WORKDIR", help="folder of a run, local or at gs://")
    add("--output", default="", metavar="FILE", help="default WORKDIR/report.html")
    add(
        "--max_examples",
        type=int,
        metavar="N",
        help="maximum number of evaluation images (default 2000; 0 skips them)",
    )
    add(
        "--against",
        type=accuracy,
        action="append",
        default=[],
        metavar="NAME=ACCURACY",
        help="an accuracy in [0, 1] to show beside that of this run",
    )
    add("--recipe", default="", help="to compare settings with (default that of the command)")
    arguments = vars(parser.parse_args())
    arguments["against"] = dict(arguments["against"])
    launch.start_logging()
    with launch.one_line_errors():
        from vit_jax.report.report import write_report

        print(f"Wrote {write_report(**arguments)}.")
