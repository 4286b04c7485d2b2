"""What a work directory says of its run: the model, where it came from, the results."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import logging
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax.errors import counted, list_names, unsigned
from vit_jax.files.paths import (
    csv_text,
    read_object,
    to_path,
    write_arrays,
    write_atomically,
    write_json,
)
from vit_jax.models.description import Description, parts_to_json
from vit_jax.parameters.names import count_parameters, flatten_names, unstack_blocks
from vit_jax.workdir.metrics import read_metrics

# What a work directory holds.
CHECKPOINTS = "checkpoints"
CONFIG_FILE = "config.json"
MODEL_FILE = "model.json"  # what `parts_to_json` gives
PARAMETERS_FILE = "parameters.txt"
PARAMS_FILE = "params.npz"
RESULTS_FILE = "results.json"
PROVENANCE_FILE = "provenance.jsonl"

_PACKAGES = ["jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"]
_PACKAGES += ["tensorflow-datasets", "opencv-python-headless"]


def write_params(path: str | os.PathLike[str], params: Any) -> None:
    """Writes a parameter tree (either form of the blocks) as `.npz`, float32, names as in Flax."""
    flat = flatten_names(unstack_blocks(params))
    write_arrays(path, {name: np.asarray(x, np.float32) for name, x in flat.items()})


def write_results(workdir: str, params: Any, results: dict[str, float]) -> dict[str, float]:
    """Writes `params.npz`, then `results.json`, whose existence means that the run has ended.

    Returns `results` with `images_per_second`, the median of the log. `params`: host arrays.
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
    """What a run of that length wrote when it ended, if early; None if it has not."""
    folder = to_path(workdir)
    if not (folder / RESULTS_FILE).exists() or not (folder / PARAMS_FILE).exists():
        return None
    results = read_object(folder / RESULTS_FILE)
    return results if results.get("planned_steps", results.get("step")) == total_steps else None


def describe(
    workdir: str,
    *,
    descriptions: Mapping[str, Description],
    params: Any,
    datasets: Sequence[Any],
    total_steps: int,
    batch_size: int,
) -> None:
    """Writes `model.json`, the table of parameters and drawn splits; logs what is to be trained.

    `descriptions`: by prefix; `params`: arrays or shapes; `datasets`: the one that is trained on,
    then the evaluators'.
    """
    train, description = datasets[0], next(iter(descriptions.values()))
    if jax.process_index() == 0:
        from clu import parameter_overview

        folder = to_path(workdir)
        write_json(folder / MODEL_FILE, parts_to_json(descriptions))
        table = parameter_overview.get_parameter_overview(params, include_stats=False)
        write_atomically(folder / PARAMETERS_FILE, table + "\n")
        _write_splits(datasets, folder / "splits.csv")
    logging.info(
        f"{workdir}: {counted(count_parameters(params), 'parameter')}, "
        f"{counted(description.model['num_classes'], 'output')}, "
        f"{counted(train.num_examples, 'training image')} of "
        f"{'x'.join(map(str, description.image_shape))}, "
        f"{counted(total_steps, 'step')} of {batch_size}, "
        f"{counted(jax.device_count(), 'device')}."
    )


def _write_splits(datasets: Sequence[Any], path: Path) -> None:
    """Which file is in which split, where the folder does not say."""
    drawn = [each for each in datasets if getattr(each.source, "drawn", False)]
    if drawn:
        rows = [[each.split, name] for each in drawn for name in each.source.relative_paths()]
        write_atomically(path, csv_text([["split", "file"], *rows]))
        counts = ", ".join(f"{each.split} {each.num_examples}" for each in drawn)
        logging.info("%s has no splits; drawn: %s (see %s).", datasets[0].name, counts, path)
        labels = [each.source.columns["label"] for each in drawn]
        found = [
            each.sum(axis=0) if each.ndim > 1 else np.bincount(each, minlength=drawn[0].num_classes)
            for each in labels
        ]
        shown = zip(drawn[0].class_names, *found, strict=True)
        per_class = (f"{name} {' + '.join(map(str, counts))}" for name, *counts in shown)
        logging.info("Of each class: %s.", list_names(per_class, 20))


def write_provenance(workdir: str, *, start_step: int) -> None:
    """Appends one line to `WORKDIR/provenance.jsonl` for this start of the run; process 0 only."""
    if jax.process_index() == 0:
        path = to_path(workdir) / PROVENANCE_FILE
        # Whatever a disk has made of the lines of earlier starts.
        known = path.read_bytes().decode(errors="replace") if path.exists() else ""
        line = json.dumps({"start_step": start_step, **collect_provenance()})
        write_atomically(path, f"{known}{line}\n")


def collect_provenance() -> dict[str, Any]:
    """Commit, versions, devices, command line and time of this process."""
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    changed = _git("status", "--porcelain")
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": unsigned(shlex.join([sys.executable, *sys.argv])),
        # An image has no history: the Dockerfile leaves a note.
        "commit": _git("rev-parse", "HEAD") or os.environ.get("VIT_JAX_COMMIT"),
        "uncommitted_changes": None if changed is None else bool(changed),
        "python": platform.python_version(),
        "packages": versions,
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
        "host": platform.platform(),
    }


def _git(*args: str) -> str | None:
    """Its answer; None without a checkout, or without git on this machine."""
    command = ["git", "-C", os.path.dirname(__file__), *args]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        output = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=10)
        return output.decode().strip()
    return None
