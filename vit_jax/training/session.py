"""What happens between two updates: logging, evaluation, checkpoint, stopping on request."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.errors import PreemptedError
from vit_jax.multihost.first_process import run_on_first_process
from vit_jax.multihost.preemption import PreemptionNotice
from vit_jax.multihost.watchdog import watchdog
from vit_jax.training.clock import Clock, format_seconds
from vit_jax.training.optimizer import Schedule
from vit_jax.training.state import TrainState
from vit_jax.workdir.checkpoints import CheckpointManager
from vit_jax.workdir.metrics import MetricWriter

_FIRST_LINE_SECONDS = 10.0  # after the first update


class TrainingDivergedError(RuntimeError):
    """Loss, gradient or parameters are NaN or infinite; the message names the step."""


@dataclasses.dataclass
class Session:
    """Does what is due after an update, in the order log, evaluate, checkpoint.

    The host waits for the devices only when something is due.
    """

    config: ConfigDict
    total_steps: int
    schedule: Schedule
    evaluators: Mapping[str, Any]  # by their key in the config
    constants: Mapping[str, Any]  # of the objective, on the devices
    checkpoints: CheckpointManager
    writer: MetricWriter
    clock: Clock
    notice: PreemptionNotice

    def __post_init__(self) -> None:
        self._log_by: float | None = None  # time of the next line, if no step is due before
        self._pending: list[tuple[int, dict[str, jax.Array]]] = []
        self.schedule = jax.jit(self.schedule)  # one program, and not one for each operation
        self.schedule(0)  # compiled now: the first speed would include it

    def start(self, state: TrainState, done: Mapping[str, float]) -> dict[str, float]:
        """What comes before the first update; returns all evaluations of this step.

        Args:
          state: restored or new.
          done: results of this step from an earlier session that was stopped before the rest.

        Raises:
          PreemptedError: the run was asked to stop while it started.
        """
        step = int(state.step)
        if self.notice.reached():
            raise PreemptedError(
                f"Stopped as asked before the first update of this session (at step {step}); the "
                "same command resumes."
            )
        results = {**done, **self._evaluate(state, step, done)}
        if results and step:
            self.checkpoints.add_metrics(step, results)
        return results

    def after_update(
        self, state: TrainState, step: int, metrics: dict[str, jax.Array]
    ) -> dict[str, float]:
        """Call after `step` finished updates; returns the results of evaluations, if any.

        Raises:
          PreemptedError: the run was asked to stop, and its state is saved.
          TrainingDivergedError: names the first step with a loss, gradient or parameter that is not
            finite.
        """
        self._pending.append((step, metrics))
        config, last = self.config, step == self.total_steps
        evaluates = any(self._is_due(key, step) for key in self.evaluators)
        stops = self.notice.reached() and not last
        saves = self.checkpoints.should_save(step, self.total_steps) or stops
        saves |= evaluates and bool(config.checkpoint.best_metric)
        if self._log_by is None:
            self._log_by = time.monotonic() + min(_FIRST_LINE_SECONDS, config.log.every_seconds)
        overdue = config.log.every_seconds > 0 and time.monotonic() >= self._log_by
        if step % config.log.every_steps == 0 or evaluates or saves or last or overdue:
            self._log()
        results = self._evaluate(state, step) if evaluates and not stops else {}
        if saves:
            self._save(state, step, results)
        if stops:
            self._stop(step)
        return results

    def wait_for_checkpoint(self, step: int) -> None:
        """Blocks until the last checkpoint is complete."""
        watchdog.note("saving", step, waits=True)
        with self.clock.book("checkpoint"):
            self.checkpoints.wait()

    def _log(self) -> None:
        """Fetches the metrics of all updates since the last call, checks all, writes the last."""
        watchdog.note("waiting for the devices", self._pending[-1][0], waits=True)
        fetched = [
            (step, {name: float(value) for name, value in metrics.items()})
            for step, metrics in jax.device_get(self._pending)
        ]
        self._pending.clear()
        for step, metrics in fetched:
            self._check_finite(step, metrics)
        step, metrics = fetched[-1]
        self._log_by = time.monotonic() + self.config.log.every_seconds
        speed = self.clock.report(step)
        eta = speed.pop("eta_seconds")
        learning_rate = float(self.schedule(step - 1))  # the one that update `step` used
        self.writer.write(step, {**metrics, "learning_rate": learning_rate, **speed})
        others = "  ".join(f"{key} {value:.4g}" for key, value in metrics.items() if key != "loss")
        logging.info(
            f"step {step}/{self.total_steps}  loss {metrics['loss']:.4f}  {others}  "
            f"lr {learning_rate:.3g}  {_pace(speed)}ETA {format_seconds(eta)}"
        )

    def _evaluate(self, state: TrainState, step: int, done: Iterable[str] = ()) -> dict[str, float]:
        """Runs the evaluators that are due at `step`; returns `{NAME/METRIC: value}`.

        Raises:
          PreemptedError: as above. The resumed run makes up for what was not evaluated.
          TrainingDivergedError: a value is not finite.
        """
        known = {name.partition("/")[0] for name in done}
        params = {**state.eval_params, **self.constants}
        results: dict[str, float] = {}
        for key, evaluator in self.evaluators.items():
            if key in known or not self._is_due(key, step):
                continue

            def on_batch(key: str = key) -> None:
                watchdog.note(f"evaluating {key}", step, waits=True)
                if step and self.notice.reached():  # there is less time than this may take
                    if run_on_first_process(self.checkpoints.latest_step) != step:
                        self._save(state, step, {})
                    self._stop(step)

            with self.clock.book("evaluation"):
                found = evaluator(params, on_batch=on_batch)
            values = {f"{key}/{name}": value for name, value in found.items()}
            text = "  ".join(
                f"{name} {value:.4f}" for name, value in values.items() if "num_exam" not in name
            )
            logging.info("step %d/%d  %s", step, self.total_steps, text)
            self.writer.write(step, {**values, **self.clock.totals()})
            if step:  # the pre-trained model is not this run's fault
                self._check_finite(step, values)
            results |= values
        return results

    def _is_due(self, key: str, step: int) -> bool:
        evaluator = self.config.evaluators[key]
        if step == 0:
            return evaluator.at_start
        every_steps = evaluator.every_steps
        return step == self.total_steps or bool(every_steps and step % every_steps == 0)

    def _save(self, state: TrainState, step: int, results: dict[str, float]) -> None:
        watchdog.note("saving", step, waits=True)
        with self.clock.book("checkpoint"):
            self.writer.flush()  # a resumed run does not repeat what comes before its checkpoint
            self.checkpoints.save(step, state, results or None)

    def _stop(self, step: int) -> None:
        """Ends the run on all processes; its state is being saved."""
        self.wait_for_checkpoint(step)
        raise PreemptedError(
            f"Stopped as asked after step {step} of {self.total_steps}. Its checkpoint is "
            "complete; the same command resumes from there."
        )

    def _check_finite(self, step: int, metrics: Mapping[str, Any]) -> None:
        bad = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
        if not bad:
            return
        self.checkpoints.wait()
        good = self.checkpoints.latest_step()
        kept = "no checkpoint yet" if good is None else f"the checkpoint of step {good} is kept"
        raise TrainingDivergedError(
            f"step {step}: {', '.join(bad)}; {kept}. Try a lower optimizer.learning_rate, a longer "
            "schedule.warmup_steps, or optimizer.clip_norm=1.0."
        )


def _pace(speed: Mapping[str, float]) -> str:
    """Images per second and its companions; nothing after the first step alone."""
    if "images_per_second" not in speed:
        return ""
    pace = f"{speed['images_per_second']:.0f} images/s  "
    if "mfu" in speed:
        pace += f"MFU {speed['mfu']:.0%}  "
    if speed["data_wait"] >= 0.01:
        pace += f"waited for data {speed['data_wait']:.0%}  "
    return pace
