"""Where numbers go: `metrics.jsonl`, TensorBoard and, if asked, W&B; from process 0 only."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vit_jax.errors import (
    PreemptedError,
    UserError,
    as_user_error,
    import_extra,
    is_network_error,
    one_line,
)
from vit_jax.files.atomic import free_name, read_object, write_atomically, write_json
from vit_jax.files.paths import copy, full_path, is_bucket, to_path
from vit_jax.multihost.first_process import run_on_first_process
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE

METRICS_FILE = "metrics.jsonl"
WANDB_FILE = "wandb_run.json"


class MetricWriter:
    """Appends one line of JSON per call to `WORKDIR/metrics.jsonl`, and TensorBoard scalars.

    Lines look like `{"step": 20, "loss": 1.5, "images_per_second": 900.0}`; a step with training
    metrics and evaluations has a line for each. A resumed run drops the lines after the step it
    starts from, because it writes them again. A context: W&B is told how the run has ended.
    """

    def __init__(
        self,
        workdir: str,
        *,
        start_step: int,
        tensorboard: bool,
        wandb_project: str = "",
        config: dict[str, Any] | None = None,
    ):
        """Must be called by every process.

        Args:
          workdir: folder of the run.
          start_step: finished updates.
          tensorboard: whether to write event files, into `WORKDIR/tensorboard`.
          wandb_project: project on Weights & Biases; empty: none.
          config: of the run; shown by TensorBoard (as text) and W&B.

        Raises:
          UserError: W&B is wanted, but not installed or not to be reached.
        """
        self._file: Any = None
        self._summary: Any = None
        self._wandb: WandbRun | None = None

        def start() -> None:
            if wandb_project:  # first, for this may fail
                self._wandb = WandbRun(
                    workdir, project=wandb_project, config=config or {}, start_step=start_step
                )
            path = to_path(workdir) / METRICS_FILE
            kept = [row for row in read_metrics(workdir) if row["step"] <= start_step]
            _set_others_aside(path)
            self._file = _appending(path, "".join(json.dumps(row) + "\n" for row in kept))
            if tensorboard:
                self._summary = _summary_writer(workdir, start_step, config)

        run_on_first_process(start)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Writes scalars by name.

        Raises:
          UserError: the disk is full, or gone.
        """
        if self._file is not None:
            with _errors_of(self._file):
                self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self._summary is not None:
            for name, value in metrics.items():
                self._summary.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.write(step, metrics)

    def flush(self) -> None:
        """Returns once `metrics.jsonl` has all rows; what a checkpoint follows must not be lost."""
        if self._file is not None:
            with _errors_of(self._file):
                self._file.flush()

    def close(self, error: BaseException | None = None) -> None:
        """Flushes everything; W&B shows the run as finished, preempted or failed, by `error`."""
        if self._file is not None:
            with _errors_of(self._file) if error is None else contextlib.suppress(Exception):
                self._file.close()
        if self._summary is not None:
            self._summary.close()
        if self._wandb is not None:
            self._wandb.close(error)

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)


def _appending(path: Path, text: str) -> Any:
    """Replaces a file's content by `text`, and opens it to write to its end."""
    write_atomically(path, text)
    if is_bucket(path):
        from vit_jax.workdir.bucket_log import BucketLog

        return BucketLog(path, text.encode())
    return path.open("a", buffering=1)


