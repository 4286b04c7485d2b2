"""What happens between two updates: logging, evaluation, checkpoint, the end on request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from vit_jax.errors import PreemptedError
from vit_jax.multihost import liveness
from vit_jax.multihost.first_process import run_on_first_process
from vit_jax.multihost.preemption import PreemptionNotice
from vit_jax.training.clock import Progress
from vit_jax.training.log import TrainLog
from vit_jax.training.state import TrainState
from vit_jax.workdir.checkpoints import CheckpointManager


class TrainEvents:
    """Does what is due after an update, in the order log, evaluate, checkpoint.

    Args:
      config: of the run.
      total_steps: updates in all.
      evaluators: by their key in the config.
      checkpoints, progress, log, notice: of this session.
    """

    def __init__(
        self,
        *,
        config: ConfigDict,
        total_steps: int,
        evaluators: Mapping[str, Any],
        checkpoints: CheckpointManager,
        progress: Progress,
        log: TrainLog,
        notice: PreemptionNotice,
    ):
        self._config = config
        self._total_steps = total_steps
        self._evaluators = evaluators
        self._checkpoints = checkpoints
        self._progress = progress
        self._log = log
        self._notice = notice

    def stop_before_the_first_update(self, step: int) -> None:
        """Raises PreemptedError if the run was asked to stop while it started."""
        if self._notice.reached():
            raise PreemptedError(
                f"Stopped as asked before the first update of this session (at step {step}); the "
                "same command goes on."
            )

    def after_update(self, state: TrainState, step: int) -> dict[str, float]:
        """To be called after `step` finished updates; returns what was evaluated.

        Only where something is due does the host wait for the devices.

        Raises:
          PreemptedError: the run was asked to stop, and its state is saved.
        """
        config, last = self._config, step == self._total_steps
        evaluates = any(self._is_due(key, step) for key in self._evaluators)
        stops = self._notice.reached() and not last
        saves = self._checkpoints.should_save(step, self._total_steps) or stops
        saves |= evaluates and bool(config.checkpoint.best_metric)
        if step % config.log.every_steps == 0 or evaluates or saves or last:
            self._log.flush()
        results = self.evaluate(state, step) if evaluates and not stops else {}
        if saves:
            self._save(state, step, results)
        if stops:
            self._stop(step)
        return results

    def evaluate(self, state: TrainState, step: int, done: Iterable[str] = ()) -> dict[str, float]:
        """Runs the evaluators that are due at `step`; returns `{NAME/METRIC: value}`.

        Args:
          state: whose (averaged) parameters are evaluated.
          step: finished updates.
          done: metrics of this step that an earlier session has evaluated.

        Raises:
          PreemptedError: as above. What was not evaluated is made up for when the run goes on.
        """
        known = {name.partition("/")[0] for name in done}
        results: dict[str, float] = {}
        for key, evaluator in self._evaluators.items():
            if key in known or not self._is_due(key, step):
                continue

            def on_batch(key: str = key) -> None:
                liveness.note(f"evaluating {key}", step, waits=True)
                if step and self._notice.reached():  # there is less time than this may take
                    if run_on_first_process(self._checkpoints.latest_step) != step:
                        self._save(state, step, {})
                    self._stop(step)

            with self._progress.book("evaluation", f"evaluate {key}"):
                values = evaluator(state.eval_params, on_batch=on_batch)
            results |= {f"{key}/{name}": value for name, value in values.items()}
            self._log.evaluated(step, {f"{key}/{name}": v for name, v in values.items()})
        return results

    def wait_for_checkpoint(self, step: int) -> None:
        """Blocks until the last checkpoint is complete."""
        liveness.note("saving", step, waits=True)
        with self._progress.book("checkpoint"):
            self._checkpoints.wait()

    def _is_due(self, key: str, step: int) -> bool:
        evaluator = self._config.evaluators[key]
        if step == 0:
            return evaluator.at_start
        every_steps = evaluator.every_steps
        return step == self._total_steps or bool(every_steps and step % every_steps == 0)

    def _save(self, state: TrainState, step: int, results: dict[str, float]) -> None:
        liveness.note("saving", step, waits=True)
        with self._progress.book("checkpoint", "save"):
            self._checkpoints.save(step, state, results or None)

    def _stop(self, step: int) -> None:
        """Ends the run on all processes; its state is being saved."""
        self.wait_for_checkpoint(step)
        raise PreemptedError(
            f"Stopped as asked after step {step} of {self._total_steps}. Its checkpoint is "
            "complete; the same command goes on from there."
        )
