"""The training loop: pre-training, fine-tuning and every baseline go through `train_and_evaluate`.

Order inside a step: update, log, evaluate, checkpoint. The checkpoint comes last, so that its
existence means that all of the step is done. Everything random and the order of the data are
functions of (seed, step), so the state is all that a checkpoint needs to resume bit for bit.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
import zipfile
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from vit_jax.data.device import RunAhead, device_batches, local_rows
from vit_jax.data.pipeline import HostBatches, train_batches
from vit_jax.errors import PassingError, UserError
from vit_jax.files.atomic import read_object, set_aside, write_json
from vit_jax.files.paths import to_path
from vit_jax.hardware.chips import find_chip
from vit_jax.multihost.first_process import run_on_first_process
from vit_jax.multihost.preemption import PreemptionNotice
from vit_jax.multihost.watchdog import watchdog
from vit_jax.parameters.sharding import batch_sharding, create_mesh, to_host
from vit_jax.run import Run, create_run
from vit_jax.training.clock import KINDS, Clock
from vit_jax.training.session import Session
from vit_jax.training.state import TrainState
from vit_jax.workdir.checkpoints import CheckpointManager
from vit_jax.workdir.claim import claim_workdir, release_workdir
from vit_jax.workdir.description import PARAMS_FILE, RESULTS_FILE, write_params
from vit_jax.workdir.metrics import MetricWriter, check_wandb, read_metrics
from vit_jax.workdir.provenance import describe, write_provenance
from vit_jax.workdir.tracing import Trace

# The processes of a run may differ in these: where the data lie, how a host works.
LOCAL_KEYS = ("dataset.data_dir", "loader.", "log.")
# A resumed run may change these too: they say how it runs, not what it computes.
RUNTIME_KEYS = (*LOCAL_KEYS, "mesh.", "checkpoint.", "processes.", "model.remat", "sweep.")


def train_and_evaluate(
    config: ConfigDict,
    workdir: str,
    *,
    dataset: Mapping[str, Any] | None = None,
    resume: str = "auto",
) -> dict[str, float]:
    """Trains the model that `config` describes, from where `workdir` stands, and evaluates it.

    A work directory holds `config.json`, `model.json`, `parameters.txt`, `provenance.jsonl`,
    `metrics.jsonl`, `tensorboard/`, `checkpoints/`, and, once the run has ended, `params.npz` and
    `results.json`.

    Args:
      config: with the keys of `vit_jax/config.py`.
      workdir: folder of this run; created, or resumed if it exists.
      dataset: splits of your own, for which `config.dataset.name` stands; see
        `data.memory.open_given`. Every process gives the same.
      resume: `auto` refuses a work directory of another config; `force` resumes it.

    Returns:
      What `results.json` holds: `step`, `seconds`, `images_per_second`, where the time went
      (`Clock.totals`), and the last evaluations as `NAME/METRIC` for each evaluator.

    Raises:
      UserError: anything that the user can put right, before anything is compiled.
      session.TrainingDivergedError: NaN or Inf; the last good checkpoint is kept.
      errors.PreemptedError: the run was asked to stop (SIGTERM) and has saved its state.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        watchdog.expect_progress(True)
        stack.callback(watchdog.expect_progress, False)
        watchdog.note("starting the devices")
        mesh = create_mesh(**config.mesh)
        run_on_first_process(lambda: check_wandb(config.log.wandb))
        stack.enter_context(jax.set_mesh(mesh))
        notice = stack.enter_context(PreemptionNotice())
        watchdog.note("opening the data")
        run = create_run(config, mesh, _opener(config, dataset))
        claim_workdir(
            workdir,
            config.to_dict(),
            run.fingerprints,
            resume=resume,
            runtime_keys=RUNTIME_KEYS,
            local_keys=LOCAL_KEYS,
        )
        stack.callback(release_workdir, workdir)
        finished = run_on_first_process(lambda: _finished_results(workdir, run.total_steps))
        if finished is not None:
            logging.info("%s: this run has ended at step %d.", workdir, run.total_steps)
            return finished
        describe(
            workdir,
            description=run.description,
            params=run.abstract_state.params,
            datasets=[run.dataset, *run.eval_datasets.values()],
            total_steps=run.total_steps,
            batch_size=run.batch_size,
        )
        checkpoints = CheckpointManager(workdir, **config.checkpoint)
        stack.callback(checkpoints.close)
        watchdog.note("making or restoring the state")
        state = run.initial_state(checkpoints)
        start_step = int(state.step)
        if start_step > run.total_steps:
            raise UserError(
                f"{workdir} stands at step {start_step}, past the {run.total_steps} steps "
                "that duration asks for; ask for more, or choose another --workdir."
            )
        write_provenance(workdir, start_step=start_step)
        earlier = run_on_first_process(lambda: _earlier_times(workdir, start_step))
        writer = stack.enter_context(
            MetricWriter(
                workdir,
                start_step=start_step,
                tensorboard=config.log.tensorboard,
                wandb_project=config.log.wandb,
                config=config.to_dict(),
            )
        )
        clock = create_clock(run, start_step, earlier, began)
        stack.callback(clock.close)
        if earlier:  # kept even if this session dies before its first row
            writer.write(start_step, clock.totals())
        return train(run, state, workdir, checkpoints, writer, clock, notice)


