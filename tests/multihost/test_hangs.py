"""Nothing dies, and yet nothing moves: a file that never answers, a network that is cut."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.distributed.cluster import cluster
from vit_jax.data.order import order
from vit_jax.multihost.verdict import REQUEUE_EXIT_CODE

pytestmark = pytest.mark.slow

NUM_IMAGES = 320
BATCH_SIZE = 16


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, count in (("train", NUM_IMAGES), ("test", 8)):
        for i in range(count):
            folder = tmp_path / "photos" / split / f"class{i % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            image = rng.integers(0, 255, (20, 20, 3), np.uint8)
            cv2.imwrite(str(folder / f"{i:04}.png"), image)
    return tmp_path / "photos"


def run_on(photos: Path, *arguments: str) -> tuple[str, ...]:
    return (
        f"--config.dataset.name={photos}",
        "--config.dataset.split=train",
        "--config.evaluators.test.split=test",
        f"--config.dataset.batch_size={BATCH_SIZE}",
        "--config.duration.steps=1000",
        "--config.loader.prefetch=1",
        "--config.processes.step_timeout_seconds=10",
        *arguments,
    )


def block_example(photos: Path, rows: slice, after_step: int) -> Path:
    """Turns a file into a pipe nobody writes to: reading it never returns, as on a dead mount.

    It is an example that comes up, after `after_step`, in these rows of a batch.
    """
    files = sorted((photos / "train").rglob("*.png"))
    positions = (after_step * BATCH_SIZE + np.arange(BATCH_SIZE))[rows]
    path = files[order(0, NUM_IMAGES, positions)[0]]
    path.unlink()
    os.mkfifo(path)
    return path


def test_a_process_that_hangs_with_its_heart_beating_is_named(photos: Path, tmp_path: Path) -> None:
    with cluster(tmp_path, *run_on(photos), num_processes=2) as running:
        running.wait_for_step(5)
        later = running[0].step + 12
        block_example(photos, slice(BATCH_SIZE // 2, None), later)  # of process 1
        assert running.exit_codes() == [REQUEUE_EXIT_CODE] * 2, running.output
    verdict = f"No progress: process 1 (pid {running[1].popen.pid} on"
    assert verdict in running[0].output
    assert verdict in running[1].output
    assert "reading a batch" in running[0].output
    assert "in __next__" in running[1].output  # the stack of the one that hangs


def test_a_stuck_worker_ends_a_process_alone(photos: Path, tmp_path: Path) -> None:
    run = run_on(photos, "--config.loader.num_workers=1")
    with cluster(tmp_path, *run, num_processes=1) as running:
        running.wait_for_step(5)
        block_example(photos, slice(None), running[0].step + 12)
        assert running.exit_codes() == [REQUEUE_EXIT_CODE], running.output
    assert "reading a batch" in running[0].output
    assert "No progress: process 0" in running[0].output


NAMESPACES = ("vitjax0", "vitjax1", "vitjax2")
SWITCH = "vitjaxsw"


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


@pytest.fixture
def network() -> Iterator[list[str]]:
    """Addresses of network namespaces that see each other through a bridge, and nothing else."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    addresses = [f"10.77.31.{i + 1}" for i in range(len(NAMESPACES))]
    hosts = []
    try:
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "br0", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "br0", "up")
        for i, (name, address) in enumerate(zip(NAMESPACES, addresses, strict=True)):
            ip("netns", "add", name)
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", f"v{i}", "netns", SWITCH)
            ip("-n", SWITCH, "link", "set", f"v{i}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            # Gloo listens on the address of the machine's name.
            folder = Path("/etc/netns") / name
            hosts.append(folder)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n"
            )
        yield addresses
    finally:
        for name in (*NAMESPACES, SWITCH):
            ip("netns", "del", name, check=False)
        for folder in hosts:
            shutil.rmtree(folder, ignore_errors=True)


def test_a_cut_link_ends_both_sides(network: list[str], tmp_path: Path) -> None:
    with cluster(
        tmp_path,
        "--config.duration.steps=1000",
        "--config.dataset.batch_size=15",
        num_processes=3,
        num_devices=1,
        prefix=lambda i: ["ip", "netns", "exec", NAMESPACES[i]],
        address=f"{network[0]}:5000",
    ) as running:
        running.wait_for_step(3)
        ip("-n", SWITCH, "link", "set", "v2", "down")
        assert running.exit_codes() == [REQUEUE_EXIT_CODE] * 3, running.output
    assert "process 2 (" in running[0].output
    assert "process 2 (" in running[1].output
    assert "process 0 (pid" in running[2].output
