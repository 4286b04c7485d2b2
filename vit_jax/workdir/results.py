"""What a run has come to: the evaluations and times in its log, and its finished results."""

from __future__ import annotations

import logging
import statistics
import zipfile
from typing import Any

import jax

from vit_jax.errors import PassingError, UserError
from vit_jax.files.atomic import read_object, set_aside, write_json
from vit_jax.files.paths import to_path
from vit_jax.workdir.description import PARAMS_FILE, RESULTS_FILE, write_params
from vit_jax.workdir.metrics import read_metrics


def write_results(workdir: str, params: Any, results: dict[str, float]) -> dict[str, float]:
    """Writes `params.npz`, then `results.json`, whose existence means that the run has ended.

    Args:
      workdir: folder of the run.
      params: nested dict of host arrays.
      results: of the run; `images_per_second`, the median of its log, is added.

    Returns:
      What `results.json` holds.
    """
    rows = read_metrics(workdir)
    speeds = [row["images_per_second"] for row in rows if "images_per_second" in row]
    results = {"images_per_second": statistics.median(speeds) if speeds else 0.0, **results}
    if jax.process_index() == 0:
        folder = to_path(workdir)
        write_params(folder / PARAMS_FILE, params)
        write_json(folder / RESULTS_FILE, results)
        logging.info("Wrote %s.", folder / PARAMS_FILE)
    return results


def finished_results(workdir: str, total_steps: int) -> dict[str, float] | None:
    """What a run that has ended wrote; files that cannot be that are set aside."""
    path, params = to_path(workdir) / RESULTS_FILE, to_path(workdir) / PARAMS_FILE
    if not path.exists() or not params.exists():
        return None
    with params.open("rb") as file:
        whole = zipfile.is_zipfile(file)
    if not whole:
        set_aside(params, "is no file of parameters")
        return None
    try:
        results = read_object(path)
        if not all(type(value) in (int, float) for value in results.values()):
            raise UserError(f"{path} holds other values than numbers.")
    except PassingError:
        raise
    except UserError as error:
        set_aside(path, f"is none of a run's ({error})")
        return None
    return results if results.get("step") == total_steps else None


def evaluations_of(workdir: str, step: int) -> dict[str, float]:
    """The evaluations of `step` that an earlier session has written, as `NAME/METRIC`."""
    rows = [row for row in read_metrics(workdir) if row["step"] == step and "loss" not in row]
    return {key: value for row in rows for key, value in row.items() if "/" in key}


def earlier_times(workdir: str, start_step: int, kinds: tuple[str, ...]) -> dict[str, float]:
    """Seconds by kind at the end of the earlier sessions; {} in the first one.

    What they trained after `start_step`, where this session starts, is lost.
    """
    rows = [row for row in read_metrics(workdir) if "elapsed_seconds" in row]
    if not rows:
        return {}

    def training(row: dict[str, float]) -> float:
        return row["elapsed_seconds"] - sum(row.get(f"{kind}_seconds", 0.0) for kind in kinds)

    kept = [training(row) for row in rows if row["step"] <= start_step]
    lost = training(rows[-1]) - (kept[-1] if kept else 0.0)
    return {**rows[-1], "lost_seconds": rows[-1].get("lost_seconds", 0.0) + max(lost, 0.0)}