@contextlib.contextmanager
def _errors_of(file: Any) -> Iterator[None]:
    """Names the file, as the system's errors of writing to an open one do not."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not is_network_error(error):
            raise
        message = f"{file.name} could not be written: {one_line(error)}."
        raise as_user_error(f"{message} Make room, then start again.", error) from error


def _summary_writer(workdir: str, start_step: int, config: dict[str, Any] | None) -> Any:
    """TensorBoard's events; each start of a run also adds its config, as a code block."""
    with _without_torch():
        from tensorboardX import SummaryWriter, record_writer  # imports protobuf: 0.3 s

    record_writer.register_writer_factory("gs", _BucketEvents)  # theirs needs a project's name
    summary = SummaryWriter(
        str(to_path(workdir) / "tensorboard"), purge_step=start_step + 1, flush_secs=20
    )
    if config is not None:
        lines = json.dumps(config, indent=2).splitlines()
        summary.add_text("config", "\n".join("    " + line for line in lines), start_step)
    return summary


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """tensorboardX imports PyTorch, where it is installed, for a type: 1.3 s of every start."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["torch"]


class _BucketEvents:
    """How tensorboardX writes to a bucket."""

    @staticmethod
    def directory_check(path: str) -> None:
        """A bucket has no folders to make."""

    @staticmethod
    def open(path: str) -> Any:
        from vit_jax.workdir.bucket_log import EventLog

        return EventLog(to_path(path), b"")


class WandbRun:
    """The run on Weights & Biases, one and the same for all sessions of a work directory.

    Its id is in `WORKDIR/wandb_run.json`; W&B's own files are in `WORKDIR/wandb`. Everything else
    (account, server, `WANDB_MODE=offline`) is as W&B's own environment variables say.
    """

    def __init__(self, workdir: str, *, project: str, config: dict[str, Any], start_step: int):
        check_wandb(project)
        import wandb

        path = to_path(workdir) / WANDB_FILE
        known = read_object(path) if path.exists() else {}
        if known.get("project") != project:
            known = {"project": project, "id": secrets.token_hex(6)}
            write_json(path, known)  # before the run exists, or a kill would lose its id
        try:
            self._run = wandb.init(
                project=project,
                id=known["id"],
                resume="allow",
                name=full_path(workdir).name,
                dir=None if is_bucket(workdir) else workdir,
                # Where the network went away, the end of the run must not wait for it: what has
                # not been sent by then stays in the folder, for `wandb sync`.
                settings=wandb.Settings(finish_timeout=30),
            )
        except Exception as error:  # W&B has no common class for no login, network, permission
            message = f"log.wandb={project!r}: W&B does not start: {' '.join(str(error).split())}"
            raise UserError(f"{message} Try `wandb login` or WANDB_MODE=offline.") from error
        self._run.config.update(config, allow_val_change=True)  # a resumed run may bring other keys
        self._lost = False
        # Evaluations that a preempted run makes up for. W&B has closed that step, so they go to
        # the next; where it knows later steps as well, it knows the evaluations.
        self._closed_step = start_step if self._run.starting_step == start_step + 1 else None

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Logs scalars, except those of steps that W&B has from before the run was interrupted.

        It cannot take them again, and they are the same: a resumed run repeats them bit for bit.
        """
        if step == self._closed_step:
            step += 1
        if step >= self._run.starting_step:
            self._attempt(lambda: self._run.log(dict(metrics), step=step))

    def close(self, error: BaseException | None) -> None:
        if resumes := isinstance(error, PreemptedError):
            self._attempt(self._run.mark_preempting)  # "preempted" takes the place of "failed"
        exit_code = REQUEUE_EXIT_CODE if resumes else int(error is not None)
        self._attempt(lambda: self._run.finish(exit_code=exit_code))

    def _attempt(self, call: Callable[[], Any]) -> None:
        """W&B is a process of its own, which a SIGTERM to the whole job ends: training goes on."""
        if self._lost:
            return
        try:
            call()
        except Exception as error:
            self._lost = True
            logging.warning("W&B does not answer (%r); this session sends it no more.", error)


def check_wandb(project: str) -> None:
    """Raises a UserError if a project is given and the package wandb is not installed."""
    if project:
        import_extra(f"log.wandb={project!r}", "wandb", "wandb")


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` that are rows of metrics.

    A killed run may leave part of a line behind, at the end or, where a file system lost what came
    next, in the middle.
    """
    return [row for row in map(_row, _lines(to_path(workdir) / METRICS_FILE)) if row is not None]


def _lines(path: Path) -> list[str]:
    return path.read_bytes().decode(errors="replace").splitlines() if path.exists() else []


def _row(line: str) -> dict[str, Any] | None:
    """A row as `MetricWriter` writes it, numbers by name; None for any other line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    # A larger int would overflow where it meets a float.
    numbers = all(type(x) is float or (type(x) is int and abs(x) < 2**53) for x in row.values())
    return row if numbers and row["step"] >= 0 else None


def _set_others_aside(path: Path) -> None:
    """Keeps a copy of a file with lines that no run of ours has written; the last may be torn."""
    if others := sum(_row(line) is None for line in _lines(path)[:-1]):
        kept = free_name(path)
        copy(path, kept)
        logging.warning("%s: lines that are no metrics (%d); see %s.", path, others, kept.name)
