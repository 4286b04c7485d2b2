"""Downloads against a server that fails in every way."""

from __future__ import annotations

import base64
import collections
import datetime
import errno
import hashlib
import ipaddress
import logging
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.file_server import FileServer, Served, serve_files
from vit_jax.errors import UserError
from vit_jax.pretrained.zoo import download as download_module
from vit_jax.pretrained.zoo.download import download

BODY = bytes(i * 7 % 251 for i in range(20_000))
OTHER = bytes(i * 5 % 241 for i in range(24_000))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve_files() as server:
        yield server


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds between attempts, which are not slept."""
    pauses: list[float] = []

    class Time:
        sleep = pauses.append
        monotonic = download_module.time.monotonic

    monkeypatch.setattr(download_module, "time", Time)
    return pauses


def put(server: FileServer, body: bytes = BODY, **kwargs: Any) -> Served:
    server.files["/file.npz"] = Served(body, **kwargs)
    return server.files["/file.npz"]


def get(server: FileServer, folder: Path, **kwargs: Any) -> Path:
    return download(f"{server.address}/file.npz", folder / "cache" / "file.npz", **kwargs)


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache").iterdir())


def ranges(server: FileServer) -> list[str | None]:
    return [wanted for _, wanted, _ in server.requests]


@pytest.fixture
def patient_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fault is the last."""
    monkeypatch.setattr(download_module, "_ATTEMPTS", 1)


def test_fetches_once(server: FileServer, tmp_path: Path) -> None:
    put(server)
    sha256 = hashlib.sha256(BODY).hexdigest()
    size = (len(BODY), len(BODY))
    for _ in range(2):
        path = get(server, tmp_path, sha256=sha256.upper(), size=size)
    assert path.read_bytes() == BODY
    assert len(server.requests) == 1
    assert left_over(tmp_path) == ["file.npz"]


def test_continues_a_broken_connection_where_it_broke(
    server: FileServer, tmp_path: Path, pauses: list[float]
) -> None:
    put(server, faults=[{"break_after": 7000}, {"break_after": 5000}])
    assert get(server, tmp_path).read_bytes() == BODY
    # Each time with the last byte again, so that a complete file can be recognized.
    assert ranges(server) == [None, "bytes=6999-", "bytes=11998-"]
    assert server.requests[1][2] == '"one"'  # only of the same file
    assert pauses == [1, 2]


def test_gives_up_and_continues_in_the_next_call(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "_ATTEMPTS", 2)
    put(server, faults=[{"break_after": 7000}, {"status": 503}])
    with pytest.raises(UserError) as error:
        get(server, tmp_path)
    assert "gave up after 2 attempts: the server answers 503" in str(error.value)
    assert "continues at 7,000 bytes" in str(error.value)
    assert left_over(tmp_path) == ["file.npz.part", "file.npz.part.version"]
    assert get(server, tmp_path).read_bytes() == BODY
    assert ranges(server)[-1] == "bytes=6999-"
    assert left_over(tmp_path) == ["file.npz"]


def test_attempts_are_bounded(server: FileServer, tmp_path: Path, pauses: list[float]) -> None:
    put(server, faults=[{"break_after": 1000} for _ in range(50)])
    with pytest.raises(UserError, match="gave up after 7 attempts"):
        get(server, tmp_path)
    assert pauses == [1, 2, 4, 8, 16, 32]


def test_a_server_that_cannot_continue_sends_all_again(server: FileServer, tmp_path: Path) -> None:
    put(server, faults=[{"break_after": 7000}, {"ignore_range": True}])
    assert get(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None, "bytes=6999-"]


@pytest.mark.parametrize("fault", [{}, {"ignore_if_range": True}])
def test_never_joins_two_versions_of_a_file(
    server: FileServer, tmp_path: Path, fault: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, faults=[{"break_after": 7000}])
    with monkeypatch.context() as patch:
        patch.setattr(download_module, "_ATTEMPTS", 1)
        with pytest.raises(UserError):
            get(server, tmp_path)
    put(server, OTHER, headers={"ETag": '"two"'}, faults=[fault])
    assert get(server, tmp_path).read_bytes() == OTHER
    assert ranges(server)[1] == "bytes=6999-"


