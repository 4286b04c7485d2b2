"""Checkpoints: Orbax writes and reads them, checksums verify them.

Orbax is atomic (a step's folder is renamed once it is complete) but restores flipped bytes
without an error. So each step has a `state/checksums.json`, written after Orbax's files and
before the rename: a step without it, or that does not match it, is never restored.
"""

import contextlib
import dataclasses
import errno
import logging
import math
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.console import number_text
from vit_jax.errors import UserError, as_user_error, one_line
from vit_jax.files import paths
from vit_jax.files.manifest import read_manifest, write_manifest
from vit_jax.kinds import check_known
from vit_jax.multihost.agreement import run_on_first_process
from vit_jax.trees import flatten_names, merge_trees
from vit_jax.wording import list_names
from vit_jax.workdir import orbax_parts
from vit_jax.workdir.description import CHECKPOINTS, CONFIG_FILE
from vit_jax.workdir.metrics import is_lowest_best
from vit_jax.workdir.orbax_parts import ITEM, newest_intact, saves_in, steps_in

_LOG = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, keeps and restores the train state under `workdir/checkpoints/<step>`.

    Every process creates one, with the keys of `config.checkpoint`, and calls every method at the
    same point.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        every_steps: int,
        keep: int,
        best_metric: str = "",
        best_mode: str = "auto",
        keep_best: int = 1,
    ):
        check_known("checkpoint.best_mode", best_mode, ("auto", "max", "min"))
        self._folder = paths.full_path(workdir) / CHECKPOINTS
        self._every_steps = every_steps
        self._keep, self._keep_best = keep, keep_best
        self._best_metric, self._best_mode = best_metric, best_mode
        if best_metric:
            which = "lowest" if is_lowest_best(best_metric, best_mode) else "highest"
            _LOG.info("Best is the %s %s (checkpoint.best_mode).", which, best_metric)
        run_on_first_process(self._create_folder)
        self._handler = orbax_parts.ChecksummedHandler()
        self._orbax = orbax_parts.async_checkpointer(self._handler)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        # Values, by step, of the metric that may end the run; saved with each state.
        self.history: dict[int, float] = {}

    def _create_folder(self) -> None:
        """And removes remains of killed saves. Runs on process 0."""
        paths.make_folder(self._folder)
        for name, is_complete in saves_in(self._folder).items():
            if not is_complete:
                paths.remove(self._folder / name)

    def should_save(self, step: int, total_steps: int, evaluates: bool = False) -> bool:
        """Whether a checkpoint is due after `step`; raises UserError if the last save has failed.

        `evaluates`: whether `step` has an evaluation.
        """
        if self._saving is not None and self._saving.done():
            self.wait()
        is_best = evaluates and bool(self._best_metric)  # possibly
        return step % self._every_steps == 0 or step == total_steps or is_best

    def save(self, step: int, state: Any, metrics: dict[str, float] | None = None) -> None:
        """Starts to write a checkpoint and returns; the state may be donated right away.

        Raises UserError if this or the previous checkpoint could not be written.
        """
        self.wait()  # the handler still needs the metrics of the save in progress
        history = sorted(self.history.items())
        self._handler.note = {"step": step, "metrics": metrics or {}, "history": history}
        with self._saving_errors(step):
            args = ocp.args.Composite(**{ITEM: ocp.args.PyTreeSave(state)})
            self._orbax.save(self._folder / str(step), args=args)
        self._saving = self._thread.submit(self._finish_save, step)

    def _finish_save(self, step: int) -> None:
        """Waits for Orbax's threads, then deletes the steps that are not to be kept."""
        with self._saving_errors(step):
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                best = _best_first(self._folder, self._best_metric, self._best_mode)
                for old in set(steps_in(self._folder)[self._keep :]) - set(best[: self._keep_best]):
                    paths.remove(self._folder / str(old))

    def add_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Adds the metrics of a late evaluation to a step that was saved without them."""

        def write() -> None:
            item = self._folder / str(step) / ITEM
            manifest = read_manifest(item)
            if manifest is not None and not manifest["note"].get("metrics"):
                note = {**manifest["note"], "metrics": metrics}
                note["history"] = sorted(self.history.items())
                write_manifest(item, note, known=manifest["files"])

        run_on_first_process(write)

    def metrics_of(self, step: int) -> dict[str, float]:
        """The metrics of a step on disk; {} if it was saved without them."""
        return _note(self._folder / str(step)).get("metrics", {})

    def wait(self) -> None:
        """Blocks until the save in progress is committed; raises UserError if it failed."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def close(self) -> None:
        """Calls `wait`, and frees the threads. The manager cannot be used afterwards."""
        with contextlib.closing(self._orbax), self._thread:
            self.wait()

    @contextlib.contextmanager
    def _saving_errors(self, step: int) -> Iterator[None]:
        """Turns an error that the user can fix into a UserError."""
        try:
            yield
        except Exception as error:
            if not orbax_parts.is_disk_error(error):
                raise
            steps = [saved for saved in steps_in(self._folder) if saved != step]
            good = f"The last good one is step {steps[0]}" if steps else "There is no earlier one"
            reason = one_line(error)
            is_limit = reason == os.strerror(errno.EMFILE)
            hint = "Raise the limit (ulimit -n)" if is_limit else "Free space or use another disk"
            raise as_user_error(
                f"The checkpoint of step {step} could not be written to {self._folder}: "
                f"{reason}. {good}. {hint}, then start again.",
                error,
            ) from error

    def latest_step(self) -> int | None:
        """The newest step on disk (checksums not verified), or None."""
        return max(steps_in(self._folder), default=None)

    def restore(self, abstract_state: Any) -> tuple[int, Any] | None:
        """(step, state) of the newest step that matches its checksums; None if there are no steps.

        Newer steps that do not match are reported and moved to `workdir/checkpoints_damaged/`.
        `abstract_state` has shapes with the shardings to restore to; mesh and process count may
        differ from those of the save. UserError if none is intact, or the state is another.
        """
        self.wait()
        step = run_on_first_process(self._choose_step)
        if step is None:
            return None
        item = epath.Path(self._folder / str(step) / ITEM)
        handler = ocp.StandardCheckpointHandler()
        saved = handler.metadata(item).tree
        if differing := orbax_parts.differing_leaves(saved, abstract_state):
            raise UserError(
                f"Checkpoint {item.parent} does not fit this model or optimizer: "
                f"{list_names(differing)}. Use its own config, or another --workdir."
            )
        # By the fields of the file: a version before may have lacked one that is empty here.
        fields = {name: getattr(abstract_state, name) for name in saved}
        arrays = handler.restore(item, args=ocp.args.StandardRestore(fields))
        return step, dataclasses.replace(abstract_state, **arrays)

    def _choose_step(self) -> int | None:
        """The newest intact step; damaged ones are moved away. Runs on process 0."""
        intact, damaged = newest_intact(self._folder, steps_in(self._folder))
        for step in damaged:
            folder = self._folder.with_name(f"{CHECKPOINTS}_damaged")
            paths.make_folder(folder)
            target = paths.free_name(folder / str(step))
            # Not a rename: `checkpoints` may be a link to another disk.
            paths.move(self._folder / str(step), target)
            _LOG.warning("Moved it to %s.", target)
        if intact is not None:
            self.history = dict(_note(self._folder / str(intact)).get("history", ()))
        return intact


