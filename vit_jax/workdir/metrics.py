"""Outputs for metrics, on process 0: `metrics.jsonl`, TensorBoard and W&B; and profiler traces."""

import contextlib
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from vit_jax.errors import (
    REQUEUE_EXIT_CODE,
    PreemptedError,
    UserError,
    as_user_error,
    import_extra,
    is_network_error,
    one_line,
)
from vit_jax.files import paths
from vit_jax.files.paths import is_bucket, to_path
from vit_jax.multihost.agreement import run_on_first_process
from vit_jax.workdir.buckets import BucketUpload

# Metrics of which less is better, by the last part of their names.
_LESS_IS_BETTER = re.compile(
    r"loss|error|perplexity|entropy|(^|_)(ppl|bpd|nll|r?mse|mae|abs_rel|ece|brier|[ewc]er|err|fid)(_|$)",
    re.IGNORECASE,
)
METRICS_FILE = "metrics.jsonl"
WANDB_FILE = "wandb_run.json"


def is_lowest_best(metric: str, mode: str = "auto") -> bool:
    """Whether the best value of `NAME/METRIC` is the lowest; `auto` goes by the name."""
    is_loss = _LESS_IS_BETTER.search(metric.rpartition("/")[2]) is not None
    return is_loss if mode == "auto" else mode == "min"


class MetricWriter(contextlib.AbstractContextManager["MetricWriter"]):
    """Appends a JSON line per call to `WORKDIR/metrics.jsonl`, and TensorBoard scalars.

    Lines look like `{"step": 20, "loss": 1.5, "images_per_second": 900.0}`. A resumed run drops
    lines that it will write again. A context manager: it reports to W&B how the run ended.
    Every process creates one.

    Args:
      start_step: completed updates.
      is_evaluated: whether its evaluations are known; else they will be written again.
      tensorboard: whether to write event files to `WORKDIR/tensorboard`.
      wandb_project: on Weights & Biases; "": none. UserError if it cannot be started.
      config: of the run; shown in TensorBoard (as text) and W&B.
    """

    def __init__(
        self,
        workdir: str,
        *,
        start_step: int,
        is_evaluated: bool = False,
        tensorboard: bool,
        wandb_project: str = "",
        config: dict[str, Any],
    ):
        self._start_step = start_step
        self._path = to_path(workdir) / METRICS_FILE
        self._file: Any = None
        self._upload: Any = None  # to a bucket
        self._summary: Any = None
        self._wandb: Any = None

        def start() -> None:
            if wandb_project:  # first, as this may fail
                self._wandb = _start_wandb(workdir, wandb_project, config)
            rows = [row for row in read_metrics(workdir) if row["step"] <= start_step]
            if not is_evaluated:
                rows = [r for r in rows if r["step"] < start_step or not any("/" in k for k in r)]
            kept = "".join(json.dumps(row) + "\n" for row in rows)
            paths.write_atomically(self._path, kept)
            folder = self._path.parent
            if is_bucket(folder):
                self._upload = BucketUpload(folder)
                folder = self._upload.folder
                (folder / METRICS_FILE).write_text(kept)
            self._file = (folder / METRICS_FILE).open("a", buffering=1)
            if tensorboard:
                self._summary = _summary_writer(folder / "tensorboard", start_step, config)

        run_on_first_process(start)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Writes scalars by name; UserError if the disk is full or gone."""
        if self._file is not None:
            with self._writing_errors():
                self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self._summary is not None:
            for name, value in metrics.items():
                self._summary.add_scalar(name, value, step)
        if self._wandb is not None:
            first = self._wandb.starting_step
            # Late evaluations of a preempted run go to the next step, as their own is closed.
            if step >= first - (step == self._start_step):
                self._tell_wandb(lambda run: run.log(dict(metrics), step=max(step, first)))

    def flush(self) -> None:
        """Returns when all rows are in `metrics.jsonl`; called before a checkpoint is written."""
        if self._file is not None:
            with self._writing_errors():
                self._file.flush()
                if self._upload is not None:
                    self._upload.copy(METRICS_FILE)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Flushes everything; W&B shows the run as finished, preempted or failed."""
        try:
            self.flush()
        except UserError:
            if error is None:
                raise
        finally:
            for part in (self._summary, self._file, self._upload):
                with contextlib.suppress(OSError):  # `flush` has reported it
                    if part is not None:
                        part.close()
        exit_code = int(error is not None)
        if isinstance(error, PreemptedError):  # in place of "failed"
            self._tell_wandb(lambda run: run.mark_preempting())
            exit_code = REQUEUE_EXIT_CODE
        self._tell_wandb(lambda run: run.finish(exit_code=exit_code))

    @contextlib.contextmanager
    def _writing_errors(self) -> Iterator[None]:
        """Adds the file name, which errors of writing to an open file lack."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, OSError) and not is_network_error(error):
                raise
            message = f"{self._path} could not be written: {one_line(error)}."
            raise as_user_error(f"{message} Free some space, then start again.", error) from error

    def _tell_wandb(self, call: Callable[[Any], Any]) -> None:
        """W&B is a separate process, which a SIGTERM to the job also ends: training continues."""
        try:
            if self._wandb is not None:
                call(self._wandb)
        except Exception as error:
            self._wandb = None
            logging.warning("W&B does not respond (%r); this session stops logging to it.", error)


def _summary_writer(folder: Path, start_step: int, config: dict[str, Any]) -> Any:
    """TensorBoard's event writer; each start of a run adds its config, as a code block."""
    hidden = "torch" not in sys.modules
    if hidden:  # tensorboardX imports PyTorch, if installed, just for a type: 1.3 s
        sys.modules["torch"] = None  # type: ignore[assignment]
    from tensorboardX import SummaryWriter  # imports protobuf: 0.3 s

    if hidden:
        del sys.modules["torch"]
    summary = SummaryWriter(str(folder), purge_step=start_step + 1, flush_secs=20)
    lines = json.dumps(config, indent=2).splitlines()
    summary.add_text("config", "\n".join("    " + line for line in lines), start_step)
    return summary


