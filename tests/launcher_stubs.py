"""Stand-ins for gcloud, sbatch, srun, scontrol and kubectl, and for a worker's Python.

A stub writes down what it was asked, one JSON line per call, and answers from files that the test
writes. Commands for workers (`gcloud ... ssh`, `srun`) are really run here: each worker is a folder
that is its home.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

STUB = """\
import json, os, pathlib, shutil, subprocess, sys
world = pathlib.Path(os.environ["STUB_WORLD"])
program, argv = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
call = {"program": program, "argv": argv}
if program == "kubectl" and "--filename=-" in argv:
    call["stdin"] = sys.stdin.read()
with open(world / "calls.jsonl", "a") as file:
    file.write(json.dumps(call) + "\\n")

def pop(name, default):
    path = world / name
    words = path.read_text().split() if path.exists() else [default]
    if len(words) > 1:
        path.write_text(" ".join(words[1:]))
    return words[0]

def on_workers(do):
    homes = sorted(world.glob("worker-*"))
    statuses = [do(home) for home in (homes if "--worker=all" in argv else homes[:1])]
    sys.exit(next((status for status in statuses if status), 0))

if program == "gcloud" and "describe" in argv:
    if "--format=value(state.failedData.error.message)" in argv:
        print("no more capacity in the zone")
    else:
        answer = pop("states", "ACTIVE")
        if answer == "absent":
            sys.exit("ERROR: NOT_FOUND")
        print(answer)
elif program == "gcloud" and "create" in argv and (world / "refuse_create").exists():
    sys.exit("ERROR: RESOURCE_EXHAUSTED: quota")
elif program == "gcloud" and argv[2:4] == ["tpu-vm", "scp"]:
    target = argv[5].partition(":")[2]
    on_workers(lambda home: shutil.copy(argv[4], home / target) and 0)
elif program == "gcloud" and argv[2:4] == ["tpu-vm", "ssh"]:
    command = next(x for x in argv if x.startswith("--command=")).partition("=")[2]
    on_workers(lambda home: subprocess.run(
        ["bash", "-c", command], cwd=home, env={**os.environ, "HOME": str(home)}).returncode)
elif program == "sbatch":
    script = next(i for i, word in enumerate(argv) if not word.startswith("-"))
    copy = shutil.copy(argv[script], world / "slurm_script")  # as SLURM does
    values = dict(word[2:].split("=", 1) for word in argv[:script] if "=" in word)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": values["cpus-per-task"],
             "SLURM_NTASKS": str(int(values["nodes"]) * int(values["ntasks-per-node"]))}
    if "gpus-per-node" in values:
        slurm["SLURM_GPUS_PER_NODE"] = values["gpus-per-node"]
    sys.exit(subprocess.run([copy, *argv[script + 1:]], env={**os.environ, **slurm}).returncode)
elif program == "srun":
    start = next(i for i, word in enumerate(argv) if not word.startswith("-"))
    statuses = []
    for task in range(int(os.environ["SLURM_NTASKS"])):
        home = world / f"worker-{task}"
        home.mkdir(exist_ok=True)
        task_env = {**os.environ, "HOME": str(home), "SLURM_PROCID": str(task)}
        statuses.append(subprocess.run(argv[start:], env=task_env).returncode)
    sys.exit(max(128 - status if status < 0 else status for status in statuses))
"""

# Answers setup questions as Python 3.12 would; a script is a training run that ends with the next
# status of $HOME/statuses, or waits for SIGTERM where that says "wait" or "slow".
PYTHON = """\
import json, os, pathlib, signal, sys, time
argv, home = sys.argv[1:], pathlib.Path(os.environ["HOME"])
with open(home / "python.jsonl", "a") as file:
    file.write(json.dumps({"argv": argv, "cwd": os.getcwd(), "A": os.environ.get("A")}) + "\\n")
if argv[0] == "-c":
    print("3.12")
