"""Where numbers go: `metrics.jsonl` and TensorBoard event files, from process 0 only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax

METRICS_FILE = "metrics.jsonl"


class MetricWriter:
    """Appends one line of JSON per call to `WORKDIR/metrics.jsonl`, and TensorBoard scalars.

    Lines look like `{"step": 20, "loss": 1.5, "images_per_second": 900.0}`; a step with training
    metrics and evaluations has a line for each. A resumed run drops the lines after the step it
    starts from, because it writes them again.
    """

    def __init__(self, workdir: str, *, start_step: int, tensorboard: bool):
        self._file: Any = None
        self._summary: Any = None
        if jax.process_index() != 0:
            return
        path = Path(workdir) / METRICS_FILE
        kept = [row for row in read_metrics(workdir) if row["step"] <= start_step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(temporary, path)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  (closed in close)
        if tensorboard:
            from tensorboardX import SummaryWriter  # imports protobuf: half a second

            self._summary = SummaryWriter(
                str(Path(workdir) / "tensorboard"), purge_step=start_step + 1, flush_secs=20
            )

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Writes scalars by name."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self._summary is not None:
            for name, value in metrics.items():
                self._summary.add_scalar(name, value, step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._summary is not None:
            self._summary.close()


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, without a last one that a killed run left unfinished."""
    path = Path(workdir) / METRICS_FILE
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows
