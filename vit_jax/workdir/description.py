"""Description of a run in its work directory: the model, its provenance, the results."""

import contextlib
import datetime
import importlib.metadata
import json
import logging
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from vit_jax import wording
from vit_jax.console import format_seconds, number_text, wilson_interval
from vit_jax.files import paths
from vit_jax.models.create import MODELS, VARIANTS_OF
from vit_jax.models.description import Description, parts_to_json
from vit_jax.models.variants import SIZES
from vit_jax.parameters.table import ParameterTable
from vit_jax.trees import flatten_names
from vit_jax.wording import counted, unsigned
from vit_jax.workdir.metrics import is_lowest_best, read_metrics

# Contents of a work directory.
CHECKPOINTS = "checkpoints"
CONFIG_FILE = "config.json"
MODEL_FILE = "model.json"  # see `parts_to_json`
PARAMETERS_FILE = "parameters.txt"
PARAMS_FILE = "params.npz"
RESULTS_FILE = "results.json"
PROVENANCE_FILE = "provenance.jsonl"

_PACKAGES = ["jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"]
_PACKAGES += ["tensorflow-datasets", "opencv-python-headless"]


def write_description(
    workdir: str,
    models: Mapping[str, Description],
    table: ParameterTable,
    params: Any,
    datasets: Sequence[Any],
) -> None:
    """Writes `model.json`, a table of the parameters, and splits that were drawn."""
    from clu import parameter_overview

    folder = paths.to_path(workdir)
    paths.write_json(folder / MODEL_FILE, parts_to_json(models, table.own))
    text = parameter_overview.get_parameter_overview(params, include_stats=False)
    paths.write_atomically(folder / PARAMETERS_FILE, text + "\n")
    write_splits(folder / "splits.csv", datasets)


def write_params(path: str | os.PathLike[str], params: Any, table: ParameterTable) -> None:
    """Writes a parameter tree (either form of the blocks) as `.npz`, float32, with Flax names."""
    flat = flatten_names(table.unstack(params))
    paths.write_arrays(path, {name: np.asarray(x, np.float32) for name, x in flat.items()})


def write_results(
    workdir: str, params: Any, table: ParameterTable, results: dict[str, float]
) -> dict[str, float]:
    """Writes `params.npz`, then `results.json`, which marks the run as finished.

    Returns `results` with `images_per_second`, the median from the log. `params`: host arrays.
    """
    rows = read_metrics(workdir)
    speeds = [row["images_per_second"] for row in rows if "images_per_second" in row]
    results = {"images_per_second": statistics.median(speeds) if speeds else 0.0, **results}
    if jax.process_index() == 0:
        folder = paths.to_path(workdir)
        write_params(folder / PARAMS_FILE, params, table)
        paths.write_json(folder / RESULTS_FILE, results)
        log_results(workdir, results, rows)
    return results


def log_results(
    workdir: str, results: Mapping[str, float], rows: Sequence[Mapping[str, float]]
) -> None:
    """Logs duration, metrics, where the result is; `rows`: of `metrics.jsonl`, for the best."""
    took, share = format_seconds(results["seconds"]), results["goodput"]
    steps = counted(int(results["step"]), "step")
    logging.info(f"Finished {steps} in {took}, {share:.0%} of it training.")
    for name, value in results.items():
        key, _, metric = name.rpartition("/")
        if not key or metric not in ("accuracy", "mAP", "mIoU", "delta1", "mae", "r2"):
            continue
        text = f"{name} {number_text(name, value)}"
        if metric == "accuracy" and (count := results.get(f"{key}/num_examples")):
            low, high = wilson_interval(value, count)
            text += f" (95 % interval {100 * low:.1f} to {100 * high:.1f}, {count:,.0f} images)"
        known, sign = [row for row in rows if name in row], -1 if is_lowest_best(name) else 1
        best = max(known, key=lambda row: sign * row[name], default=None)
        if best and sign * best[name] > sign * value:
            text += f"; best {number_text(name, best[name])} at step {best['step']:,}"
        logging.info(f"{text}.")
    logging.info(f"Parameters: {paths.to_path(workdir) / PARAMS_FILE}")
    script = f"python scripts/report.py {shlex.quote(workdir)} --max_examples=2000"
    logging.info(f"Next: {script}, or scripts/predict.py, or scripts/evaluate.py")