def _note(step: Path) -> dict[str, Any]:
    """What was saved with a state."""
    manifest = read_manifest(step / ITEM)
    return manifest["note"] if manifest else {}


def _score(step: Path, metric: str) -> float:
    """The metric with which a step was saved; NaN without."""
    return _note(step).get("metrics", {}).get(metric, math.nan)


def _best_first(folder: Path, metric: str, mode: str) -> list[int]:
    """The steps on disk that were saved with a metric, from the best to the worst."""
    scores = {step: _score(folder / str(step), metric) for step in steps_in(folder) if metric}
    sign = -1.0 if is_lowest_best(metric, mode) else 1.0
    known = [step for step, score in scores.items() if not math.isnan(score)]
    return sorted(known, key=lambda step: (sign * scores[step], step), reverse=True)


def best_checkpoint(workdir: str | os.PathLike[str]) -> Path:
    """The best step of a run by `checkpoint.best_metric`; UserError if there is none."""
    folder = paths.to_path(workdir)
    config = paths.read_object(folder / CONFIG_FILE, checkpoint=dict)["checkpoint"]
    with paths.reading(str(folder / CONFIG_FILE)):
        metric, mode = config["best_metric"], config["best_mode"]
    steps = _best_first(folder / CHECKPOINTS, metric, mode)
    if not steps:
        text = f"{workdir} has no best checkpoint: checkpoint.best_metric={metric!r}"
        raise UserError(f"{text}. Set it to an evaluation, such as test/accuracy, before training.")
    return folder / CHECKPOINTS / str(steps[0])


def best_text(workdir: str | os.PathLike[str]) -> tuple[str, bool]:
    """A sentence on `RUN/best`, and whether it is an earlier step; ("", False) if there is none."""
    try:
        best = best_checkpoint(workdir)
    except UserError:  # no metric chooses one, or this is no run of ours
        return "", False
    metric = paths.read_object(paths.to_path(workdir) / CONFIG_FILE)["checkpoint"]["best_metric"]
    last = best.parent / str(max(steps_in(best.parent)))

    def step_text(step: Path) -> str:
        score = _score(step, metric)
        value = "" if math.isnan(score) else f", {metric} {number_text(metric, score)}"
        return f"step {step.name}{value}"

    if best == last:
        return f"{workdir}/best is the last, {step_text(best)}.", False
    return f"{workdir}/best is {step_text(best)}; {workdir} is {step_text(last)}.", True


def restore_params(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The parameters of one of our checkpoints, or their average if the run kept one, as numpy.

    With the buffers of the state and with adapters merged. `path` is a workdir, its `checkpoints`
    folder (the newest intact step is used) or one step. UserError if there is none intact.
    """
    paths.check_utf8("checkpoint", path)
    folder = paths.full_path(path)
    if folder.name.isdecimal() and (folder / ITEM).is_dir():
        folder, steps = folder.parent, [int(folder.name)]
    else:
        folder = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
        steps = steps_in(folder)
    step, _ = newest_intact(folder, steps)
    if step is None:
        raise UserError(f"{path} holds no checkpoint; give a workdir, its checkpoints or one step.")
    item = epath.Path(folder / str(step) / ITEM)
    handler = ocp.PyTreeCheckpointHandler()
    tree = handler.metadata(item).tree
    name = "polyak_params" if tree.get("polyak_params") else "params"  # may exist but be None
    if not tree.get(name):
        raise UserError(f"{item.parent} holds no params, only {', '.join(sorted(tree))}.")
    target = {key: tree[key] for key in (name, "buffers") if tree.get(key)}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
    args = ocp.args.PyTreeRestore(item=target, restore_args=as_numpy, partial_restore=True)
    restored = handler.restore(item, args=args)
    params = merge_trees(restored[name], restored.get("buffers", {}))
    if not any(name.endswith("/lora_a") for name in flatten_names(params)):
        return params
    from vit_jax.parameters.lora import Lora  # few runs need it

    return Lora(**paths.read_object(folder.parent / CONFIG_FILE, lora=dict)["lora"]).merge(params)
