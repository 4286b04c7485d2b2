"""Runs in a bucket: the same bits as on a disk, the same safety, also where requests fail."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.gcs_emulator import FAULTS, Server
from vit_jax.errors import PreemptedError, TransientError, UserError, is_transient
from vit_jax.files.manifest import damaged_files, write_manifest
from vit_jax.files.paths import bucket_files, to_path
from vit_jax.multihost.agreement import PreemptionNotice
from vit_jax.pretrained.load import read_source
from vit_jax.report.runs import read_run
from vit_jax.train import train_and_evaluate
from vit_jax.workdir import buckets
from vit_jax.workdir.buckets import BucketLock
from vit_jax.workdir.checkpoints import CheckpointManager
from vit_jax.workdir.metrics import MetricWriter, read_metrics
from vit_jax.workdir.orbax_parts import steps_in


def train(workdir: Any, **overrides: Any) -> dict[str, float]:
    return train_and_evaluate(
        tiny.config(**{"checkpoint__every_steps": 4, **overrides}, log__tensorboard=True),
        str(workdir),
    )


def arrays(workdir: str) -> dict[str, bytes]:
    with to_path(workdir).joinpath("params.npz").open("rb") as file, np.load(file) as archive:
        return {name: archive[name].tobytes() for name in archive}


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> str:
    workdir = str(tmp_path_factory.mktemp("disk") / "run")
    train(workdir, log__profile_steps=(2, 4))
    return workdir


class Impatient:
    """asyncio, but for the pauses between the attempts of gcsfs."""

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 50)


def names(server: Server, bucket: str) -> set[str]:
    return {name for b, name in server.bucket.objects if f"gs://{b}" == bucket}


OF_A_TRACE = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # gcsfs


@OF_A_TRACE
def test_a_run_in_a_bucket_is_the_run_on_a_disk(bucket, bucket_server, on_disk, monkeypatch):
    workdir = f"{bucket}/a/run"
    seen: list[tuple[int, int]] = []
    save = CheckpointManager.save

    def look(self: Any, step: int, *args: Any) -> None:
        seen.append((step, read_metrics(workdir)[-1]["step"]))
        save(self, step, *args)

    monkeypatch.setattr(CheckpointManager, "save", look)
    results = train(workdir, log__profile_steps=(2, 4))
    # A run killed after a checkpoint would not repeat the rows before it.
    assert seen == [(4, 4), (8, 8)]
    assert arrays(workdir) == arrays(on_disk)
    assert any(name.endswith(".xplane.pb") for name in names(bucket_server, bucket))
    files = {name.removeprefix("a/run/").split("/")[0] for name in names(bucket_server, bucket)}
    # Folders are marked by no object, and the lock is gone.
    assert files == {path.name for path in Path(on_disk).iterdir()} - {".lock"}
    assert train(workdir) == results  # has ended
    with pytest.raises(UserError, match=f"{workdir} belongs to a run with another config: seed"):
        train(workdir, seed=1)
    losses = [read_run(folder).curves["loss"].values for folder in (workdir, on_disk)]
    np.testing.assert_array_equal(*losses)
    stored, expected = read_source(workdir), read_source(on_disk)
    assert stored.description == expected.description
    np.testing.assert_equal(stored.params, expected.params)
    np.testing.assert_equal(read_source(f"{workdir}/checkpoints/8").params, expected.params)


def test_a_run_resumes_bit_for_bit_where_requests_fail(bucket, bucket_server, on_disk, monkeypatch):
    """Stopped in the middle; one request in twenty fails, in all ways that Google's do."""
    bucket_server.faults, bucket_server.slow_seconds = 0.05, 0.2
    monkeypatch.setattr("gcsfs.retry.asyncio", Impatient)
    workdir = f"{bucket}/run"
    reached = iter([False] * 5 + [True])
    with monkeypatch.context() as patch:
        patch.setattr(PreemptionNotice, "reached", lambda _: next(reached))
        with pytest.raises(PreemptedError, match="at step 5/8"):
            train(workdir)
    train(workdir)
    assert arrays(workdir) == arrays(on_disk)
    steps = [row["step"] for row in read_metrics(workdir) if "loss" in row]
    assert steps == list(range(1, 9))
    assert all(bucket_server.failed[fault] for fault in FAULTS)


