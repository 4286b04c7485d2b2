"""Curves of runs in one figure, a panel per metric."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax.console import is_share
from vit_jax.errors import UserError, import_extra
from vit_jax.files.paths import full_path
from vit_jax.kinds import check_known
from vit_jax.report.runs import HOUSEKEEPING, Curve, Run, metric_title, read_run

# Distinguishable with any kind of colour vision, and on white: Okabe and Ito's (2008), without
# yellow. Further runs repeat the colours, dashed.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX"  # one per evaluator
_FEW = 25  # up to this many training values get markers
X_TITLES = {"step": "step", "images": "training images", "hours": "hours"}
_ABSENT = "(absent)"


def plot_run(
    workdirs: Sequence[str],
    *,
    output: str = "curves.png",
    metrics: Sequence[str] = (),
    x: str = "step",
    smooth: float = 0.02,
) -> Path:
    """Draws the metrics of several runs; returns the file: .png, .pdf or .svg.

    Training metrics are lines: logged values in a pale colour behind their moving average;
    evaluations are marked points, with a marker per evaluator; each run has a colour.

    Args:
      workdirs: folders of runs, finished or not.
      metrics: a panel for each; `accuracy` shows the training's and all evaluators',
        `test/accuracy` one evaluator's. Empty: loss, evaluations, learning rate and speed.
      x: `step`, `images` (comparable if batch sizes differ) or `hours` (including evaluation).
      smooth: width of the moving average, as a share of the x axis; 0 disables it.

    UserError: a folder is not a run, an unknown metric, or matplotlib is not installed.
    """
    runs = [read_run(workdir) for workdir in workdirs]
    figure = draw(runs, choose_panels(runs, metrics), x=x, smooth=smooth)
    try:
        figure.savefig(output)
    except (OSError, ValueError) as error:  # ValueError: unsupported file suffix
        raise UserError(f"--output={output}: {error}") from error
    return Path(output)


def choose_panels(runs: Sequence[Run], asked: Sequence[str]) -> list[str]:
    """The panels to draw: the metrics asked for, or the most common ones."""
    names = dict.fromkeys(name for run in runs for name in run.curves)
    metrics = {name: name.rpartition("/")[2] for name in names}
    for panel in asked:
        check_known("--metrics", panel, dict.fromkeys([*names, *metrics.values()]))
    evaluated = [metrics[name] for name in names if "/" in name]
    usual = ["loss", "accuracy", *evaluated, "learning_rate", "images_per_second"]
    known = set(metrics.values()) - {"num_examples"}
    chosen = dict.fromkeys(asked or [panel for panel in usual if panel in known])
    if not chosen:
        raise UserError(f"no metric to plot in {', '.join(str(run.folder) for run in runs)}.")
    return list(chosen)


def draw(runs: Sequence[Run], panels: Sequence[str], *, x: str, smooth: float) -> Any:
    """The figure: panels in rows, above them the legend if there are several runs."""
    import_extra("a plot", "matplotlib", "embedded")
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    rows = math.ceil(len(panels) / columns)
    size = (5.4 * columns + 2.1 * (columns == 1), 3.4 * rows + 0.25 * len(runs))
    # Figure instead of pyplot: nothing stays open, and no display is needed.
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    ends = [positions(run, curve, x) for run in runs for curve in run.curves.values()]
    end = max(map(np.nanmax, ends), default=1.0)
    names = sorted({"", *(name.rpartition("/")[0] for run in runs for name in run.curves)})
    markers = ["", *itertools.islice(itertools.cycle(MARKERS), len(names))]
    sources = {name: {"marker": m} for name, m in zip(names, markers, strict=False)}
    if len(runs) == 1:  # with several, colours identify the runs
        for look, color in zip(sources.values(), itertools.cycle(COLORS), strict=False):
            look["color"] = color
    looks = itertools.islice(itertools.cycle(itertools.product(LINES, COLORS)), len(runs))
    styles: Any = [{"ls": line, "color": color} for line, color in looks]
    for axis, panel in itertools.zip_longest(axes, panels):
        if panel is None:
            axis.remove()
            continue
        width = 0.0 if panel == "learning_rate" else smooth * end
        _draw_panel(axis, panel, zip(runs, styles, strict=True), x, width, sources)
        axis.set_xlim(0, 1.02 * end or 1)
    if len(runs) == 1:
        return figure
    handles = [Line2D([], [], lw=2, **style) for style in styles]
    place: Any = {"loc": "outside upper left", "frameon": False, "handlelength": 3}
    for text in figure.legend(handles, legend_labels(runs), **place).get_texts():
        text.set_parse_math(False)  # a $ belongs to a folder name or a regular expression
    return figure


def positions(run: Run, curve: Curve, x: str) -> np.ndarray:
    """Positions of a curve's values on one of the axes of `X_TITLES`, [N]."""
    if x == "hours":
        return curve.hours
    return curve.steps * (run.config["dataset"]["batch_size"] if x == "images" else 1)


