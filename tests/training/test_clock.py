import unittest.mock

import jax.numpy as jnp
import pytest

from tests.clock import Clock as FakeTime
from vit_jax.multihost.watchdog import Watchdog
from vit_jax.training import clock as clock_module
from vit_jax.training.clock import Clock, update_text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(clock_module, "time", clock)
    return clock


def test_speed_leaves_out_compilation_and_pauses_and_the_eta_does_not(clock: FakeTime) -> None:
    earlier = {"elapsed_seconds": 7.0, "evaluation_seconds": 2.0}
    progress = Clock(
        start_step=0,
        total_steps=101,
        batch_size=10,
        began=clock.now,
        earlier=earlier,
        every_steps=50,
        every_seconds=0.0,
        flops_per_image=30.0,
        peak_flops=1000.0,
        progress=(shown := unittest.mock.Mock()),
        watchdog=Watchdog(),
    )
    clock.now += 30.0
    progress.dispatched(1, jnp.zeros(()))
    assert "images_per_second" not in progress.report(1)
    clock.now += 50.0  # 50 steps of one second
    assert progress.report(51)["eta_seconds"] == pytest.approx(50.0)
    with progress.book("evaluation", "evaluating test", 51):
        clock.now += 25.0
    clock.now += 10.0
    report = progress.report(61)
    assert report["images_per_second"] == pytest.approx(10.0)
    assert report["mfu"] == pytest.approx(10.0 * 30.0 / 1000.0)
    assert report["elapsed_seconds"] == pytest.approx(7.0 + 115.0)
    assert report["compile_seconds"] == pytest.approx(30.0)
    assert report["evaluation_seconds"] == pytest.approx(2.0 + 25.0)
    # 60 steps took 60 s, and an evaluation 25 s.
    assert report["eta_seconds"] == pytest.approx(40 * 85.0 / 60)
    progress.close()
    shown.begin.assert_called_once_with(0, 101)
    shown.advance.assert_called_once_with(1)


def test_the_line_of_an_update_fits_and_says_shares_in_percent() -> None:
    row = {"loss": 9.87654, "learning_rate": 0.000123456, "accuracy": 0.54321, "grad_norm": 1.0}
    assert update_text(row, 0.0) == (["loss 9.8765", "accuracy 54.32 %", "lr 0.000123"], [])
    row |= {"images_per_second": 123456.7, "mfu": 0.41, "data_wait": 0.123, "start_seconds": 3.0}
    numbers, speed = update_text(row, 356400.0)
    assert numbers[3:] == ["MFU 41%", "data wait 12%"]
    assert speed == ["ETA 4d03h", "123,457 images/s"]
