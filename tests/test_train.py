"""The loop, from config to files, on real scans."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import vit_jax
from tests import fixtures_data, tiny
from tests.saved_models import save_model
from vit_jax import train as train_module
from vit_jax.errors import PreemptedError, TrainingDivergedError, UserError
from vit_jax.files.manifest import read_manifest, write_manifest
from vit_jax.models.kernels import attention as choose
from vit_jax.multihost.watchdog import Watchdog
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import create_run
from vit_jax.train import train_and_evaluate
from vit_jax.training.clock import Clock
from vit_jax.trees import flatten_names
from vit_jax.workdir.checkpoints import CheckpointManager, best_text, restore_params
from vit_jax.workdir.description import collect_provenance
from vit_jax.workdir.metrics import read_metrics


class StopHere(Exception):
    """Stands for a power cut."""


def as_of(step: int, run: Path, copy: Path) -> Path:
    """What is left of a run if the power is cut before anything after `step` is saved."""
    shutil.copytree(run, copy)
    for folder in (copy / "checkpoints").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)
    for name in ("params.npz", "results.json"):
        (copy / name).unlink()
    return copy


ALL_ON = {
    "checkpoint__every_steps": 4,
    "evaluators__test__every_steps": 4,
    "model__dropout_rate": 0.1,
    "train_step__accumulation_steps": 2,
    "train_step__polyak_decay": 0.9,
    "optimizer__clip_norm": 1.0,
    "optimizer__weight_decay": 0.1,
    "optimizer__freeze": "cls",
    "optimizer__layer_decay": 0.75,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything on, that nothing has disturbed."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    train_and_evaluate(tiny.config(**ALL_ON), str(workdir))
    return workdir


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same one, which a power cut ends in step 7: two updates past its checkpoint."""
    workdir, dispatched = tmp_path_factory.mktemp("interrupted") / "run", Clock.dispatched

    def stopping(self: Clock, step: int, loss: jax.Array) -> None:
        if step == 7:
            raise StopHere
        dispatched(self, step, loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "dispatched", stopping)
        with pytest.raises(StopHere):
            train_and_evaluate(tiny.config(**ALL_ON), str(workdir))
    return workdir


