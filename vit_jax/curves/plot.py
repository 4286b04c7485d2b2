"""Curves of runs in one picture, a panel per metric."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.curves.read import RunCurves, legend_labels, read_run, smoothed
from vit_jax.errors import UserError, check_known, import_extra

# Told apart with any kind of colour vision, and on white paper: Okabe and Ito's (2008), without
# their yellow. After them the same colours come again, dashed.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES: list[dict[str, Any]] = [
    {"color": color, "ls": line} for line in ("-", "--", ":", "-.") for color in COLORS
]
MARKERS = "osD^vPX"  # one per evaluator
MAX_PANELS = 9  # where nothing is asked for
MAX_MARKERS = 40  # per curve, or they hide each other
X_TITLES = {"step": "step", "images": "training images", "hours": "hours"}


def plot_run(
    workdirs: Sequence[str],
    *,
    output: str = "curves.png",
    metrics: Sequence[str] = (),
    x: str = "step",
    smooth: float = 0.02,
) -> Path:
    """Draws the metrics of several runs; returns the file.

    Training metrics are lines, with what was logged faintly behind their moving average;
    evaluations are marked points, a shape per evaluator; a colour is a run.

    Args:
      workdirs: folders of runs, finished or not.
      output: file to write: .png, .pdf or .svg.
      metrics: a panel for each; `accuracy` shows those of training and of all evaluators,
        `test/accuracy` of one. Empty: loss, evaluations, learning rate and speed.
      x: `step`, `images` (comparable where batch sizes differ) or `hours` (evaluation included).
      smooth: width of the moving average, as a share of the x axis; 0 shows what was logged.

    Raises:
      UserError: a folder is no run, nothing is called that, or matplotlib is not installed.
    """
    runs = [read_run(workdir) for workdir in workdirs]
    figure = draw(runs, choose_panels(runs, metrics), x=x, smooth=smooth)
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:  # ValueError: of a suffix that is no format
        raise UserError(f"--output={output}: {error}") from error
    return Path(output)


def curves_of(run: RunCurves, panel: str) -> list[str]:
    """Names of the run's metrics that a panel shows, that of training first."""
    return sorted(
        (name for name in run.curves if panel in (name, name.rpartition("/")[2])),
        key=lambda name: "/" in name,
    )


def choose_panels(runs: Sequence[RunCurves], asked: Sequence[str]) -> list[str]:
    """What to draw: the metrics asked for, or those that most readers look at.

    Raises:
      UserError: no run has a metric of that name, or any metric.
    """
    names = dict.fromkeys(name for run in runs for name in run.curves)
    last_parts = dict.fromkeys(name.rpartition("/")[2] for name in names)
    for panel in asked:
        check_known("--metrics", panel, {**names, **last_parts})
    if asked:
        return list(dict.fromkeys(asked))
    evaluated = [name.rpartition("/")[2] for name in names if "/" in name]
    first = ["loss", "accuracy", *(part for part in evaluated if part != "num_examples")]
    chosen = [part for part in dict.fromkeys(first) if part in last_parts]
    room = MAX_PANELS - 2
    if len(chosen) > room:
        logging.info("Not drawn: %s; --metrics chooses.", ", ".join(chosen[room:]))
    speed = [name for name in ("learning_rate", "images_per_second") if name in names]
    if not chosen and not speed:
        where = ", ".join(str(run.workdir) for run in runs)
        raise UserError(f"There is no number to draw in the metrics of {where}.")
    return chosen[:room] + speed


def draw(runs: Sequence[RunCurves], panels: Sequence[str], *, x: str, smooth: float) -> Any:
    """The figure: panels in rows, the legend of runs above them."""
    import_extra("a plot", "matplotlib", "embedded")
    from matplotlib import font_manager, rcParams
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    rows = math.ceil(len(panels) / columns)
    # Figure instead of pyplot: nothing stays open, and no display is looked for.
    figure = Figure(
        figsize=(5.4 * columns + 2.1 * (columns == 1), 3.4 * rows + 0.25 * len(runs)),
        dpi=110,
        layout="constrained",
    )
    shown = [(run, name) for run in runs for panel in panels for name in curves_of(run, panel)]
    end = max((np.nanmax(run.along(run.curves[name], x)) for run, name in shown), default=1.0)
    evaluators = dict.fromkeys(name.rpartition("/")[0] for _, name in shown)
    markers = dict(zip(filter(None, evaluators), itertools.cycle(MARKERS), strict=False))
    for number, panel in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, columns, number)
        for run, style in zip(runs, itertools.cycle(STYLES), strict=False):
            _draw_run(axis, run, panel, x, smooth * end, style, markers)
        _finish_panel(axis, panel, x, runs, markers)
        axis.set_xlim(0, 1.02 * end or 1)
    styles = itertools.islice(itertools.cycle(STYLES), len(runs))
    handles = [Line2D([], [], lw=2, **style) for style in styles]
    labels = legend_labels(runs)
    place: Any = {"loc": "outside upper left", "frameon": False, "handlelength": 3}
    noto = (name for name in font_manager.get_font_names() if name.startswith("Noto Sans"))
    font = {"family": [*rcParams["font.family"], *sorted(noto)]}  # for names in any script
    legend = figure.legend(handles, labels, prop=font, **place)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ is one of a folder's name, or of a regular expression
    return figure


def _draw_run(
    axis: Any,
    run: RunCurves,
    panel: str,
    x: str,
    width: float,
    style: dict[str, Any],
    markers: dict[str, str],
) -> None:
    """The run's curves of one panel; `width` of the moving average, in units of the x axis."""
    for name in curves_of(run, panel):
        curve = run.curves[name]
        positions = run.along(curve, x)
        known = np.isfinite(positions)
        positions, values = positions[known], curve.values[known]
        if "/" in name:
            every = max(1, math.ceil(len(values) / MAX_MARKERS))
            # The last point always has a marker: it is what the run is remembered by.
            marked = {"marker": markers[name.rpartition("/")[0]], "mec": "white"}
            offset = (len(values) - 1) % every
            axis.plot(positions, values, **style, **marked, lw=1, markevery=(offset, every))
        elif width and name != "learning_rate":
            axis.plot(positions, values, **style, lw=0.7, alpha=0.25)
            axis.plot(positions, smoothed(positions, values, width), **style, lw=1.6)
        else:
            axis.plot(positions, values, **style, lw=1.6)


def _finish_panel(
    axis: Any, panel: str, x: str, runs: Sequence[RunCurves], markers: dict[str, str]
) -> None:
    """Title, number formats, grid, and which shape is which evaluator."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    axis.set_title(panel, loc="left", fontsize=11)
    axis.set_xlabel(X_TITLES[x])
    if x != "hours":
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 250, 10k, 1.5M
    axis.grid(color="0.92")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    names = [name for run in runs for name in curves_of(run, panel)]
    sources = dict.fromkeys(name.rpartition("/")[0] for name in names)
    if any(sources):
        handles = [Line2D([], [], marker=markers.get(each, ""), color="0.4") for each in sources]
        labels = [source or "training" for source in sources]
        axis.legend(handles, labels, fontsize=8, frameon=False)
