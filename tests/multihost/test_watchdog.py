"""The watchdogs of several processes, as threads of one, around a store of their own."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from vit_jax.multihost import watchdog
from vit_jax.multihost.watchdog import Watchdog


class Store:
    """What `Watchdog` asks of the client of JAX's coordination service."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._lock = threading.Lock()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert allow_overwrite
        with self._lock:
            self.values[key] = value

    def key_value_try_get(self, key: str) -> str | None:
        return self.values.get(key)

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        with self._lock:
            return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]


class Group:
    """The watchdogs of a run, and with which status each ended its process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int):
        store = Store()
        monkeypatch.setattr(watchdog, "coordination_client", lambda: store)
        monkeypatch.setattr(watchdog, "num_processes", lambda: count)
        monkeypatch.setattr(watchdog, "try_get", Store.key_value_try_get)
        self.ended: dict[int, int] = {}
        self.watchdogs: list[Watchdog] = []
        for i in range(count):
            monkeypatch.setattr(watchdog, "process_id", lambda i=i: i)
            self.watchdogs.append(
                Watchdog(
                    heartbeat_timeout_seconds=3.0,
                    step_timeout_seconds=1.0,
                    start_timeout_seconds=1.0,
                    exit_process=lambda code, i=i: self._end(i, code),
                )
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


@pytest.mark.parametrize("seed", range(4))
def test_all_stop_at_the_same_point_however_far_apart_they_are(seed: int, group: Any) -> None:
    rng = random.Random(seed)
    members = group(3).watchdogs
    pauses = [rng.uniform(0.001, 0.05) for _ in members]
    stopped_at: dict[int, int] = {}

    def main_thread(i: int) -> None:
        for poll in range(1, 2000):
            if members[i].stop_reached():
                stopped_at[i] = poll
                return
            time.sleep(pauses[i])

    threads = [threading.Thread(target=main_thread, args=[i]) for i in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(rng.uniform(0.0, 0.5))
    members[rng.randrange(3)].ask_to_stop()
    for thread in threads:
        thread.join(timeout=30)
    assert len(stopped_at) == 3
    assert len(set(stopped_at.values())) == 1, (stopped_at, pauses)


def test_nobody_stops_unasked(group: Any) -> None:
    members = group(2).watchdogs
    assert not any(member.stop_reached() for member in members for _ in range(50))


@pytest.mark.parametrize("failing", [0, 1])
def test_the_failure_of_one_ends_all_with_its_status(
    failing: int, group: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = group(3)
    run.watchdogs[failing].fail("the disk is full", exit_code=2)
    run.wait_for_ends(3)
    assert run.ended == {0: 2, 1: 2, 2: 2}
    # Known before the end: JAX aborts those that process 0 leaves behind.
    assert [each.exit_code for each in run.watchdogs] == [2, 2, 2]
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
    assert "process 0 (pid" in caplog.text
    assert "is lost: silent for" in caplog.text