def check_wandb(project: str) -> Any:
    """The package wandb, if a project is given; UserError if it is not installed."""
    return import_extra(f"log.wandb={project!r}", "wandb", "wandb") if project else None


def _start_wandb(workdir: str, project: str, config: dict[str, Any]) -> Any:
    """The run on Weights & Biases; all sessions of a work directory share one.

    Other settings (account, server, `WANDB_MODE`) come from W&B's environment variables.
    """
    wandb = check_wandb(project)
    path = to_path(workdir) / WANDB_FILE
    known = paths.read_object(path, project=str, id=str) if path.exists() else {}
    if known.get("project") != project:
        known = {"project": project, "id": secrets.token_hex(6)}
        paths.write_json(path, known)  # before the run exists, or a kill would lose its id
    try:
        run = wandb.init(
            project=project,
            id=known["id"],
            resume="allow",
            name=paths.full_path(workdir).name,
            dir=None if is_bucket(workdir) else workdir,
            # Without a network the rest stays in the folder, for `wandb sync`.
            settings=wandb.Settings(finish_timeout=30),
        )
        run.config.update(config, allow_val_change=True)  # a resumed run may have other keys
    except Exception as error:  # W&B has no common class for login, network, permission errors
        message = f"log.wandb={project!r}: cannot start W&B: {' '.join(str(error).split())}"
        raise UserError(f"{message} Try `wandb login` or WANDB_MODE=offline.") from error
    return run


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, numbers by name, without incomplete lines of a killed run."""
    path = to_path(workdir) / METRICS_FILE
    text = paths.read_file(path).decode(errors="replace") if path.exists() else ""
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            row = paths.parse_json(line)
            is_row = isinstance(row, dict) and type(row.get("step")) is int
            if is_row and all(type(value) in (int, float) for value in row.values()):
                rows.append(row)
    return rows


def earlier_times(workdir: str, start_step: int, kinds: tuple[str, ...]) -> dict[str, float]:
    """Seconds by category at the end of the earlier sessions; {} if this is the first one.

    Training after `start_step`, where this session starts, counts as lost.
    """
    rows = [row for row in read_metrics(workdir) if "elapsed_seconds" in row]
    if not rows:
        return {}

    def training(row: dict[str, float]) -> float:
        return row["elapsed_seconds"] - sum(row.get(f"{kind}_seconds", 0.0) for kind in kinds)

    resumed = [training(row) for row in rows if row["step"] <= start_step]
    lost = training(rows[-1]) - (resumed[-1] if resumed else 0.0)
    return {**rows[-1], "lost_seconds": rows[-1].get("lost_seconds", 0.0) + max(lost, 0.0)}


class Profile:
    """Traces updates first <= step < last into WORKDIR/profile, for TensorBoard or xprof.

    Starting and stopping it, which takes seconds with many devices, happens inside `book(step)`.
    """

    def __init__(
        self,
        workdir: str,
        *,
        steps: tuple[int, int],
        start_step: int,
        total_steps: int,
        book: Callable[[int], contextlib.AbstractContextManager[None]],
    ):
        self._folder, self._book = to_path(workdir) / "profile", book
        self._recording = contextlib.ExitStack()
        first, last = max(steps[0], start_step + 1), min(steps[1], total_steps + 1)
        self._steps: tuple[int, ...] = (first, steps[1]) if first < last else ()
        if steps[0] < steps[1] and not self._steps:
            logging.warning(
                f"log.profile_steps={steps}: no trace; this session runs updates "
                f"{start_step + 1} to {total_steps}."
            )

    def before(self, step: int, state: Any) -> None:
        """Call before each update, with its input state."""
        if step in self._steps:
            with self._book(step):
                jax.block_until_ready(state)  # the host is ahead of the devices
                self._recording.close()
                if step == self._steps[0]:
                    folder = self._folder
                    if is_bucket(folder):  # copied there at the end
                        folder = self._recording.enter_context(paths.uploaded(folder))
                    self._recording.enter_context(jax.profiler.trace(str(folder)))

    def close(self) -> None:
        self._recording.close()
