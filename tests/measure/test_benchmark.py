"""The benchmark measures what it says; how fast is no test's business."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from tests import tiny
from tests.peers import import_timm
from vit_jax.measure.step import benchmark_step, in_memory, reference_step
from vit_jax.measure.weights import benchmark_load, write_file
from vit_jax.parameters.sharding import batch_sharding, create_mesh, state_shardings
from vit_jax.run import create_run


def test_loop_and_reference_take_turns() -> None:
    result = benchmark_step(tiny.config(schedule__warmup_steps=0), steps=2, rounds=3)
    pairs = list(zip(result["loop"], result["reference"], strict=True))
    assert len(pairs) == 3
    slower = [1 - loop / plain for loop, plain in pairs]
    assert min(slower) <= result["overhead"] <= max(slower)


def test_the_reference_computes_the_same_update() -> None:
    mesh = create_mesh()
    with jax.set_mesh(mesh):
        run = create_run(tiny.config(optimizer__clip_norm=1.0), mesh)
        data = in_memory(run.dataset, 16)
        examples = [data.example(i, np.random.default_rng(i)) for i in range(16)]
        batch = {
            "image": np.stack([example["image"] for example in examples]),
            "label": np.array([example["label"] for example in examples], np.int32),
            "mask": np.ones(16, np.float32),
        }
        batch = jax.device_put(batch, batch_sharding(mesh))
        shardings = state_shardings(run.abstract_state, mesh)
        init = jax.jit(run.init_state, out_shardings=shardings)
        plain = reference_step(run, run.tx)
        ours_state, theirs_state = init(jax.random.key(0)), init(jax.random.key(0))
        ours = run.train_step(ours_state, {})
        for _ in range(3):
            ours_state, metrics = ours(ours_state, {}, batch)
            theirs_state, theirs = plain(theirs_state, batch)
            np.testing.assert_allclose(metrics["loss"], theirs["loss"], rtol=1e-6)


def test_loading_is_compared_on_the_same_file(tmp_path: Path) -> None:
    import_timm()
    write_file(tmp_path / "file.npz", "Ti/16")
    result = benchmark_load(tmp_path / "file.npz", variant="Ti/16", rounds=2)
    ratios = [a / b for a, b in zip(result["vit_jax"], result["timm"], strict=True)]
    assert len(ratios) == 2
    assert min(ratios) <= result["ratio"] <= max(ratios)
