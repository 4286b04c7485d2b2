"""The benchmark measures what it says; how fast is no test's business."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from configs.benchmark import get_config
from scripts import benchmark
from tests import tiny
from tests.peers import import_timm
from tests.tiny import Script
from vit_jax.errors import UserError
from vit_jax.measure import fit, tpu
from vit_jax.measure.checkpoints import benchmark_checkpoint
from vit_jax.measure.compilation import benchmark_compile
from vit_jax.measure.loop import benchmark_loop, device_batch, in_memory, reference_step
from vit_jax.measure.peers import check_peer, timm_step
from vit_jax.measure.step import benchmark_step
from vit_jax.measure.tpu import benchmark_sizes, benchmark_tpu
from vit_jax.measure.turns import Case, take_turns
from vit_jax.measure.weights import benchmark_load
from vit_jax.parameters.sharding import create_mesh, state_shardings
from vit_jax.plan.compiled import compile_step
from vit_jax.plan.topology import parse_topology
from vit_jax.run import create_run


def test_loop_and_reference_take_turns() -> None:
    result = benchmark_loop(tiny.config(schedule__warmup_steps=0), steps=2, rounds=3)
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


def test_a_ratio_above_one_is_in_our_favour() -> None:
    speed = Case("update", "timm", [30.0, 20.0, 40.0], [20.0, 20.0, 20.0], "images/s")
    assert speed.json()["ratio"] == 1.5
    assert speed.json()["ratio_of_turns"] == [1.0, 2.0]
    assert "ratio 1.50 (1.00 to 2.00 in 3 turns)" in speed.text()
    cost = Case("update", "official", [50.0], [100.0], "Mcycles")
    assert cost.json()["ratio"] == 2.0
    assert cost.text() == "update: 50 Mcycles, official 100: ratio 2.00"


def test_all_take_turns_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    def subject(name: str) -> Any:
        def turn() -> float:
            order.append(name)
            return len(order)

        return turn

    found = take_turns({"a": subject("a"), "b": subject("b")}, rounds=2)
    assert order == ["a", "b"] * 3
    assert found == {"a": [3, 5], "b": [4, 6]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_the_update_beside_timm_and_the_reference() -> None:
    import_timm()
    config = tiny.config(optimizer__clip_norm=1.0, optimizer__weight_decay=0.1)
    cases, figures = benchmark_step(config, against=["timm_eager", "reference"], steps=1, rounds=2)
    assert [case.peer for case in cases] == ["timm_eager", "reference"]
    assert cases[0].case.startswith("update, float32")
    assert min(*cases[0].ours, *cases[0].theirs, figures["mfu"], figures["ceiling"]) > 0


def test_torch_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import_timm()
    import torch

    def fail(*_: Any) -> Any:
        raise FileNotFoundError("g++")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=fail))
    images, labels = np.zeros((2, 8, 8, 3), np.uint8), np.zeros(2, int)
    step = timm_step(tiny.config(), images, labels, 2, train=False, compiled=True)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        step(1)


def test_timm_trains_in_it() -> None:
    """Its loss falls: gradients reach the parameters through autocast and clipping."""
    import_timm()
    images = np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), np.uint8)
    config = tiny.config(optimizer__clip_norm=1.0, model__patch_size=8, model__dtype="bfloat16")
    step = timm_step(config, images, np.arange(8) % 2, 2, train=True, compiled=False)
    first = step(1)
    assert step(30) < 0.7 * first


def test_the_update_for_a_tpu_beside_the_reference() -> None:
    pytest.importorskip("libtpu", reason="no TPU compiler: pip install -e '.[tpu]'")
    topology = parse_topology("v5e:2x2")
    sizes = {"model__hidden_size": 128, "model__mlp_dim": 256, "model__dtype": "bfloat16"}
    config = tiny.config(**sizes, dataset__batch_size=64)
    cases = benchmark_tpu(config, topology, against=["reference"])
    assert [case.unit for case in cases] == ["Mcycles", "GB", "GiB"]
    assert all(min(*case.ours, *case.theirs) > 0 for case in cases)
    with pytest.raises(UserError, match="must name TPUs"):
        benchmark_tpu(config, parse_topology("cpu:4"), against=[])


def test_sizes_are_those_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def compile_step(run: Any, *_: Any, **__: Any) -> Any:
        tried.append(run.batch_size // 4)
        if tried[-1] > 13:
            raise tpu.TooLargeError("out of memory")
        return SimpleNamespace(cycles=1.5e6 * run.batch_size // 4, kernel_cycles=0.0)  # 1 ms each

    monkeypatch.setattr(tpu, "compile_step", compile_step)
    pytest.importorskip("libtpu", reason="no TPU compiler: pip install -e '.[tpu]'")
    config = get_config("tpu")
    config.dataset.name = "glyphs(size=224, num_examples=32)"
    rows = benchmark_sizes(config, parse_topology("v5e:2x2"), variants=["Ti/16"], resolutions=[224])
    assert rows == [{"model": "Ti/16", "pixels": 224, "fit": 12, "images_per_second": 1000.0}]
    assert tried == [192, 16, 4, 8, 12, 12]


def test_the_largest_batch_is_the_last_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(run: Any, *args: Any, **kwargs: Any) -> Any:
        step = compile_step(run, *args, **kwargs)
        seen.append((run.batch_size, step.memory["total"]))
        return step

    monkeypatch.setattr(fit, "compile_step", spy)
    monkeypatch.setattr(fit, "_SIZES", [1, 2, 4])  # of each of 8 devices
    monkeypatch.setattr(fit, "_bytes_of_a_device", lambda: 2**62)
    config = tiny.config()
    assert fit.largest_batch(config) == 32
    [(_, for_16), (_, for_32)] = seen
    assert for_16 < for_32
    monkeypatch.setattr(fit, "_bytes_of_a_device", lambda: for_32 - 1)
    assert fit.largest_batch(config) == 16
    assert config.dataset.batch_size == 16  # of the recipe, as it was


def test_until_the_first_update_beside_the_reference() -> None:
    cases = benchmark_compile(tiny.config(), against=["reference"], rounds=1)
    assert [case.case for case in cases] == [
        "until there: initial parameters",
        "until there: update",
    ]
    assert min(value for case in cases for value in (*case.ours, *case.theirs)) > 0
    with pytest.raises(UserError, match="--against=timm: compile takes official"):
        benchmark_compile(tiny.config(), against=["timm"])


def test_checkpoints_beside_flax(tmp_path: Path) -> None:
    cases = benchmark_checkpoint(tiny.config(), tmp_path, rounds=1)
    names = [case.case.partition(": ")[2] for case in cases]
    assert names == ["the training waits", "on the disk", "read back"]
    assert cases[0].ours[0] < cases[1].ours[0]
    assert min(value for case in cases for value in case.theirs) > 0


@pytest.mark.parametrize(
    ("peer", "model", "message"),
    [
        ("tim", {}, "--against=tim: it is unknown"),
        ("official", {}, "git clone https://github.com/google-research/vision_transformer"),
        ("big_vision", {}, "git clone https://github.com/google-research/big_vision"),
        ("timm", {"name": "bit"}, "plain Vision Transformers only"),
    ],
)
def test_a_peer_that_is_not_here_is_one_line(peer: str, model: dict, message: str) -> None:
    config = tiny.config()
    with config.unlocked():
        config.model.update(model)
    with pytest.raises(UserError, match=message):
        check_peer(peer, config.model, "/nowhere")


def test_the_kept_files_make_the_tables_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(benchmark.launch.ROOT)
    page = (root / "docs" / "performance.md").read_text()
    files = sorted((root / "benchmarks").glob("*.json"))
    assert files
    for path in files:
        benchmark.table([path])
        assert capsys.readouterr().out.strip() in page, path.name


def test_the_command_prints_and_keeps_its_cases(script: Script, tmp_path: Path) -> None:
    kept = tmp_path / "cases.json"
    model = {"hidden_size": 16, "num_layers": 1, "mlp_dim": 16, "num_heads": 2, "patch_size": 56}
    command = ["step", "--inference", "--against=reference", "--distributed=off"]
    command += [f"--config.model.{key}={value}" for key, value in model.items()]
    command += ["--config.model.dtype=bfloat16", "--steps=1", "--rounds=2", f"--json={kept}"]
    output = script("benchmark.py", *command).stdout
    [case] = json.loads(kept.read_text())["cases"]
    assert f"ratio {case['ratio']:.2f}" in output
    assert "MFU" in output
    assert case["case"] == "forward pass, bfloat16, batch 8, 224x224 pixels"
    assert (case["peer"], case["unit"]) == ("reference", "images/s")