def model_name(model: Mapping[str, Any]) -> str:
    """Display name of a model: `ViT-Ti/16`; `ViT/4` or `R+ViT/4` if it is not a named variant."""
    family = MODELS[model["name"]]
    plain = {"resnet_layers": None}  # a hybrid has the sizes of its Transformer
    ours = {key: tuple(v) if isinstance(v, list) else v for key, v in {**plain, **model}.items()}
    for variant, sizes in VARIANTS_OF[model["name"]].items():
        if all(ours[key] == value for key, value in {**plain, **sizes}.items()):
            is_size = "-" not in variant or variant.partition("/")[0] in SIZES  # such as g-opt
            return f"{family.acronym}-{variant}" if is_size else variant
    patch = ours.get("patch_size")
    stem = "R+" if "patch_size" in ours and ours["resnet_layers"] is not None else ""
    return f"{stem}{family.acronym}/{patch}" if isinstance(patch, int) else stem + family.acronym


def read_parameter_count(folder: Path) -> int:
    """Number of parameters of a run's model; 0 before `session.describe`."""
    path = folder / PARAMETERS_FILE
    text = paths.read_file(path).decode(errors="replace") if path.exists() else ""
    total = re.search(r"^Total: ([\d,]+)", text, re.MULTILINE)
    return int(total[1].replace(",", "")) if total else 0


def finished_results(workdir: str, total_steps: int) -> dict[str, float] | None:
    """Results of a run of that length, or that ended early; None if it has not finished."""
    folder = paths.to_path(workdir)
    if not (folder / RESULTS_FILE).exists() or not (folder / PARAMS_FILE).exists():
        return None
    results = paths.read_object(folder / RESULTS_FILE, step=int)
    return results if results.get("planned_steps", results.get("step")) == total_steps else None


def write_splits(path: Path, datasets: Sequence[Any]) -> None:
    """Lists the split of each file if it is not given by the folders."""
    every = (part for dataset in datasets for part in getattr(dataset, "parts", (dataset,)))
    drawn = [dataset for dataset in every if getattr(dataset.source, "drawn", False)]
    if not drawn:
        return
    rows = [[split.split, name] for split in drawn for name in split.source.relative_paths()]
    paths.write_atomically(path, paths.csv_text([["split", "file"], *rows]))
    logging.info(f"Which image is in which split: see {path}.")


def write_provenance(workdir: str, *, start_step: int) -> None:
    """Appends a line to `WORKDIR/provenance.jsonl` for this start of the run; process 0 only."""
    if jax.process_index() == 0:
        path = paths.to_path(workdir) / PROVENANCE_FILE
        earlier = paths.read_file(path).decode(errors="replace") if path.exists() else ""
        line = json.dumps({"start_step": start_step, **collect_provenance()})
        paths.write_atomically(path, f"{earlier}{line}\n")


def collect_provenance() -> dict[str, Any]:
    """Commit, versions, devices, command line and time of this process."""
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    changed = _git("status", "--porcelain")
    script = sys.argv[0]
    program = ["vit", Path(script).stem] if wording.called_vit else [sys.executable, script]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": unsigned(shlex.join([*program, *sys.argv[1:]])),
        # A Docker image has no git history: the Dockerfile writes the commit to a file.
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
    """Output of git; None if there is no repository or no git on this machine."""
    command = ["git", "-C", os.path.dirname(__file__), *args]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        output = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=10)
        return output.decode().strip()
    return None
