"""Checkpoints: Orbax writes and reads them, checksums say whether to believe them.

Orbax is atomic (a step folder appears by rename once it is complete) but restores flipped bytes
without a word. So each step carries `state/checksums.json`, written after Orbax has finished the
files and before the rename: a step without it, or that disagrees with it, is never restored.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.errors import UserError, explained, may_pass, nearest
from vit_jax.files.manifest import damaged_files, read_manifest, write_manifest
from vit_jax.multihost import liveness
from vit_jax.multihost.first_process import run_on_first_process
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE
from vit_jax.workdir.orbax_parts import (
    ChecksummedHandler,
    differing_leaves,
    is_disk_error,
    open_manager,
)

_LOG = logging.getLogger(__name__)
_CHECKPOINTS = "checkpoints"
_DAMAGED = "checkpoints_damaged"
_ITEM = "state"
_UNFINISHED = ".orbax-checkpoint-tmp"  # how Orbax names a step before it is complete


class CheckpointManager:
    """Saves, keeps and restores the train state under `workdir/checkpoints/<step>`.

    Every process makes one and calls every method at the same point.

    Args:
      workdir: existing folder, the same for every process.
      every_steps: a checkpoint is due at multiples of this, and at the last step.
      keep: how many of the latest checkpoints to keep.
      best_metric: name in the metrics given to `save`; empty: only the latest are kept.
      best_mode: `max` or `min`: which value of the metric is best.
      keep_best: how many of the best checkpoints to keep besides.

    Raises:
      UserError: an argument is out of range, or the folder cannot be written.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        every_steps: int,
        keep: int,
        best_metric: str = "",
        best_mode: str = "max",
        keep_best: int = 1,
    ):
        for key, value in (("every_steps", every_steps), ("keep", keep), ("keep_best", keep_best)):
            if value < 1:
                raise UserError(f"checkpoint.{key}={value} must be at least 1.")
        if best_mode not in ("max", "min"):
            raise UserError(f"checkpoint.best_mode={best_mode!r} is not known. Known: max, min.")
        self._workdir = Path(workdir).absolute()
        self._every_steps = every_steps
        self._keep = keep
        self._keep_best = keep_best
        self._best_metric = best_metric
        self._best_sign = 1 if best_mode == "max" else -1
        self._handler = ChecksummedHandler(self._end_with_peers)
        self._saving: int | None = None
        self._orbax = self._open()

    def _open(self) -> ocp.CheckpointManager:
        """Orbax's manager over the steps now on disk; removes what killed saves left behind."""
        self._scores: dict[int, float] = {}
        for step in self._steps():
            manifest = read_manifest(self._step_dir(step) / _ITEM)
            self._record_score(step, manifest["note"]["metrics"] if manifest else {})
        run_on_first_process(self._prepare_folder)
        return open_manager(
            self._workdir / _CHECKPOINTS,
            self._handler,
            item=_ITEM,
            keep=self._keep,
            scores=self._scores,
            keep_best=self._keep_best,
        )

    def _prepare_folder(self) -> None:
        """Makes the folder and removes what killed saves left in it. Runs on process 0."""
        folder = self._workdir / _CHECKPOINTS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for unfinished in folder.glob(f"*{_UNFINISHED}*"):
                shutil.rmtree(unfinished)
        except OSError as error:
            raise explained(
                f"{folder} cannot be written: {error.strerror}. Choose another --workdir.", error
            ) from error

    def _step_dir(self, step: int) -> Path:
        return self._workdir / _CHECKPOINTS / str(step)

    def _steps(self) -> list[int]:
        """Committed steps on disk, newest first."""
        return _steps_in(self._workdir / _CHECKPOINTS)

    def _record_score(self, step: int, metrics: dict[str, float]) -> None:
        if self._best_metric in metrics:
            score = self._best_sign * float(metrics[self._best_metric])
            if not math.isnan(score):
                self._scores[step] = score

    def should_save(self, step: int, total_steps: int) -> bool:
        """Whether a checkpoint is due after `step` finished updates."""
        return step % self._every_steps == 0 or step == total_steps

    def save(self, step: int, state: Any, metrics: dict[str, float] | None = None) -> None:
        """Starts to write a checkpoint and returns; the state may be donated right away.

        Args:
          step: finished updates.
          state: pytree of (sharded) jax.Arrays.
          metrics: of this step, where there are any; `best_metric` is looked up in them.

        Raises:
          UserError: this or the previous checkpoint could not be written.
        """
        self.wait()  # the handler still needs the metrics of the save under way
        metrics = {name: float(value) for name, value in (metrics or {}).items()}
        if self._best_metric and metrics and self._best_metric not in metrics:
            _LOG.warning(
                "checkpoint.best_metric=%r is not among the metrics of step %d (%s).%s",
                self._best_metric, step, ", ".join(metrics), nearest(self._best_metric, metrics),
            )  # fmt: skip
        self._handler.metrics = metrics
        self._record_score(step, metrics)
        self._saving = step
        try:
            args = ocp.args.Composite(**{_ITEM: ocp.args.PyTreeSave(state)})
            self._orbax.save(step, args=args, force=True)
        except Exception as error:
            self._raise_if_of_the_disk(error)
            raise

    def add_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Gives a step on disk the metrics that it was saved without: it may be one of the best.

        So that of a run that had to stop before it was evaluated, and was so when it went on.
        """
        metrics = {name: float(value) for name, value in metrics.items()}

        def write() -> None:
            item = self._step_dir(step) / _ITEM
            manifest = read_manifest(item)
            if manifest is not None and not manifest["note"]["metrics"]:
                write_manifest(item, {"metrics": metrics}, known=manifest["files"])

        run_on_first_process(write)
        self._record_score(step, metrics)

    def wait(self) -> None:
        """Blocks until the save under way is committed.

        Raises:
          UserError: it could not be written; earlier checkpoints are intact.
        """
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            self._raise_if_of_the_disk(error)
            raise
        self._saving = None

    def close(self) -> None:
        """Waits, as `wait`, and frees the threads. The manager cannot be used afterwards."""
        try:
            self.wait()
        except BaseException:
            with contextlib.suppress(Exception):  # Orbax raises the error of the save once more
                self._orbax.close()
            raise
        self._orbax.close()

    def _raise_if_of_the_disk(self, error: Exception) -> None:
        """Turns an error that the user can put right into a UserError."""
        step, self._saving = self._saving, None
        if step in self._scores:
            del self._scores[step]
        if is_disk_error(error):
            raise explained(self._not_written(step, error), error) from error

    def _not_written(self, step: int | None, error: Exception) -> str:
        steps = [each for each in self._steps() if each != step]
        kept = f"The last good one is step {steps[0]}" if steps else "There is none before it"
        reason = " ".join(str(error).split())[:200]
        way_out = " Make room, then start again." if is_disk_error(error) else ""
        return (
            f"The checkpoint of step {step} could not be written to "
            f"{self._workdir / _CHECKPOINTS}: {reason}. {kept}.{way_out}"
        )

    def _end_with_peers(self, error: Exception) -> None:
        """A save has failed in a thread: process after process would wait for the next one."""
        if jax.process_count() > 1:
            if not is_disk_error(error):
                liveness.wait_for_verdict()  # a process that is lost may be the reason
            message = self._not_written(self._saving, error)
            _LOG.error("error: %s", message)
            status = REQUEUE_EXIT_CODE if may_pass(error) else 2 if is_disk_error(error) else 1
            liveness.fail(message, status)

    def latest_step(self) -> int | None:
        """The newest step on disk (not checked against its checksums), or None."""
        return max(self._steps(), default=None)

    def verify(self, step: int) -> list[str]:
        """Files that are missing or changed, relative to the folder of the step."""
        return _damaged_in(self._step_dir(step))

    def restore(self, abstract_state: Any) -> tuple[int, Any] | None:
        """Restores the newest step that agrees with its checksums.

        Newer steps that do not are named in the log and moved to `workdir/checkpoints_damaged/`.

        Args:
          abstract_state: the state with jax.ShapeDtypeStruct leaves that carry the shardings to
            restore to; mesh and process count may differ from those of the save.

        Returns:
          (step, state), or None where there is no checkpoint at all.

        Raises:
          UserError: there are checkpoints, but none is intact; or the newest intact one is of a
            state with other leaves, shapes or dtypes.
        """
        self.wait()
        step, moved = run_on_first_process(self._choose_step)
        if moved:
            self._orbax.close()
            self._orbax = self._open()
        if step is None:
            return None
        item = epath.Path(self._step_dir(step) / _ITEM)
        handler = ocp.StandardCheckpointHandler()
        differing = differing_leaves(handler.metadata(item).tree, abstract_state)
        if differing:
            raise UserError(
                f"Checkpoint {self._step_dir(step)} is of another model or optimizer: "
                f"{_listed(differing)}. Use the config it was written with, or another --workdir."
            )
        try:
            return step, handler.restore(item, args=ocp.args.StandardRestore(abstract_state))
        except Exception as error:
            if is_disk_error(error):
                reason = " ".join(str(error).split())[:200]
                raise explained(f"Checkpoint {item} cannot be read: {reason}.", error) from error
            raise

    def _choose_step(self) -> tuple[int | None, bool]:
        """(newest intact step, whether damaged ones were moved aside). Runs on process 0."""
        damaged: dict[int, list[str]] = {}
        for step in self._steps():
            files = self.verify(step)
            if not files:
                for bad_step in damaged:
                    self._set_aside(bad_step)
                return step, bool(damaged)
            _LOG.warning("Checkpoint %s is damaged: %s.", self._step_dir(step), _listed(files))
            damaged[step] = files
        if damaged:
            raise UserError(_none_intact(self._workdir / _CHECKPOINTS, damaged))
        return None, False

    def _set_aside(self, step: int) -> None:
        """Moves a damaged step away, so that the step can be saved again; deletes nothing."""
        target = self._workdir / _DAMAGED
        target.mkdir(exist_ok=True)
        number = 1
        while (target / f"{step}-{number}").exists():
            number += 1
        # Not os.rename: `checkpoints` may be a link to another disk.
        shutil.move(self._step_dir(step), target / f"{step}-{number}")
        _LOG.warning("Moved it to %s.", target / f"{step}-{number}")


def restore_params(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the parameters of one of our checkpoints, for use as pre-trained weights.

    Args:
      path: a workdir, its `checkpoints` folder (the newest intact step is taken) or one step.

    Returns:
      Nested dict of numpy arrays: the averaged parameters where the run kept an average.

    Raises:
      UserError: there is no checkpoint there, or none is intact.
    """
    folder = Path(path).absolute()
    damaged: dict[int, list[str]] = {}
    for step_dir in _find_steps(folder):
        files = _damaged_in(step_dir)
        if not files:
            return _read_params(step_dir)
        _LOG.warning("Checkpoint %s is damaged: %s.", step_dir, _listed(files))
        damaged[int(step_dir.name)] = files
    if damaged:
        raise UserError(_none_intact(folder, damaged))
    raise UserError(f"{path} holds no checkpoint: give a workdir, its checkpoints or one step.")


