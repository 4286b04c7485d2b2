"""The same numbers from any number of processes, on any mesh; the processes find each other."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.distributed.cluster import Process, cluster, free_port, read_results
from vit_jax.wording import counted

pytestmark = pytest.mark.slow

RUN = (
    "--config.duration.steps=30",  # of which 20 are made
    "--config.early_stopping.metric=test/loss",
    "--config.early_stopping.patience=1",
    "--config.early_stopping.min_delta=100.0",  # never gained
    "--config.evaluators.test.every_steps=10",
    "--config.objective.class_weights=balanced",
    "--config.checkpoint.every_steps=20",
    "--config.model.dropout_rate=0.1",
    "--config.model.attention_dropout_rate=0.1",
    "--config.optimizer.clip_norm=1.0",
    "--config.optimizer.weight_decay=0.1",
    "--config.evaluators.test.split=test[:45]",
    "--config.evaluators.test.batch_size=24",  # the last batch has 21 of 24
)
# (processes, devices of each, mesh): data across processes, tensor inside each. That fsdp crosses
# processes is in test_failures.py.
LAYOUTS: list[tuple[int, int, dict[str, int]]] = [(1, 1, {}), (2, 2, {"data": 2, "tensor": 2})]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Work directories by layout."""
    workdirs = []
    for num_processes, num_devices, axes in LAYOUTS:
        mesh = [f"--config.mesh.{axis}={size}" for axis, size in axes.items()]
        with cluster(
            tmp_path_factory.mktemp("layout"),
            *RUN,
            *mesh,
            num_processes=num_processes,
            num_devices=num_devices,
            recipe="../tests/distributed/many_evaluators.py",
        ) as running:
            assert running.exit_codes() == [0] * num_processes, running.output
            devices = counted(num_processes * num_devices, "device")
            assert re.search(rf"on\s+{devices}\.", running[0].output)
        workdirs.append(running.workdir)
    return workdirs


def losses(workdir: Path) -> np.ndarray:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return np.array([row["loss"] for row in rows if "loss" in row])


def test_loss_curves_agree(runs: list[Path]) -> None:
    one, two = map(losses, runs)
    assert len(one) == 20
    assert np.ptp(one) > 0.01  # something is learned
    # A unit in the last place of float32 is 2.4e-7 here; see feasibility, section 1.
    np.testing.assert_allclose(two, one, atol=1e-6, rtol=0)


def test_evaluation_is_exact_where_the_hosts_have_unequal_shares(runs: list[Path]) -> None:
    one, two = map(read_results, runs)
    assert two["test/accuracy"] == pytest.approx(one["test/accuracy"], abs=1e-6)
    assert two["test/loss"] == pytest.approx(one["test/loss"], abs=2e-6)
    metrics = [name for name in one if "/" in name and not name.endswith("_ci95")]
    assert len(metrics) > 11
    for name in metrics:
        # Parameters differ in the last places, so one image in 45 may fall to the other side.
        assert two[name] == pytest.approx(one[name], abs=1.01 / 45), name
        if name.endswith("num_examples"):
            assert two[name] == one[name] == 45


SLURM = {  # what srun tells its tasks
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "{i}",
    "SLURM_LOCALID": "{i}",
}
NO_RUN = ["--config=vit_jax/config.py", "--workdir=nowhere"]
JOIN = """
import jax
from vit_jax import launch
run = lambda *_: print(jax.device_count(), "devices")
launch.main(run, "")
"""


@pytest.mark.parametrize(("flags", "num_processes"), [([], 2), (["--distributed=off"], 1)])
def test_a_cluster_is_found_by_itself(tmp_path: Path, flags: list[str], num_processes: int) -> None:
    """Without a flag; `--distributed=off` runs alone all the same."""
    port, script = str(free_port()), tmp_path / "join.py"
    script.write_text(JOIN)
    processes = []
    for i in range(num_processes):
        env = tiny.environment(
            XLA_FLAGS="--xla_force_host_platform_device_count=2",
            JAX_COORDINATOR_PORT=port,
            **{name: value.format(i=i) for name, value in SLURM.items()},
        )
        processes.append(Process([str(script), *flags, *NO_RUN], tmp_path / f"{i}.log", env))
    for i, process in enumerate(processes):
        assert process.wait() == 0, process.output
        assert re.search(rf"\b{2 * num_processes}\s+devices", process.output)
        assert (f"Process {i} of 2" in process.output) == (num_processes == 2), process.output
