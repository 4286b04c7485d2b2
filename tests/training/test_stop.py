"""Between two updates: how far the host is ahead of the devices, what is logged when, Ctrl-C."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests import tiny
from vit_jax.evaluators.stream import ObjectiveEvaluator
from vit_jax.multihost.agreement import PreemptionNotice
from vit_jax.run import Run
from vit_jax.train import train_and_evaluate
from vit_jax.workdir.metrics import read_metrics


@jax.jit
def slowly(x: jax.Array) -> jax.Array:
    """The same, after some hundredths of a second."""
    work = jax.lax.fori_loop(0, 20, lambda _, y: y @ y, jnp.eye(250))
    return x * work[0, 0]


class Unfinished:
    """Counts, at each start of a program, those before it that still run."""

    def __init__(self) -> None:
        self._outputs: list[jax.Array] = []
        self.counts: list[int] = []

    def start(self, output: jax.Array) -> None:
        self.counts.append(sum(not each.is_ready() for each in self._outputs))
        self._outputs.append(output)


def test_the_host_is_at_most_two_updates_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished, jit_train_step = Unfinished(), Run.jit_train_step

    def slow_step(self: Run) -> Any:
        step = jit_train_step(self)

        def function(*arguments: Any) -> Any:
            state, metrics = step(*arguments)
            metrics["loss"] = slowly(metrics["loss"])
            unfinished.start(metrics["loss"])
            return state, metrics

        return function

    monkeypatch.setattr(Run, "jit_train_step", slow_step)
    train_and_evaluate(tiny.config(log__every_steps=1000), str(tmp_path))
    assert len(unfinished.counts) == 8
    assert max(unfinished.counts) == 1  # and the one that starts


def test_an_evaluation_is_not_ahead_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished, create = Unfinished(), ObjectiveEvaluator.__init__

    def slow_init(self: Any, *arguments: Any) -> None:
        create(self, *arguments)
        merge = self._merge

        def function(a: Any, b: Any) -> Any:
            merged = merge(a, b)
            merged["loss"] = merged["loss"].replace(total=slowly(merged["loss"].total))
            unfinished.start(merged["loss"].total)
            return merged

        self._merge = function

    monkeypatch.setattr(ObjectiveEvaluator, "__init__", slow_init)
    config = tiny.config(duration__steps=1, evaluators__test__batch_size=8)
    train_and_evaluate(config, str(tmp_path))
    assert len(unfinished.counts) == 6  # 50 examples
    assert max(unfinished.counts) == 1


@pytest.mark.parametrize(("every_seconds", "steps"), [(1e-9, [*range(1, 9)]), (0.0, [8])])
def test_lines_come_by_time_too(tmp_path: Path, every_seconds: float, steps: list[int]) -> None:
    config = tiny.config(
        log__every_steps=1000, log__every_seconds=every_seconds, checkpoint__every_steps=1000
    )
    train_and_evaluate(config, str(tmp_path))
    assert [row["step"] for row in read_metrics(tmp_path) if "loss" in row] == steps


def test_an_interrupt_that_was_swallowed_comes_again() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores it
    try:
        with PreemptionNotice() as notice:
            assert not notice.reached()
            with pytest.raises(KeyboardInterrupt):  # as a callback that JAX makes from C++
                os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                notice.reached()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
