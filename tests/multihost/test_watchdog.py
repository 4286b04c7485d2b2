"""The watchdogs of several processes, as threads of one, around a store of their own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from vit_jax.multihost import watchdog
from vit_jax.multihost.watchdog import Watchdog


class Store(dict[str, str]):
    """What `Watchdog` asks of the client of JAX's coordination service."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert allow_overwrite
        self[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in list(self.items()) if key.startswith(folder)]


class Group:
    """The watchdogs of a run, and with which status each ended its process, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int):
        store = Store()
        self.ended: dict[int, int] = {}
        self.watchdogs: list[Watchdog] = []
        for i in range(count):
            state = SimpleNamespace(client=store, num_processes=count, process_id=i)
            monkeypatch.setattr(watchdog, "global_state", state)
            self.watchdogs.append(Watchdog(lambda code, i=i: self._end(i, code)))
            self.watchdogs[i].start(
                heartbeat_timeout_seconds=3.0, step_timeout_seconds=1.0, start_timeout_seconds=1.0
            )

    def _end(self, i: int, exit_code: int) -> None:
        self.ended[i] = exit_code
        self.watchdogs[i].stop()

    def wait_for_ends(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.ended) < count and time.monotonic() < deadline:
            time.sleep(0.02)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Group]]:
    monkeypatch.setattr(watchdog, "_EXIT_SECONDS", 0.3)
    monkeypatch.setattr(watchdog, "_LAST_EXIT_SECONDS", 1.5)
    groups: list[Group] = []

    def make(count: int) -> Group:
        groups.append(Group(monkeypatch, count))
        return groups[-1]

    yield make
    for member in groups[0].watchdogs:
        member.stop()


@pytest.mark.parametrize("failing", [0, 1])
def test_the_failure_of_one_ends_all_with_its_status(
    failing: int, group: Callable[[int], Group], caplog: pytest.LogCaptureFixture
) -> None:
    run = group(3)
    # Returns when this one has ended: it would end with another status by itself, since a
    # collective fails as soon as the first peer is gone.
    run.watchdogs[failing].fail("the disk is full", exit_code=2)
    assert run.ended[failing] == 2
    run.wait_for_ends(3)
    assert run.ended == {0: 2, 1: 2, 2: 2}
    assert list(run.ended)[-1] == 0  # XLA aborts those that process 0 leaves behind
    assert f"process {failing} (pid {os.getpid()}" in caplog.text
    assert "failed: the disk is full" in caplog.text


def test_one_that_gets_nowhere_ends_all_to_be_started_again(
    group: Callable[[int], Group], caplog: pytest.LogCaptureFixture
) -> None:
    run = group(2)
    for member in run.watchdogs:
        member.expect_progress(True)
    run.watchdogs[0].note("updating", 7, waits=True, started=True)
    run.watchdogs[1].note("reading a batch", 7, waits=False, started=True)
    run.wait_for_ends(2)
    assert run.ended == {0: 75, 1: 75}
    assert "has been reading a batch (step 7)" in caplog.text
    assert "process 0 (" not in caplog.text


def test_the_silence_of_process_0_ends_the_others(
    group: Callable[[int], Group], caplog: pytest.LogCaptureFixture
) -> None:
    run = group(2)
    time.sleep(0.5)  # both have been heard of
    run.watchdogs[0].stop()
    run.wait_for_ends(1)
    assert run.ended == {1: 75}
    me = f"process 0 (pid {os.getpid()} on {socket.gethostname()}) is lost"
    assert f"{me}: no heartbeat for 3 s. It was starting (step 0)." in caplog.text


def test_a_process_alone_ends_when_it_makes_no_progress(
    group: Callable[[int], Group], caplog: pytest.LogCaptureFixture
) -> None:
    run = group(1)
    run.watchdogs[0].expect_progress(True)
    run.wait_for_ends(1)
    assert run.ended == {0: 75}
    assert "No progress: process 0" in caplog.text