def _find_steps(folder: Path) -> list[Path]:
    """Step folders at the path, newest first."""
    if folder.name.isdecimal() and (folder / _ITEM).is_dir():
        return [folder]
    if (folder / _CHECKPOINTS).is_dir():
        folder = folder / _CHECKPOINTS
    return [folder / str(step) for step in _steps_in(folder)]


def _steps_in(folder: Path) -> list[int]:
    """Steps committed in a folder, newest first; a save under way has a suffix to its number."""
    if not folder.is_dir():
        return []
    return sorted((int(p.name) for p in folder.iterdir() if p.name.isdecimal()), reverse=True)


def _read_params(step_dir: Path) -> dict[str, Any]:
    handler = ocp.PyTreeCheckpointHandler()
    item = epath.Path(step_dir / _ITEM)
    tree = handler.metadata(item).tree
    present = {name for name, leaves in tree.items() if leaves}  # polyak_params may be None
    name = "polyak_params" if "polyak_params" in present else "params"
    if name not in present:
        raise UserError(f"{step_dir} holds no params, but {', '.join(sorted(present))}.")
    target = {name: tree[name]}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
    args = ocp.args.PyTreeRestore(item=target, restore_args=as_numpy, partial_restore=True)
    return handler.restore(item, args=args)[name]


def _damaged_in(step_dir: Path) -> list[str]:
    return [f"{_ITEM}/{name}" for name in damaged_files(step_dir / _ITEM)]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _none_intact(folder: Path, damaged: dict[int, list[str]]) -> str:
    steps = "; ".join(f"step {step}: {_listed(files)}" for step, files in damaged.items())
    return (
        f"No checkpoint in {folder} is intact (damaged files of {steps}). Bring back a copy, "
        "or move them away to start over."
    )
