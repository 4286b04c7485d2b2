"""Draws the curves of runs: loss, evaluations, learning rate, images per second.

    python scripts/plot_run.py runs/a runs/b --output=curves.png
    python scripts/plot_run.py runs/sweep/* --metrics=accuracy --x=images

The legend shows the differences of the runs' config.json. Unfinished runs can be plotted, too.
"""

from vit_jax import launch
from vit_jax.arguments import create_parser, names


def main():
    parser = create_parser(__doc__)
    add = parser.add_argument
    add("workdirs", nargs="+", metavar="WORKDIR", help="folder of a run")
    add("--output", default="curves.png", metavar="FILE", help=".png, .pdf or .svg (curves.png)")
    add(
        "--metrics",
        type=names,
        default=[],
        help="panels, as loss,test/accuracy (default: loss, evaluations, learning rate, speed)",
    )
    add("--x", default="step", choices=("step", "images", "hours"), help="default: step")
    add(
        "--smooth",
        type=float,
        default=0.02,
        help="width of the moving average as a share of the x axis (default 0.02; 0: none)",
    )
    arguments = vars(parser.parse_args())
    launch.start_logging()
    with launch.one_line_errors():
        from vit_jax.report.plot import plot_run

        print(f"Wrote {plot_run(**arguments)}.")


if __name__ == "__main__":
    main()
