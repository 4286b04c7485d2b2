"""Real processes of one run on this machine: virtual CPU devices, gloo, loopback."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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


def read_results(workdir: Path) -> dict[str, float]:
    return json.loads((workdir / "results.json").read_text())


class Process:
    """One process of a run, with its output in a file."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str]):
        """`command` is a script of Python and its arguments."""
        self.log = log
        self.popen = forks.Process(command, log, env)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def step(self) -> int:
        """The last step that was logged."""
        steps = re.findall(r"step (\d+)/", self.output)
        return int(steps[-1]) if steps else 0

    def send(self, signum: int) -> None:
        self.popen.send_signal(signum)

    def wait(self) -> int:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.popen.wait(TIMEOUT_SECONDS)
        raise AssertionError(f"still running:\n{self.output}")


class Cluster:
    """The processes of one run."""

    def __init__(self, workdir: Path, processes: list[Process]):
        self.workdir, self.processes = workdir, processes

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

    def exit_codes(self) -> list[int]:
        return [process.wait() for process in self.processes]

    @property
    def output(self) -> str:
        return "\n".join(f"-- {p.log.name}\n{p.output}" for p in self.processes)


@contextlib.contextmanager
def cluster(
    folder: Path,
    *arguments: str,
    script: str = "train.py",
    num_processes: int,
    num_started: int | None = None,
    num_devices: int = 2,
    recipe: str = "../vit_jax/config.py",
    last: tuple[str, ...] = (),
    namespaces: Sequence[str] = (),
    address: str = "",
    workdir: Path | None = None,
) -> Iterator[Cluster]:
    """Starts a run, of which nothing is left at the end.

    Args:
      folder: where the logs go; `folder/workdir` is the default of `workdir`.
      *arguments: added to the command line of the tiny run; `last`: to that of its last process.
      script: of scripts/, or with its path.
      num_started: how many of the processes come; all by default.
      num_devices: per process.
      namespaces: of the network, one of each process.
      address: of the coordinator; a free port of this machine by default.
    """
    workdir = workdir or folder / "workdir"
    logs = folder / f"session{len(list(folder.glob('session*')))}"
    logs.mkdir(parents=True)
    count = f"--xla_force_host_platform_device_count={num_devices}"
    env = tiny.environment(XLA_FLAGS=f"{os.environ['XLA_FLAGS']} {count}", PYTHONUNBUFFERED="1")
    address = address or f"127.0.0.1:{free_port()}"
    several = [f"--coordinator_address={address}", f"--num_processes={num_processes}"]
    heartbeat = f"--config.processes.heartbeat_timeout_seconds={HEARTBEAT_SECONDS}"
    running = Cluster(workdir, [])
    try:
        for i in range(num_started or num_processes):
            flags = [*several, f"--process_id={i}"] if num_processes > 1 else []
            flags += last if i == num_processes - 1 else ()
            command = tiny.command(script, workdir, heartbeat, *arguments, *flags, recipe=recipe)
            command[:1] = [str(Path(__file__).with_name("start.py"))] if num_processes > 1 else []
            of_process = {"NETWORK_NAMESPACE": namespaces[i]} if namespaces else {}
            running.processes.append(Process(command, logs / f"{i}.log", env | of_process))
        yield running
    finally:
        for process in running.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()
