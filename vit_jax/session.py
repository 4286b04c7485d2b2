"""What a process holds while it trains, besides the state: the claim, the log, the clock."""

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any, NoReturn, Self

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from vit_jax.console import Progress, ensure_logging, numbers_text
from vit_jax.errors import PreemptedError, TrainingDivergedError, UserError
from vit_jax.multihost.agreement import PreemptionNotice, run_on_first_process
from vit_jax.multihost.watchdog import Watchdog
from vit_jax.parameters.sharding import create_mesh, to_host
from vit_jax.run import Run, to_plain
from vit_jax.training.clock import KINDS, Clock, update_text
from vit_jax.training.step import TrainState
from vit_jax.trees import count_parameters
from vit_jax.wording import counted
from vit_jax.workdir.checkpoints import CheckpointManager, best_text
from vit_jax.workdir.claim import check_name, claim_workdir, release_workdir
from vit_jax.workdir.description import (
    finished_results,
    model_name,
    write_description,
    write_provenance,
    write_results,
)
from vit_jax.workdir.metrics import MetricWriter, Profile, check_wandb, earlier_times

Results = dict[str, float]


class Session(contextlib.ExitStack):
    """One start of a run, on the main thread of every process.

    Called in this order: `start_devices`, `claim`, `first_state`, `begin`, those of the loop,
    `finish`. By default its watchdog watches nothing.
    """

    workdir: str  # with ~ expanded
    checkpoints: CheckpointManager
    clock: Clock
    profile: Profile

    def __init__(self, config: ConfigDict, workdir: str, watchdog: Watchdog | None = None):
        super().__init__()
        self._began = time.monotonic()
        check_name(workdir)
        self._config, self.workdir = config, os.path.expanduser(workdir)
        self._watchdog = watchdog or Watchdog()
        self.note = self._watchdog.note

    def __enter__(self) -> Self:
        ensure_logging()
        watchdog = self._watchdog
        self._progress = Progress(watchdog.state, shown=watchdog.process_id == 0)
        self.callback(self._progress.close)
        watchdog.expect_progress(True)
        self.callback(watchdog.expect_progress, False)
        return self

    def start_devices(self) -> Mesh:
        """The mesh, set until the session ends; from here on requests to stop are heard."""
        self.note("starting the devices")
        mesh = create_mesh(**self._config.mesh)
        self.enter_context(jax.set_mesh(mesh))
        self.notice = self.enter_context(PreemptionNotice())
        run_on_first_process(lambda: check_wandb(self._config.log.wandb))
        return mesh

    def claim(self, run: Run, config: ConfigDict, resume: str) -> Results | None:
        """Claims the work directory and describes the run in it; its results if it has ended.

        `config`: with what `pretrained.source` determines.
        """
        workdir, self._config = self.workdir, config
        self.callback(release_workdir, workdir)
        claim_workdir(
            workdir, to_plain(config), run.fingerprints, resume=resume, on_loss=self._watchdog.fail
        )
        results = run_on_first_process(lambda: finished_results(workdir, run.total_steps))
        if results is not None:
            logging.info("%s: this run has ended at step %d.", workdir, results["step"])
            return results
        describe(workdir, run)
        return None

    def first_state(self, run: Run) -> TrainState:
        """The state of the newest checkpoint, else from pre-trained parameters, else random."""
        self.note("making or restoring the state")
        self.checkpoints = CheckpointManager(self.workdir, **self._config.checkpoint)
        self.callback(self.checkpoints.close)
        restored = self.checkpoints.restore(run.abstract_state)
        if restored is None:
            return run.initial_state(self._config.seed)
        step, state = restored
        logging.info("Resuming from the checkpoint of step %d.", step)
        if step > run.total_steps:
            raise UserError(
                f"{self.workdir} is at step {step}, past the {run.total_steps} steps that "
                "duration sets; increase it, or choose another --workdir."
            )
        return state

    def begin(self, run: Run, start_step: int) -> None:
        """Opens the log, and starts the clock."""
        workdir, log = self.workdir, self._config.log
        write_provenance(workdir, start_step=start_step)
        times = run_on_first_process(lambda: earlier_times(workdir, start_step, KINDS))
        self._writer = MetricWriter(
            workdir,
            start_step=start_step,
            is_evaluated=bool(self.evaluations_of(start_step)),
            tensorboard=log.tensorboard,
            wandb_project=log.wandb,
            config=to_plain(self._config),
        )
        self.enter_context(self._writer)
        self.clock = Clock(
            start_step=start_step,
            total_steps=run.total_steps,
            batch_size=run.batch_size,
            began=self._began,
            earlier=times,
            every_steps=log.every_steps,
            every_seconds=log.every_seconds,
            progress=self._progress,
            watchdog=self._watchdog,
            **run.flops(),
        )
        self.callback(self.clock.close)
        if times:  # kept even if this session dies before its first row
            self._writer.write(start_step, self.clock.totals())
        self.profile = Profile(
            workdir,
            steps=log.profile_steps,
            start_step=start_step,
            total_steps=run.total_steps,
            book=functools.partial(self.clock.book, "profile", "starting or ending a trace"),
        )
        self.callback(self.profile.close)

    def evaluations_of(self, step: int) -> Results:
        """What earlier sessions have measured of `step`, from its checkpoint."""
        return run_on_first_process(lambda: self.checkpoints.metrics_of(step))

    def log(
        self, pending: list[tuple[int, dict[str, jax.Array]]], learning_rate: jax.Array
    ) -> Results:
        """Fetches and checks the metrics of updates since the last line; writes the last row."""
        self.note("waiting for the devices", pending[-1][0], waits=True)
        for step, values in jax.device_get(pending):
            metrics = {name: float(value) for name, value in values.items()}
            self.check_finite(step, metrics)
        pending.clear()
        speed = self.clock.report(step)
        eta_seconds = speed.pop("eta_seconds")
        row = {**metrics, "learning_rate": float(learning_rate), **speed}
        self._writer.write(step, row)
        self._progress.show(step, *update_text(row, eta_seconds))
        return row

    def evaluate(
        self,
        run: Run,
        state: TrainState,
        params: Any,
        *,
        total_steps: int,
        done: Mapping[str, float],
    ) -> Results:
        """Runs the evaluators due at the step of `state`: `{NAME/METRIC: value}`.

        Args:
          run: what is trained.
          state: saved if the run is asked to stop meanwhile.
          params: `Run.eval_params` of it, and the constants.
          total_steps: after which all evaluators are due.
          done: evaluations of an earlier session, which are left out.
        """
        step, known = int(state.step), {name.partition("/")[0] for name in done}
        results: Results = {}

        def on_batch(doing: str) -> None:
            self.note(doing, step, waits=True)
            if step and self.notice.reached():  # there may not be enough time to finish
                if run_on_first_process(self.checkpoints.latest_step) != step:
                    self.save(step, state, {})
                self.stop(step, run.total_steps)

        for key, evaluation in run.evaluations.items():
            if key in known or not evaluation.is_due(step, total_steps):
                continue
            doing = f"evaluating {key}"
            with self.clock.book("evaluation", doing, step):
                measured = evaluation.evaluator(params, on_batch=functools.partial(on_batch, doing))
            values = {f"{key}/{name}": value for name, value in measured.items()}
            shown = {name: value for name, value in values.items() if "num_exam" not in name}
            logging.info("step %d/%d  %s", step, run.total_steps, numbers_text(shown))
            self._writer.write(step, {**values, **self.clock.totals()})
            if step:  # the pre-trained model is not this run's fault
                self.check_finite(step, values)
            results |= values
        return results

    def check_finite(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises TrainingDivergedError for a value that is not finite."""
        bad = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
        if not bad:
            return
        self.checkpoints.wait()
        good = self.checkpoints.latest_step()
        saved = "no checkpoint yet" if good is None else f"the checkpoint of step {good} is kept"
        raise TrainingDivergedError(
            f"step {step}: {', '.join(bad)}; {saved}. Try a lower schedule.learning_rate, a longer "
            "schedule.warmup_steps, or optimizer.clip_norm=1.0."
        )

    def save(self, step: int, state: TrainState, results: Mapping[str, float]) -> None:
        """Starts to write a checkpoint."""
        with self.clock.book("checkpoint", "saving", step):
            self._writer.flush()  # a resumed run does not repeat rows before its checkpoint
            self.checkpoints.save(step, state, dict(results))

    def stop(self, step: int, total_steps: int) -> NoReturn:
        """Raises PreemptedError once the checkpoint of `step` is complete."""
        self.wait_for_checkpoint(step)
        text = f"Stopped by SIGTERM at step {step}/{total_steps}"
        raise PreemptedError(f"{text}; checkpoint saved. The same command resumes from there.")

    def wait_for_checkpoint(self, step: int) -> None:
        with self.clock.book("checkpoint", "saving", step):
            self.checkpoints.wait()

    def finish(self, run: Run, state: TrainState, results: Results) -> Results:
        """Writes the results of a run that has ended, with the totals of the clock."""
        self.note("writing the results")
        totals = self.clock.totals()
        seconds = totals.pop("elapsed_seconds")
        results = {"step": int(state.step), "seconds": seconds, **totals, **results}
        params = run.result(to_host(run.eval_params(state)))
        best, _ = best_text(self.workdir)
        if best and jax.process_index() == 0:
            logging.info(best)
        return write_results(self.workdir, params, run.start.table, results)


def describe(workdir: str, run: Run) -> None:
    """Writes `write_description`'s files; logs what will be trained."""
    data, params, datasets = run.dataset, run.start.shapes, list(run.datasets.values())
    if jax.process_index() == 0:
        write_description(workdir, run.descriptions, run.start.table, params, datasets)
    passes = data.passes(run.total_steps * run.batch_size)
    texts = {name: f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for name, x in passes.items()}
    epochs_text = ", ".join(x if len(texts) == 1 else f"{n} {x}" for n, x in texts.items())
    epochs_text += " epoch" if epochs_text == "1" else " epochs"
    model = next(iter(run.descriptions.values())).model  # the first, if there are several
    parameters = counted(count_parameters(params), "parameter")
    outputs = counted(model["num_classes"], "output")
    steps, batch = counted(run.total_steps, "step"), counted(run.batch_size, "image")
    devices = counted(jax.device_count(), "device")
    logging.info(f"Work directory: {workdir}")
    for line in dict.fromkeys(dataset.summary for dataset in datasets):
        logging.info(line)
    logging.info(f"Model: {model_name(model)}, {parameters}, {outputs}.")
    logging.info(f"Training: {steps} of {batch} ({epochs_text}) on {devices}.")
