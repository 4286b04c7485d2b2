"""Real processes of one run on this machine: virtual CPU devices, gloo, loopback."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import forks, tiny

if sys.platform != "linux":
    pytest.skip("processes are watched through Linux's signals", allow_module_level=True)

# Quick to notice, yet longer than a busy machine leaves a thread without its turn.
HEARTBEAT_SECONDS = 8.0
TIMEOUT_SECONDS = 240.0


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class Process:
    """One process of a run, with its output in a file."""

    popen: subprocess.Popen[bytes] | forks.Process

    def __init__(self, command: list[str], log: Path, env: dict[str, str], *, forked: bool):
        self.log = log
        if forked:
            self.popen = forks.Process(command[1:], log, env)
            return
        with open(log, "w") as file:
            self.popen = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def step(self) -> int:
        """The last step that was logged."""
        found = re.findall(r"step (\d+)/", self.output)
        return int(found[-1]) if found else 0

    def send(self, signum: int) -> None:
        self.popen.send_signal(signum)

    def wait(self, timeout: float = TIMEOUT_SECONDS) -> int:
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output}") from None


class Cluster:
    """The processes of one run, started together."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        num_processes: int,
        num_devices: int = 2,
        recipe: str = "../vit_jax/config.py",
        prefix: Callable[[int], list[str]] | None = None,
        address: str = "",
        by_hand: bool = True,
        workdir: Path | None = None,
        **variables: str,
    ):
        """
        Args:
          folder: where the logs go.
          *arguments: added to the command line of the tiny run.
          num_processes: of the run.
          num_devices: per process.
          prefix: put before the command of process i, such as another network namespace.
            With one, a process starts by itself; others fork, see `tests/forks.py`.
          address: of the coordinator; a free port of this machine by default.
          by_hand: the flags say who is who; otherwise `prefix` has to.
          workdir: of the run; `folder/workdir` by default.
          **variables: of the environment.
        """
        self.workdir = workdir or folder / "workdir"
        folder.mkdir(parents=True, exist_ok=True)
        address = address or f"127.0.0.1:{free_port()}"
        count = f"--xla_force_host_platform_device_count={num_devices}"
        flags = f"{os.environ['XLA_FLAGS']} {count}"
        env = tiny.environment(XLA_FLAGS=flags, PYTHONUNBUFFERED="1", **variables)
        number = len(list(folder.glob("session*")))
        logs = folder / f"session{number}"
        logs.mkdir()
        self.processes = []
        for i in range(num_processes):
            member = [f"--num_processes={num_processes}", f"--process_id={i}"]
            member.append(f"--coordinator_address={address}")
            command = tiny.command(
                "train.py",
                self.workdir,
                *(member if num_processes > 1 and by_hand else []),
                f"--config.processes.heartbeat_timeout_seconds={HEARTBEAT_SECONDS}",
                *arguments,
                recipe=recipe,
            )
            if num_processes > 1:
                command.insert(1, str(Path(__file__).with_name("start.py")))
            command = [*(prefix(i) if prefix else []), *command]
            log = logs / f"{i}.log"
            self.processes.append(Process(command, log, env, forked=prefix is None))

    def __getitem__(self, i: int) -> Process:
        return self.processes[i]

    def wait_for_step(self, step: int) -> None:
        """Until process 0 has logged `step`."""
        self.wait_until(lambda: self[0].step >= step, f"step {step}")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            ended = [p.popen.returncode for p in self.processes if p.popen.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"no {what} (ended: {ended}):\n{self.output}")
            time.sleep(0.02)

    def exit_codes(self, timeout: float = TIMEOUT_SECONDS) -> list[int]:
        return [process.wait(timeout) for process in self.processes]

    @property
    def output(self) -> str:
        return "\n".join(f"-- {p.log.name}\n{p.output}" for p in self.processes)

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()


@contextlib.contextmanager
def cluster(folder: Path, *arguments: str, **kwargs: object) -> Iterator[Cluster]:
    """A `Cluster` of which nothing is left at the end."""
    running = Cluster(folder, *arguments, **kwargs)  # type: ignore[arg-type]
    try:
        yield running
    finally:
        running.close()
