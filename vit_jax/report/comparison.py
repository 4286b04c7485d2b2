"""Variants of an experiment over seeds: intervals, verdicts on claims, a table and a picture.

Values are by variant and metric, one per seed: `values["vit"]["accuracy"] == [91.2, 90.4, 91.0]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import import_extra
from vit_jax.evaluators.few_shot import confidence95

_LOOKS = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"))  # as in report/plot.py
Values = Mapping[str, Mapping[str, Sequence[float]]]


def difference95(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Difference of the means and half of its 95 % interval (Welch's t), of two or more values."""
    from scipy.special import stdtrit

    errors = np.array([np.var(each, ddof=1) / len(each) for each in (first, second)])
    weights = errors**2 / (len(first) - 1, len(second) - 1)
    freedom = errors.sum() ** 2 / max(weights.sum(), np.finfo(float).tiny)
    half = stdtrit(freedom, 0.975) * np.sqrt(errors.sum()) if errors.any() else 0.0
    return float(np.mean(first) - np.mean(second)), float(half)


def verdict(first: Sequence[float], relation: str, second: Sequence[float], margin: float) -> str:
    """`shows`, `not at this scale` or `undecided`, and the difference with its interval.

    `>` shows if the whole interval is above 0, and does not if it is below; `=` shows if it is
    within +-margin, and does not if it is outside.
    """
    if min(len(first), len(second)) < 2:
        return "-"
    difference, half = difference95(first, second)
    low, high = difference - half, difference + half
    shows, fails = low > 0, high < 0
    if relation == "=":
        shows, fails = -margin < low and high < margin, low > margin or high < -margin
    found = "shows" if shows else "not at this scale" if fails else "undecided"
    return f"{found} ({difference:+.1f} ± {half:.1f})"


def interval(found: Sequence[float]) -> str:
    """The mean ± half of its 95 % interval (Student's t)."""
    half = confidence95(found)
    return (f"{np.mean(found):.1f}" if found else "-") + ("" if half is None else f" ± {half:.1f}")


def draw(
    series: Mapping[str, Mapping[str, float]], metrics: Sequence[str], values: Values, x_title: str
) -> Any:
    """The figure: a panel per metric, a line per series of variants with their x.

    Without `x_title` x are places, labelled with the variants' names.
    """
    import_extra("a plot", "matplotlib", "embedded")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.3 * len(metrics) + 0.5, 3.4), dpi=80, layout="constrained")
    for axis, metric in zip(np.ravel(figure.subplots(1, len(metrics))), metrics, strict=True):
        for (name, at), (color, marker) in zip(series.items(), _LOOKS, strict=False):
            shown = {x: found for each, x in at.items() if (found := values[each].get(metric))}
            bars = [confidence95(found) or 0.0 for found in shown.values()]
            look: Any = {"fmt": f"{marker}-" if x_title else marker, "color": color, "capsize": 3}
            axis.errorbar(list(shown), [*map(np.mean, shown.values())], bars, label=name, **look)
            if not x_title:
                axis.set_xticks([*at.values()], [*at], rotation=60, ha="right")
            elif max(at.values()) > 10 * min(at.values()):
                axis.set_xscale("log")
        axis.margins(x=0.12)
        axis.set_xlabel(x_title)
        axis.set_title(metric, loc="left", fontsize=10)
        axis.grid(color="0.5", alpha=0.2)
        if len(series) > 1:
            axis.legend(fontsize=8, frameon=False)
    return figure
