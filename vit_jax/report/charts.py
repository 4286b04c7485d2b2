"""Charts as inline SVG; colours and dashes are classes of page.css."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from vit_jax.report.page import Html, details, table, tag
from vit_jax.report.plot import MAX_MARKERS, smoothed
from vit_jax.report.runs import Curve

_HEIGHT = 220
_VIEW_BOX = f"0 0 360 {_HEIGHT}"  # about a phone's width, so that text keeps its size
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 340, 10, 192
_MOST_POINTS = 300  # per line; more would be narrower than the screen's pixels
_WINDOW = 0.02  # of the x axis, as in scripts/plot_run.py
_COLORS = 8  # classes c0, c1, ... in page.css


def is_share(name: str) -> bool:
    """Whether a metric is a share, which is written in percent."""
    return any(part in name for part in ("accuracy", "mAP", "calibration", "goodput", "mfu"))


def value_text(name: str, value: float) -> str:
    """A metric's value as tables show it: `93.00 %`, `0.3143`, `300`."""
    if is_share(name):
        return f"{100 * value:.2f} %"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def line_chart(panel: str, curves: Mapping[str, Curve]) -> Html:
    """A figure over the steps: legend with values, picture, and a table of the numbers.

    page.js shows the values under the pointer, or where arrow keys have moved the cursor.

    Args:
      panel: the metric.
      curves: of training by `METRIC`, a line with its moving average; of evaluators by
        `NAME/METRIC`, a dot for each value.
    """
    labels = [name.rpartition("/")[0] or "training" for name in curves]
    last = [value_text(panel, curve.values[-1]) for curve in curves.values()]
    ends = list(zip(labels, last, strict=True))
    entries = [
        tag("li", swatch(i, "line"), label, " ", tag("b", text))
        for i, (label, text) in enumerate(ends)
    ]
    legend = tag(
        "ul", *entries, tag("li", "last", class_="at"), class_="legend", aria_live="polite"
    )
    spoken = f"{panel} over the steps; at the end {', '.join(map(' '.join, ends))}"
    svg = tag("svg", *_drawing(panel, curves), role="img", aria_label=spoken, viewBox=_VIEW_BOX)
    keys = f"{panel}: left and right arrow keys show values"
    return tag(
        "figure",
        tag("figcaption", tag("h3", panel), legend),
        tag("div", svg, class_="plot", tabindex=0, role="group", aria_label=keys),
        details("Numbers", _numbers(panel, labels, curves)),
        class_="chart",
    )


def share_bar(parts: Mapping[str, float], title: str) -> Html:
    """Shares of a whole as one bar, in the colours of their place in `parts`."""
    whole = sum(parts.values()) or 1.0
    texts = "; ".join(f"{label} {value / whole:.1%}" for label, value in parts.items() if value)
    boxes = [
        tag("span", class_=f"c{i % _COLORS}", style=f"flex-grow: {value / whole:.4f}")
        for i, value in enumerate(parts.values())
        if value
    ]
    return tag("div", *boxes, role="img", aria_label=f"{title}: {texts}", class_="bar")


def swatch(number: int, kind: str = "square") -> Html:
    """The colour of a line or part; what it stands for is written beside it."""
    return tag("span", class_=f"swatch {kind} c{number % _COLORS}", aria_hidden="true")


def _drawing(panel: str, curves: Mapping[str, Curve]) -> list[Html]:
    """Lines of a grid with the numbers of both axes, the curves, and page.js's cursor."""
    end = max(curve.steps[-1] for curve in curves.values()) or 1.0
    values = np.concatenate([curve.values for curve in curves.values()])
    # Noise would fill the picture of a speed that is steady.
    low = 0.0 if panel == "images_per_second" else values.min()
    x_ticks, y_ticks = _ticks(0.0, end, least=1.0), _ticks(low, values.max())

    def across(x: np.ndarray) -> np.ndarray:
        return _LEFT + (_RIGHT - _LEFT) * x / end

    def up(y: np.ndarray) -> np.ndarray:
        return _BOTTOM - (_BOTTOM - _TOP) * (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])

    drawn = [tag("text", "step", x=(_LEFT + _RIGHT) / 2, y=_HEIGHT - 2, text_anchor="middle")]
    for tick, y in zip(y_ticks, up(y_ticks).round(1), strict=True):
        text = f"{100 * tick:.4g} %" if is_share(panel) else f"{tick:.4g}"
        drawn.append(tag("line", x1=_LEFT, x2=_RIGHT, y1=y, y2=y, class_="grid"))
        drawn.append(tag("text", text, x=_LEFT - 5, y=y, dy="0.3em", text_anchor="end"))
    for tick in x_ticks[x_ticks <= end]:
        x = across(tick).round(1)
        drawn.append(tag("text", f"{tick:,.0f}", x=x, y=_BOTTOM + 14, text_anchor="middle"))
    for number, (name, curve) in enumerate(curves.items()):
        color, x = f"c{number % _COLORS}", across(curve.steps)
        lines = {"line": up(curve.values)}
        if "/" not in name and panel != "learning_rate":
            mean = smoothed(curve.steps, curve.values, _WINDOW * end)
            lines = {"line faint": lines["line"], "mean": up(mean)}
        for kind, y in lines.items():
            points = np.stack([x, y], axis=1)[_thinned(curve)].round(1).tolist()
            text = " ".join(f"{a},{b}" for a, b in points)
            drawn.append(tag("polyline", points=text, class_=f"{kind} {color}"))
        # Many dots would hide each other.
        dots = points if len(points) <= MAX_MARKERS else points[-1:]
        if "/" in name or len(points) == 1:
            drawn += [tag("circle", cx=a, cy=b, r=3, class_=color) for a, b in dots]
    return [*drawn, tag("line", x1=0, x2=0, y1=_TOP, y2=_BOTTOM, class_="cursor")]


def _numbers(panel: str, labels: list[str], curves: Mapping[str, Curve]) -> Html:
    known = []
    for curve in curves.values():
        few = np.stack([curve.steps, curve.values], axis=1)[_thinned(curve)]
        known.append({step: value_text(panel, value) for step, value in few.tolist()})
    steps = sorted(set().union(*known))
    rows = [(f"{step:.0f}", *(each.get(step, "") for each in known)) for step in steps]
    return table(["step", *labels], rows, label=f"{panel} by step", kind="numbers")


def _thinned(curve: Curve) -> slice:
    """Which points to show of a long curve, the last one among them."""
    every = math.ceil(len(curve.steps) / _MOST_POINTS)
    return slice((len(curve.steps) - 1) % every, None, every)


def _ticks(low: float, high: float, *, least: float = 0.0) -> np.ndarray:
    """About five round numbers that enclose a range, `least` apart or more."""
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # rounding is no span
        low, high = min(low, 0.0), max(high, 0.0)
        high = high if high > low else 1.0
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    size = next(power * each for each in (1, 2, 5, 10) if (high - low) / (power * each) <= 5)
    size = max(size, least)
    return size * np.arange(math.floor(low / size + 1e-6), math.ceil(high / size - 1e-6) + 1)
