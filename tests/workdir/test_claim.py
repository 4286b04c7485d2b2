"""Workdirs: whose they are, who works in them, and that nothing of another run is overwritten."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from vit_jax.errors import UserError
from vit_jax.files.paths import read_json
from vit_jax.workdir import buckets
from vit_jax.workdir.claim import claim_workdir, release_workdir

CONFIG: dict[str, Any] = {
    "seed": 0,
    "model": {"patch_size": (4, 4), "dropout": 0.0, "name": "vit", "extra": None, "kwargs": {}},
    "mesh": {"data": -1, "fsdp": 1},
    "log": {"every_steps": 10},
    "mesh_more": 1,
}
DATASET = {"num_examples": 1797, "digest": "abc"}


def hold(
    workdir: Path,
    config: dict[str, Any] = CONFIG,
    dataset: dict[str, Any] = DATASET,
    *,
    resume: str = "auto",
) -> None:
    claim_workdir(workdir, config, dataset, resume=resume)


def claim(workdir: Path, *args: Any, **kwargs: Any) -> None:
    """A start of the run that gets as far as its first line of metrics."""
    hold(workdir, *args, **kwargs)
    (workdir / "metrics.jsonl").write_text('{"step": 1}\n')
    release_workdir(workdir)


def changed(**sections: Any) -> dict[str, Any]:
    """CONFIG with some values of its sections, or whole keys, replaced."""
    return {
        key: {**value, **sections[key]}
        if key in sections and isinstance(value, dict)
        else sections.get(key, value)
        for key, value in CONFIG.items()
    }


def test_a_new_workdir_is_created_and_resumed(tmp_path: Path) -> None:
    workdir = tmp_path / "a" / "b"
    claim(workdir)
    saved = (workdir / "config.json").read_bytes()
    assert json.loads(saved) == json.loads(json.dumps(CONFIG))
    assert read_json(workdir / "dataset.json") == DATASET
    (workdir / "thesis.tex").write_text("hands off")
    claim(workdir)
    claim(workdir, changed(mesh={"data": 2}, log={"every_steps": 1}, model={"remat": "full"}))
    # A key of another version, which is off.
    claim(workdir, changed(model={"new": False, "newer": None}))
    # The same values in another form.
    claim(workdir, changed(seed=0.0, model={"patch_size": [4.0, 4], "dropout": 0}))
    assert (workdir / "config.json").read_bytes() == saved
    assert (workdir / "thesis.tex").read_text() == "hands off"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"mesh_more": 2, "seed": 1}, "config: mesh_more: 1 -> 2, seed: 0 -> 1"),
        ({"model": {"patch_size": (4, 8)}}, r"model.patch_size: \[4, 4\] -> \[4, 8\]"),
        ({"model": {"kwargs": {"a": 1}}}, r"kwargs: \{\} -> \(absent\), .*a: \(absent\) -> 1"),
    ],
)
def test_another_config_is_refused_with_its_keys(tmp_path, sections, message):
    claim(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(UserError, match=message + r".*--workdir, or --resume=force") as error:
        claim(tmp_path, changed(**sections))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="another dataset: num_examples: 1797 -> 1798"):
        claim(tmp_path, dataset={**DATASET, "num_examples": 1798})
    assert (tmp_path / "config.json").read_bytes() == before
    claim(tmp_path)  # a refused run leaves the workdir free


def test_force_keeps_every_earlier_config(tmp_path: Path) -> None:
    claim(tmp_path)
    claim(tmp_path, changed(seed=1), resume="force")
    for name in ("params.npz", "results.json"):
        (tmp_path / name).write_text("of seed 1")
    for _ in range(2):  # the second time there is nothing new
        claim(tmp_path, changed(seed=2), {**DATASET, "digest": "d"}, resume="force")
    seeds = [read_json(tmp_path / f"config{n}.json")["seed"] for n in ("", ".1", ".2")]
    assert seeds == [2, 0, 1]
    assert read_json(tmp_path / "dataset.1.json") == DATASET
    renamed = {"config.1.json", "config.2.json", "dataset.1.json", "params.1.npz", "results.1.json"}
    current = {".lock", "metrics.jsonl", "config.json", "dataset.json"}
    assert {p.name for p in tmp_path.iterdir()} == renamed | current
    claim(tmp_path, changed(seed=2), {**DATASET, "digest": "d"})
    with pytest.raises(UserError, match=r"--resume='yes' is unknown\. Known: auto, force"):
        claim(tmp_path, resume="yes")


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    claim(tmp_path)
    (tmp_path / "config.json").write_bytes(content := b"[]")
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        claim(tmp_path)
    claim(tmp_path, resume="force")
    assert (tmp_path / "config.1.json").read_bytes() == content
    claim(tmp_path)


def test_results_of_something_else_are_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "something").mkdir(parents=True)
    (tmp_path / "params.npz").write_text("weights")
    with pytest.raises(UserError, match="contains checkpoints and params.npz but no config.json"):
        claim(tmp_path)
    claim(tmp_path, resume="force")
    claim(tmp_path)


def test_a_start_that_failed_before_its_first_update_holds_nobody(tmp_path: Path) -> None:
    hold(tmp_path)
    release_workdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()  # made before the failure, still empty
    hold(tmp_path, changed(seed=5), {**DATASET, "digest": "other"})
    (tmp_path / "config.json").unlink()  # it is written last: killed before that
    claim(tmp_path, changed(seed=5))
    assert read_json(tmp_path / "config.json")["seed"] == 5
    assert read_json(tmp_path / "dataset.json") == DATASET
    with pytest.raises(UserError, match="seed: 5 -> 0"):
        claim(tmp_path)


def test_a_file_in_the_way_and_a_folder_that_even_root_cannot_write_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/vit_jax")):
        with pytest.raises(UserError, match="cannot be written: .*Choose another --workdir") as e:
            claim(workdir)
        assert "\n" not in str(e.value)


HOLDER = """
import os, socket, sys, time
from vit_jax.workdir import claim
if boot := sys.argv[2]:
    claim._machine = lambda: f"{socket.gethostname()} (boot {boot})"