def test_a_file_that_became_shorter_is_fetched_anew(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, faults=[{"break_after": 7000}])
    with monkeypatch.context() as patch:
        patch.setattr(download_module, "_ATTEMPTS", 1)
        with pytest.raises(UserError):
            get(server, tmp_path)
    put(server, BODY[:5000], faults=[{"ignore_if_range": True}])  # answers 416
    assert get(server, tmp_path).read_bytes() == BODY[:5000]
    assert ranges(server) == [None, "bytes=6999-", None]


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
    assert ranges(server) == [None, "bytes=6999-" if continued else None]


@pytest.mark.parametrize("version", [None, b"", b"\xff\x00", b'"o\nne"'])
def test_a_part_of_unknown_origin_is_not_continued(
    server: FileServer, tmp_path: Path, version: bytes | None
) -> None:
    put(server)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "file.npz.part").write_bytes(OTHER[:100])
    if version is not None:
        (tmp_path / "cache" / "file.npz.part.version").write_bytes(version)
    assert get(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None]


def test_a_process_killed_at_the_very_end_fetches_next_to_nothing(
    server: FileServer, tmp_path: Path
) -> None:
    part = tmp_path / "cache" / "file.npz.part"
    part.parent.mkdir()
    part.write_bytes(BODY)
    part.with_name("file.npz.part.version").write_text('"one"')
    put(server)
    assert get(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == ["bytes=19999-"]


def test_a_silent_server_counts_as_broken(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "_TIMEOUT", 0.2)
    put(server, faults=[{"stall_after": 7000}])
    assert get(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None, "bytes=6999-"]


@pytest.mark.usefixtures("patient_once")
def test_a_server_that_never_ends_is_given_up(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, faults=[{"endless": True}, {"endless": True}, {"drip": 0.01}])
    with pytest.raises(UserError, match="has more than 30,000 bytes; it is not kept"):
        get(server, tmp_path, size=(100, 30_000))
    monkeypatch.setattr(download_module, "_LARGEST", 10_000_000)
    with pytest.raises(UserError, match="has more than 10,000,000 bytes"):
        get(server, tmp_path)
    assert left_over(tmp_path) == []
    monkeypatch.setattr(download_module, "_TIMEOUT", 0.2)
    with pytest.raises(UserError, match="sends less than 4096 bytes per second"):
        get(server, tmp_path)


@pytest.mark.usefixtures("patient_once")
@pytest.mark.parametrize(
    ("served", "message"),
    [
        (Served(b""), "has 0 bytes and should have 1 to"),
        (Served(b"", faults=[{"chunked": True}]), "it is too short; the file is not kept"),
        (Served(b"\n<!DOCTYPE html><html>Sign in"), "it is a web page; the file is not kept"),
        (Served(b"<HTML>"), "it is a web page; the file is not kept"),
        (Served(BODY, {"Content-Encoding": "gzip"}), "compressed or of unknown length"),
        (Served(BODY, faults=[{"without_length": True}]), "compressed or of unknown length"),
        (Served(BODY, {}, [{"break_after": 70}]), "broke after 70 of 20000 bytes"),
        (Served(BODY, {}, [{"chunked": True, "break_after": 70}]), "the connection broke"),
        (Served(BODY, faults=[{"location": "file:///etc/passwd"}]), "server answers 302"),
        (Served(BODY, faults=[{"location": "ftp://127.0.0.1/file"}]), "it redirects to FTP"),
        (Served(BODY, faults=[{"location": "/file.npz"}] * 20), "answers 302"),
    ],
)
def test_what_is_no_weights_is_not_kept(
    server: FileServer, tmp_path: Path, served: Served, message: str
) -> None:
    server.files["/file.npz"] = served
    with pytest.raises(UserError, match=message) as error:
        get(server, tmp_path)
    assert "\n" not in str(error.value)
    assert "file.npz" not in left_over(tmp_path)


def test_an_answer_in_chunks_is_kept(server: FileServer, tmp_path: Path) -> None:
    put(server, faults=[{"chunked": True}])
    assert get(server, tmp_path).read_bytes() == BODY


def test_wrong_bytes_are_not_kept(server: FileServer, tmp_path: Path) -> None:
    put(server)
    with pytest.raises(
        UserError, match="its sha256 is .* and should be 0123; the file is not kept"
    ):
        get(server, tmp_path, sha256="0123")
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
    with pytest.raises(UserError, match="has 1,000 bytes and should have 19,000 to 21,000"):
        get(server, tmp_path, size=(19_000, 21_000))
    assert len(server.requests) == 1
    assert left_over(tmp_path) == []


def test_a_damaged_copy_is_fetched_again(server: FileServer, tmp_path: Path) -> None:
    put(server)
    path = get(server, tmp_path)
    path.write_bytes(BODY[:10])
    assert get(server, tmp_path, size=(len(BODY), len(BODY))).read_bytes() == BODY


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_what_cannot_be_had(
    server: FileServer, tmp_path: Path, status: int, pauses: list[float]
) -> None:
    put(server, faults=[{"status": status}])
    with pytest.raises(UserError, match=f"file.npz: the server answers {status} .* check the addr"):
        get(server, tmp_path)
    assert pauses == left_over(tmp_path) == []


def test_no_network(tmp_path: Path, pauses: list[float]) -> None:
    with serve_files() as server:
        address = server.address  # of a port that nobody listens to any more
    with pytest.raises(UserError) as error:
        download(f"{address}/a", tmp_path / "cache" / "a")
    assert f"no connection to {address[7:]} (Connection refused). Check the netw" in str(
        error.value
    )
    assert "\n" not in str(error.value)
    assert len(pauses) == 6
    assert left_over(tmp_path) == []


def test_follows_to_another_address_with_the_range(server: FileServer, tmp_path: Path) -> None:
    put(server, faults=[{"location": "/moved.npz"}, {"location": "/moved.npz"}])
    server.files["/moved.npz"] = Served(BODY, faults=[{"break_after": 7000}])
    assert get(server, tmp_path).read_bytes() == BODY
    assert ranges(server) == [None, None, "bytes=6999-", "bytes=6999-"]


@pytest.mark.usefixtures("patient_once")
def test_redirects_to_files_ftp_and_in_circles_are_not_followed(
    server: FileServer, tmp_path: Path, pauses: list[float]
) -> None:
    circle = "/file.npz"
    for location in ("file:///etc/hostname", "ftp://127.0.0.1/x", circle):
        put(server, faults=[{"location": location}] * 30)
        with pytest.raises(UserError) as error:
            get(server, tmp_path)
        assert "\n" not in str(error.value)
        assert left_over(tmp_path) == pauses == []


def test_a_certificate_has_to_be_trusted(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """At once, not after a minute of attempts; SSL_CERT_FILE is the way out that is named."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    chain = tmp_path / "server.pem"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    chain.write_bytes(private + certificate.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    put(server)
    url = server.address.replace("http:", "https:") + "/file.npz"
    with pytest.raises(UserError, match="certificate of 127.0.0.1:.* is not trusted .self-signed"):
        download(url, tmp_path / "cache" / "file.npz")
    assert left_over(tmp_path) == pauses == []
    monkeypatch.setenv("SSL_CERT_FILE", str(chain))
    assert download(url, tmp_path / "cache" / "file.npz").read_bytes() == BODY


def test_goes_through_a_proxy(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.address)
    server.files["http://models.invalid/file.npz"] = Served(BODY)
    path = download("http://models.invalid/file.npz", tmp_path / "file.npz")
    assert path.read_bytes() == BODY


def test_a_cache_that_cannot_be_written(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot write to .*cache .*set VIT_JAX_CACHE"):
        get(server, tmp_path)
    assert server.requests == []


def test_a_full_disk_is_noticed_before(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server)
    usage = collections.namedtuple("usage", "total used free")(10, 0, 100)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="cannot write to .*cache .no space for the 20,000 bytes"):
        get(server, tmp_path)
    assert left_over(tmp_path) == []


def test_a_disk_that_fills_up_meanwhile(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    put(server)
    monkeypatch.setattr(download_module, "_copy", full)
    with pytest.raises(UserError, match="cannot write to .*cache .No space left on device"):
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
    server: FileServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(server, faults=[{"status": 500}])
    with caplog.at_level(logging.INFO):
        path = get(server, tmp_path)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "the server answers 500 Internal Server Error; again in 1 s" in caplog.text
    assert capsys.readouterr().err == ""
    # The bar is for terminals.
    path.unlink()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    get(server, tmp_path)
    assert "20.0k/20.0k" in capsys.readouterr().err
