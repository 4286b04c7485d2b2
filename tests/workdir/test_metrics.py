"""Metrics of a run in its file, TensorBoard and W&B: each step once, whatever interrupts it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import wandb_stand_in
from tests.wandb_stand_in import Record
from vit_jax.errors import PreemptedError, UserError
from vit_jax.workdir.metrics import METRICS_FILE, MetricWriter, check_wandb, read_metrics

WANDB: dict[str, Any] = {"wandb_project": "vit", "config": {"log": 1}}


def writer_of(workdir: Path, *, start_step: int = 0, **options: Any) -> MetricWriter:
    options = {"tensorboard": False, "config": {}, **options}
    return MetricWriter(str(workdir), start_step=start_step, **options)


def write(workdir: Path, steps: range, **options: Any) -> None:
    with writer_of(workdir, start_step=steps[0] - 1, **options) as writer:
        for step in steps:
            writer.write(step, {"loss": 1.0 / step})


def steps_in(workdir: Path) -> list[int]:
    return [row["step"] for row in read_metrics(workdir)]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Record]:
    return wandb_stand_in.install(monkeypatch)


def test_a_resumed_run_writes_each_step_once(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    write(tmp_path, range(5, 10))
    assert steps_in(tmp_path) == list(range(1, 10))
    assert read_metrics(tmp_path)[6] == {"step": 7, "loss": 1.0 / 7}
    assert not (tmp_path / "tensorboard").exists()


def test_a_line_that_a_killed_run_left_unfinished_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-5] + b"\xff")
    assert steps_in(tmp_path) == [1, 2]
    write(tmp_path, range(3, 5))
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    assert len(list(tmp_path.iterdir())) == 1


def test_event_files_hold_the_scalars_and_the_config(tmp_path: Path) -> None:
    config = {"optimizer": {"learning_rate": 0.125}}
    write(tmp_path, range(4, 6), tensorboard=True, config=config)
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    assert file.read_bytes().count(b"loss") == 2
    # Four spaces make a block of code in Markdown, which TensorBoard renders.
    shown = b'    {\n      "optimizer": {\n        "learning_rate": 0.125\n      }\n    }'
    assert shown in file.read_bytes()


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    def write_to_it() -> None:
        with writer_of(tmp_path) as writer:
            writer._file.close()
            writer._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
            writer.write(1, {"loss": 1.0})

    with pytest.raises(UserError, match="metrics.jsonl could not be written: No space left on"):
        write_to_it()


def test_wandb_gets_the_same_scalars_at_the_same_steps(tmp_path, runs):
    with writer_of(tmp_path, **WANDB) as writer:
        writer.write(0, {"test/accuracy": 0.1})
        writer.write(1, {"loss": 2.0})
        writer.write(2, {"loss": 1.0, "learning_rate": 0.5})
        writer.write(2, {"test/accuracy": 0.9})
    run_id = json.loads((tmp_path / "wandb_run.json").read_text())["id"]
    record = runs[f"vit/{run_id}"]
    assert record.rows == {
        0: {"test/accuracy": 0.1},
        1: {"loss": 2.0},
        2: {"loss": 1.0, "learning_rate": 0.5, "test/accuracy": 0.9},
    }
    assert record.config == {"log": 1}
    assert (record.init["dir"], record.init["name"]) == (str(tmp_path), tmp_path.name)
    assert record.init["finish_timeout"] > 0  # 0 waits for a network that went away
    assert record.exit_codes == [0]


def test_a_resumed_run_continues_the_run_of_wandb(tmp_path: Path, runs: dict[str, Record]) -> None:
    write(tmp_path, range(1, 8), **WANDB)
    write(tmp_path, range(5, 10), **{**WANDB, "config": {"log": 2}})  # config.log may change
    with writer_of(tmp_path, start_step=9, **WANDB) as writer:
        writer.write(9, {"test/accuracy": 0.5})  # that a preempted run makes up for
        writer.write(10, {"loss": 0.1})
    (record,) = runs.values()
    assert list(record.rows) == list(range(1, 11))
    assert record.rows[10] == {"test/accuracy": 0.5, "loss": 0.1}
    assert record.dropped == []  # the package would warn of each
    write(tmp_path, range(11, 12), wandb_project="other")
    assert [key.partition("/")[0] for key in runs] == ["vit", "other"]


def test_training_goes_on_without_a_wandb_that_died(tmp_path, runs, caplog):
    with writer_of(tmp_path, **WANDB) as writer:
        writer.write(1, {"loss": 1.0})
        (record,) = runs.values()
        record.error = ConnectionResetError("Connection lost")  # as from the real one
        writer.write(2, {"loss": 0.5})
        writer.write(3, {"loss": 0.25})
    assert list(record.rows) == [1]
    assert steps_in(tmp_path) == [1, 2, 3]
    assert [message.count("Connection lost") for message in caplog.messages] == [1]


@pytest.mark.parametrize(("error", "exit_code"), [(ZeroDivisionError, 1), (PreemptedError, 75)])
def test_wandb_learns_how_a_run_has_ended(tmp_path, runs, error, exit_code):
    with pytest.raises(error), writer_of(tmp_path, **WANDB):
        raise error
    (record,) = runs.values()
    assert record.exit_codes == [exit_code]
    assert record.preempting == (error is PreemptedError)


def test_what_keeps_wandb_from_starting_is_told(tmp_path, monkeypatch):
    wandb_stand_in.install(monkeypatch, fails=RuntimeError("no API key\nconfigured"))
    with pytest.raises(UserError, match="no API key configured .*wandb login.*offline"):
        writer_of(tmp_path, **WANDB)
    assert not (tmp_path / METRICS_FILE).exists()
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"log.wandb='vit' needs the package wandb: .*'.\[wandb\]'"):
        check_wandb("vit")
    # A folder `wandb`, which W&B leaves wherever it ran, is not the package.
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()
    with pytest.raises(UserError, match="needs the package wandb"):
        check_wandb("vit")
