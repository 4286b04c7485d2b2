"""Additions to Orbax for checkpoints.py: checksums, intact steps, differences of states."""

import functools
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.errors import UserError, is_network_error
from vit_jax.files.manifest import damaged_files, read_manifest, write_manifest
from vit_jax.files.paths import COMMITTED, is_bucket, names_below, to_path
from vit_jax.wording import list_names

_LOG = logging.getLogger(__name__)
ITEM = "state"  # subfolder of a step with the train state
_STEP = re.compile("0|[1-9][0-9]*")  # name of a step's folder
_UNFINISHED = ".orbax-checkpoint-tmp"  # Orbax's suffix of incomplete steps

# In the ValueErrors that TensorStore raises for system errors.
_DISK_ERROR = re.compile(
    "RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|os_error_code|ABORTED|DEADLINE_EXCEEDED"
    "|UNAVAILABLE"
)

# All holders of a replicated array write a part of it; for smaller ones the programs that slice
# them would cost more than they save.
_MIN_PART_BYTES = 1 << 20


class ChecksummedHandler(ocp.PyTreeCheckpointHandler):
    """Writes the manifest as the last file of the item, before Orbax commits the step."""

    def __init__(self) -> None:
        array = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_MIN_PART_BYTES)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, array))
        super().__init__(type_handler_registry=registry)
        self.note: dict[str, Any] = {}  # stored with the step in progress

    def finalize(self, directory: epath.Path) -> None:
        """Called on process 0, when all processes have written their shards."""
        super().finalize(directory)
        write_manifest(to_path(directory), self.note)


@functools.cache
def _silence_duplicate_errors() -> None:
    """A failed save is reported once: not by each thread of Orbax and array of TensorStore."""

    def is_news(record: logging.LogRecord) -> bool:
        return not (record.exc_info and "/orbax/" in f"{record.pathname} {record.getMessage()}")

    before = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    for library in ("absl", "asyncio"):
        logging.getLogger(library).addFilter(is_news)
    sys.unraisablehook = report


def async_checkpointer(handler: ChecksummedHandler) -> ocp.AsyncCheckpointer:
    """Writes a step in a thread; the step's folder is renamed once it is complete.

    Not ocp.CheckpointManager: if a save fails on one process, its threads and those of the other
    processes wait for each other, and the error is never raised.
    """
    _silence_duplicate_errors()
    options = ocp.options.AsyncOptions(
        # Otherwise a save that fails early leaves threads that wait minutes for its folder.
        create_directories_asynchronously=False,
        # The watchdog handles processes that hang.
        timeout_secs=7 * 24 * 3600,
    )
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(ITEM, ocp.args.PyTreeSave, handler)
    items = ocp.CompositeCheckpointHandler(
        handler_registry=registry, composite_options=ocp.CompositeOptions(async_options=options)
    )
    return ocp.AsyncCheckpointer(items, async_options=options)


def is_disk_error(error: Exception) -> bool:
    """Whether a save failed for lack of space or permission, not because of a bug."""
    if isinstance(error, TimeoutError):  # an OSError too, but from a barrier
        return False
    tensorstore = isinstance(error, ValueError) and _DISK_ERROR.search(str(error)) is not None
    return tensorstore or isinstance(error, OSError) or is_network_error(error)


def differing_leaves(saved_tree: Any, abstract_state: Any) -> list[str]:
    """Leaves of two trees that differ in name, shape or dtype, which Orbax would cast silently."""

    def types(tree: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
        return {name(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}

    saved, wanted = types(saved_tree), types(abstract_state)
    return [
        f"{name} (saved {saved.get(name, 'nothing')}, needed {wanted.get(name, 'nothing')})"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]


def steps_in(folder: Path) -> list[int]:
    """Committed steps in a folder, newest first."""
    complete = [name for name, is_complete in saves_in(folder).items() if is_complete]
    return sorted((int(name) for name in complete if _STEP.fullmatch(name)), reverse=True)


def saves_in(folder: Path) -> dict[str, bool]:
    """Names in a folder, and whether each is complete; in a bucket, steps only."""
    if is_bucket(folder):  # one listing, which raises if unanswered: gcsfs's `isdir` returns False
        names = names_below(folder)
        steps = {name.partition("/")[0] for name in names}
        return {step: f"{step}/{COMMITTED}" in names for step in steps if _STEP.fullmatch(step)}
    names = os.listdir(folder) if folder.is_dir() else []
    return {name: _UNFINISHED not in name for name in names}


def newest_intact(folder: Path, steps: list[int]) -> tuple[int | None, list[int]]:
    """(the first step that matches its checksums, or None without steps; the steps before it)."""
    damaged: dict[int, str] = {}
    for step in steps:
        files = damaged_in(folder / str(step))
        if not files:
            return step, list(damaged)
        damaged[step] = list_names(files)
        _LOG.warning("Checkpoint %s is damaged: %s.", folder / str(step), damaged[step])
    if damaged:
        problems = "; ".join(f"step {step}: {files}" for step, files in damaged.items())
        text = f"No checkpoint in {folder} is intact (damaged: {problems})"
        raise UserError(f"{text}. Restore them from a copy, or move them away to start over.")
    return None, []


def damaged_in(step_dir: Path) -> list[str]:
    """Problems of a step: changed files, or a different step number."""
    manifest = read_manifest(step_dir / ITEM)
    if manifest and (step := manifest["note"]["step"]) != int(step_dir.name):
        return [f"it is step {step}"]
    return [f"{ITEM}/{name}" for name in damaged_files(step_dir / ITEM)]
