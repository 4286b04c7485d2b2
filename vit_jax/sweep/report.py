"""What a sweep found, as numbers and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from vit_jax.sweep.plan import Outcome, metric


def summarize(
    config: ConfigDict,
    grid: Sequence[Outcome],
    learning_rate: float | None,
    final: Sequence[Outcome],
) -> dict[str, Any]:
    """Everything about a sweep, finished or not, for JSON.

    `learning_rate` is None before the grid is complete. `mean` and `std` (of a sample, None for
    one run) are over the final runs that finished, in percent of the test set.
    """
    percents = [100 * each["accuracy"] for each in final if each["state"] == "finished"]
    missing = [each["run"] for each in (*grid, *final) if each["state"] == "missing"]
    return {
        "complete": not missing and bool(final),
        "missing": missing,
        "validation_split": config.sweep.validation_split,
        "grid": list(grid),
        "learning_rate": learning_rate,
        "metric": metric(config),
        "test_split": config.evaluators.test.split,
        "final": list(final),
        "mean": statistics.fmean(percents) if percents else None,
        "std": statistics.stdev(percents) if len(percents) > 1 else None,
        "published": config.sweep.published,
    }


def table(summary: Mapping[str, Any]) -> str:
    """The summary as text."""
    lines = []
    if summary["grid"]:
        lines.append(f"{'learning rate':16}{summary['metric']} on {summary['validation_split']}")
    for each in summary["grid"]:
        chosen = "  <- chosen" if each["learning_rate"] == summary["learning_rate"] else ""
        lines.append(f"{each['learning_rate']:<16g}{_result(each)}{chosen}")
    if summary["final"]:
        rate = f"rate {summary['learning_rate']:g}"
        lines.append(f"{rate:16}{summary['metric']} on {summary['test_split']}")
    lines += [f"seed {each['seed']:<11}{_result(each)}" for each in summary["final"]]
    if summary["mean"] is not None:
        finished = [each for each in summary["final"] if each["state"] == "finished"]
        spread = "" if summary["std"] is None else f" +- {summary['std']:.2f}"
        note = f"mean and standard deviation of {len(finished)} of {len(summary['final'])} seeds"
        lines.append(f"{'this sweep':16}{summary['mean']:.2f}{spread} ({note})")
    if summary["published"]:
        lines.append(f"{'published':16}{summary['published']}")
    if not summary["complete"]:
        stage = "" if summary["final"] else "; the final runs come after the grid"
        missing = ", ".join(summary["missing"]) or "nothing else"
        lines.append(f"Not complete; missing: {missing}{stage}. The same command resumes.")
    return "\n".join(lines)


def _result(outcome: Outcome) -> str:
    if outcome["state"] == "finished":
        return f"{100 * outcome['accuracy']:.2f}"
    if outcome["state"] == "diverged":
        return f"diverged at {outcome['message'].partition(';')[0]}"
    return outcome["state"]
