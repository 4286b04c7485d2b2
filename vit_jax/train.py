"""The training loop, used by pre-training, fine-tuning and every baseline: `train_and_evaluate`.

Order inside a step: update, log, evaluate, checkpoint. The checkpoint comes last, so that its
existence means that the step is complete. All randomness and the data order are functions
of (seed, step), so the state is all that a checkpoint needs to resume bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
from ml_collections import ConfigDict

from vit_jax.console import Progress, ensure_logging, holding_warnings, numbers_text
from vit_jax.data.pipeline import DeviceBatch, train_batches_on
from vit_jax.errors import PreemptedError, TrainingDivergedError, UserError
from vit_jax.multihost.agreement import PreemptionNotice, run_on_first_process
from vit_jax.multihost.watchdog import watchdog
from vit_jax.parameters.sharding import batch_sharding, create_mesh, to_host
from vit_jax.run import Run, complete_config, create_run, to_plain
from vit_jax.training.clock import KINDS, Clock
from vit_jax.training.step import TrainState
from vit_jax.trees import merge_trees
from vit_jax.workdir.checkpoints import CheckpointManager
from vit_jax.workdir.claim import claim_workdir, release_workdir
from vit_jax.workdir.description import describe, finished_results, write_provenance, write_results
from vit_jax.workdir.metrics import (
    MetricWriter,
    Profile,
    check_wandb,
    earlier_times,
    evaluations_of,
    read_metrics,
)

# Called with a step and its metrics by name.
Callback = Callable[[int, dict[str, float]], Any]


def train_and_evaluate(
    config: ConfigDict,
    workdir: str,
    *,
    dataset: Mapping[str, Any] | None = None,
    resume: str = "auto",
    on_log: Callback | None = None,
    on_evaluation: Callback | None = None,
) -> dict[str, float]:
    """Trains and evaluates the model that `config` describes, resuming from `workdir` if it exists.

    A work directory contains `config.json`, `model.json`, `parameters.txt`, `provenance.jsonl`,
    `metrics.jsonl`, `tensorboard/`, `checkpoints/`, and, once the run has ended, `params.npz` and
    `results.json`.

    Args:
      config: with the keys of `vit_jax/config.py`.
      workdir: folder of this run; created, or resumed if it exists.
      dataset: your own splits, used instead of `config.dataset.name`; see
        `data.memory.open_given`. Pass the same in every process.
      resume: `auto` refuses a work directory of another config; `force` resumes it.
      on_log: called with the step and its metrics after each row of training metrics.
      on_evaluation: called with the step and `{NAME/METRIC: value}` after its evaluations, and
        again for the step from which a resumed run starts. If it returns "stop" the run ends there,
        as with `early_stopping`. Pass both in every process; they run on process 0, and their
        exceptions end all processes.

    Returns:
      The contents of `results.json`: `step`, `seconds`, `images_per_second`, where the time went
      (`Clock.totals`), the last evaluations as `NAME/METRIC` for each evaluator, and for a run that
      ended early `planned_steps`, see `training.early_stopping.create_ending`.

    Raises:
      UserError: anything that the user can fix, before compilation starts.
      errors.TrainingDivergedError: NaN or Inf; the last good checkpoint is kept.
      errors.PreemptedError: the run was asked to stop (SIGTERM) and has saved its state.
    """
    began = time.monotonic()
    if not workdir:
        raise UserError("workdir='' is not a folder; give one for this run.")
    workdir = os.path.expanduser(workdir)
    ensure_logging()
    with contextlib.ExitStack() as stack:
        start = stack.enter_context(contextlib.ExitStack())
        start.enter_context(holding_warnings())
        progress = Progress(watchdog.state, shown=watchdog.process_id == 0)
        stack.callback(progress.close)
        watchdog.expect_progress(True)
        stack.callback(watchdog.expect_progress, False)
        watchdog.note("starting the devices")
        mesh = create_mesh(**config.mesh)
        stack.enter_context(jax.set_mesh(mesh))
        notice = stack.enter_context(PreemptionNotice())
        run_on_first_process(lambda: check_wandb(config.log.wandb))

        watchdog.note("opening the data")
        config = complete_config(config, workdir)
        run = create_run(config, mesh, _opener(dataset, config.dataset.name))
        stack.callback(release_workdir, workdir)
        results = _claim(run, config, workdir, resume)
        if results is not None:
            logging.info("%s: this run has ended at step %d.", workdir, results["step"])
            return results

        start.close()
        watchdog.note("making or restoring the state")
        update = run.compile_train_step()
        checkpoints = CheckpointManager(workdir, **config.checkpoint)
        stack.callback(checkpoints.close)
        state = _first_state(run, checkpoints, config.seed, workdir)
        start_step = int(state.step)
        write_provenance(workdir, start_step=start_step)
        times = run_on_first_process(lambda: earlier_times(workdir, start_step, KINDS))
        writer = MetricWriter(
            workdir,
            start_step=start_step,
            tensorboard=config.log.tensorboard,
            wandb_project=config.log.wandb,
            config=to_plain(config),
        )
        stack.enter_context(writer)
        clock = Clock(
            start_step=start_step,
            total_steps=run.total_steps,
            batch_size=run.batch_size,
            began=began,
            earlier=times,
            every_steps=config.log.every_steps,
            every_seconds=config.log.every_seconds,
            progress=progress,
            **run.flops(),
        )
        stack.callback(clock.close)
        if times:  # kept even if this session dies before its first row
            writer.write(start_step, clock.totals())
        profile = Profile(
            workdir,
            steps=config.log.profile_steps,
            start_step=start_step,
            total_steps=run.total_steps,
            book=functools.partial(clock.book, "profile", "starting or ending a trace"),
        )
        stack.callback(profile.close)
        batches = train_batches_on(
            batch_sharding(mesh),
            run.objective.example_keys,
            dataset=run.dataset,
            batch_size=run.batch_size,
            repeated_augmentation=config.dataset.repeated_augmentation,
            seed=config.seed,
            start_step=start_step,
            total_steps=run.total_steps,
            **config.loader,
        )
        # Usually done before the checkpoint, but not at the start or after a notice.
        done = run_on_first_process(lambda: evaluations_of(workdir, start_step))
        state, results = train(
            run,
            update,
            state,
            stack.enter_context(batches),
            done=done,
            checkpoints=checkpoints,
            writer=writer,
            clock=clock,
            profile=profile,
            notice=notice,
            on_log=_on_first_process(on_log),
            ends=_on_first_process(_ending(run, config, workdir, start_step, on_evaluation)),
        )
        watchdog.note("writing the results")
        params = run.result(to_host(run.eval_params(state)))
        return write_results(workdir, params, run.start.table, results)


def _opener(splits: Mapping[str, Any] | None, name: str) -> Callable[..., Any] | None:
    """How to open the data of the run; None for `create_run`'s default."""
    if splits is None:
        return None
    from vit_jax.data.memory import open_given  # few runs need it

    return open_given(splits, name)


