"""The table of a suite: a row for each number, means of groups, three formats."""

from __future__ import annotations

import csv
import dataclasses
import io
import statistics
from collections.abc import Sequence
from pathlib import Path

from vit_jax.files.atomic import write_atomically, write_json


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table; `ours` and `ci95`, half of the 95 % interval, are in percent.

    `of` says of what the interval is; `state` is `finished`, `missing`, `diverged`, or why there
    is no number.
    """

    group: str
    task: str
    metric: str
    ours: float | None
    ci95: float | None
    of: str
    published: str
    state: str = "finished"


def means(rows: Sequence[Row]) -> list[Row]:
    """Means over the tasks of each group, and over all, by metric."""
    groups = list(dict.fromkeys(row.group for row in rows))
    found = []
    for group in [*groups, None] if len(groups) > 1 else groups:
        members = [row for row in rows if group in (None, row.group)]
        count = len({row.task for row in members})
        for metric in dict.fromkeys(row.metric for row in members if row.ours is not None):
            values = [row.ours for row in members if row.metric == metric and row.ours is not None]
            if count > 1 and metric != "calibration_error":
                of = f"mean of {len(values)} of {count} tasks"
                name = f"mean {group or ''}".strip()
                found.append(Row("", name, metric, statistics.fmean(values), None, of, ""))
    return found


def write_report(folder: Path, rows: Sequence[Row], source: str) -> None:
    """The rows as `suite.md`, `suite.csv` and `suite.json`."""
    write_atomically(folder / "suite.md", markdown(rows, source) + "\n")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(Row))
    writer.writerows(dataclasses.astuple(row) for row in rows)
    write_atomically(folder / "suite.csv", text.getvalue())
    write_json(
        folder / "suite.json", {"model": source, "rows": [dataclasses.asdict(row) for row in rows]}
    )


def markdown(rows: Sequence[Row], source: str) -> str:
    """The rows as a table, and below it why some have no number."""
    lines = [
        f"{source}, in percent ± half of the 95 % interval.",
        "",
        "| group | task | metric | ours | over | published |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = "" if row.ci95 is None else f" ± {row.ci95:.2f}"
        ours = "-" if row.ours is None else f"{row.ours:.2f}{spread}"
        cells = (row.group, row.task, row.metric, ours, row.of, row.published)
        lines.append("| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |")
    why = [f"{row.task}: {row.state}" for row in rows if row.state != "finished"]
    return "\n".join([*lines, *(["", "Without a number:", ""] if why else []), *why])
