from __future__ import annotations

from pathlib import Path

from vit_jax.writers import METRICS_FILE, MetricWriter, read_metrics


def write(workdir: Path, *, start_step: int, steps: range, tensorboard: bool = False) -> None:
    writer = MetricWriter(str(workdir), start_step=start_step, tensorboard=tensorboard)
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
