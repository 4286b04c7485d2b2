"""The training loop, used by pre-training, fine-tuning and every baseline: `train_and_evaluate`.

Order inside a step: update, log, evaluate, checkpoint. The checkpoint comes last, so that its
existence means that the step is complete. All randomness and the data order are functions
of (seed, step), so the state is all that a checkpoint needs to resume bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.data.pipeline import DeviceBatch, train_batches_on
from vit_jax.multihost.agreement import run_on_first_process
from vit_jax.multihost.watchdog import Watchdog
from vit_jax.parameters.sharding import batch_sharding
from vit_jax.run import Run, complete_config, create_run
from vit_jax.session import Results, Session
from vit_jax.training.early_stopping import create_ending
from vit_jax.training.step import TrainState
from vit_jax.trees import merge_trees

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
    watchdog: Watchdog | None = None,
) -> Results:
    """Trains and evaluates the model that `config` describes, resuming from `workdir` if it exists.

    Args:
      config: with the keys of `vit_jax/config.py`.
      workdir: folder of this run (docs/runs.md has its files); created, or resumed if it exists.
      dataset: your own splits, used instead of `config.dataset.name`; see
        `data.memory.open_given`. Pass the same in every process.
      resume: `auto` refuses a work directory of another config; `force` resumes it.
      on_log: called with the step and its metrics after each row of training metrics.
      on_evaluation: called with the step and `{NAME/METRIC: value}` after its evaluations, and
        again for the step from which a resumed run starts. If it returns "stop" the run ends there,
        as with `early_stopping`. Pass both in every process; they run on process 0, and their
        exceptions end all processes.
      watchdog: of this process, see `launch.start_processes`; None: it is not watched.

    Returns:
      The contents of `results.json`: `step`, `seconds`, `images_per_second`, where the time went
      (`Clock.totals`), the last evaluations as `NAME/METRIC` for each evaluator, and for a run that
      ended early `planned_steps`, see `training.early_stopping.create_ending`.

    Raises:
      UserError: anything that the user can fix, before compilation starts.
      errors.TrainingDivergedError: NaN or Inf; the last good checkpoint is kept.
      errors.PreemptedError: the run was asked to stop (SIGTERM) and has saved its state.
    """
    with Session(config, workdir, watchdog) as session:
        mesh = session.start_devices()
        session.note("opening the data")
        config = complete_config(config, session.workdir)
        on_wait = functools.partial(session.note, "reading a batch to evaluate")
        open_dataset = None
        if dataset is not None:
            from vit_jax.data.memory import open_given  # few runs need it

            open_dataset = open_given(dataset, config.dataset.name)
        run = create_run(config, mesh, open_dataset, on_wait)
        finished = session.claim(run, config, resume)
        if finished is not None:
            return finished

        update = run.compile_train_step()
        state = session.first_state(run)
        session.begin(run, int(state.step))
        ends = create_ending(
            session.checkpoints.history,
            **config.early_stopping,
            total_steps=run.total_steps,
            on_evaluation=on_evaluation,
        )
        with train_batches_on(
            batch_sharding(mesh),
            run.objective.example_keys,
            dataset=run.dataset,
            batch_size=run.batch_size,
            repeated_augmentation=config.dataset.repeated_augmentation,
            seed=config.seed,
            start_step=int(state.step),
            total_steps=run.total_steps,
            **config.loader,
        ) as batches:
            on_log, ends = _on_first_process(on_log), _on_first_process(ends)
            state, results = train(run, update, state, batches, session, on_log=on_log, ends=ends)
        return session.finish(run, state, results)


def train(
    run: Run,
    update: Callable[..., Any],
    state: TrainState,
    batches: Iterator[DeviceBatch],
    session: Session,
    *,
    on_log: Callable[..., Any] = lambda *_: None,
    ends: Callable[..., Any] = lambda *_: None,
) -> tuple[TrainState, Results]:
    """Updates `state` up to the last step; returns it with its evaluations.

    Args:
      update: (state, constants, batch) -> (state, metrics), see `Run.compile_train_step`.
      on_log: see `train_and_evaluate`.
      ends: see `create_ending`.
    """
    total_steps, constants = run.total_steps, run.place_constants()
    learning_rate = jax.jit(run.schedule)
    learning_rate(0)  # compile now, or the first speed would include it
    ending: Results = {}  # result of `ends`

    def evaluate(done: Results) -> Results:
        """If the run ends early, also runs what is due after the last step."""
        nonlocal ending
        step, params = int(state.step), merge_trees(run.eval_params(state), constants)
        results = session.evaluate(run, state, params, total_steps=total_steps, done=done)
        if done or results:
            ending = ends(step, {**done, **results}) or {}
        if ending:
            known = {**done, **results}
            remaining = session.evaluate(run, state, params, total_steps=step, done=known)
            if remaining:
                ends(step, remaining)  # the callback gets all
                results |= remaining
        return results

    step = int(state.step)
    if session.notice.reached():
        session.stop(step, total_steps)
    done = session.evaluations_of(step)
    results = {**done, **evaluate(done)}
    if results and step:
        session.checkpoints.add_metrics(step, results)

    pending: list[tuple[int, dict[str, jax.Array]]] = []  # metrics not yet fetched
    while step < total_steps and not ending:
        step += 1
        with session.clock.waiting_for_data(step):
            batch = next(batches)
        session.profile.before(step, state)
        state, metrics = update(state, constants, batch)
        session.clock.dispatched(step, metrics["loss"])
        pending.append((step, metrics))

        last = step == total_steps
        evaluates = any(e.is_due(step, total_steps) for e in run.evaluations.values())
        stops = session.notice.reached() and not last
        saves = session.checkpoints.should_save(step, total_steps, evaluates) or stops
        if session.clock.is_line_due(step) or evaluates or saves or last:
            rate = learning_rate(step - 1)  # the one used in this update
            row = session.log(pending, rate)
            run.objective.watch(step, row)
            on_log(step, row)
        measured = evaluate({}) if evaluates and not stops else {}
        if saves or ending:
            session.save(step, state, measured)
        if stops:
            session.stop(step, total_steps)
        results = measured or results

    session.wait_for_checkpoint(step)
    return state, {**ending, **results}


def _on_first_process(callback: Callable[..., Any] | None) -> Callable[..., Any]:
    """Calls it on process 0, and passes its error or dict to all; without a callback, a no-op."""
    if callback is None:
        return lambda *_: None

    def call(*args: Any) -> dict[str, float] | None:
        answer = callback(*args)
        return answer if isinstance(answer, dict) else None  # others may not be serializable

    return lambda *args: run_on_first_process(functools.partial(call, *args))