claim.claim_workdir(sys.argv[1], {"seed": 0}, {}, resume="auto")
if os.fork() == 0:
    print("claimed", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def holding(workdir: Path, boot: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that has claimed the workdir, on a host of that boot, and has a child."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(workdir), boot],
        cwd=tiny.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "claimed\n"
        yield holder
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)
        holder.communicate()


def test_a_workdir_is_for_one_process_until_it_dies(tmp_path: Path) -> None:
    with holding(tmp_path) as holder:
        for resume in ("auto", "force"):
            with pytest.raises(UserError, match=f"in use by another process .pid {holder.pid} on"):
                claim(tmp_path, {"seed": 0}, {}, resume=resume)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        # A worker that outlives its killed parent must not keep the workdir shut.
        claim(tmp_path, {"seed": 0}, {})


def test_a_lock_of_another_host_is_waited_for(tmp_path, monkeypatch, caplog):
    """Of the same name but started on another machine, as in Kubernetes."""
    monkeypatch.setattr(buckets, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(buckets, "LOST_SECONDS", 0.5)
    with holding(tmp_path, "another") as holder:
        with pytest.raises(UserError, match=f"in use .*pid {holder.pid} on {socket.gethostname()}"):
            claim(tmp_path, {"seed": 0}, {})
        assert caplog.text.count("is locked by another host") == 1
        monkeypatch.setattr(buckets, "LOST_SECONDS", 60.0)
        threading.Timer(0.5, holder.kill).start()
        claim(tmp_path, {"seed": 0}, {})  # it was lost


def test_the_same_process_may_claim_again(tmp_path: Path) -> None:
    workdir = tmp_path / "w"
    hold(workdir)
    hold(workdir)
    shutil.rmtree(workdir)  # with the lock in it
    hold(workdir)
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", code, str(workdir / ".lock")]
    assert b"BlockingIOError" in subprocess.run(command, capture_output=True).stderr
    release_workdir(workdir)
    release_workdir(workdir)
    assert subprocess.run(command).returncode == 0
