"""Processes of one run are killed, asked to end and cut short; the run goes on."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.cluster import Cluster, cluster, read_results
from tests.gcs_emulator import Server
from vit_jax.errors import REQUEUE_EXIT_CODE
from vit_jax.files.paths import COMMITTED, local_copy, names_below, size_of, to_path
from vit_jax.workdir.orbax_parts import steps_in

pytestmark = pytest.mark.slow

RUN = (
    "--config.duration.steps=25",
    "--config.checkpoint.every_steps=5",
    "--config.model.dropout_rate=0.1",  # and all else that a restart could get wrong
    "--config.train_step.accumulation_steps=2",
    "--config.train_step.polyak_decay=0.9",
    "--config.evaluators.test.split=test[:45]",  # no multiple of anything
    "--config.evaluators.test.every_steps=15",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Work directory of a run of two processes that nothing happened to."""
    with cluster(tmp_path_factory.mktemp("undisturbed"), *RUN, num_processes=2) as running:
        assert running.exit_codes() == [0, 0], running.output
    return running.workdir


def saving(running: Cluster) -> bool:
    """Whether a checkpoint is being written right now."""
    return any((running.workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def wait_for_resuming(running: Cluster, step: int) -> None:
    text = f"Resuming from the checkpoint of step {step}."
    running.wait_until(lambda: text in running[0].output, text)


def test_a_run_survives_term_and_kill_bit_for_bit(undisturbed: Path, tmp_path: Path) -> None:
    # So that its checkpoint can only be there because of the signal.
    rarely = "--config.checkpoint.every_steps=1000"
    with cluster(tmp_path, *RUN, rarely, num_processes=2) as running:
        running.wait_for_step(7)
        running[0].send(signal.SIGSTOP)  # JAX looks once a second; by then the run would have ended
        running[1].send(signal.SIGTERM)  # to one of them only
        running.wait_until(lambda: "SIGTERM caught" in running[1].output, "notice")
        running[0].send(signal.SIGCONT)
        assert running.exit_codes() == [REQUEUE_EXIT_CODE] * 2, running.output
        assert "Stopped by SIGTERM at step" in running[0].output
    stopped_at = running[0].step
    assert (running.workdir / "checkpoints" / str(stopped_at)).is_dir()

    with cluster(tmp_path, *RUN, num_processes=2) as running:
        wait_for_resuming(running, stopped_at)
        running.wait_until(lambda: saving(running), "save")
        running[1].send(signal.SIGKILL)
        assert running[0].wait() == REQUEUE_EXIT_CODE, running.output
        assert f"process 1 (pid {running[1].popen.pid} on" in running[0].output
        assert "is lost" in running[0].output

    with cluster(tmp_path, *RUN, num_processes=2) as running:
        assert running.exit_codes() == [0, 0], running.output
    expected, result = (path / "params.npz" for path in (undisturbed, running.workdir))
    assert result.read_bytes() == expected.read_bytes()
    for name, value in read_results(undisturbed).items():
        if name.startswith("test/"):
            assert read_results(running.workdir)[name] == value


def test_other_processes_and_another_mesh_go_on_in_a_bucket(
    undisturbed: Path, tmp_path: Path, bucket: str, bucket_server: Server
) -> None:
    """Two processes of two devices with fsdp across them, then one of four with tensor.

    The first to be killed holds the lock; one request in a hundred fails.
    """
    bucket_server.faults, bucket_server.slow_seconds = 0.01, 0.2
    workdir = to_path(f"{bucket}/run")
    fsdp = ("--config.mesh.fsdp=4", "--config.mesh.data=1")
    with cluster(tmp_path, *RUN, *fsdp, num_processes=2, workdir=workdir) as running:
        second = workdir / "checkpoints" / "10" / COMMITTED
        running.wait_until(second.exists, "second checkpoint")
        running[0].send(signal.SIGKILL)  # JAX's coordination service dies with it
        assert running[1].wait() == -signal.SIGABRT, running.output
        assert "coordination service" in running[1].output
    newest = steps_in(workdir / "checkpoints")[0]
    damage(workdir / "checkpoints" / str(newest))
    tensor = "--config.mesh.tensor=2"
    with cluster(
        tmp_path, *RUN, tensor, num_processes=1, num_devices=4, workdir=workdir
    ) as running:
        wait_for_resuming(running, newest - 5)  # the damaged one is reported and moved aside
        assert f"checkpoints/{newest} is damaged" in running[0].output
        assert running.exit_codes() == [0], running.output
    assert bucket_server.failed.total() > bucket_server.failed[""]
    with local_copy(workdir / "params.npz") as file:
        expected, result = np.load(undisturbed / "params.npz"), np.load(file)
        for name, array in expected.items():
            if name.endswith("key/bias"):
                continue  # its gradient is zero but for rounding, which Adam makes as large as any
            # Sums of another order: one unit in the last place per update (feasibility, section 1).
            np.testing.assert_allclose(array, result[name], atol=2e-5, err_msg=name)
    assert read_results(workdir)["test/num_examples"] == 45


def damage(step_dir: Path) -> None:
    """Flips a byte in the middle of the largest file of a checkpoint."""
    largest = max((step_dir / name for name in names_below(step_dir)), key=size_of)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0x10
    largest.write_bytes(content)


def test_a_mistake_of_one_process_ends_all(tmp_path: Path) -> None:
    """Before the first collective: nobody waits for the one that is gone."""
    mistake = ("--config.dataset.split=trian",)
    with cluster(tmp_path, *RUN, num_processes=2, last=mistake) as running:
        assert running.exit_codes() == [2, 2], running.output
    assert re.search(r"process 1 \(.*\) failed: .*'trian'", running[0].output), running.output


def test_a_process_with_other_settings_ends_all(tmp_path: Path) -> None:
    # How a host reads its data is its own affair.
    last = ("--config.schedule.learning_rate=0.5", "--config.loader.prefetch=4")
    with cluster(tmp_path, *RUN, num_processes=2, last=last) as running:
        assert running.exit_codes() == [2, 2], running.output
    assert re.search(
        r"Process 1 on \S+ has another config or other data than process 0: "
        r"schedule.learning_rate: \S+ -> 0.5\. Give",
        running[0].output,
    ), running.output
    assert not list(running.workdir.glob("checkpoints/*"))


def test_a_process_that_never_comes_is_reported(tmp_path: Path) -> None:
    patience = "--config.processes.arrival_timeout_seconds=4"
    with cluster(tmp_path, patience, num_processes=3, num_started=2) as running:
        assert running.exit_codes() == [REQUEUE_EXIT_CODE] * 2, running.output
    for process in running.processes:
        last_line = process.output.strip().splitlines()[-1]
        assert last_line.startswith("error: not all processes arrived within 4 s"), running.output