def _opener(config: ConfigDict, splits: Mapping[str, Any] | None) -> Any:
    """What opens the data of the run; None for what `create_run` does by itself."""
    if splits is None:
        return None
    from vit_jax.data.memory import open_given  # of few runs

    return open_given(splits, config.dataset.name)


def train(
    run: Run,
    state: TrainState,
    workdir: str,
    checkpoints: CheckpointManager,
    writer: MetricWriter,
    clock: Clock,
    notice: PreemptionNotice,
) -> dict[str, float]:
    """Updates `state` up to the last step; returns the results (see `train_and_evaluate`)."""
    start_step = int(state.step)
    constants = run.place_constants()
    step_fn = run.train_step(state, constants)
    session = Session(
        config=run.config,
        total_steps=run.total_steps,
        schedule=run.schedule,
        evaluators=run.evaluators,
        constants=constants,
        checkpoints=checkpoints,
        writer=writer,
        clock=clock,
        notice=notice,
    )
    # Usually done before the checkpoint; not at the start, nor if a notice came first.
    done = run_on_first_process(lambda: _evaluated(workdir, start_step))
    results = session.start(state, done)
    with contextlib.ExitStack() as stack:
        host_batches = stack.enter_context(train_iterator(run, start_step))
        batches = device_batches(
            host_batches,
            batch_sharding(run.mesh),
            batch_size=run.batch_size,
            keys=run.objective.example_keys,
        )
        trace = Trace(
            run.config.log.profile_steps,
            workdir,
            lambda: clock.book("profile"),
            first_step=start_step + 1,
            total_steps=run.total_steps,
        )
        stack.enter_context(trace)
        run_ahead = RunAhead()
        for step in range(start_step + 1, run.total_steps + 1):
            watchdog.note("reading a batch", step)
            with clock.data_wait.waiting():
                batch = next(batches)
            watchdog.note("updating", step, waits=True)
            trace.before(step, state)
            state, metrics = step_fn(state, constants, batch)
            clock.data_wait.dispatched(metrics["loss"])
            run_ahead.started(metrics["loss"])
            if step == start_step + 1:
                jax.block_until_ready(state.step)
                watchdog.note("updating", step, waits=True, started=True)
                seconds = clock.first_step_done(step)
                logging.info("The first step, compilation included, took %.1fs.", seconds)
            results = session.after_update(state, step, metrics) or results
        session.wait_for_checkpoint(run.total_steps)
        return finish(run, state, workdir, results, clock)


