from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from tests import wandb_stand_in
from vit_jax import config as default
from vit_jax.errors import PreemptedError, UserError
from vit_jax.multihost import first_process
from vit_jax.workdir.metrics import (
    METRICS_FILE,
    WANDB_FILE,
    MetricWriter,
    check_wandb,
    read_metrics,
)


def write(
    workdir: Path, *, start_step: int, steps: range, tensorboard: bool = False, **options: Any
) -> None:
    writer = MetricWriter(str(workdir), start_step=start_step, tensorboard=tensorboard, **options)
    for step in steps:
        writer.write(step, {"loss": 1.0 / step})
    writer.close()


def test_a_resumed_run_writes_each_step_once(tmp_path: Path) -> None:
    write(tmp_path, start_step=0, steps=range(1, 8))
    write(tmp_path, start_step=4, steps=range(5, 10))
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 10))
    assert rows[6] == {"step": 7, "loss": 1.0 / 7}


def test_a_line_that_a_killed_run_left_unfinished_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, start_step=0, steps=range(1, 4))
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-5] + b"\xff")
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    write(tmp_path, start_step=2, steps=range(3, 5))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_event_files_hold_the_scalars(tmp_path: Path) -> None:
    write(tmp_path, start_step=0, steps=range(1, 4), tensorboard=True)
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    assert file.read_bytes().count(b"loss") == 3


def test_no_event_files_where_none_are_wanted(tmp_path: Path) -> None:
    write(tmp_path, start_step=0, steps=range(1, 4))
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("start_step", [0, 3])
def test_tensorboard_shows_the_config_as_a_code_block(tmp_path: Path, start_step: int) -> None:
    config = {"optimizer": {"learning_rate": 0.125}}
    options: dict[str, Any] = {"tensorboard": True, "config": config}
    write(tmp_path, start_step=start_step, steps=range(start_step + 1, 6), **options)
    (file,) = (tmp_path / "tensorboard").iterdir()
    # Four spaces make a block of code in Markdown, which TensorBoard renders.
    shown = b'    {\n      "optimizer": {\n        "learning_rate": 0.125\n      }\n    }'
    assert shown in file.read_bytes()


def test_wandb_gets_the_same_scalars_at_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = wandb_stand_in.install(monkeypatch)
    config = default.get_config().to_dict()
    with MetricWriter(
        *(str(tmp_path),), start_step=0, tensorboard=False, wandb_project="vit", config=config
    ) as writer:
        writer.write(0, {"test/accuracy": 0.1})
        writer.write(1, {"loss": 2.0})
        writer.write(2, {"loss": 1.0, "learning_rate": 0.5})
        writer.write(2, {"test/accuracy": 0.9})
    run_id = json.loads((tmp_path / WANDB_FILE).read_text())["id"]
    record = runs[f"vit/{run_id}"]
    assert record.rows == {
        0: {"test/accuracy": 0.1},
        1: {"loss": 2.0},
        2: {"loss": 1.0, "learning_rate": 0.5, "test/accuracy": 0.9},
    }
    assert record.config == config
    assert record.init["dir"] == str(tmp_path)
    assert record.init["name"] == tmp_path.name
    assert record.init["finish_timeout"] > 0  # 0 waits for a network that went away
    assert record.exit_codes == [0]


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = wandb_stand_in.install(monkeypatch)
    wandb: dict[str, Any] = {"wandb_project": "vit", "config": {"log": 1}}
    write(tmp_path, start_step=0, steps=range(1, 8), **wandb)
    wandb["config"] = {"log": 2}  # as --config.log.every_steps=2 does
    write(tmp_path, start_step=4, steps=range(5, 10), **wandb)
    (record,) = runs.values()
    assert list(record.rows) == list(range(1, 10))
    assert record.dropped == []  # the package would warn of each
    assert record.config == {"log": 2}
    write(tmp_path, start_step=9, steps=range(10, 11), wandb_project="other")
    assert [key.partition("/")[0] for key in runs] == ["vit", "other"]


