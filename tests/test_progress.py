from __future__ import annotations

import pytest

from vit_jax import progress as progress_module
from vit_jax.progress import Progress, format_seconds


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def test_speed_leaves_out_compilation_and_pauses_and_the_eta_does_not(clock: Clock) -> None:
    progress = Progress(start_step=0, total_steps=101, batch_size=10, elapsed=7.0)
    clock.now += 30.0
    assert progress.first_step_done(1) == 30.0
    assert "images_per_second" not in progress.report(1)
    clock.now += 50.0  # 50 steps of one second
    with progress.pause():
        clock.now += 25.0
    report = progress.report(51)
    assert report["images_per_second"] == pytest.approx(10.0)
    assert report["elapsed_seconds"] == pytest.approx(7.0 + 105.0)
    # 50 steps and their share of evaluation are left, but no compilation.
    assert report["eta_seconds"] == pytest.approx(75.0, rel=0.03)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (42, "42s"), (185, "3m05s"), (7620, "2h07m"), (356400, "4d03h")],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
