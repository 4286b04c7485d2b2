"""What a training says while it runs: numbers of the updates, their evaluations, the time left."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import jax

from vit_jax.multihost import liveness
from vit_jax.training.clock import Progress, format_seconds
from vit_jax.training.optimizer import Schedule
from vit_jax.workdir.checkpoints import CheckpointManager
from vit_jax.workdir.metrics import MetricWriter


class TrainingDivergedError(RuntimeError):
    """Loss, gradient or parameters are NaN or infinite; the message names the step."""


class TrainLog:
    """Collects the metrics of updates, fetches them now and then, checks and writes them.

    Between two calls of `flush` the host never waits for the devices.
    """

    def __init__(
        self,
        *,
        writer: MetricWriter,
        progress: Progress,
        checkpoints: CheckpointManager,
        schedule: Schedule,
        total_steps: int,
    ):
        self._writer = writer
        self._progress = progress
        self._checkpoints = checkpoints
        self._schedule = schedule
        self._total_steps = total_steps
        self._pending: list[tuple[int, dict[str, jax.Array]]] = []
        schedule(0)  # compiles its operations, which the first speed would else be told with

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self._pending.append((step, metrics))

    def flush(self) -> None:
        """Fetches the metrics of all updates since the last call, checks all, writes the last.

        Raises:
          TrainingDivergedError: naming the first step whose loss, gradient or parameters are not
            finite.
        """
        if not self._pending:
            return
        liveness.note("waiting for the devices", self._pending[-1][0], waits=True)
        fetched = [
            (step, {name: float(value) for name, value in metrics.items()})
            for step, metrics in jax.device_get(self._pending)
        ]
        self._pending.clear()
        for step, metrics in fetched:
            self._check_finite(step, metrics)
        step, metrics = fetched[-1]
        speed = self._progress.report(step)
        eta = speed.pop("eta_seconds")
        learning_rate = float(self._schedule(step - 1))  # the one that update `step` used
        self._writer.write(step, {**metrics, "learning_rate": learning_rate, **speed})
        others = "  ".join(f"{key} {value:.4g}" for key, value in metrics.items() if key != "loss")
        logging.info(
            "step %d/%d  loss %.4f  %s  lr %.3g  %sETA %s",
            *(step, self._total_steps, metrics["loss"], others, learning_rate, _pace(speed)),
            format_seconds(eta),
        )

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values of one evaluator, `NAME/METRIC`.

        Raises:
          TrainingDivergedError: one of them is not finite.
        """
        text = "  ".join(
            f"{name} {value:.4f}" for name, value in values.items() if "num_examples" not in name
        )
        logging.info("step %d/%d  %s", step, self._total_steps, text)
        self._writer.write(step, {**values, **self._progress.totals()})
        if step:  # what a fine-tuning starts from is not of its making
            self._check_finite(step, values)

    def _check_finite(self, step: int, metrics: Mapping[str, Any]) -> None:
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        if not bad:
            return
        self._checkpoints.wait()
        good = self._checkpoints.latest_step()
        kept = (
            "there is no checkpoint" if good is None else f"the checkpoint of step {good} is kept"
        )
        values = ", ".join(f"{name}={value}" for name, value in bad.items())
        raise TrainingDivergedError(
            f"step {step}: {values}; {kept}. Try a lower optimizer.learning_rate, a longer "
            "schedule.warmup_steps, or optimizer.clip_norm=1.0."
        )


def _pace(speed: Mapping[str, float]) -> str:
    """After nothing but the first step there is no speed to tell."""
    if "images_per_second" not in speed:
        return ""
    pace = f"{speed['images_per_second']:.0f} images/s  "
    if "mfu" in speed:
        pace += f"MFU {speed['mfu']:.0%}  "
    if speed["data_wait"] >= 0.01:
        pace += f"waited for data {speed['data_wait']:.0%}  "
    return pace
