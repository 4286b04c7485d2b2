"""The same numbers from any number of processes, on any mesh; the processes find each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import forks, tiny
from tests.distributed.cluster import TIMEOUT_SECONDS, cluster, free_port
from vit_jax.errors import counted
from vit_jax.evaluators.create import OF_FEATURES

pytestmark = pytest.mark.slow

RUN = (
    "--config.duration.steps=20",
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
LAYOUTS: list[tuple[int, int, dict[str, int]]] = [
    (1, 1, {}),
    (2, 2, {"data": 2, "tensor": 2}),
]


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
            assert f", {counted(num_processes * num_devices, 'device')}." in running[0].output
        workdirs.append(running.workdir)
    return workdirs


def losses(workdir: Path) -> np.ndarray:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return np.array([row["loss"] for row in rows if "loss" in row])


def results(workdir: Path) -> dict[str, float]:
    return json.loads((workdir / "results.json").read_text())


def test_loss_curves_agree(runs: list[Path]) -> None:
    expected, found = map(losses, runs)
    assert len(expected) == 20
    assert np.ptp(expected) > 0.01  # something is learned
    # A unit in the last place of float32 is 2.4e-7 here; see feasibility, section 1.
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)


def test_evaluation_is_exact_where_the_hosts_have_unequal_shares(runs: list[Path]) -> None:
    expected, found = map(results, runs)
    assert found["test/num_examples"] == expected["test/num_examples"] == 45
    assert found["test/accuracy"] == pytest.approx(expected["test/accuracy"], abs=1e-6)
    assert found["test/loss"] == pytest.approx(expected["test/loss"], abs=2e-6)


def test_so_are_features_of_uneven_splits(runs: list[Path]) -> None:
    expected, found = map(results, runs)
    metrics = [name for name in expected if name.startswith(tuple(OF_FEATURES))]
    assert len(metrics) > 8
    for name in metrics:
        # The parameters differ in the last places, so one image in 45 may fall to the other side.
        allowed = 0 if name.endswith("num_examples") else 1.01 / 45
        if not name.endswith("_ci95"):
            assert found[name] == pytest.approx(expected[name], abs=allowed), name
        if name.endswith("num_examples"):
            assert found[name] == 45


def slurm(i: int, port: int) -> dict[str, str]:
    """What srun tells its tasks."""
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(i),
        "SLURM_LOCALID": str(i),
        "JAX_COORDINATOR_PORT": str(port),
    }


def open_mpi(i: int, port: int) -> dict[str, str]:
    """What mpirun tells its ranks."""
    return {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(i),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(i),
        "JAX_COORDINATOR_PORT": str(port),
    }


JOIN = """
import sys
from vit_jax import command_line, launch
command_line.define_flags()
command_line.parse_flags("vit_jax/config.py")
launch.start_logging()
launch.join_processes(launch.FLAGS.config.processes)
import jax
print(jax.device_count(), "devices")
launch.leave_processes()
"""


@pytest.mark.parametrize(
    ("variables", "flags", "num_devices"),
    [(slurm, [], 4), (open_mpi, [], 4), (slurm, ["--distributed=off"], 2)],
)
def test_a_cluster_is_found_by_itself(
    tmp_path: Path,
    variables: Callable[[int, int], dict[str, str]],
    flags: list[str],
    num_devices: int,
) -> None:
    """Without a flag; `--distributed=off` runs alone all the same."""
    port, num_processes = free_port(), num_devices // 2
    xla_flags = "--xla_force_host_platform_device_count=2"
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    processes = [
        forks.Process(
            [str(script), *flags],
            tmp_path / f"{i}.log",
            tiny.environment(XLA_FLAGS=xla_flags, **variables(i, port)),
        )
        for i in range(num_processes)
    ]
    for i, process in enumerate(processes):
        status = process.wait(TIMEOUT_SECONDS)
        output = (tmp_path / f"{i}.log").read_text()
        assert status == 0, output
        assert f"{num_devices} devices" in output
        assert (f"Process {i} of 2" in output) == (num_processes == 2), output