def _on_first_process(callback: Callable[..., Any] | None) -> Callable[..., Any]:
    """Calls it on process 0, and passes its error or dict to all; without a callback, a no-op."""
    if callback is None:
        return lambda *_: None

    def call(*args: Any) -> dict[str, float] | None:
        answer = callback(*args)
        return answer if isinstance(answer, dict) else None  # others may not be serializable

    return lambda *args: run_on_first_process(functools.partial(call, *args))


def _ending(
    run: Run, config: ConfigDict, workdir: str, start_step: int, on_evaluation: Callback | None
) -> Callable[..., Any] | None:
    """Decides whether the run ends early; None if nothing does."""
    keys = dict(config.early_stopping)
    if not keys["metric"] and on_evaluation is None:
        return None
    from vit_jax.training.early_stopping import create_ending  # few runs need it

    rows = [row for row in read_metrics(workdir) if row["step"] <= start_step]
    earlier = {row["step"]: row[keys["metric"]] for row in rows if keys["metric"] in row}
    return create_ending(
        **keys, earlier=earlier, total_steps=run.total_steps, on_evaluation=on_evaluation
    )


def _claim(run: Run, config: ConfigDict, workdir: str, resume: str) -> dict[str, float] | None:
    """Claims `workdir` for this run, and describes the run there; its results if it has ended."""
    claim_workdir(workdir, to_plain(config), run.fingerprints, resume=resume)
    finished = run_on_first_process(lambda: finished_results(workdir, run.total_steps))
    if finished is None:
        describe(
            workdir,
            descriptions=run.descriptions,
            objective_parameters=run.start.table.own,
            params=run.start.shapes,
            datasets=list(run.datasets.values()),
            total_steps=run.total_steps,
            batch_size=run.batch_size,
        )
    return finished


