"""Downloads against a server that fails in every way."""

from __future__ import annotations

import base64
import collections
import errno
import hashlib
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.file_server import FileServer, Served, serve_files
from vit_jax.errors import UserError
from vit_jax.pretrained.zoo import download as download_module
from vit_jax.pretrained.zoo import remote_file
from vit_jax.pretrained.zoo.download import download
from vit_jax.pretrained.zoo.download_bar import Bar

BODY = bytes(i * 7 % 251 for i in range(20_000))
OTHER = bytes(i * 5 % 241 for i in range(24_000))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve_files() as server:
        yield server


class Pauses(list[float]):
    """Takes the place of time.sleep."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def put(server: FileServer, body: bytes = BODY, **kwargs: Any) -> Served:
    server.files["/file.npz"] = Served(body, **kwargs)
    return server.files["/file.npz"]


def get(server: FileServer, folder: Path, **kwargs: Any) -> Path:
    kwargs = {"sleep": Pauses(), **kwargs}
    return download(f"{server.address}/file.npz", folder / "cache" / "file.npz", **kwargs)


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache").iterdir())


def ranges(server: FileServer) -> list[str | None]:
    return [wanted for _, wanted, _ in server.requests]


def test_fetches_once(server: FileServer, tmp_path: Path) -> None:
    put(server)
    sha256 = hashlib.sha256(BODY).hexdigest()
    md5 = hashlib.md5(BODY).hexdigest()
    size = (len(BODY), len(BODY))
    for _ in range(2):
        path = get(server, tmp_path, sha256=sha256, md5=md5.upper(), size=size)
    assert path.read_bytes() == BODY
    assert len(server.requests) == 1
    assert left_over(tmp_path) == ["file.npz"]


def test_continues_a_broken_connection_where_it_broke(server: FileServer, tmp_path: Path) -> None:
    put(server, faults=[{"break_after": 7000}, {"break_after": 5000}])
    pauses = Pauses()
    assert get(server, tmp_path, sleep=pauses).read_bytes() == BODY
    assert ranges(server) == [None, "bytes=7000-", "bytes=12000-"]
    assert server.requests[1][2] == '"one"'  # only of the same file
    assert pauses == [1.0, 2.0]


def test_gives_up_and_continues_in_the_next_call(server: FileServer, tmp_path: Path) -> None:
    put(server, faults=[{"break_after": 7000}, {"status": 503}])
    with pytest.raises(UserError) as error:
        get(server, tmp_path, attempts=2)
    assert "gave up after 2 attempts: the server says 503" in str(error.value)
    assert "continues at" in str(error.value)
    assert left_over(tmp_path) == ["file.npz.part", "file.npz.part.json"]
    assert get(server, tmp_path).read_bytes() == BODY
    assert ranges(server)[-1] == "bytes=7000-"
    assert left_over(tmp_path) == ["file.npz"]


def test_long_progress_resets_the_count_of_faults(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "_PROGRESS", 3000)
    put(server, faults=[{"break_after": 4000} for _ in range(4)])
    pauses = Pauses()
    assert get(server, tmp_path, attempts=2, sleep=pauses).read_bytes() == BODY
    assert pauses == [1.0] * 4


def test_a_server_that_cannot_continue_sends_all_again(server: FileServer, tmp_path: Path) -> None:
    put(server, faults=[{"break_after": 7000}, {"ignore_range": True}])
    assert get(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None, "bytes=7000-"]


@pytest.mark.parametrize("fault", [{}, {"ignore_if_range": True}])
def test_never_joins_two_versions_of_a_file(
    server: FileServer, tmp_path: Path, fault: dict[str, object]
) -> None:
    put(server, faults=[{"break_after": 7000}])
    with pytest.raises(UserError):
        get(server, tmp_path, attempts=1)
    put(server, OTHER, headers={"ETag": '"two"'}, faults=[fault])
    assert get(server, tmp_path).read_bytes() == OTHER
    assert ranges(server)[1] == "bytes=7000-"


def test_a_file_that_became_shorter_is_fetched_anew(server: FileServer, tmp_path: Path) -> None:
    put(server, faults=[{"break_after": 7000}])
    with pytest.raises(UserError):
        get(server, tmp_path, attempts=1)
    put(server, BODY[:5000], faults=[{"ignore_if_range": True}])  # answers 416
    assert get(server, tmp_path).read_bytes() == BODY[:5000]
    assert ranges(server) == [None, "bytes=7000-", None]


@pytest.mark.parametrize(
    ("headers", "continued"),
    [
        ({"Last-Modified": "Mon, 19 Oct 2020 10:27:41 GMT"}, True),
        ({"ETag": 'W/"weak"'}, False),
        ({}, False),
    ],
)
def test_continues_only_what_can_be_recognised(
    server: FileServer, tmp_path: Path, headers: dict[str, str], continued: bool
) -> None:
    put(server, headers=headers, faults=[{"break_after": 7000}])
    assert get(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None, "bytes=7000-" if continued else None]


def test_a_part_of_unknown_origin_is_not_continued(server: FileServer, tmp_path: Path) -> None:
    put(server)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "file.npz.part").write_bytes(OTHER[:100])
    assert get(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None]


def test_a_process_killed_at_the_very_end_fetches_nothing(
    server: FileServer, tmp_path: Path
) -> None:
    part = tmp_path / "cache" / "file.npz.part"
    part.parent.mkdir()
    part.write_bytes(BODY)
    remote = remote_file.RemoteFile(len(BODY), '"one"', "")
    remote_file.remember(part, f"{server.address}/file.npz", remote)
    assert get(server, tmp_path).read_bytes() == BODY
    assert server.requests == []


def test_a_silent_server_counts_as_broken(server: FileServer, tmp_path: Path) -> None:
    put(server, faults=[{"stall_after": 7000}])
    assert get(server, tmp_path, timeout=0.2).read_bytes() == BODY
    assert ranges(server) == [None, "bytes=7000-"]


def test_waits_as_long_as_the_server_asks(server: FileServer, tmp_path: Path) -> None:
    put(
        server,
        faults=[{"status": 500}, {"status": 429, "headers": {"Retry-After": "7"}}, {"status": 503}],
    )
    pauses = Pauses()
    assert get(server, tmp_path, sleep=pauses).read_bytes() == BODY
    assert pauses == [1.0, 7.0, 4.0]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"sha256": "0123"}, "its sha256 is .* and should be 0123; the file is not kept"),
        ({"md5": "0123"}, "its md5 is .* and should be 0123; the file is not kept"),
    ],
)
def test_wrong_bytes_are_not_kept(
    server: FileServer, tmp_path: Path, kwargs: dict[str, str], message: str
) -> None:
    put(server)
    with pytest.raises(UserError, match=message):
        get(server, tmp_path, **kwargs)
    assert len(server.requests) == 2  # once may have happened on the way
    assert left_over(tmp_path) == []


def test_the_servers_own_hash_is_checked(server: FileServer, tmp_path: Path) -> None:
    def headers(body: bytes) -> dict[str, str]:
        digest = base64.b64encode(hashlib.md5(body).digest()).decode()
        return {"ETag": '"one"', "x-goog-hash": f"crc32c=AAAAAA==,md5={digest}"}

    put(server, headers=headers(OTHER))
    with pytest.raises(UserError, match="its md5 is"):
        get(server, tmp_path)
    put(server, headers=headers(BODY), faults=[{"break_after": 7000}])
    assert get(server, tmp_path).read_bytes() == BODY


def test_a_file_of_another_size_is_refused_before_it_is_fetched(
    server: FileServer, tmp_path: Path
) -> None:
    put(server, BODY[:1000])
    with pytest.raises(UserError, match="has 1000 bytes and should have 19000 to 21000"):
        get(server, tmp_path, size=(19_000, 21_000))
    assert len(server.requests) == 1
    assert left_over(tmp_path) == []


def test_a_damaged_copy_is_fetched_again(server: FileServer, tmp_path: Path) -> None:
    put(server)
    path = get(server, tmp_path)
    path.write_bytes(BODY[:10])
    assert get(server, tmp_path, size=(len(BODY), len(BODY))).read_bytes() == BODY


def test_a_server_that_always_sends_less_than_it_says(server: FileServer, tmp_path: Path) -> None:
    put(server, headers={}, faults=[{"break_after": 7000} for _ in range(3)])
    with pytest.raises(UserError, match="the connection broke after 7000 of 20000 bytes"):
        get(server, tmp_path, attempts=3)
    assert len(server.requests) == 3


def test_no_such_file(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"file.npz does not exist \(404 Not Found\)"):
        get(server, tmp_path)
    assert len(server.requests) == 1
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("status", [401, 403])
def test_no_permission(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    put(server, faults=[{"status": status}])
    with pytest.raises(UserError, match=f"the server refuses it \\({status}"):
        get(server, tmp_path)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.address)
    server.files["/bucket/a/file.npz"] = Served(BODY, faults=[{"status": status}])
    with pytest.raises(UserError, match="gcloud storage cp gs://bucket/a/file.npz"):
        download("gs://bucket/a/file.npz", tmp_path / "x", sleep=Pauses())


def test_no_network(tmp_path: Path) -> None:
    with serve_files() as server:
        address = server.address  # of a port that nobody listens to any more
    pauses = Pauses()
    with pytest.raises(UserError) as error:
        download(f"{address}/a", tmp_path / "cache" / "a", sleep=pauses)
    assert "no connection to 127.0.0.1 (Connection refused). Check the network" in str(error.value)
    assert "\n" not in str(error.value)
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    assert left_over(tmp_path) == []


def test_follows_to_another_address_with_the_range(server: FileServer, tmp_path: Path) -> None:
    put(server, faults=[{"location": "/moved.npz"}, {"location": "/moved.npz"}])
    server.files["/moved.npz"] = Served(BODY, faults=[{"break_after": 7000}])
    assert get(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None, None, "bytes=7000-", "bytes=7000-"]


def test_goes_through_a_proxy(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.address)
    server.files["http://models.invalid/file.npz"] = Served(BODY)
    path = download("http://models.invalid/file.npz", tmp_path / "file.npz")
    assert path.read_bytes() == BODY


def test_a_bucket_is_read_over_https(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    assert (
        remote_file.http_address("gs://vit_models/imagenet21k+imagenet2012/R50+ViT-B_16.npz")
        == "https://storage.googleapis.com/vit_models/imagenet21k%2Bimagenet2012/R50%2BViT-B_16.npz"
    )
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:4443")
    assert remote_file.http_address("gs://a/b.npz") == "http://localhost:4443/a/b.npz"
    for wrong in ("gs://bucket", "gs://bucket/", "gs:///x", "ftp://a/b", "nothing", "https://a/b/"):
        with pytest.raises(UserError, match="is no address of a file"):
            remote_file.http_address(wrong)


def test_a_cache_that_cannot_be_written(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot write to .*cache .*; set VIT_JAX_CACHE"):
        get(server, tmp_path)
    assert server.requests == []


def test_a_full_disk_is_noticed_before(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server)
    usage = collections.namedtuple("usage", "total used free")(10, 0, 100)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="the disk is full: .* does not fit into .*cache"):
        get(server, tmp_path)
    assert left_over(tmp_path) == []


def test_a_disk_that_fills_up_meanwhile(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BufferedRandom):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_full(path: Path) -> Full:
        path.parent.mkdir()
        return Full(io.FileIO(path, "a+"))

    put(server)
    monkeypatch.setattr(download_module, "_open", open_full)
    with pytest.raises(UserError, match="the disk is full"):
        get(server, tmp_path)


def test_of_two_processes_one_fetches_and_the_other_waits(
    server: FileServer, tmp_path: Path
) -> None:
    put(server, faults=[{"wait": True}])
    program = (
        "import logging, sys; logging.basicConfig(level=logging.INFO)\n"
        "from vit_jax.pretrained.zoo.download import download\n"
        "download(sys.argv[1], sys.argv[2])"
    )
    path = tmp_path / "cache" / "file.npz"
    command = [sys.executable, "-c", program, f"{server.address}/file.npz", str(path)]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as first,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as second,
    ):
        lines = [[], []]
        # Which of them waits is for the kernel to say; the one that does says so.
        for process, own in ((first, lines[0]), (second, lines[1])):
            assert process.stderr
            own.append(process.stderr.readline())
        assert sum("waiting for it" in own[0] for own in lines) == 1, lines
        server.release.set()
        assert [process.wait(20) for process in (first, second)] == [0, 0]
    assert len(server.requests) == 1
    assert path.read_bytes() == BODY
    assert left_over(tmp_path) == ["file.npz"]


def test_says_what_it_does(
    server: FileServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(server, faults=[{"status": 500}])
    with caplog.at_level(logging.INFO):
        get(server, tmp_path)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "the server says 500 Internal Server Error; again in 1 s" in caplog.text


def test_the_bar_is_for_terminals_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bar("a.npz", have=0, length=100) as bar:
        bar.add(100)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Bar("a.npz", have=2**20, length=4 * 2**20) as bar:
        bar.add(2**20)
    drawn = capsys.readouterr().err
    assert "a.npz   25 % of 4.0 MiB" in drawn
    assert "a.npz   50 % of 4.0 MiB" in drawn
    assert drawn.endswith("\n")