def test_a_run_leaves_what_it_promises(finished: Path) -> None:
    files = {path.name for path in finished.iterdir()}
    assert {
        "config.json",
        "model.json",
        "dataset.json",
        "parameters.txt",
        "provenance.jsonl",
        "metrics.jsonl",
        "checkpoints",
        "params.npz",
        "results.json",
    } <= files
    results = json.loads((finished / "results.json").read_text())
    assert results["step"] == 8
    assert results["test/num_examples"] == 50
    assert 0 <= results["test/accuracy"] <= 1
    rows = [row for row in read_metrics(finished) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    # The rates that the updates used: a warm-up of 2 steps to 1e-3.
    assert [row["learning_rate"] for row in rows[:3]] == pytest.approx([0.0, 0.0005, 0.001])
    model = json.loads((finished / "model.json").read_text())
    assert model["grid"] == [2, 2]
    assert model["class_names"] == [str(i) for i in range(10)]
    assert "head/kernel" in (finished / "parameters.txt").read_text()
    provenance = json.loads((finished / "provenance.jsonl").read_text().splitlines()[0])
    assert provenance["packages"]["jax"] == jax.__version__


def test_a_damaged_file_of_results_is_named(finished: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    (workdir / "results.json").write_bytes(b"")
    with pytest.raises(UserError, match=r"results\.json is damaged"):
        train_and_evaluate(tiny.config(**ALL_ON), str(workdir))


def losses(workdir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(workdir) if "loss" in row]


def assert_same_params(workdir: Path, other: Path) -> None:
    assert (workdir / "params.npz").read_bytes() == (other / "params.npz").read_bytes()


def scores_of(workdir: Path, step: int) -> dict[str, float]:
    """What a checkpoint knows of its evaluation."""
    return read_manifest(workdir / "checkpoints" / str(step) / "state")["note"]["metrics"]  # type: ignore[index]


def test_an_interrupted_run_goes_on_bit_for_bit(finished, interrupted, tmp_path):
    """Mid-epoch (100 examples, 64 seen), under accumulation, dropout, averaging and freezing.

    Killed after step 4 was evaluated, and before its checkpoint was told: it gets the score that
    only the log has.
    """
    workdir = Path(shutil.copytree(interrupted, tmp_path / "run"))
    assert not (workdir / "params.npz").exists()
    scores = scores_of(workdir, 4)
    assert "test/accuracy" in scores
    write_manifest(workdir / "checkpoints" / "4" / "state", {"step": 4, "metrics": {}})
    train_and_evaluate(tiny.config(**ALL_ON), str(workdir))
    assert_same_params(workdir, finished)
    assert losses(workdir) == losses(finished)
    assert scores_of(workdir, 4) == scores


def test_so_does_one_with_another_attention_adapters_and_repeated_images(tmp_path, monkeypatch):
    """In bfloat16, with dropout, whose random words are the update's own."""
    monkeypatch.delitem(choose.PLATFORMS, "pallas")  # Pallas' interpreter
    config = tiny.config(
        pretrained__source=str(save_model(tmp_path / "source", num_classes=3, mlp_dim=16)),
        lora__rank=2,
        model__attention="pallas",
        model__dtype="bfloat16",
        model__dropout_rate=0.1,
        dataset__repeated_augmentation=2,
        duration__steps=4,
        checkpoint__every_steps=2,
    )
    train_and_evaluate(config, str(tmp_path / "whole"))
    parts = as_of(2, tmp_path / "whole", tmp_path / "parts")
    train_and_evaluate(config, str(parts))
    assert_same_params(tmp_path / "whole", parts)


def test_a_stop_during_an_evaluation_is_made_up_for(
    finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGTERM while step 4 is evaluated: its checkpoint gets the score when the run goes on."""
    # Between two checkpoints: only the request to stop saves step 4.
    checkpoint = {"checkpoint__best_metric": "test/accuracy", "checkpoint__every_steps": 100}
    config = tiny.config(**{**ALL_ON, **checkpoint})
    workdir = tmp_path / "run"

    class Stopping(Watchdog):
        def note(self, doing: str, step: int | None = None, **kwargs: Any) -> None:
            if (doing, step) == ("evaluating test", 4):
                os.kill(os.getpid(), signal.SIGTERM)
            super().note(doing, step, **kwargs)

    with pytest.raises(PreemptedError, match="Stopped by SIGTERM at step 4/8"):
        train_and_evaluate(config, str(workdir), watchdog=Stopping())
    assert scores_of(workdir, 4) == {}
    assert not any("test/accuracy" in row for row in read_metrics(workdir))

    caplog.set_level("INFO")
    train_and_evaluate(config, str(workdir))
    assert best_text(workdir)[0] in caplog.messages
    evaluated = {row["step"]: row for row in read_metrics(workdir) if "test/accuracy" in row}
    assert sorted(evaluated) == [4, 8]
    assert scores_of(workdir, 4)["test/accuracy"] == evaluated[4]["test/accuracy"]
    assert_same_params(workdir, finished)


def test_a_finished_run_returns_its_results_and_the_workdir_of_another_is_refused(finished):
    other = tiny.config(**{**ALL_ON, "schedule__learning_rate": 0.5})
    with pytest.raises(UserError, match=r"schedule.learning_rate: 0.001 -> 0.5"):
        train_and_evaluate(other, str(finished))
    # How a run is carried out may change; here another mesh, and it has ended anyway.
    same = tiny.config(**{**ALL_ON, "mesh__fsdp": 2, "log__every_steps": 3})
    before = (finished / "params.npz").stat().st_mtime_ns
    assert train_and_evaluate(same, str(finished))["step"] == 8
    assert (finished / "params.npz").stat().st_mtime_ns == before


def test_another_mesh_continues_the_run(finished: Path, interrupted: Path, tmp_path: Path) -> None:
    shutil.copytree(interrupted, tmp_path / "run")
    layout = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
    train_and_evaluate(tiny.config(**ALL_ON, **layout), str(tmp_path / "run"))
    # Sums over devices come in another order: a unit or two in the last place.
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(finished), rtol=0, atol=1e-6)


def test_fine_tuning_at_twice_the_resolution(finished: Path, tmp_path: Path) -> None:
    """Into a rectangle of tokens, with new classes and a zero head; the rest is as it was."""
    root = fixtures_data.write_folder(
        tmp_path / "photos", {"train": {"cat": 20, "dog": 20}, "test": {"cat": 5, "dog": 6}}
    )
    config = tiny.config(
        dataset__name=str(root),
        dataset__split="train",
        dataset__preprocess="decode|resize(32, 16)",
        dataset__eval_preprocess="decode|resize(32, 16)",
        evaluators__test__split="test",
        evaluators__test__at_start=True,
        pretrained__source=str(finished),
        model__scan=True,
        duration__steps=2,
        schedule__learning_rate=0.0,
    )
    results = train_and_evaluate(config, str(tmp_path / "run"))
    start = read_metrics(tmp_path / "run")[0]
    assert start["step"] == 0
    # A zero head gives both classes the same logit: ln 2, and the first class wins.
    assert start["test/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert start["test/accuracy"] == pytest.approx(5 / 11)
    assert results["test/num_examples"] == 11
    model = json.loads((tmp_path / "run" / "model.json").read_text())
    assert model["grid"] == [4, 2]
    with np.load(tmp_path / "run" / "params.npz") as params:
        assert params["Transformer/posembed_input/pos_embedding"].shape == (1, 9, 16)
        assert params["head/kernel"].shape == (16, 2)
        assert not params["head/kernel"].any()
        with np.load(finished / "params.npz") as before:
            assert set(params.files) == set(before.files)
            for name in before.files:
                if not name.startswith("head/") and "posembed" not in name:
                    np.testing.assert_array_equal(params[name], before[name], err_msg=name)


def test_nan_stops_the_run_with_its_step_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    """The rate explodes on the way: after some good checkpoints, between two lines of the log."""
    config = tiny.config(
        optimizer__name="sgd",
        schedule__learning_rate=3e4,
        schedule__warmup_steps=0,
        schedule__name="constant",
        duration__steps=60,
        log__every_steps=100,
        checkpoint__every_steps=1,
    )
    with pytest.raises(TrainingDivergedError, match=r"step \d+: .*=(nan|inf)") as error:
        train_and_evaluate(config, str(tmp_path / "run"))
    bad_step = int(str(error.value).split(":")[0].removeprefix("step "))
    checkpoints = CheckpointManager(tmp_path / "run", every_steps=1, keep=1)
    assert checkpoints.latest_step() == bad_step - 1
    assert f"the checkpoint of step {bad_step - 1} is kept" in str(error.value)
    params = flatten_names(restore_params(tmp_path / "run"))
    assert all(np.isfinite(array).all() for array in params.values())
    assert not (tmp_path / "run" / "params.npz").exists()


def test_parameters_that_overflow_without_a_bad_loss_are_noticed(tmp_path: Path) -> None:
    config = tiny.config(schedule__learning_rate=1e30, schedule__warmup_steps=0, duration__steps=1)
    with pytest.raises(TrainingDivergedError, match="param_norm"):
        train_and_evaluate(config, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "params.npz").exists()


def test_force_sets_the_old_results_aside(finished: Path, tmp_path: Path) -> None:
    """Also of a recipe that is shorter than its warm-up."""
    workdir = Path(shutil.copytree(finished, tmp_path / "run"))
    longer = tiny.config(**{**ALL_ON, "duration__steps": 9, "schedule__warmup_steps": 100})
    assert train_and_evaluate(longer, str(workdir), resume="force")["step"] == 9
    first = (finished / "params.npz").read_bytes()
    assert (workdir / "params.1.npz").read_bytes() == first
    assert (workdir / "params.npz").read_bytes() != first
    with pytest.raises(UserError, match="past the 8 steps"):
        train_and_evaluate(tiny.config(**ALL_ON), str(workdir), resume="force")


def test_a_session_that_dies_at_its_start_keeps_the_times_of_those_before(
    interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any, **_kwargs: Any) -> None:
        raise StopHere

    workdir = Path(shutil.copytree(interrupted, tmp_path / "run"))
    first = read_metrics(workdir)[-1]
    assert first["step"] == 6  # two updates past the checkpoint
    monkeypatch.setattr(train_module, "train_batches_on", dies)
    with pytest.raises(StopHere):
        train_and_evaluate(tiny.config(**ALL_ON), str(workdir))
    second = read_metrics(workdir)[-1]
    assert second["step"] == 4
    assert second["elapsed_seconds"] > first["elapsed_seconds"]
    assert second["lost_seconds"] > 0


def test_the_commit_of_an_image_is_the_one_it_was_built_from(monkeypatch):
    monkeypatch.setenv("VIT_JAX_COMMIT", "c0ffee")
    monkeypatch.setenv("PATH", "")  # no git, and an image has no .git either
    assert collect_provenance()["commit"] == "c0ffee"


BAD_CONFIGS = {
    "batch": ({"dataset__batch_size": 12}, r"dataset.batch_size=12 .* use 8 or 16"),
    "mesh": ({"mesh__data": 3}, r"mesh.data=3"),
    "patch": ({"model__patch_size": 7}, r"model.patch_size=7 .* becomes 14 or 21"),
    "dataset": ({"dataset__name": "cifar11"}, r"cifar11"),
    "split": ({"dataset__split": "trian"}, r"trian"),
    "cooldown": ({"schedule__cooldown_steps": -8}, r"cooldown_steps=-8"),
    "rate": ({"schedule__learning_rate": float("nan")}, r"learning_rate=nan"),
    "log": ({"log__every_steps": 0}, r"log.every_steps=0"),
    "parts": ({"train_step__accumulation_steps": 0}, r"accumulation_steps=0"),
    "average": ({"train_step__polyak_decay": 2.0}, r"polyak_decay=2.0"),
    "heads": ({"model__num_heads": 0}, r"model.num_heads=0"),
    "metric": ({"checkpoint__best_metric": "tset/accuracy"}, r"Did you mean 'test/accuracy'"),
    "stop": ({"early_stopping__metric": "tset/loss"}, r"Did you mean 'test/loss'"),
    "stop late": ({"early_stopping__metric": "test/loss"}, r"test.every_steps=0 it is com"),
    "stop later": (
        {"early_stopping__metric": "test/loss", "evaluators__test__every_steps": 8},
        r"cannot end a run of 8 steps",
    ),
    "patience": ({"early_stopping__patience": 0}, r"early_stopping.patience=0 must be at least 1"),
    "infinite": ({"mix__mixup_alpha": float("inf")}, r"mix.mixup_alpha=inf"),
    "decay": ({"optimizer__weight_decay": -0.1}, r"weight_decay=-0.1"),
    "seed": ({"seed": 2**32}, r"seed=4294967296 must be from 0 to 4294967295"),
    "trace": ({"log__profile_steps": (3, 2)}, r"log.profile_steps=\(3, 2\)"),
    "evaluates": ({"evaluators__test__every_steps": -3}, r"evaluators.test.every_steps=-3"),
    "cloud": ({"dataset__name": "s3://bucket/photos"}, r"dataset.name='s3://bucket/photos'"),
    "evaluator": ({"evaluators__test__split": "tset"}, r"evaluators.test \(split='tset'\)"),
    "sizes differ": ({"dataset__eval_preprocess": "decode|resize(24)"}, r"eval_preprocess"),
    "pretrained": ({"pretrained__source": "/nowhere.npz"}, r"pretrained.source='/nowhere.npz'"),
    "unpooled": ({"model__classifier": "unpooled"}, r"model.classifier='unpooled'"),
}


@pytest.mark.parametrize("case", list(BAD_CONFIGS))
def test_bad_configs_end_in_one_line_before_any_compilation(case, tmp_path, caplog):
    overrides, message = BAD_CONFIGS[case]
    with jax.log_compiles(), pytest.raises(UserError, match=message) as error:
        train_and_evaluate(tiny.config(**overrides), str(tmp_path / "run"))
    assert "\n" not in str(error.value)
    assert "XLA compilation" not in caplog.text


def test_a_mistake_does_not_lock_the_workdir(tmp_path: Path) -> None:
    """The config of a start that failed before its first update is not held against the next.

    A trace is written, although it would end after the run.
    """
    workdir = str(tmp_path / "run")
    with pytest.raises(UserError, match="nowhere"):
        train_and_evaluate(tiny.config(pretrained__source="/nowhere.npz"), workdir)
    config = tiny.config(log__profile_steps=(2, 50), duration__steps=2, schedule__warmup_steps=0)
    with config.unlocked():
        config.evaluators = {}  # its compilation would be traced too
    assert train_and_evaluate(config, workdir)
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_a_workdir_has_a_name_that_checkpoints_can_have(finished: Path, tmp_path: Path) -> None:
    latin1 = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    for name, refused in {
        "": "workdir='' is not a folder",
        latin1: r"workdir='.*caf\\udce9': the names of folders must be UTF-8",
        "a\0b": "NUL",
    }.items():
        with pytest.raises(UserError, match=refused):
            train_and_evaluate(tiny.config(), name)
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(UserError, match="Workdir .*circle/run cannot be written: Too many levels"):
        train_and_evaluate(tiny.config(), str(circle / "run"))
    shutil.copytree(finished, latin1)
    assert vit_jax.load_model(latin1).num_outputs == 10  # needs no checkpoint
    with pytest.raises(UserError, match="must be UTF-8"):
        vit_jax.load_model(f"{latin1}/checkpoints")
    with pytest.raises(UserError, match="must be UTF-8"):
        vit_jax.convert_checkpoint(finished, f"{latin1}/orbax", format="orbax")


def test_every_example_counts_once() -> None:
    """Against plain numpy over the same scans; 8 devices, batches of 24."""
    config, counts = tiny.config(), (1, 7, 50, 64)
    with config.unlocked():
        for count in counts:
            split = f"test[:{count}]"
            config.evaluators[f"first{count}"] = tiny.default.evaluator(split, batch_size=24)
    mesh = create_mesh()
    with jax.set_mesh(mesh):
        run = create_run(config, mesh)
        params = run.initial_state(0).params
        params["head"]["kernel"] = np.random.default_rng(0).normal(size=(16, 10)).astype(np.float32)
        dataset = run.datasets["first64"]
        examples = [dataset.example(i, np.random.default_rng(0)) for i in range(64)]
        batch = {
            "image": np.stack([example["image"] for example in examples]),
            "label": np.array([example["label"] for example in examples], np.int32),
        }
        expected = jax.device_get(jax.jit(run.objective.evaluate)(params, batch))
        for count in counts:
            values = run.evaluations[f"first{count}"].evaluator(params)
            assert values["num_examples"] == count
            accuracy, loss = (np.mean(expected[name][:count]) for name in ("accuracy", "loss"))
            assert values["accuracy"] == pytest.approx(float(accuracy), abs=1e-6)
            assert values["loss"] == pytest.approx(float(loss), rel=1e-5)
