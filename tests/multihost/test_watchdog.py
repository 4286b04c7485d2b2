"""The watchdogs of several processes, as threads of one, around a store of their own."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from vit_jax.multihost import watchdog
from vit_jax.multihost.watchdog import Watchdog


class Store:
    """What `Watchdog` asks of the client of JAX's coordination service."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._barriers: dict[str, threading.Barrier] = {}
        self._lock = threading.Lock()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert allow_overwrite
        with self._lock:
            self.values[key] = value

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        with self._lock:
            return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def wait_at_barrier(self, name: str, milliseconds: int, peers: list[int]) -> None:
        """All come within the time, or an error is raised."""
        with self._lock:
            barrier = self._barriers.setdefault(name, threading.Barrier(len(peers)))
        try:
            barrier.wait(milliseconds / 1000)
        except threading.BrokenBarrierError:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED") from None


class Group:
    """The watchdogs of a run, and with which status each ended its process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int):
        store = Store()
        monkeypatch.setattr(watchdog, "coordination_client", lambda: store)
        monkeypatch.setattr(watchdog, "num_processes", lambda: count)
        self.ended: dict[int, int] = {}
        self.watchdogs: list[Watchdog] = []
        for i in range(count):
            monkeypatch.setattr(watchdog, "process_id", lambda i=i: i)
            self.watchdogs.append(Watchdog(lambda code, i=i: self._end(i, code)))
            self.watchdogs[i].start(
                heartbeat_timeout_seconds=3.0, step_timeout_seconds=1.0, start_timeout_seconds=1.0
            )

    def _end(self, i: int, exit_code: int) -> None:
        time.sleep(0.2)  # a verdict has been found, and the process still lives
        self.ended[i] = exit_code

    def wait_for_ends(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.ended) < count and time.monotonic() < deadline:
            time.sleep(0.02)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    groups: list[Group] = []

    def make(count: int) -> Group:
        groups.append(Group(monkeypatch, count))
        return groups[-1]

    yield make
    for each in groups:
        for member in each.watchdogs:
            member.stop()


@pytest.mark.parametrize("failing", [0, 1])
def test_the_failure_of_one_ends_all_with_its_status(
    failing: int, group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = group(3)
    run.watchdogs[failing].fail("the disk is full", exit_code=2)
    run.wait_for_ends(3)
    assert run.ended == {0: 2, 1: 2, 2: 2}
    # Known before process 0 ends: JAX aborts those that it leaves behind.
    assert [each.verdict[1] for each in run.watchdogs] == [2, 2, 2]
    assert f"process {failing} (pid" in caplog.text
    assert "failed: the disk is full" in caplog.text


def test_the_main_thread_waits_until_a_verdict_has_ended_the_process(group: Any) -> None:
    """It would end it with another status: a collective fails as soon as the first peer is gone."""
    run = group(2)
    run.watchdogs[0].fail("the disk is full", exit_code=2)
    assert run.ended[0] == 2
    run.watchdogs[1].wait_for_verdict()
    assert run.ended[1] == 2


def test_one_that_gets_nowhere_ends_all_to_be_started_again(
    group: Any, caplog: pytest.LogCaptureFixture
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
    group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = group(2)
    time.sleep(0.5)  # both have been heard of
    run.watchdogs[0].stop()
    run.wait_for_ends(1)
    assert run.ended == {1: 75}
    me = f"process 0 (the coordinator, pid {os.getpid()} on {socket.gethostname()}) is lost"
    assert f"{me}: no heartbeat for 3 s. It was starting (step 0)." in caplog.text