elif argv[0] != "-m":
    path = home / "statuses"
    words = path.read_text().split() if path.exists() else ["0"]
    path.write_text(" ".join(words[1:] or ["0"]))
    if words[0] == "slow":  # saves for half a second; hears every SIGTERM meanwhile
        def save(*_):
            with open(home / "signals", "a") as file:
                file.write("SIGTERM\\n")
        signal.signal(signal.SIGTERM, save)
        (home / "waiting").touch()
        while not (home / "signals").exists():
            time.sleep(0.02)
        time.sleep(0.5)
        (home / "saved").touch()
        sys.exit(75)
    if words[0] == "wait":
        signal.signal(signal.SIGTERM, lambda *_: (home / "saved").touch() or os._exit(75))
        (home / "waiting").touch()
        time.sleep(60)
    if int(words[0]) > 128:
        os.kill(os.getpid(), int(words[0]) - 128)
    sys.exit(int(words[0]))
"""


# Starts fast, without site-packages. Not a plain `#!`: the interpreter's path may hold spaces.
HEADER = f"""\
#!/bin/sh
''':'
exec "{sys.executable}" -IS "$0" "$@"
'''
"""


def write_program(path: Path, source: str) -> Path:
    """An executable Python script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER + source)
    path.chmod(0o755)
    return path


class World:
    """A clone of this repository's scripts, a PATH with stubs, and workers."""

    def __init__(self, folder: Path, *, workers: int) -> None:
        self.folder = folder
        self.stdin: list[str] = []  # of the kubectl calls that `calls` gave last
        self.clone = folder / "a clone"
        for name in ("scripts", "setup.py", "constraints.txt"):
            subprocess.run(["cp", "-r", ROOT / name, self._made(self.clone)], check=True)
        for place in (self.clone, folder):  # a recipe; slurm.sh takes it from where it is called
            (place / "a b.py").touch()
            subprocess.run(["cp", "-r", ROOT / "configs", place], check=True)
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=first")
        for name in ("gcloud", "sbatch", "srun", "scontrol", "kubectl"):
            write_program(folder / "bin" / name, STUB)
        for index in range(workers):
            write_program(folder / f"worker-{index}" / "vit_jax_venv" / "bin" / "python", PYTHON)
        self.python = write_program(folder / "bin" / "a python", PYTHON)
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "STUB_WORLD": str(folder),
        }

    @staticmethod
    def _made(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", *identity, *arguments]
        return subprocess.run(
            command, cwd=self.clone, check=True, capture_output=True, text=True
        ).stdout.strip()

    def run(self, script: str, *arguments: str, answer: str = "") -> tuple[int, str, str]:
        """Exit status, stdout and stderr of `scripts/SCRIPT`; `answer` is typed into it."""
        result = subprocess.run(
            [self.clone / "scripts" / script, *arguments],
            cwd=self.folder,
            env=self.environment,
            input=answer,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return result.returncode, result.stdout, result.stderr

    def calls(self, program: str | None = None) -> list[list[str]]:
        """What the stubs were asked so far, in order, and forgets it."""
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        calls = [json.loads(line) for line in lines]
        self.stdin = [call["stdin"] for call in calls if "stdin" in call]
        return [
            [call["program"], *call["argv"]] for call in calls if program in (None, call["program"])
        ]

    def trainings(self, worker: int) -> list[dict[str, Any]]:
        """The training commands that this worker ran."""
        path = self.folder / f"worker-{worker}" / "python.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [line for line in lines if not line["argv"][0].startswith("-")]


def printed_commands(stdout: str, program: str) -> list[list[str]]:
    """The commands of that program that a dry run printed, as a shell would read them."""
    commands = [shlex.split(line) for line in stdout.splitlines()]
    return [command for command in commands if command and command[0] == program]


def wait_for(path: Path, text: str = "") -> None:
    """Until another process has made it, with that text in it.

    Raises:
      TimeoutError: after 30 seconds.
    """
    deadline = time.monotonic() + 30
    while not path.exists() or text not in path.read_text():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} with {text!r}")
        time.sleep(0.02)