def train_iterator(run: Run, start_step: int) -> HostBatches:
    """This process's rows of the batches for updates start_step + 1 to the last."""
    return train_batches(
        run.dataset,
        batch_size=run.batch_size,
        repeated_augmentation=run.config.dataset.repeated_augmentation,
        seed=run.config.seed,
        start_step=start_step,
        total_steps=run.total_steps,
        rows=local_rows(batch_sharding(run.mesh), run.batch_size),
        **run.config.loader,
    )


def create_clock(
    run: Run, start_step: int, earlier: dict[str, float], began: float | None = None
) -> Clock:
    """The clock of this session; for the arguments see `Clock`."""
    # Freezing skips an unknown part of the backward pass: no MFU then.
    chip = None if run.config.optimizer.freeze else find_chip(jax.devices()[0].device_kind)
    return Clock(
        start_step=start_step,
        total_steps=run.total_steps,
        batch_size=run.batch_size,
        began=began,
        earlier=earlier,
        flops_per_second=chip.device_peak_flops * jax.device_count() if chip else None,
        flops_per_image=run.train_flops_per_image() if chip else 0.0,
    )


def finish(
    run: Run, state: TrainState, workdir: str, results: dict[str, float], clock: Clock
) -> dict[str, float]:
    """Writes `params.npz`, then `results.json`, whose existence means that the run has ended."""
    watchdog.note(f"writing {PARAMS_FILE}")
    params = to_host(state.eval_params)
    rows = read_metrics(workdir)
    speeds = [row["images_per_second"] for row in rows if "images_per_second" in row]
    totals = clock.totals()
    results = {
        "step": run.total_steps,
        "seconds": totals.pop("elapsed_seconds"),
        "images_per_second": statistics.median(speeds) if speeds else 0.0,
        **totals,
        **results,
    }
    if jax.process_index() == 0:
        folder = to_path(workdir)
        write_params(folder / PARAMS_FILE, params)
        write_json(folder / RESULTS_FILE, results)
        logging.info("Wrote %s.", folder / PARAMS_FILE)
    return results


def _earlier_times(workdir: str, start_step: int) -> dict[str, float]:
    """`Clock.totals` of the earlier sessions; {} in the first one.

    What they trained after `start_step`, where this session starts, is lost.
    """
    rows = [row for row in read_metrics(workdir) if "elapsed_seconds" in row]
    if not rows:
        return {}

    def training(row: dict[str, float]) -> float:
        return row["elapsed_seconds"] - sum(row.get(f"{kind}_seconds", 0.0) for kind in KINDS)

    kept = [training(row) for row in rows if row["step"] <= start_step]
    lost = training(rows[-1]) - (kept[-1] if kept else 0.0)
    return {**rows[-1], "lost_seconds": rows[-1].get("lost_seconds", 0.0) + max(lost, 0.0)}


def _evaluated(workdir: str, step: int) -> dict[str, float]:
    """The evaluations of `step` that an earlier session has written."""
    rows = [row for row in read_metrics(workdir) if row["step"] == step and "loss" not in row]
    return {key: value for row in rows for key, value in row.items() if "/" in key}


def _finished_results(workdir: str, total_steps: int) -> dict[str, float] | None:
    """What a run that has ended wrote; files that cannot be that are set aside."""
    path, params = to_path(workdir) / RESULTS_FILE, to_path(workdir) / PARAMS_FILE
    if not path.exists() or not params.exists():
        return None
    with params.open("rb") as file:
        whole = zipfile.is_zipfile(file)
    if not whole:
        set_aside(params, "is no file of parameters")
        return None
    try:
        results = read_object(path)
        if not all(type(value) in (int, float) for value in results.values()):
            raise UserError(f"{path} holds other values than numbers.")
    except PassingError:
        raise
    except UserError as error:
        set_aside(path, f"is none of a run's ({error})")
        return None
    return results if results.get("step") == total_steps else None