@OF_A_TRACE
def test_damaged_and_unfinished_steps_are_not_restored(bucket, bucket_server, on_disk, caplog):
    workdir = f"{bucket}/run"
    bucket_files().put(on_disk, workdir, recursive=True)
    (to_path(workdir) / ".lock").unlink()  # a bucket's is another
    objects, name = bucket_server.bucket, bucket.removeprefix("gs://")
    step = sorted(file for file in names(bucket_server, bucket) if "checkpoints/8/" in file)
    # Step 8: one byte of an array is another. Step 9: killed while it was written.
    damaged = next(file for file in step if "/d/" in file)
    data = bytearray(objects.objects[name, damaged].data)
    data[len(data) // 2] ^= 1
    objects.put(name, damaged, bytes(data), {})
    for file in step:
        if not file.endswith("commit_success.txt"):
            copied = file.replace("checkpoints/8", "checkpoints/9")
            objects.put(name, copied, objects.objects[name, file].data, {})
    objects.put(name, "run/checkpoints/8_backup/notes.txt", b"mine", {})
    for result in ("params.npz", "results.json"):
        objects.delete(name, f"run/{result}", {})
    with caplog.at_level(logging.WARNING):
        train(workdir)
    assert arrays(workdir) == arrays(on_disk)
    assert f"Checkpoint {workdir}/checkpoints/8 is damaged: {damaged.partition('/8/')[2]}" in (
        caplog.text
    )
    files = names(bucket_server, bucket)
    assert damaged.replace("checkpoints/8", "checkpoints_damaged/8.1") in files
    assert not any("checkpoints/9" in file for file in files)
    assert "run/checkpoints/8_backup/notes.txt" in files


def test_an_address_that_is_no_folder() -> None:
    with pytest.raises(UserError, match="is not a folder in a bucket, such as gs://BUCKET/FOLDER"):
        train("gs://bucket/../x")


@pytest.mark.parametrize(("kind", "reason"), [("refused", "storage.objects"), ("missing", "exist")])
def test_a_bucket_that_is_not_ours(bucket, bucket_server, kind, reason):
    """It is not made, either."""
    vars(bucket_server)[kind] = bucket.removeprefix("gs://")
    before = bucket_server.requests["POST /storage/v1/b"]
    with pytest.raises(UserError, match=rf"Workdir {bucket}/run cannot be written: .*{reason}"):
        train(f"{bucket}/run")
    assert bucket_server.requests["POST /storage/v1/b"] == before


def test_a_bucket_that_does_not_answer_has_not_lost_its_checkpoints(
    bucket: str, bucket_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gcsfs says "no such folder" where a server answers 502; a run would begin anew."""
    monkeypatch.setattr("gcsfs.retry.asyncio", Impatient)
    folder = to_path(f"{bucket}/run/checkpoints")
    for step in ("4", "8"):
        (folder / step / "state" / "data").write_text("values")
        write_manifest(folder / step / "state", {"step": int(step)})
        (folder / step / "commit_success.txt").write_text("done")
    assert steps_in(folder) == [8, 4]
    for status in (502, 503, 403):
        bucket_server.answers = status
        with pytest.raises(Exception, match=r".*") as error:
            steps_in(folder)
        assert is_transient(error.value) == (status != 403)
        with pytest.raises(Exception, match=r".*"):
            damaged_files(folder / "8" / "state")  # not: "they are damaged"
        bucket_server.answers = 0
    assert damaged_files(folder / "8" / "state") == []


def test_logs_are_there_after_a_while_and_when_they_must_be(bucket, bucket_server, monkeypatch):
    """An outage costs neither rows nor events."""
    monkeypatch.setattr("gcsfs.retry.asyncio", Impatient)
    folder = to_path(f"{bucket}/run")
    rows = folder / "metrics.jsonl"

    def events() -> bytes:
        return b"".join(path.read_bytes() for path in folder.glob("tensorboard/*"))

    with MetricWriter(str(folder), start_step=0, tensorboard=True, config={}) as writer:
        writer.write(1, {"first": 1.0})
        assert rows.read_text() == ""
        writer.flush()
        assert rows.read_text() == '{"step": 1, "first": 1.0}\n'
    assert b"first" in events()
    monkeypatch.setattr(buckets, "_UPLOAD_SECONDS", 0.1)
    with MetricWriter(str(folder), start_step=1, tensorboard=True, config={}) as writer:
        bucket_server.answers = 503
        writer.write(2, {"second": 2.0})
        with pytest.raises(TransientError, match="run/metrics.jsonl could not be written"):
            writer.flush()
        bucket_server.answers = 0
        wait(lambda: "second" in rows.read_text())  # by itself
        writer.write(3, {"third": 3.0})
    assert rows.read_text().count("\n") == 3
    assert b"second" in events()
    assert b"third" in events()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(buckets, "LOST_SECONDS", 1.5)
    monkeypatch.setattr(buckets, "POLL_SECONDS", 0.1)


class Holder(BucketLock):
    """A lock of `host`; `lost` is what it was told."""

    def __init__(self, bucket: str, host: str):
        self.lost: list[str] = []
        super().__init__(to_path(f"{bucket}/run"), machine=host, on_loss=lambda *_: None)

    def end(self, message: str, exit_code: int) -> None:
        self.lost.append(f"{exit_code} {message}")


def wait(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("fast")
def test_a_lock_that_is_held_is_refused(bucket: str) -> None:
    first, second = Holder(bucket, "a"), Holder(bucket, "a")
    first.acquire()
    with pytest.raises(
        UserError, match=rf"{bucket}/run is in use by another process \(pid .* on a"
    ):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    assert not first.lost + second.lost


@pytest.mark.usefixtures("fast")
def test_the_lock_of_a_lost_host_is_taken_and_the_host_ends_if_it_comes_back(
    bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Holder(bucket, "a"), Holder(bucket, "b")
    with monkeypatch.context() as patch:
        patch.setattr(buckets, "RENEW_SECONDS", 4.0)  # it hangs
        first.acquire()
    began = time.monotonic()
    second.acquire()
    assert time.monotonic() - began >= 1.5
    assert "locked by another host (pid" in caplog.text
    wait(lambda: first.lost)
    assert first.lost[0].startswith("2 ")
    assert "was taken over by another run" in first.lost[0]
    first.release()  # is not its own any more
    with pytest.raises(UserError, match="in use"):
        Holder(bucket, "c").acquire()
    second.release()


@pytest.mark.usefixtures("fast")
def test_the_lock_of_a_killed_process_of_this_machine_is_taken_at_once(bucket, monkeypatch):
    """Also where another process has its number by now."""
    with monkeypatch.context() as patch:
        patch.setattr(buckets, "RENEW_SECONDS", 1e9)
        patch.setattr(buckets, "_started", lambda _: "12345")
        Holder(bucket, "a").acquire()
    began, second = time.monotonic(), Holder(bucket, "a")
    second.acquire()
    assert time.monotonic() - began < 1.5
    second.release()


@pytest.mark.usefixtures("fast")
def test_a_run_that_cannot_renew_its_lock_ends_before_another_takes_it(
    bucket: str, bucket_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "_TIMEOUT", 0.3)
    ours = Holder(bucket, "a")
    ours.acquire()
    began = time.monotonic()
    bucket_server.speaks.clear()  # neither an answer nor an error
    wait(lambda: ours.lost)
    assert time.monotonic() - began < buckets.LOST_SECONDS
    bucket_server.speaks.set()
    assert ours.lost[0].startswith("75 ")
    ours.release()


@pytest.mark.usefixtures("fast")
def test_a_lock_stays_ours_where_replies_are_lost(bucket: str, bucket_server: Server) -> None:
    ours = Holder(bucket, "a")
    bucket_server.lost_replies = 3  # of the first write and its repetitions
    ours.acquire()
    bucket_server.lost_replies = 1
    wait(lambda: not bucket_server.lost_replies)
    generation = ours._generation
    wait(lambda: ours._generation != generation)
    assert not ours.lost
    ours.release()
    assert not to_path(f"{bucket}/run/.lock").exists()