def _first_state(run: Run, checkpoints: CheckpointManager, seed: int, workdir: str) -> TrainState:
    """The state of the newest checkpoint, else from pre-trained parameters, else random."""
    restored = checkpoints.restore(run.abstract_state)
    if restored is None:
        return run.initial_state(seed)
    step, state = restored
    logging.info("Resuming from the checkpoint of step %d.", step)
    if step > run.total_steps:
        raise UserError(
            f"{workdir} is at step {step}, past the {run.total_steps} steps that duration sets; "
            "increase it, or choose another --workdir."
        )
    return state


def train(
    run: Run,
    update: Callable[..., Any],
    state: TrainState,
    batches: Iterator[DeviceBatch],
    *,
    done: Mapping[str, float],
    checkpoints: CheckpointManager,
    writer: MetricWriter,
    clock: Clock,
    profile: Profile,
    notice: PreemptionNotice,
    on_log: Callable[..., Any] = lambda *_: None,
    ends: Callable[..., Any] = lambda *_: None,
) -> tuple[TrainState, dict[str, float]]:
    """Updates `state` up to the last step; returns it with the results of the run.

    Args:
      update: (state, constants, batch) -> (state, metrics), see `Run.compile_train_step`.
      done: evaluations of `state` that an earlier session has finished.
      on_log: see `train_and_evaluate`.
      ends: called with a step and its evaluations; returns the results' entries for an early end,
        or nothing.

    Raises:
      TrainingDivergedError: see `check_finite`.
      PreemptedError: `notice` was received; the state is saved.
    """
    start_step, total_steps = int(state.step), run.total_steps
    constants = run.place_constants()
    learning_rate = jax.jit(run.update.schedule)
    learning_rate(0)  # compile now, or the first speed would include it
    ending: dict[str, float] = {}  # result of `ends`

    def save(step: int, results: Mapping[str, float]) -> None:
        with clock.book("checkpoint", "saving", step):
            writer.flush()  # a resumed run does not repeat rows before its checkpoint
            checkpoints.save(step, state, dict(results))

    def stop_if_asked(step: int) -> None:
        """Called during an evaluation: there may not be enough time to finish it."""
        if step and notice.reached():
            if run_on_first_process(checkpoints.latest_step) != step:
                save(step, {})
            stop(step, total_steps, checkpoints, clock)

    def evaluate_due(step: int, done: Mapping[str, float]) -> dict[str, float]:
        """If the run ends early, also runs what is due after the last step."""
        nonlocal ending
        params = merge_trees(run.eval_params(state), constants)
        evaluate_until = functools.partial(
            evaluate, run, step, params, checkpoints, writer, clock, stop_if_asked
        )
        found = evaluate_until(total_steps=total_steps, done=done)
        if done or found:
            ending = ends(step, {**done, **found}) or {}
        if ending and (rest := evaluate_until(total_steps=step, done={**done, **found})):
            ends(step, rest)  # the callback gets all
            found |= rest
        return found

    if notice.reached():
        stop(start_step, total_steps, checkpoints, clock)
    results = {**done, **evaluate_due(start_step, done)}
    if results and start_step:
        checkpoints.add_metrics(start_step, results)

    pending: list[tuple[int, dict[str, jax.Array]]] = []  # metrics not yet fetched
    step = start_step
    while step < total_steps and not ending:
        step += 1
        with clock.waiting_for_data(step):
            batch = next(batches)
        profile.before(step, state)
        state, metrics = update(state, constants, batch)
        clock.dispatched(step, metrics["loss"])
        pending.append((step, metrics))

        last = step == total_steps
        evaluates = any(each.is_due(step, total_steps) for each in run.evaluations.values())
        stops = notice.reached() and not last
        saves = checkpoints.should_save(step, total_steps, evaluates) or stops
        if clock.is_line_due(step) or evaluates or saves or last:
            rate = learning_rate(step - 1)  # the one used in this update
            on_log(step, log(pending, rate, checkpoints, writer, clock))
        found = evaluate_due(step, {}) if evaluates and not stops else {}
        if saves or ending:
            save(step, found)
        if stops:
            stop(step, total_steps, checkpoints, clock)
        results = found or results

    with clock.book("checkpoint", "saving", step):
        checkpoints.wait()
    totals = clock.totals()
    seconds = totals.pop("elapsed_seconds")
    return state, {"step": step, "seconds": seconds, **ending, **totals, **results}