def _draw_panel(
    axis: Any, panel: str, runs: Iterable[Any], x: str, width: float, looks: Mapping[str, Any]
) -> None:
    """One metric of all runs; training is averaged over `width` of x; `looks` override styles."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, FuncFormatter

    sources = dict[str, Any]()
    for run, style in runs:
        for name, curve in run.curves_of(panel).items():
            at, values = positions(run, curve, x), curve.values
            at, values = at[np.isfinite(at)], values[np.isfinite(at)]
            source = name.rpartition("/")[0]
            sources[source] = {"color": "0.5", **looks[source]}
            line = {**style, **looks[source], "clip_on": False}
            if width and not source:
                axis.plot(at, values, **line, lw=0.7, alpha=0.25)
                values = smoothed(at, values, width)
            line["marker"] = line["marker"] or "." * (len(at) <= _FEW)
            axis.plot(at, values, **line, lw=1.6 if not source else 1 if len(at) > 2 else 0)
    axis.set_title(metric_title(panel), loc="left", fontsize=11)
    axis.set_xlabel(X_TITLES[x])
    if is_share(panel):
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))
    if x != "hours":
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 250, 10k, 1.5M
    axis.grid(color="0.5", alpha=0.2)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if any(sources):
        handles = [Line2D([], [], **look) for look in sources.values()]
        labels = [source or "training" for source in sources]
        axis.legend(handles, labels, fontsize=8, frameon=False)


def smoothed(x: np.ndarray, y: np.ndarray, width: float) -> np.ndarray:
    """Mean over a window of `width` around each position; x [N] increasing, y [N] -> [N].

    At the start, where curves are steep, it shrinks symmetrically; at the end it is cut off.
    """
    half = np.minimum(width / 2, x - x[:1])
    first = np.searchsorted(x, x - half, side="left")
    last = np.searchsorted(x, x + half, side="right")
    sums = np.concatenate([[0.0], np.cumsum(y)])
    return (sums[last] - sums[first]) / (last - first)


def legend_labels(runs: Sequence[Run]) -> list[str]:
    """One label per run: `folder: schedule.learning_rate=0.003  dataset.batch_size=512`.

    Shows three keys that differ: those with the most values first, technical settings last.
    """
    names = [full_path(run.folder).name for run in runs]
    if len(set(names)) < len(names):
        names = ["/".join(full_path(run.folder).parts[-2:]) for run in runs]
    flat = [flatten_dict(run.config, sep=".") for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    texts = {key: [_value_text(values.get(key, _ABSENT)) for values in flat] for key in keys}

    def rank(key: str) -> tuple[bool, int]:
        new = _ABSENT in texts[key]  # added to the code since the oldest of these runs
        return new or key.startswith(HOUSEKEEPING), -len(set(texts[key]))

    shown = sorted((key for key in keys if len(set(texts[key])) > 1), key=rank)[:3]
    parts = ["  ".join(f"{key}={texts[key][i]}" for key in shown) for i in range(len(runs))]
    return [f"{a}: {b}" if b else a for a, b in zip(names, parts, strict=True)]


def _value_text(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 32 else f"{text[:15]}…{text[-15:]}"
