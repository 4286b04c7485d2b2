"""The benchmark measures what it says; how fast is no test's business."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np

from tests import tiny
from tests.peers import import_timm
from vit_jax.measure.step import benchmark_step, device_batch, in_memory, reference_step
from vit_jax.measure.weights import benchmark_load
from vit_jax.parameters.sharding import create_mesh, state_shardings
from vit_jax.run import create_run


def test_loop_and_reference_take_turns() -> None:
    result = benchmark_step(tiny.config(schedule__warmup_steps=0), steps=2, rounds=3)
    assert len(result["loop"]) == len(result["reference"]) == 3
    assert min(result["loop"] + result["reference"]) > 0


def test_the_reference_computes_the_same_update() -> None:
    mesh = create_mesh()
    with jax.set_mesh(mesh):
        run = create_run(tiny.config(optimizer__clip_norm=1.0), mesh)
        run = dataclasses.replace(run, dataset=in_memory(run.dataset, 16))
        batch = device_batch(run)
        shardings = state_shardings(run.abstract_state, mesh)
        init = jax.jit(run.init_state, out_shardings=shardings)
        plain = reference_step(run)
        ours_state, theirs_state = init(jax.random.key(0)), init(jax.random.key(0))
        ours = run.train_step(ours_state, {})
        for _ in range(3):
            ours_state, metrics = ours(ours_state, {}, batch)
            theirs_state, theirs = plain(theirs_state, batch)
            np.testing.assert_allclose(metrics["loss"], theirs["loss"], rtol=1e-6)


def test_both_load_the_file_in_turn(tmp_path: Path) -> None:
    import_timm()
    result = benchmark_load(tmp_path, variant="Ti/16", rounds=2)
    assert len(result["vit_jax"]) == len(result["timm"]) == 2
    assert min(result["vit_jax"] + result["timm"]) > 0
