"""Between two updates: how far the host is ahead of the devices, what is logged when, Ctrl-C."""

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ml_collections import ConfigDict

from tests import tiny
from vit_jax.multihost.agreement import PreemptionNotice
from vit_jax.run import Run
from vit_jax.train import train_and_evaluate
from vit_jax.workdir.metrics import read_metrics


@jax.jit
def slowly(x: jax.Array) -> jax.Array:
    """The same, after some hundredths of a second."""
    work = jax.lax.fori_loop(0, 20, lambda _, y: y @ y, jnp.eye(250))
    return x * work[0, 0]


def without_evaluations(**overrides: Any) -> ConfigDict:
    config = tiny.config(log__every_steps=1000, **overrides)
    with config.unlocked():
        config.evaluators = {}
    return config


def logged_steps(workdir: Path) -> list[int]:
    return [row["step"] for row in read_metrics(workdir) if "loss" in row]


def test_the_host_is_at_most_two_updates_ahead(tmp_path, monkeypatch):
    compile_train_step = Run.compile_train_step
    outputs: list[jax.Array] = []
    unfinished: list[int] = []

    def slow_step(self: Run) -> Any:
        step = compile_train_step(self)

        def function(*arguments: Any) -> Any:
            state, metrics = step(*arguments)
            metrics["loss"] = slowly(metrics["loss"])
            unfinished.append(sum(not output.is_ready() for output in outputs))
            outputs.append(metrics["loss"])
            return state, metrics

        return function

    monkeypatch.setattr(Run, "compile_train_step", slow_step)
    config = without_evaluations(log__every_seconds=0.0)
    train_and_evaluate(config, str(tmp_path))
    assert len(unfinished) == 8
    assert max(unfinished) == 1  # and the one that starts
    assert logged_steps(tmp_path) == [1, 8]


def test_lines_come_by_time_too(tmp_path: Path) -> None:
    config = without_evaluations(log__every_seconds=1e-9)
    train_and_evaluate(config, str(tmp_path))
    assert logged_steps(tmp_path) == list(range(1, 9))


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
