"""Runs that end before their last step: by a metric, or by a callback."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from vit_jax.config import evaluator
from vit_jax.train import train_and_evaluate
from vit_jax.training.early_stopping import stalled_since
from vit_jax.workdir.metrics import read_metrics

ACCURACIES = {10: 0.1, 20: 0.5, 30: 0.4, 40: 0.52, 50: 0.5}


@pytest.mark.parametrize(
    ("values", "metric", "patience", "min_delta", "expected"),
    [
        ({}, "test/accuracy", 1, 0.0, None),
        (ACCURACIES, "test/accuracy", 2, 0.0, None),  # 40 was better
        (ACCURACIES, "test/accuracy", 1, 0.0, 40),
        (ACCURACIES, "test/accuracy", 3, 0.03, 20),  # 40 was not much better
        (ACCURACIES, "test/accuracy", 4, 0.03, None),
        (ACCURACIES, "val/loss", 4, 0.0, 10),  # lower is better
        (ACCURACIES, "a/b/calibration_error", 4, 0.0, 10),
        (ACCURACIES, "val/RMSE", 4, 0.0, 10),
        (ACCURACIES, "val/false_alarms", 4, 0.0, None),  # unknown: higher is better
        ({10: 0.5, 20: 0.5}, "test/accuracy", 1, 0.0, 10),  # no gain is no improvement
    ],
)
def test_patience(values, metric, patience, min_delta, expected):
    keys: dict[str, Any] = {"metric": metric, "patience": patience, "min_delta": min_delta}
    assert stalled_since(values, **keys) == expected


class StopHere(Exception):
    """Of a callback."""


def config(**overrides: Any) -> Any:
    """A rate of 0: the first evaluation is as good as all others, and the third ends the run."""
    result = tiny.config(
        schedule__learning_rate=0.0,
        checkpoint__every_steps=2,
        early_stopping__metric="test/accuracy",
        early_stopping__patience=2,
        evaluators__test__every_steps=1,
        **overrides,
    )
    with result.unlocked():
        result.evaluators.last = evaluator(split="test[50:60]")  # after the last step
    return result


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    workdir = tmp_path_factory.mktemp("ended") / "run"
    told: dict[str, Any] = {"log": [], "evaluation": []}
    train_and_evaluate(
        config(),
        str(workdir),
        on_log=lambda *args: told["log"].append(args),
        on_evaluation=lambda *args: told["evaluation"].append(args),
    )
    return workdir, told


def test_an_end_is_like_that_of_the_last_step(
    ended: tuple[Path, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    workdir, told = ended
    results = json.loads((workdir / "results.json").read_text())
    early = {key: results[key] for key in ("step", "planned_steps", "early_stopping_best_step")}
    assert early == {"step": 3, "planned_steps": 8, "early_stopping_best_step": 1}
    assert results["last/num_examples"] == 10
    assert results["test/num_examples"] == 50
    assert (workdir / "params.npz").exists()
    assert (workdir / "checkpoints" / "3").is_dir()
    # A finished run is finished.
    caplog.set_level("INFO")
    assert train_and_evaluate(config(), str(workdir)) == results
    assert "checkpoint.best_metric='test/accuracy' would keep as WORKDIR/best." in caplog.text
    rows = [row for row in read_metrics(workdir) if "loss" in row]
    assert [(row.pop("step"), row) for row in rows] == told["log"]
    assert [step for step, values in told["evaluation"] if "test/loss" in values] == [1, 2, 3]
    (step, values) = told["evaluation"][-1]
    assert (step, set(values)) == (3, {"last/loss", "last/accuracy", "last/num_examples"})


def test_a_resumed_run_ends_at_the_same_step(ended, tmp_path):
    """Interrupted by the error of a callback after the second and during the third evaluation."""

    def failing(*where: Any) -> Any:
        def callback(step: int, metrics: dict[str, float]) -> None:
            if (step, "last/loss" in metrics) == where:
                raise StopHere

        return callback

    workdir = str(tmp_path / "run")
    with pytest.raises(StopHere):
        train_and_evaluate(config(), workdir, on_log=failing(3, False))
    with pytest.raises(StopHere):
        train_and_evaluate(config(), workdir, on_evaluation=failing(3, True))
    results = train_and_evaluate(config(), workdir)
    expected = json.loads((ended[0] / "results.json").read_text())
    same = [key for key in expected if "step" in key or "/" in key]
    assert {key: results[key] for key in same} == {key: expected[key] for key in same}

    def altered(row: str) -> str:
        return json.dumps({**json.loads(row), "test/accuracy": 0.999})

    # The log decides nothing.
    with pytest.raises(StopHere):
        train_and_evaluate(config(), str(tmp_path / "altered"), on_log=failing(3, False))
    log = tmp_path / "altered" / "metrics.jsonl"
    log.write_text("\n".join(map(altered, log.read_text().splitlines())) + "\n")
    results = train_and_evaluate(config(), str(tmp_path / "altered"))
    assert {key: results[key] for key in same} == {key: expected[key] for key in same}

    killed = tmp_path / "killed"  # after its last checkpoint
    shutil.copytree(ended[0], killed)
    (killed / "results.json").unlink()
    results = train_and_evaluate(config(), str(killed))
    assert {key: results[key] for key in same} == {key: expected[key] for key in same}


def test_a_callback_may_end_the_run(tmp_path: Path) -> None:
    def on_evaluation(step: int, _: dict[str, float]) -> str:
        return "stop" if step == 2 else "go on"

    results = train_and_evaluate(config(), str(tmp_path), on_evaluation=on_evaluation)
    assert (results["step"], results["planned_steps"]) == (2, 8)
    assert "early_stopping_best_step" not in results
    assert "last/loss" in results