def test_evaluations_that_a_preempted_run_makes_up_for_reach_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = wandb_stand_in.install(monkeypatch)
    write(tmp_path, start_step=0, steps=range(1, 5), wandb_project="vit")
    with MetricWriter(
        *(str(tmp_path),), start_step=4, tensorboard=False, wandb_project="vit"
    ) as writer:
        writer.write(4, {"test/accuracy": 0.5})
        writer.write(5, {"loss": 0.25})
    (record,) = runs.values()
    assert record.rows[5] == {"test/accuracy": 0.5, "loss": 0.25}
    assert record.dropped == []


def test_training_goes_on_without_a_wandb_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = wandb_stand_in.install(monkeypatch)
    with MetricWriter(
        *(str(tmp_path),), start_step=0, tensorboard=False, wandb_project="vit"
    ) as writer:
        writer.write(1, {"loss": 1.0})
        (record,) = runs.values()
        record.error = ConnectionResetError("Connection lost")  # as from the real one
        writer.write(2, {"loss": 0.5})
        writer.write(3, {"loss": 0.25})
    assert list(record.rows) == [1]
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert [message.count("Connection lost") for message in caplog.messages] == [1]


def test_wandb_learns_that_a_run_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = wandb_stand_in.install(monkeypatch)
    with (
        pytest.raises(ZeroDivisionError),
        MetricWriter(str(tmp_path), start_step=0, tensorboard=False, wandb_project="vit") as writer,
    ):
        writer.write(1, {"loss": 1 / 0})
    (record,) = runs.values()
    assert record.exit_codes == [1]
    assert not record.preempting


def test_wandb_learns_that_a_run_will_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = wandb_stand_in.install(monkeypatch)
    with (
        pytest.raises(PreemptedError),
        MetricWriter(str(tmp_path), start_step=0, tensorboard=False, wandb_project="vit"),
    ):
        raise PreemptedError
    (record,) = runs.values()
    assert record.preempting
    assert record.exit_codes == [75]


def test_nothing_of_wandb_without_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = wandb_stand_in.install(monkeypatch)
    check_wandb("")
    write(tmp_path, start_step=0, steps=range(1, 3))
    assert not runs
    assert not (tmp_path / WANDB_FILE).exists()


def test_only_process_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = wandb_stand_in.install(monkeypatch)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(first_process, "_broadcast", lambda _: pickle.dumps((None, None)))
    write(tmp_path, start_step=0, steps=range(1, 3), tensorboard=True, wandb_project="vit")
    assert not runs
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"log.wandb='vit' needs the package wandb: .*'.\[wandb\]'"):
        check_wandb("vit")
    # A folder `wandb`, which W&B leaves wherever it ran, is not the package.
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()
    with pytest.raises(UserError, match="needs the package wandb"):
        check_wandb("vit")


def test_what_keeps_wandb_from_starting_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb_stand_in.install(monkeypatch, fails=RuntimeError("no API key\nconfigured"))
    with pytest.raises(UserError, match="no API key configured .*wandb login.*offline"):
        write(tmp_path, start_step=0, steps=range(1, 3), wandb_project="vit")
    assert not (tmp_path / METRICS_FILE).exists()


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()

    def write() -> None:
        with MetricWriter(str(tmp_path), start_step=0, tensorboard=False) as writer:
            writer._file.close()
            writer._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
            writer.write(1, {"loss": 1.0})

    with pytest.raises(UserError, match="^/dev/full could not be written: No space left on device"):
        write()


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "3",
        '"step"',
        "{}",
        '{"loss": 1.0}',
        '{"step": "3"}',
        '{"step": true}',
        '{"step": -1}',
        '{"step": 1, "loss": "low"}',
        '{"step": 1, "loss": null}',
        '{"step": 1, "loss": [1.0]}',
        '{"step": 1, "loss": 1' + 400 * "0" + "}",
        "[" * 100_000,
        '{"step": 1, "a": ' + '{"a":' * 100_000,
    ],
    ids=range(14),
)
def test_lines_of_others_are_set_aside(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, start_step=0, steps=range(1, 3))
    path = tmp_path / METRICS_FILE
    before = path.read_text()
    path.write_text(line + "\n" + before)
    write(tmp_path, start_step=2, steps=range(3, 4))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    assert path.read_text().startswith(before)
    assert (tmp_path / "metrics.1.jsonl").read_text() == line + "\n" + before
    assert "lines that are no metrics (1); see metrics.1.jsonl" in caplog.text
