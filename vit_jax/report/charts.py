"""Charts as inline SVG; colours and dashes are classes of page.css."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from vit_jax.curves.read import smoothed
from vit_jax.report.page import Html, details, table, tag

_WIDTH, _HEIGHT = 360, 220  # of the view box: about a phone's width, so that text keeps its size
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 340, 10, 192
_MOST_POINTS = 300  # per line; more would be narrower than the screen's pixels
_MOST_DOTS = 40  # per line, or they hide each other: then only the last
_SMOOTHED = 150  # points from which on a moving average is drawn: three in its window
_WINDOW = 0.02  # of the x axis, as in scripts/plot_run.py
_COLORS = 8  # classes c0, c1, ... in page.css


@dataclasses.dataclass(frozen=True)
class Line:
    """Values `y` [N] at the steps `x` [N], rising.

    `marked`: a dot for each, as for evaluations, and no moving average.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    marked: bool = False

    @property
    def thinned(self) -> Line:
        """At most `_MOST_POINTS` of its points, the last one among them."""
        every = math.ceil(len(self.x) / _MOST_POINTS)
        kept = slice((len(self.x) - 1) % every, None, every)
        return dataclasses.replace(self, x=self.x[kept], y=self.y[kept])


def is_share(name: str) -> bool:
    """Whether a metric is a share, which is written in percent."""
    return any(part in name for part in ("accuracy", "mAP", "calibration", "goodput", "mfu"))


def value_text(name: str, value: float) -> str:
    """A metric's value as tables show it: `93.00 %`, `0.3143`, `300`."""
    if is_share(name):
        return f"{100 * value:.2f} %"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def line_chart(name: str, lines: Sequence[Line]) -> Html:
    """A figure over the steps: legend with values, picture, and a table of the numbers.

    page.js shows the values under the pointer, or where arrow keys have moved the cursor.
    """
    values = np.concatenate([line.y for line in lines])
    end = float(max(line.x[-1] for line in lines)) or 1.0
    # Noise would fill the picture of a speed that is steady.
    low = 0.0 if name == "images_per_second" else float(values.min())
    y_ticks = _ticks(low, float(values.max()), outside=True)
    x_ticks = _ticks(0.0, end, outside=False)

    def place(x: np.ndarray, y: np.ndarray) -> str:
        across = _LEFT + (_RIGHT - _LEFT) * np.asarray(x) / end
        up = _BOTTOM - (_BOTTOM - _TOP) * (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, up, strict=True))

    drawn = _grid(name, x_ticks, y_ticks, end)
    for number, line in enumerate(lines):
        few = line.thinned
        averaged = len(line.x) > _SMOOTHED and not line.marked and name != "learning_rate"
        faint = " faint" if averaged else ""
        color = f"c{number % _COLORS}"
        drawn.append(tag("polyline", points=place(few.x, few.y), class_=f"line {color}{faint}"))
        if averaged:
            average = smoothed(line.x, line.y, _WINDOW * end)
            mean = dataclasses.replace(line, y=average).thinned
            drawn.append(tag("polyline", points=place(mean.x, mean.y), class_=f"mean {color}"))
        if line.marked or len(few.x) == 1:
            points = place(few.x, few.y).split()
            for point in points if len(points) <= _MOST_DOTS else points[-1:]:
                cx, _, cy = point.partition(",")
                drawn.append(tag("circle", cx=cx, cy=cy, r=3, class_=color))
    drawn.append(tag("line", x1=0, x2=0, y1=_TOP, y2=_BOTTOM, class_="cursor"))
    ends = [
        f"{line.label}: {value_text(name, line.y[0])} at step {line.x[0]:.0f}, "
        f"{value_text(name, line.y[-1])} at step {line.x[-1]:.0f}"
        for line in lines
    ]
    svg = tag(
        "svg",
        tag("title", f"{name} over the steps"),
        tag("desc", "; ".join(ends)),
        *drawn,
        role="img",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        data_left=_LEFT,
        data_right=_RIGHT,
        data_end=f"{end:.0f}",
    )
    label = f"{name}: left and right arrow keys show values"
    return tag(
        "figure",
        tag("figcaption", tag("h3", name), _legend(name, lines)),
        tag("div", svg, class_="plot", tabindex=0, role="group", aria_label=label),
        details("Numbers", _numbers(name, lines)),
        class_="chart",
    )


