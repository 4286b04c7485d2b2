"""scripts/tpu_pod.sh, run for real against a stand-in for gcloud."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

from tests.launcher_stubs import HEADER, PYTHON, World, printed_commands, wait_for, write_program

PLACE = ("--name=vit", "--zone=us-x")
TRAINING = (
    "--config=a b.py:B/16,x",
    "--workdir=/mnt/work/it's",
    '--config.x=("1", $HOME, `ls`, &)',
)
SSH = ["gcloud", "compute", "tpus", "tpu-vm", "ssh"]
QUEUE = ["gcloud", "compute", "tpus", "queued-resources"]
STATE = [*QUEUE, "describe", "vit", "--format=value(state.state)", "--zone=us-x"]
INSTALL = (
    "--command=rm -rf vit_jax.new && mkdir vit_jax.new && tar -xzf vit_jax.tar.gz -C vit_jax.new "
    "&& bash vit_jax.new/scripts/launchers/tpu_worker.sh install tpu"
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, workers=2)


def on_worker(words: str) -> str:
    return f"--command=bash vit_jax/scripts/launchers/tpu_worker.sh {words}"


def test_a_work_directory_in_a_bucket_needs_no_folder_that_is_shared(world: World) -> None:
    training = ("--config=a b.py:B/16,x", "--workdir=gs://bucket/run")
    flags = ("--accelerator=v5e-16", *PLACE, "--")
    status, printed, said = world.run("tpu_pod.sh", "up", "--dry_run", *flags, *training)
    assert status == 0, said
    assert "tpu_worker.sh install tpu,gcs" in printed
    assert "mount" not in printed
    assert "--workdir=gs://bucket/run" in printed


def test_up_runs_what_its_dry_run_printed(world: World) -> None:
    """The whole way, really executed: packed, copied, unpacked, installed, started on 2 workers."""
    (world.folder / "states").write_text("absent WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
    flags = ("--accelerator=v5e-16", "--spot", "--poll_seconds=0.01", "--env=A=b c", "--mounted")
    flags = (*flags, *PLACE, "--")
    status, printed, _ = world.run("tpu_pod.sh", "up", "--dry_run", *flags, *TRAINING)
    assert status == 0
    assert world.calls() == []  # nothing was asked of anyone
    assert not (world.folder / "cache").exists()

    status, _, messages = world.run("tpu_pod.sh", "up", *flags, *TRAINING)
    assert status == 0, messages
    calls = world.calls()
    first, second = "WAITING_FOR_RESOURCES after 0 min", "ACTIVE after 0 min"
    assert messages.index("4 workers of 4 chips") < messages.index(first) < messages.index(second)
    # Before: is it there already? After: as often as it was not ready.
    assert calls[0] == STATE
    assert calls[2:5] == [STATE] * 3
    assert calls[1:2] + calls[4:] == printed_commands(printed, "gcloud")
    assert calls[1] == [
        *QUEUE,
        "create",
        "vit",
        "--node-id=vit",
        "--accelerator-type=v5litepod-16",
        "--runtime-version=v2-alpha-tpuv5-lite",
        "--spot",
        "--zone=us-x",
    ]
    commit = world.git("rev-parse", "--short=12", "HEAD")
    archive = str(world.folder / f"cache/vit_jax/launch/vit-{commit}.tar.gz")
    scp = [*SSH[:-1], "scp", archive, "vit:vit_jax.tar.gz", "--worker=all", "--zone=us-x"]
    assert calls[5:7] == [scp, [*SSH, "vit", "--worker=all", INSTALL, "--zone=us-x"]]
    assert not Path(archive).exists()
    assert len(calls) == 9

    for worker in (0, 1):
        home = world.folder / f"worker-{worker}"
        wait_for(home / "vit_jax.log", "ended")
        assert world.trainings(worker) == [
            {
                "argv": ["scripts/train.py", "--distributed=auto", *TRAINING],
                "cwd": str(home / "vit_jax"),
                "A": "b c",
            }
        ]
        installs = (home / "python.jsonl").read_text()
        assert '"-c", "constraints.txt", "--no-build-isolation", "-e", ".[tpu]"' in installs
        where = ["git", "-C", home / "vit_jax", "rev-parse", "--short=12", "HEAD"]
        assert subprocess.check_output(where, text=True).strip() == commit  # for provenance.jsonl


def test_uncommitted_changes_are_refused_or_copied(world: World) -> None:
    (world.clone / "scripts" / "new file.py").write_text("new")
    (world.clone / "scripts" / "gke.sh").unlink()
    status, _, message = world.run("tpu_pod.sh", "install", *PLACE)
    assert status == 2
    assert message == (
        f"tpu_pod: error: {world.clone} has uncommitted changes; commit them, or copy them too "
        "with --dirty.\n"
    )
    assert world.calls() == []
    assert world.run("tpu_pod.sh", "install", "--dirty", *PLACE)[0] == 0
    copy = world.folder / "worker-1/vit_jax"
    assert (copy / "scripts" / "new file.py").read_text() == "new"
    assert not (copy / "scripts/gke.sh").exists()
    assert (copy / "scripts/tpu_pod.sh").exists()


# `python3.12 -m venv FOLDER` with a Python that has pip.
NEW_PYTHON = f"""\
import pathlib, sys
if sys.argv[1:3] == ["-m", "venv"]:
    python = pathlib.Path(sys.argv[3], "bin", "python")
    python.parent.mkdir(parents=True)
    python.write_text({HEADER + PYTHON!r})
    python.chmod(0o755)
