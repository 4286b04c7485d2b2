"""Nothing dies, and yet nothing moves: an image that never comes, a network that is cut."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.cluster import cluster
from tests.fixtures_data import encoded, write_folder
from vit_jax.data.pipeline import order
from vit_jax.errors import REQUEUE_EXIT_CODE
from vit_jax.files.paths import replacing

pytestmark = pytest.mark.slow

NUM_IMAGES = 320
PREPROCESS = "decode|tests.distributed.waits.wait_on_black()|resize(16)|value_range(-1, 1)"
BATCH_SIZE = 16


def block_example(photos: Path, after_step: int) -> None:
    """Turns a photo black, on which `wait_on_black` never returns, as reading on a dead mount.

    It is an example of the last process that comes up after `after_step`.
    """
    files = sorted((photos / "train").rglob("*.png"))
    (position,) = order(0, NUM_IMAGES, np.array([(after_step + 1) * BATCH_SIZE - 1]))
    with replacing(files[position]) as path:
        path.write_bytes(encoded(np.zeros((16, 20, 3), np.uint8), "PNG"))


@pytest.mark.parametrize(("num_processes", "num_workers"), [(2, 0), (1, 1)])
def test_a_process_that_hangs_with_its_heart_beating_is_named(tmp_path, num_processes, num_workers):
    """In a thread of one of two processes, or in the data worker of a process alone."""
    photos = write_folder(
        tmp_path / "photos",
        {split: {"a": n // 2, "b": n // 2} for split, n in (("train", NUM_IMAGES), ("test", 8))},
        extension=".png",
    )
    with cluster(
        tmp_path,
        f"--config.dataset.name={photos}",
        "--config.dataset.split=train",
        f"--config.dataset.preprocess={PREPROCESS}",
        "--config.evaluators.test.split=test",
        f"--config.dataset.batch_size={BATCH_SIZE}",
        "--config.duration.steps=1000",
        "--config.loader.prefetch=1",
        f"--config.loader.num_workers={num_workers}",
        "--config.processes.step_timeout_seconds=10",
        num_processes=num_processes,
    ) as running:
        running.wait_for_step(5)
        block_example(photos, running[0].step + 12)
        assert running.exit_codes() == [REQUEUE_EXIT_CODE] * num_processes, running.output
    *others, last = running.processes
    verdict = f"No progress: process {len(others)} (pid {last.popen.pid} on"
    for process in running.processes:
        assert verdict in process.output
        assert "reading a batch" in process.output
    assert "in __next__" in last.output  # the stack of the one that hangs


NAMESPACES = ("vitjax0", "vitjax1", "vitjax2")
SWITCH = "vitjaxsw"


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[list[str]]:
    """Addresses of network namespaces that see each other through a bridge, and nothing else."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    addresses = [f"10.77.31.{i + 1}" for i in range(len(NAMESPACES))]
    with contextlib.ExitStack() as stack:
        for name in (SWITCH, *NAMESPACES):
            ip(f"netns add {name}")
            stack.callback(ip, f"netns del {name}")
        ip(f"-n {SWITCH} link add br0 type bridge")
        ip(f"-n {SWITCH} link set br0 up")
        for i, (name, address) in enumerate(zip(NAMESPACES, addresses, strict=True)):
            ip(f"-n {name} link add eth0 type veth peer v{i} netns {SWITCH}")
            ip(f"-n {SWITCH} link set v{i} master br0 up")
            ip(f"-n {name} addr add {address}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")
            ip(f"-n {name} link set lo up")
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            # Gloo listens on the address of the machine's name.
            hosts = f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            (folder / "hosts").write_text(hosts)
        yield addresses


def test_a_cut_link_ends_both_sides(network: list[str], tmp_path: Path) -> None:
    with cluster(
        tmp_path,
        "--config.duration.steps=1000",
        "--config.dataset.batch_size=15",
        num_processes=3,
        num_devices=1,
        namespaces=NAMESPACES,
        address=f"{network[0]}:5000",
    ) as running:
        running.wait_for_step(3)
        ip(f"-n {SWITCH} link set v2 down")
        assert running.exit_codes() == [REQUEUE_EXIT_CODE] * 3, running.output
    for i, lost in enumerate((2, 2, 0)):
        assert f"process {lost} (pid" in running[i].output