def share_bar(parts: Sequence[tuple[str, float]], title: str) -> Html:
    """Shares of a whole as one bar, in the colours of their place in `parts`."""
    whole = sum(value for _, value in parts) or 1.0
    start, drawn = 0.0, []
    for number, (_, value) in enumerate(parts):
        width = 100 * value / whole
        box = {"x": f"{start:.3f}", "y": 0, "width": f"{width:.3f}", "height": 6}
        drawn.append(tag("rect", **box, class_=f"c{number % _COLORS}"))
        start += width
    texts = "; ".join(f"{label} {value / whole:.1%}" for label, value in parts if value)
    inside = (tag("title", title), tag("desc", texts), *drawn)
    return tag(
        "svg", *inside, role="img", viewBox="0 0 100 6", preserveAspectRatio="none", class_="bar"
    )


def swatch(number: int, kind: str = "square") -> Html:
    """The colour of a line or part; what it stands for is written beside it."""
    return tag("span", class_=f"swatch {kind} c{number % _COLORS}", aria_hidden="true")


def _grid(name: str, x_ticks: np.ndarray, y_ticks: np.ndarray, end: float) -> list[Html]:
    """Horizontal lines, and the numbers at both axes."""
    found = []
    for tick, y in zip(y_ticks, np.linspace(_BOTTOM, _TOP, len(y_ticks)), strict=True):
        text = f"{100 * tick:.4g} %" if is_share(name) else f"{tick:.4g}"
        found.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        found.append(tag("text", text, x=_LEFT - 5, y=f"{y + 3.5:.1f}", text_anchor="end"))
    for tick in x_ticks:
        x = _LEFT + (_RIGHT - _LEFT) * tick / end
        found.append(
            tag("text", _compact(tick), x=f"{x:.1f}", y=_BOTTOM + 14, text_anchor="middle")
        )
    middle = (_LEFT + _RIGHT) / 2
    return [*found, tag("text", "step", x=middle, y=_HEIGHT - 2, text_anchor="middle")]


def _legend(name: str, lines: Sequence[Line]) -> Html:
    """What each line is, with its last value; page.js puts in others."""
    entries = [
        tag("li", swatch(i, "line"), line.label, " ", tag("b", value_text(name, line.y[-1])))
        for i, line in enumerate(lines)
    ]
    return tag("ul", *entries, tag("li", "last", class_="at"), class_="legend", aria_live="polite")


def _numbers(name: str, lines: Sequence[Line]) -> Html:
    few = [line.thinned for line in lines]
    known = [dict(zip(line.x.tolist(), line.y.tolist(), strict=True)) for line in few]
    rows = [
        (f"{step:.0f}", *(value_text(name, each[step]) if step in each else "" for each in known))
        for step in sorted(set().union(*known))
    ]
    columns = ["step", *(line.label for line in lines)]
    return table(columns, rows, label=f"{name} by step", kind="numbers")


def _ticks(low: float, high: float, *, outside: bool) -> np.ndarray:
    """About five round numbers: such that the first and last enclose, or whole ones inside."""
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # rounding is no span
        low, high = min(low, 0.0), max(high, 0.0)
        high = high if high > low else 1.0
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    size = next(power * each for each in (1, 2, 5, 10) if (high - low) / (power * each) <= 5)
    size = size if outside else max(size, 1.0)
    slack = 1e-6
    if outside:
        first, last = math.floor(low / size + slack), math.ceil(high / size - slack)
    else:
        first, last = math.ceil(low / size - slack), math.floor(high / size + slack)
    return np.arange(first, last + 1) * size


def _compact(value: float) -> str:
    """`250`, `10k`, `1.5M`."""
    for least, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