"""


def test_a_half_made_environment_is_made_again(world: World) -> None:
    write_program(world.folder / "bin/python3.12", NEW_PYTHON)
    without_pip = world.folder / "worker-1/vit_jax_venv"
    write_program(without_pip / "bin/python", "import sys; sys.exit('No module named pip')")
    for index in range(2):
        (world.folder / f"worker-{index}/vit_jax_venv/old").touch()
    status, _, said = world.run("tpu_pod.sh", "install", *PLACE)
    assert status == 0, said
    assert (world.folder / "worker-0/vit_jax_venv/old").exists()  # complete: kept
    assert not (without_pip / "old").exists()
    assert '".[tpu]"' in (world.folder / "worker-1/python.jsonl").read_text()


def test_several_slices_are_one_request_and_one_run(world: World) -> None:
    flags = ("--accelerator=v4-16", "--reserved", "--slices=2", "--bucket=gs://b", *PLACE)
    extra = ("--create_flag=--network=n", "--ssh_flag=--internal-ip", "--project=p", "--dry_run")
    status, printed, _ = world.run(
        "tpu_pod.sh", "up", *flags, *extra, "--", "--config=a b.py", "--workdir=/mnt/work/x"
    )
    assert status == 0
    calls = printed_commands(printed, "gcloud")
    assert calls[0] == [
        *QUEUE,
        "create",
        "vit",
        "--node-count=2",
        "--node-prefix=vit",
        "--accelerator-type=v4-16",
        "--runtime-version=tpu-ubuntu2204-base",
        "--reserved",
        "--network=n",
        "--zone=us-x",
        "--project=p",
    ]
    commands = [on_worker("mount_bucket b /mnt/work"), on_worker("refuse_if_running")]
    commands += [
        on_worker(
            r"start -- scripts/train.py --distributed=auto '--config=a b.py' --workdir=/mnt/work/x"
        )
    ]
    place = ["--internal-ip", "--zone=us-x", "--project=p"]
    assert calls[4:] == [
        [*SSH, f"vit-{index}", "--worker=all", command, *place]
        for command in [INSTALL, *commands]
        for index in range(2)
    ]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ("absent FAILED", "vit: no more capacity in the zone; delete it, then try another --zone"),
        ("absent PROVISIONING SUSPENDED", "vit was preempted (SUSPENDED); delete it, then create"),
    ],
)
def test_a_slice_that_does_not_come(world: World, states: str, message: str) -> None:
    (world.folder / "states").write_text(states)
    flags = ("--accelerator=v5p-16", "--poll_seconds=0.01")
    status, _, said = world.run("tpu_pod.sh", "create", *flags, *PLACE)
    assert status == 1
    assert message in said.splitlines()[-1]


def test_a_refused_request_is_not_waited_for(world: World) -> None:
    (world.folder / "states").write_text("absent")
    (world.folder / "refuse_create").touch()
    status, _, said = world.run("tpu_pod.sh", "create", "--accelerator=v3-8", *PLACE)
    assert status == 1
    assert "quota" in said
    assert [call[4] for call in world.calls()] == ["describe", "create"]


def test_create_again_waits_on(world: World) -> None:
    (world.folder / "states").write_text("PROVISIONING PROVISIONING ACTIVE")
    flags = ("--accelerator=v3-8", "--poll_seconds=0.01")
    status, _, said = world.run("tpu_pod.sh", "create", *flags, *PLACE)
    assert status == 0
    assert "vit is there already: PROVISIONING" in said
    assert world.calls() == [STATE] * 3


def test_run_is_refused_while_one_worker_is_busy(world: World) -> None:
    assert world.run("tpu_pod.sh", "install", *PLACE)[0] == 0
    with open(world.folder / "worker-1/vit_jax.lock", "w") as lock:
        lock.write("4321\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, _, said = world.run(
            "tpu_pod.sh", "run", *PLACE, "--", "--config=a b.py", "--workdir=/mnt/x"
        )
        assert status == 1
        assert "a run is going on (process 4321); stop it first" in said
        assert said.endswith("tpu_pod: error: nothing was started.\n")
        assert world.run("tpu_pod.sh", "install", *PLACE)[0] == 1
        _, out, _ = world.run("tpu_pod.sh", "status", *PLACE)
    assert world.trainings(0) == world.trainings(1) == []
    assert out.splitlines()[0] == "ACTIVE"
    assert out.splitlines()[1].endswith(": idle; no log")
    assert out.splitlines()[2].endswith(": running (process 4321); no log")


def test_stop_lets_the_run_save_and_it_is_not_restarted(world: World) -> None:
    homes = [world.folder / f"worker-{index}" for index in range(2)]
    for home in homes:
        (home / "statuses").write_text("wait")
    assert world.run("tpu_pod.sh", "install", *PLACE)[0] == 0
    assert (
        world.run("tpu_pod.sh", "run", *PLACE, "--", "--config=a b.py", "--workdir=/mnt/x")[0] == 0
    )
    for home in homes:
        wait_for(home / "waiting")
    assert world.run("tpu_pod.sh", "stop", *PLACE)[0] == 0
    for index, home in enumerate(homes):
        assert (home / "saved").exists()
        assert len(world.trainings(index)) == 1
        assert (home / "vit_jax.log").read_text().endswith("restart: ended with status 75\n")


def test_delete_asks(world: World) -> None:
    delete = [*QUEUE, "delete", "vit", "--force", "--quiet", "--zone=us-x"]
    for answer in ("", "n\n", "yesterday\n"):
        status, _, said = world.run("tpu_pod.sh", "delete", *PLACE, answer=answer)
        assert status == 1
        assert said.startswith("Delete vit (1 slice(s) in us-x) and stop what runs there? [y/N]")
    assert world.calls() == []
    assert world.run("tpu_pod.sh", "delete", *PLACE, answer="y\n")[0] == 0
    assert world.run("tpu_pod.sh", "delete", "--yes", *PLACE)[0] == 0
    assert world.calls() == [delete, delete]


def test_other_commands_reach_the_workers(world: World) -> None:
    for arguments, worker, command in (
        (("logs",), "0", on_worker("follow")),
        (("logs", "--worker=all"), "all", on_worker("follow")),
        (("stop", "--kill"), "all", on_worker("stop --kill")),
        (
            ("mount", "--nfs=10.0.0.2:/s", "--folder=/n"),
            "all",
            on_worker("mount_nfs 10.0.0.2:/s /n"),
        ),
        (("ssh", "--", "ls", "a b"), "all", "--command=ls 'a b'"),
    ):
        _, printed, _ = world.run("tpu_pod.sh", arguments[0], "--dry_run", *PLACE, *arguments[1:])
        expected = [*SSH, "vit", f"--worker={worker}", command, "--zone=us-x"]
        assert printed_commands(printed, "gcloud") == [expected]
