"""Variants of an experiment over seeds: intervals, verdicts on claims, a table and a picture.

Values are by variant and metric, one per seed: `values["vit"]["accuracy"] == [91.2, 90.4, 91.0]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.errors import import_extra
from vit_jax.evaluators.few_shot import confidence95
from vit_jax.report.plot import COLORS, MARKERS

Values = Mapping[str, Mapping[str, Sequence[float]]]


def difference95(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Difference of the means, and half of its 95 % interval (Welch's t); two or more values each.

    The variances of the two need not be equal.
    """
    from scipy.special import stdtrit

    errors = np.array([np.var(each, ddof=1) / len(each) for each in (first, second)])
    difference = float(np.mean(first) - np.mean(second))
    if not errors.any():
        return difference, 0.0
    freedom = errors.sum() ** 2 / np.sum(errors**2 / [len(first) - 1, len(second) - 1])
    return difference, float(stdtrit(freedom, 0.975) * np.sqrt(errors.sum()))


def verdict(first: Sequence[float], relation: str, second: Sequence[float], margin: float) -> str:
    """`shows`, `not at this scale` or `undecided`, and the difference with its interval.

    `>` shows if all of the interval of the difference is above 0, and does not if all is below;
    `=` shows if all is within +-margin, and does not if all is outside, on one side.
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


def claims(texts: Sequence[str], metrics: Sequence[str], values: Values, margin: float) -> str:
    """Markdown: the `verdict` on each claim by each metric.

    A claim is `first > second: words`, or `=`, of variants.
    """
    rows = {}
    for text in texts:
        comparison, _, words = text.partition(": ")
        first, relation, second = comparison.split(" ")
        pairs = [
            [values.get(variant, {}).get(metric, ()) for variant in (first, second)]
            for metric in metrics
        ]
        rows[f"{comparison}: {words}"] = [verdict(a, relation, b, margin) for a, b in pairs]
    return _markdown("claim", metrics, rows)


def table(labels: Mapping[str, str], metrics: Sequence[str], values: Values) -> str:
    """Markdown: mean ± half of the 95 % interval of the mean (Student's t) of each variant."""

    def cell(found: Sequence[float]) -> str:
        if not found:
            return "-"
        half = confidence95(found)
        return f"{np.mean(found):.1f}" + ("" if half is None else f" ± {half:.1f}")

    rows = {
        label: [cell(values.get(variant, {}).get(metric, ())) for metric in metrics]
        for variant, label in labels.items()
    }
    return _markdown("variant", metrics, rows)


def _markdown(first: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [[first, *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *cells] for name, cells in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(
    series: Mapping[str, Mapping[str, float]],
    metrics: Sequence[str],
    values: Values,
    *,
    x_title: str = "",
    log: bool = False,
) -> Any:
    """The figure: a panel per metric; the mean and its 95 % interval over x.

    `series` are lines of variants, each with its x. Without `x_title`, x are places, which are
    labelled with the variants' names.
    """
    import_extra("a plot", "matplotlib", "embedded")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.3 * len(metrics) + 0.5, 3.4), layout="constrained")
    for axis, metric in zip(np.ravel(figure.subplots(1, len(metrics))), metrics, strict=True):
        for (name, places), color, marker in zip(series.items(), COLORS, MARKERS, strict=False):
            shown = {x: found for each, x in places.items() if (found := values[each].get(metric))}
            halves = [confidence95(found) or 0.0 for found in shown.values()]
            style = f"{marker}-" if x_title else marker
            axis.errorbar(
                list(shown), list(map(np.mean, shown.values())), halves,
                fmt=style, color=color, capsize=3, label=name,
            )  # fmt: skip
        if not x_title:
            places = {x: each for line in series.values() for each, x in line.items()}
            axis.set_xticks(list(places), list(places.values()), rotation=60, ha="right")
        elif log:
            axis.set_xscale("log")
        axis.set_xlabel(x_title)
        axis.set_title(metric, loc="left", fontsize=10)
        axis.grid(color="0.5", alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
        if len(series) > 1:
            axis.legend(fontsize=8, frameon=False)
    return figure
