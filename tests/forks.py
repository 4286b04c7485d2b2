"""Processes forked from one that has imported everything, which takes longer than what they do.

Otherwise they are what `subprocess.Popen` starts: a script, from its first line to its last. The
order of sets is the same in all of them, as in processes of one PYTHONHASHSEED.
"""

import functools
import gc
import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def _server() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(**request: Any) -> Any:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(request), file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())


class Process:
    """What tests use of `subprocess.Popen`; it leads a process group."""

    returncode: int | None = None

    def __init__(self, command: list[str], log: Path, env: dict[str, str]):
        """
        Args:
          command: a script of Python and its arguments.
          log: gets all it prints.
          env: its environment. What JAX reads when it is imported comes from this process.
        """
        log.touch()
        self.pid: int = _ask(command=command, log=str(log), env=env)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask(pid=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


def _serve() -> dict[str, Any]:
    """Answers requests; returns in each new process what it shall run."""
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif answer := os.fork():
            os.setpgid(answer, answer)  # here too: it is asked for as soon as its number is known
        else:
            os.setpgid(0, 0)
            return request
        print(json.dumps(answer), flush=True)
    sys.exit()


def _run(command: list[str], log: str, env: dict[str, str]) -> None:
    with open(log, "w") as output, open(os.devnull) as nothing:
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    import vit_jax.command_line
    import vit_jax.data.tfds_reader
    import vit_jax.train  # noqa: F401

    gc.freeze()
    _run(**_serve())
