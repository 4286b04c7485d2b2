"""What a start of a run writes and says about itself: model, data, code, packages, devices."""

from __future__ import annotations

import contextlib
import csv
import datetime
import importlib.metadata
import io
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from clu import parameter_overview

from vit_jax.errors import counted, list_names
from vit_jax.files.paths import is_bucket, to_path, uploaded, write_atomically
from vit_jax.parameters.names import count_parameters
from vit_jax.workdir.description import MODEL_FILE, PARAMETERS_FILE, Description

PROVENANCE_FILE = "provenance.jsonl"
_PACKAGES = ["jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"]
_PACKAGES += ["tensorflow-datasets", "opencv-python-headless"]


def describe(
    workdir: str,
    *,
    description: Description,
    params: Any,
    datasets: Sequence[Any],
    total_steps: int,
    batch_size: int,
) -> None:
    """Writes `model.json`, the table of parameters and drawn splits; logs what is to be trained.

    `params` is a pytree of arrays or their shapes; `datasets` the one that is trained on, then
    those of the evaluators.
    """
    train = datasets[0]
    if jax.process_index() == 0:
        folder = to_path(workdir)
        description.write(folder / MODEL_FILE)
        table = parameter_overview.get_parameter_overview(params, include_stats=False)
        write_atomically(folder / PARAMETERS_FILE, table + "\n")
        _write_splits(datasets, folder / "splits.csv")
        _warn_of_newer_images(datasets, first_start(workdir))
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
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(["split", "file"])
        for each in drawn:
            writer.writerows([each.split, name] for name in each.source.relative_paths())
        write_atomically(path, text.getvalue())
        counts = ", ".join(f"{each.split} {each.num_examples}" for each in drawn)
        logging.info("%s has no splits; drawn: %s (see %s).", datasets[0].name, counts, path)


def _warn_of_newer_images(datasets: Sequence[Any], since: float | None) -> None:
    """Says which files were written after the run began; their names and sizes are the same."""
    sources = {id(each.source): each.source for each in datasets}.values()
    for source in sources if since else ():
        newer = source.newer_than(since) if hasattr(source, "newer_than") else []
        if newer:
            logging.warning(
                f"{counted(len(newer), 'image')} newer than this run: {list_names(newer)}. Only "
                "names and sizes are compared; if they show something else now, start anew in "
                "another --workdir."
            )


def write_provenance(workdir: str, *, start_step: int) -> None:
    """Appends one line to `WORKDIR/provenance.jsonl` for this start of the run; process 0 only."""
    if jax.process_index() == 0:
        path = to_path(workdir) / PROVENANCE_FILE
        known = path.read_text() if path.exists() else ""
        line = json.dumps({"start_step": start_step, **collect_provenance()})
        write_atomically(path, f"{known}{line}\n")


def first_start(workdir: str) -> float | None:
    """When a run began, in s since 1970; None for a new one, and where the file does not say."""
    path = to_path(workdir) / PROVENANCE_FILE
    with contextlib.suppress(ValueError, KeyError, TypeError):
        first = path.read_text().partition("\n")[0] if path.exists() else ""
        return datetime.datetime.fromisoformat(json.loads(first)["time"]).timestamp()
    return None


def collect_provenance() -> dict[str, Any]:
    """Commit, versions, devices, command line and time of this process."""
    versions: dict[str, str] = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    changed = _git("status", "--porcelain")
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.argv]),
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
        options: dict[str, Any] = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 10}
        return subprocess.check_output(command, **options).strip()
    return None


@contextlib.contextmanager
def trace(workdir: str) -> Iterator[None]:
    """Records what the devices do into WORKDIR/profile, for TensorBoard or xprof."""
    folder = to_path(workdir) / "profile"
    # A bucket, which the profiler cannot write to, gets a copy at the end.
    place = uploaded(folder) if is_bucket(folder) else contextlib.nullcontext(folder)
    with place as local, jax.profiler.trace(str(local)):
        yield
