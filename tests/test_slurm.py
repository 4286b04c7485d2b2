"""scripts/slurm.sh, run for real against stand-ins for sbatch, srun and scontrol."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher_stubs import World, printed_commands

TRAINING = ("--config=a b.py:B/16,x", "--workdir=runs/it's", '--config.x=("1", $HOME, $(A))')


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, workers=0)


def slurm(world: World, *flags: str, dry_run: bool = False) -> tuple[int, str, str]:
    flags = ("--name=vit", f"--python={world.python}", f"--log_dir={world.folder}/l o", *flags)
    dry = ("--dry_run",) if dry_run else ()
    return world.run("slurm.sh", *flags, *dry, "--", *TRAINING)


def test_slurm_runs_what_its_dry_run_printed(world: World) -> None:
    flags = ("--nodes=1", "--gpus_per_node=2", "--cpus_per_task=3", "--time=24:00:00")
    status, printed, _ = slurm(world, *flags, "--sbatch_flag=--mem=0", dry_run=True)
    assert status == 0
    assert world.calls() == []
    assert not (world.folder / "l o").exists()

    assert slurm(world, *flags, "--sbatch_flag=--mem=0")[0] == 0
    calls = world.calls()
    assert [call[0] for call in calls] == ["sbatch", "srun"]
    assert calls[:1] == printed_commands(printed, "sbatch")
    training = [
        str(world.python),
        f"{world.clone}/scripts/train.py",
        "--distributed=auto",
        *TRAINING,
    ]
    logs = f"{world.folder}/l o"
    assert calls[0] == [
        "sbatch",
        "--job-name=vit",
        "--nodes=1",
        "--ntasks-per-node=2",
        "--gpus-per-node=2",
        "--cpus-per-task=3",
        "--signal=TERM@120",
        "--requeue",
        "--open-mode=append",
        f"--output={logs}/%j.batch.log",
        "--time=24:00:00",
        "--mem=0",
        f"{world.clone}/scripts/launchers/slurm_batch.sh",
        f"--log_dir={logs}",
        "--max_requeues=100",
        "--",
        *training,
    ]
    # The dry run does not know the number of the job.
    [srun] = printed_commands(printed, "srun")
    assert calls[1] == [word.replace("/JOB.", "/7.") for word in srun]
    assert calls[1] == [
        "srun",
        "--cpus-per-task=3",
        "--gpu-bind=none",
        "--kill-on-bad-exit=0",
        "--wait=600",
        "--open-mode=append",
        f"--output={logs}/7.%t.log",
        *training,
    ]
    assert printed_commands(printed, "scontrol") == [["scontrol", "requeue", "JOB"]]
    assert Path(logs).is_dir()
    for task in (0, 1):
        [run] = world.trainings(task)
        assert run["argv"] == training[1:]


def test_slurm_without_gpus_is_one_process_per_node(world: World) -> None:
    assert slurm(world, "--nodes=3", "--gpus_per_node=0")[0] == 0
    sbatch, srun = world.calls()
    assert "--ntasks-per-node=1" in sbatch
    assert not [word for word in sbatch + srun if word.startswith("--gpu")]


@pytest.mark.parametrize(
    ("statuses", "requeued", "status"),
    [
        (("0", "0"), False, 0),
        (("75", "75"), True, 0),
        (("75", "0"), True, 0),
        (("75", "137"), True, 0),  # one was killed, the other noticed
        (("1", "1"), False, 1),
        (("2", "2"), False, 2),
        (("130", "130"), False, 130),
    ],
)
def test_slurm_requeues_on_75(
    world: World, statuses: tuple[str, str], requeued: bool, status: int
) -> None:
    for task, words in enumerate(statuses):
        home = world.folder / f"worker-{task}"
        home.mkdir()
        (home / "statuses").write_text(words)
    assert slurm(world, "--gpus_per_node=2")[0] == status
    assert world.calls("scontrol") == ([["scontrol", "requeue", "7"]] if requeued else [])


@pytest.mark.parametrize("arguments", [(), ("--log_dir=l",), ("--log_dir=l", "--")])
def test_the_batch_script_by_hand_needs_a_command(world: World, arguments: tuple[str, ...]) -> None:
    status, _, said = world.run("launchers/slurm_batch.sh", *arguments)
    assert status == 2
    assert said == "slurm_batch: error: the command is missing; give it after --.\n"
    assert world.calls() == []


def test_slurm_requeues_so_many_times(world: World) -> None:
    (world.folder / "worker-0").mkdir()
    for count, requeues in (("4", 1), ("5", 0)):
        (world.folder / "worker-0/statuses").write_text("75")
        world.environment["SLURM_RESTART_COUNT"] = count
        assert slurm(world, "--gpus_per_node=1", "--max_requeues=5")[0] == (0 if requeues else 75)
        assert len(world.calls("scontrol")) == requeues
