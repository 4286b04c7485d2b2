"""Pictures of runs: what is drawn, read back from the figure."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import Script
from vit_jax.errors import UserError
from vit_jax.report.plot import COLORS, choose_panels, draw, legend_labels, plot_run, smoothed
from vit_jax.report.runs import read_run


def make_run(
    folder: Path,
    *,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    steps: int = 60,
    evaluated: tuple[str, ...] = ("test",),
    **more: Any,
) -> Path:
    """A work directory as the loop leaves it; evaluations at 0 and every 20 steps."""
    folder.mkdir(parents=True)
    schedule = {"learning_rate": learning_rate}
    config = {"dataset": {"batch_size": batch_size}, "schedule": schedule, **more}
    (folder / "config.json").write_text(json.dumps(config))
    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        seconds = {"elapsed_seconds": 36.0 * step}
        if step:
            metrics = {"loss": 1 / step, "accuracy": 0.5, "learning_rate": learning_rate}
            rows.append({"step": step, **metrics, "images_per_second": 9.0, **seconds})
        if step % 20 == 0:
            for key in evaluated:
                values = {f"{key}/accuracy": step / 100, f"{key}/num_examples": 50}
                rows.append({"step": step, **values, **seconds})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def lines(folders: list[Path], panel: str, *, x: str = "step", smooth: float = 0.0) -> list[Any]:
    """matplotlib's lines of one panel."""
    runs = [read_run(folder) for folder in folders]
    figure = draw(runs, [panel], x=x, smooth=smooth)
    (axis,) = figure.axes
    return axis.get_lines()


def test_training_is_a_line_with_its_average_and_evaluations_are_marked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", evaluated=("test", "validation"))
    raw, average, *evaluations = lines([run], "accuracy", smooth=0.1)
    assert raw.get_alpha() < 1
    assert average.get_alpha() is None
    assert len(raw.get_xdata()) == len(average.get_xdata()) == 60
    assert [list(line.get_xdata()) for line in evaluations] == [[0, 20, 40, 60]] * 2
    assert len({line.get_marker() for line in evaluations} - {"None", ""}) == 2
    colors = [line.get_color() for line in (raw, average, *evaluations)]
    assert colors == [COLORS[0], *COLORS[:3]]  # a single run: a colour per source


def test_panels_are_titled_in_words_and_shares_are_in_percent(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    figure = draw([run], ["test/accuracy", "learning_rate"], x="step", smooth=0.0)
    accuracy, rate = figure.axes
    assert accuracy.get_title(loc="left") == "Accuracy, test"
    assert accuracy.yaxis.get_major_formatter()(0.5) == "50 %"
    assert "%" not in rate.yaxis.get_major_formatter()(0.5)


def test_images_make_batch_sizes_comparable_and_hours_are_those_of_the_run(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", batch_size=32, steps=30)]
    ends = {
        x: [line.get_xdata()[-1] for line in lines(folders, "loss", x=x)]
        for x in ("step", "images", "hours")
    }
    assert ends == {"step": [60, 30], "images": [960, 960], "hours": [0.6, 0.3]}


def test_runs_may_have_different_metrics(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", evaluated=())]
    panels = choose_panels([read_run(folder) for folder in folders], ())
    assert panels == ["loss", "accuracy", "learning_rate", "images_per_second"]
    (evaluation,) = lines(folders, "test/accuracy")
    assert evaluation.get_color() == COLORS[0]
    assert len(lines(folders, "accuracy")) == 3


def test_the_legend_tells_runs_by_what_differs(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "x" / "1", learning_rate=1e-3, log={"every_steps": 5}),
        make_run(tmp_path / "x" / "2", learning_rate=3e-3, log={"every_steps": 5}),
        make_run(tmp_path / "y" / "3", learning_rate=1e-2, batch_size=32, mix={"alpha": 1}),
    ]
    assert legend_labels([read_run(folder) for folder in folders]) == [
        "1: schedule.learning_rate=0.001  dataset.batch_size=16  log.every_steps=5",
        "2: schedule.learning_rate=0.003  dataset.batch_size=16  log.every_steps=5",
        "3: schedule.learning_rate=0.01  dataset.batch_size=32  log.every_steps=(absent)",
    ]
    same = make_run(tmp_path / "y" / "1", log={"every_steps": 5})
    labels = legend_labels([read_run(folders[0]), read_run(same)])
    assert labels == ["x/1", "y/1"]


def test_the_moving_average_is_the_mean_over_the_window() -> None:
    rng = np.random.default_rng(0)
    x = np.cumsum(rng.integers(1, 4, 200)).astype(float)
    y = rng.normal(size=200)
    averages = smoothed(x, y, 20.0)
    for i in range(200):
        half = min(10.0, x[i] - x[0])
        # float64 sums of 200 numbers around 1: errors below 1e-13
        np.testing.assert_allclose(averages[i], y[np.abs(x - x[i]) <= half].mean(), atol=1e-12)
    assert averages[0] == y[0]
    assert averages[-1] != y[-1]


MISTAKES: dict[str, dict[str, Any]] = {
    "holds no metrics.jsonl. Runs below it: a, b": {"workdirs": ["."]},
    "nowhere holds no metrics.jsonl. Not a run's --workdir": {"workdirs": ["nowhere"]},
    "foreign/config.json cannot be read": {"workdirs": ["foreign"]},
    "no metric to plot in numberless": {"workdirs": ["numberless"]},
    "Did you mean 'accuracy'": {"metrics": ["acuracy"]},
    "--output=a.xyz: Format 'xyz' is not supported": {"output": "a.xyz"},
    "--output=no/such.png: [Errno 2] No such file": {"output": "no/such.png"},
    "pip install -e '.[embedded]'": {"workdirs": ["a", "b"]},  # the last one: without matplotlib
}


def test_mistakes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "foreign", "numberless"):
        make_run(tmp_path / name)
    (tmp_path / "numberless" / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    (tmp_path / "foreign" / "config.json").unlink()
    for message, arguments in MISTAKES.items():
        if "[embedded]" in message:
            monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(UserError) as error:
            plot_run(**{"workdirs": ["a"], **arguments})
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("*.png"))


def test_the_script_writes_the_picture(script: Script, tmp_path: Path) -> None:
    """A dollar in the legend, as of a regular expression, is a dollar."""
    frozen = {"a": r"cls$|block\w/.*$", "b": "cls$|x{1,$"}
    folders = [make_run(tmp_path / k, optimizer={"freeze": frozen[k]}) for k in frozen]
    output = tmp_path / "curves.png"
    options = [f"--output={output}", "--metrics=loss,accuracy", "--x=images", "--smooth=0.05"]
    result = script("plot_run.py", *map(str, folders), *options)
    assert result.returncode == 0, result.stderr
    assert f"Wrote {output}." in result.stdout
    assert output.read_bytes().startswith(b"\x89PNG")