def stop(step: int, total_steps: int, checkpoints: CheckpointManager, clock: Clock) -> NoReturn:
    """Raises PreemptedError once the checkpoint of `step` is complete."""
    with clock.book("checkpoint", "saving", step):
        checkpoints.wait()
    raise PreemptedError(
        f"Stopped by SIGTERM at step {step}/{total_steps}; checkpoint saved. The same command "
        "resumes from there."
    )


def log(
    pending: list[tuple[int, dict[str, jax.Array]]],
    learning_rate: jax.Array,
    checkpoints: CheckpointManager,
    writer: MetricWriter,
    clock: Clock,
) -> dict[str, float]:
    """Fetches the metrics of all updates since the last line, checks all, writes the last.

    Returns the last row.

    Raises:
      TrainingDivergedError: names the first step with a non-finite loss, gradient or parameter.
    """
    step = pending[-1][0]
    watchdog.note("waiting for the devices", step, waits=True)
    fetched = [
        (each, {name: float(value) for name, value in metrics.items()})
        for each, metrics in jax.device_get(pending)
    ]
    pending.clear()
    for each, metrics in fetched:
        check_finite(each, metrics, checkpoints)
    speed = clock.report(step)
    eta_seconds = speed.pop("eta_seconds")
    row = {**fetched[-1][1], "learning_rate": float(learning_rate), **speed}
    writer.write(step, row)
    clock.show(step, row, eta_seconds)
    return row


def evaluate(
    run: Run,
    step: int,
    params: Any,
    checkpoints: CheckpointManager,
    writer: MetricWriter,
    clock: Clock,
    on_batch: Callable[[int], None],
    *,
    total_steps: int,
    done: Mapping[str, float],
) -> dict[str, float]:
    """Runs the evaluators due at `step`, except those in `done`: `{NAME/METRIC: value}`."""
    known = {name.partition("/")[0] for name in done}
    results: dict[str, float] = {}
    for key, evaluation in run.evaluations.items():
        if key in known or not evaluation.is_due(step, total_steps):
            continue
        doing = f"evaluating {key}"

        def each_batch(doing: str = doing) -> None:
            watchdog.note(doing, step, waits=True)
            on_batch(step)

        with clock.book("evaluation", doing, step):
            found = evaluation.evaluator(params, on_batch=each_batch)
        values = {f"{key}/{name}": value for name, value in found.items()}
        shown = {name: value for name, value in values.items() if "num_exam" not in name}
        logging.info("step %d/%d  %s", step, run.total_steps, numbers_text(shown))
        writer.write(step, {**values, **clock.totals()})
        if step:  # the pre-trained model is not this run's fault
            check_finite(step, values, checkpoints)
        results |= values
    return results


def check_finite(step: int, metrics: Mapping[str, float], checkpoints: CheckpointManager) -> None:
    """Raises TrainingDivergedError for a value that is not finite."""
    bad = [f"{name}={value}" for name, value in metrics.items() if not math.isfinite(value)]
    if not bad:
        return
    checkpoints.wait()
    good = checkpoints.latest_step()
    kept = "no checkpoint yet" if good is None else f"the checkpoint of step {good} is kept"
    raise TrainingDivergedError(
        f"step {step}: {', '.join(bad)}; {kept}. Try a lower schedule.learning_rate, a longer "
        "schedule.warmup_steps, or optimizer.clip_norm=1.0."
    )
