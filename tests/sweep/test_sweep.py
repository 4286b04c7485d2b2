"""The sweep: its plan, its choice, and real ones on real scans, killed and shared out."""

import json
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from tests import tiny
from tests.tiny import Script
from vit_jax.errors import UserError
from vit_jax.sweep.run import best_learning_rate, plan_final, plan_grid, run_sweep, task_number
from vit_jax.train import train_and_evaluate
from vit_jax.workdir.checkpoints import CheckpointManager
from vit_jax.workdir.description import RESULTS_FILE

DIVERGES = 1e30
OVERRIDES: dict[str, Any] = {
    "sweep.learning_rates": (DIVERGES, 0.001),
    "sweep.train_split": "train[:80]",
    "sweep.validation_split": "train[80:100]",
    "sweep.published": "98.95 from somewhere",
    "duration.steps": 4,
    "checkpoint.every_steps": 2,
    "evaluators.test.every_steps": 2,
}


def config(**overrides: Any) -> ConfigDict:
    usual = {key.replace(".", "__"): value for key, value in OVERRIDES.items()}
    return tiny.config(**{**usual, **overrides})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that nothing has disturbed."""
    workdir = tmp_path_factory.mktemp("sweep")
    run_sweep(config(), str(workdir), train=train_and_evaluate, seeds=2)
    return workdir


def test_the_grid_never_sees_the_test_set() -> None:
    assert plan_grid(config(sweep__learning_rates=(0.01,), sweep__validation_split="")) == []
    runs = plan_grid(config())
    assert [run.name for run in runs] == ["grid/lr_0.001", "grid/lr_1e+30"]
    for run, rate in zip(runs, (0.001, DIVERGES), strict=True):
        assert run.config.schedule.learning_rate == rate
        assert run.config.dataset.split == "train[:80]"
        assert run.metric == "validation/accuracy"
        test = config().evaluators.test.to_dict()
        expected = {**test, "split": "train[80:100]", "every_steps": 0}
        assert run.config.evaluators.to_dict() == {"validation": expected}


def test_the_final_runs_differ_in_their_seed_alone() -> None:
    recipe = config()
    recipe.seed = 7
    runs = plan_final(recipe, 0.003, 2)
    assert [run.name for run in runs] == ["final/lr_0.003_seed_7", "final/lr_0.003_seed_8"]
    recipe.schedule.learning_rate = 0.003
    for run in runs:
        recipe.seed = run.config.seed
        assert run.config.to_dict() == recipe.to_dict()


def test_mistakes_are_named() -> None:
    for rates in ((), (0.1, 0.1), (0.1, -1)):
        with pytest.raises(UserError, match=r"must be distinct positive numbers.*=0\.01,0\.03"):
            plan_grid(config(sweep__learning_rates=rates))
    with pytest.raises(UserError, match=r"needs a held-out part.*train\[90%:\]"):
        plan_grid(config(sweep__validation_split=""))


def test_slurm_numbers_the_tasks_of_a_shared_sweep_only() -> None:
    slurm = {"SLURM_ARRAY_TASK_ID": "3"}
    assert task_number(None, 4, slurm) == 3
    assert task_number(1, 4, slurm) == 1
    assert task_number(None, 1, slurm) == 0
    assert task_number(None, 4, {}) == 0
    with pytest.raises(UserError, match="--task=2 must be from 0 to 1"):
        task_number(2, 2, {})


def test_the_choice() -> None:
    def choice(accuracies: dict[float, float | None]) -> float:
        return best_learning_rate(
            {"learning_rate": rate, "state": "diverged" if x is None else "finished", "accuracy": x}
            for rate, x in accuracies.items()
        )

    assert choice({0.1: 0.5, 0.2: 0.6, 0.3: 0.4}) == 0.2
    assert choice({0.3: 0.6, 0.1: 0.5, 0.2: 0.6}) == 0.2  # a tie: the smaller
    assert choice({0.1: 0.0, 0.2: None}) == 0.1  # diverged is worse than nothing right
    with pytest.raises(UserError, match="every learning rate diverged"):
        choice({0.1: None, 0.2: None})


def test_a_sweep_reports_what_its_runs_found(finished: Path) -> None:
    summary = json.loads((finished / "sweep.json").read_text())
    assert summary["complete"]
    assert summary["missing"] == []
    assert [run["state"] for run in summary["grid"]] == ["finished", "diverged"]
    results = json.loads((finished / "grid/lr_0.001" / RESULTS_FILE).read_text())
    assert summary["grid"][0]["accuracy"] == results["validation/accuracy"]
    assert results["validation/num_examples"] == 20
    assert "test/accuracy" not in results
    assert summary["learning_rate"] == 0.001
    percents = []
    for seed, run in enumerate(summary["final"]):
        results = json.loads((finished / f"final/lr_0.001_seed_{seed}/{RESULTS_FILE}").read_text())
        assert results["test/num_examples"] == 50
        assert run["accuracy"] == results["test/accuracy"]
        percents.append(100 * results["test/accuracy"])
    assert summary["mean"] == pytest.approx(sum(percents) / 2)
    assert summary["std"] == pytest.approx(abs(percents[0] - percents[1]) / 2**0.5)
    text = (finished / "sweep.txt").read_text()
    assert text.count("<- chosen") == 1
    assert "1e+30           diverged at step" in text
    assert "accuracy on train[80:100]" in text
    assert "accuracy on test[:50]" in text
    assert "(mean and standard deviation of 2 of 2 seeds)" in text
    assert "published       98.95 from somewhere" in text
    assert "Not complete" not in text


def test_what_is_finished_is_read_back_and_another_config_refused(finished: Path) -> None:
    before = (finished / "sweep.json").read_text()
    # How it is carried out, and what it is compared with, may change.
    again = config(log__every_steps=3, sweep__published="98.95 from somewhere")
    run_sweep(again, str(finished), train=pytest.fail, seeds=2)
    assert (finished / "sweep.json").read_text() == before
    refused = r"grid/lr_0.001 belongs .*optimizer.weight_decay: .* -> 0.5"
    with pytest.raises(UserError, match=refused):
        run_sweep(config(optimizer__weight_decay=0.5), str(finished), train=pytest.fail)


class StopHere(Exception):
    """Stands for a power cut."""


@pytest.mark.slow
def test_two_tasks_one_of_them_killed(finished, tmp_path, capsys):
    """Each does its own part, and both come to what one undisturbed task has found."""
    shared: dict[str, Any] = {"train": train_and_evaluate, "seeds": 2, "num_tasks": 2}
    first, second = ({**shared, "task": task} for task in (0, 1))
    save = CheckpointManager.save

    def stopping(self: CheckpointManager, step: int, *args: Any) -> None:
        save(self, step, *args)
        self.wait()
        raise StopHere

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointManager, "save", stopping)
        with pytest.raises(StopHere):
            run_sweep(config(), str(tmp_path), **first)
    summary = run_sweep(config(), str(tmp_path), **second)
    assert not summary["complete"]
    assert summary["missing"] == ["grid/lr_0.001"]
    assert summary["final"] == []
    assert "the final runs follow the grid" in capsys.readouterr().out

    summary = run_sweep(config(), str(tmp_path), **first)
    assert [run["state"] for run in summary["final"]] == ["finished", "missing"]
    rows = (tmp_path / "grid/lr_0.001/provenance.jsonl").read_text().splitlines()
    assert [json.loads(row)["start_step"] for row in rows] == [0, 2]  # it went on
    summary = run_sweep(config(), str(tmp_path), **second)
    assert summary == json.loads((finished / "sweep.json").read_text())
    for name in ("grid/lr_0.001", summary["final"][1]["run"]):
        ours, theirs = ((root / name / "params.npz").read_bytes() for root in (tmp_path, finished))
        assert ours == theirs


def test_the_script(script: Script, finished: Path) -> None:
    sizes = {**OVERRIDES, "sweep.learning_rates": f"0.001,{DIVERGES}"}
    overrides = [f"--config.{key}={value}" for key, value in sizes.items()]
    command = [*tiny.command("sweep.py", finished)[2:], *overrides, "--seeds=2"]
    result = script("sweep.py", *command, "--distributed=off")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (finished / "sweep.txt").read_text() in result.stdout
