"""Downloads against a server that fails in every way."""

import asyncio
import base64
import datetime
import hashlib
import ipaddress
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.file_server import FileServer, Served, serve_files
from vit_jax.errors import UserError
from vit_jax.files import network
from vit_jax.pretrained.zoo import download as download_module
from vit_jax.pretrained.zoo.download import download

BODY = bytes(i * 7 % 251 for i in range(20_000))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve_files() as server:
        yield server


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PAUSE", 0.0)
    monkeypatch.setattr(network, "_answered", set())
    monkeypatch.setattr(download_module, "PAUSE", 0.0)
    monkeypatch.setattr(download_module, "ATTEMPTS", 3)
    monkeypatch.setattr(download_module, "SILENCE", 1.0)


def put(server: FileServer, body: bytes = BODY, **kwargs: Any) -> Served:
    server.files["/file.npz"] = Served(body, **kwargs)
    return server.files["/file.npz"]


def get(server: FileServer, folder: Path, **kwargs: Any) -> Path:
    return download(f"{server.address}/file.npz", folder / "cache" / "file.npz", **kwargs)


def refused(server: FileServer, folder: Path, message: str, **kwargs: Any) -> None:
    """One line, and nothing is left."""
    with pytest.raises(UserError, match=message) as error:
        get(server, folder, **kwargs)
    assert "\n" not in str(error.value)
    assert not list((folder / "cache").iterdir())


def test_fetches_once(server: FileServer, tmp_path: Path) -> None:
    put(server)
    sha256 = hashlib.sha256(BODY).hexdigest()
    for known in (sha256, sha256[:8].upper(), ""):
        assert get(server, tmp_path, sha256=known).read_bytes() == BODY
    assert server.requests == ["/", "/file.npz"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["file.npz"]
    get(server, tmp_path).write_bytes(BODY[:10])  # a damaged copy is fetched again
    assert get(server, tmp_path, size=(len(BODY), len(BODY))).read_bytes() == BODY


def test_two_at_the_same_time(server: FileServer, tmp_path: Path) -> None:
    put(server, faults=[{"wait": True}])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(get, server, tmp_path)
        while "/file.npz" not in server.requests:
            time.sleep(0.01)
        assert get(server, tmp_path).read_bytes() == BODY  # while the first waits
        server.release.set()
        assert first.result().read_bytes() == BODY
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["file.npz"]


def test_faults_that_pass(server: FileServer, tmp_path: Path) -> None:
    server.files["/moved.npz"] = Served(BODY)
    every: list[list[dict[str, Any]]] = [
        [{"status": 503}, {"status": 429}],
        [{"break_after": 7000}, {"chunked": True, "break_after": 70}],
        [{"stall_after": 7000}],
        [{"chunked": True}],
        [{"location": "/moved.npz"}],
    ]
    for i, faults in enumerate(every):
        put(server, faults=faults)
        assert get(server, tmp_path / f"{i}").read_bytes() == BODY


@pytest.mark.parametrize(
    ("served", "message"),
    [
        (Served(b""), "has 0 bytes instead of 1 to"),
        (Served(b"\n<!DOCTYPE html><html>Sign in"), "it is a web page; discarded"),
        (Served("\ufeff<HTML>".encode("utf-16")), "it is a web page; discarded"),
        (Served(BODY, {}, [{"break_after": 70}] * 9), "failed .* attempt 3"),
        (Served(BODY, {}, [{"status": 503}] * 9), "returned 503 Service Unavailable, attempt 3"),
        (Served(BODY, {}, [{"status": 401}]), "returned 401 Unauthorized, attempt 1; check the"),
    ],
)
def test_what_is_no_weights_is_not_kept(server, tmp_path, served, message):
    server.files["/file.npz"] = served
    refused(server, tmp_path, message)


def test_a_server_that_never_ends_is_given_up(server: FileServer, tmp_path: Path) -> None:
    put(server, faults=[{"endless": True}])
    refused(server, tmp_path, "more than 30,000 bytes; discarded", size=(100, 30_000))


def test_wrong_bytes_are_not_kept(server: FileServer, tmp_path: Path) -> None:
    put(server)
    refused(server, tmp_path, "sha256 is .* instead of 0123; discarded", sha256="0123")
    refused(server, tmp_path, "has 20,000 bytes instead of 3 to 5", size=(3, 5))


def test_the_servers_own_hash_is_checked(server: FileServer, tmp_path: Path) -> None:
    def headers(body: bytes) -> dict[str, str]:
        digest = base64.b64encode(hashlib.md5(body).digest()).decode()
        return {"ETag": '"one"', "x-goog-hash": f"crc32c=AAAAAA==,md5={digest}"}

    put(server, headers=headers(b"other"))
    refused(server, tmp_path, "its md5 is")
    put(server, headers=headers(BODY))
    assert get(server, tmp_path).read_bytes() == BODY


def test_no_network(tmp_path: Path) -> None:
    with serve_files() as server:
        pass  # nobody listens at its port any more
    refused(server, tmp_path, "127.0.0.1.* cannot be reached .*; check .* network and HTTPS_PROXY")


def test_a_network_that_swallows_everything(server, tmp_path, monkeypatch):
    monkeypatch.setattr(network, "PATIENCE", 0.05)
    server.files["/"] = Served(b"", faults=[{"wait": True}] * 2)
    refused(server, tmp_path, r"cannot be reached \(no answer within 0.05 s\); check")
    # A server that has answered is asked again.
    put(server, faults=[{"status": 503}, {"wait": True}])
    assert get(server, tmp_path).read_bytes() == BODY


def test_a_certificate_has_to_be_trusted(server: FileServer, tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match="self-signed.*attempt 1; .*SSL_CERT_FILE"):
        download(url, tmp_path / "cache" / "file.npz")
    # In another process: the variable is read when it starts.
    program = "from pathlib import Path\nfrom vit_jax.pretrained.zoo.download import download\n"
    program += f"download({url!r}, Path({str(tmp_path / 'file.npz')!r}))"
    subprocess.run([sys.executable, "-c", program], env={"SSL_CERT_FILE": str(chain)}, check=True)
    assert (tmp_path / "file.npz").read_bytes() == BODY


def test_goes_through_a_proxy(server, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", server.address)
    server.files["http://models.invalid/file.npz"] = Served(BODY)
    path = download("http://models.invalid/file.npz", tmp_path / "file.npz")
    assert path.read_bytes() == BODY


def test_a_cache_that_cannot_be_written(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot write to .*cache .*set VIT_JAX_CACHE"):
        get(server, tmp_path)
    assert server.requests == []


def test_in_a_notebook_where_a_loop_is_running(server: FileServer, tmp_path: Path) -> None:
    async def cell() -> Path:
        return get(server, tmp_path)

    put(server)
    assert asyncio.run(cell()).read_bytes() == BODY


def test_a_drip_is_given_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download_module, "WINDOW", 0.2)
    put(server, faults=[{"drip": 0.01}])
    refused(server, tmp_path, "under 16384 bytes in 0.2 s; given up")
    assert server.requests == ["/", "/file.npz"]
    monkeypatch.setattr(download_module, "LEAST", 2)
    put(server, BODY[:60], faults=[{"drip": 0.01}])
    assert get(server, tmp_path).read_bytes() == BODY[:60]  # slow, but it goes on


def test_headers_that_never_end(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download_module, "WINDOW", 0.1)
    put(server, faults=[{"wait": True}] * 9)
    refused(server, tmp_path, "failed .*, attempt 3")


def test_a_host_that_does_not_exist_is_asked_for_once(server, tmp_path, monkeypatch):
    asked: list[str] = []
    find = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> Any:
        if host == "127.0.0.1":
            return find(host, *args, **kwargs)
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(UserError, match="models.invalid/ cannot be reached .Name or service"):
        download("http://models.invalid/file.npz", tmp_path / "cache/file.npz")
    assert asked == ["models.invalid"]
    put(server, faults=[{"location": "http://moved.invalid/file.npz"}])
    refused(server, tmp_path, "connection failed .Name or service not known.*, attempt 1;")
    assert asked == ["models.invalid", "moved.invalid"]


@pytest.mark.parametrize(
    ("address", "follows"),
    [("https://b/x", True), ("http://b/x?sig=1", False), ("ftp://b/x", False), ("file:/x", False)],
)
def test_no_redirect_leaves_https(address: str, follows: bool) -> None:
    request = urllib.request.Request("https://a/x")
    arguments: Any = (request, None, 302, "Found", {}, address)
    if follows:
        assert download_module._Redirects().redirect_request(*arguments).full_url == address
    else:
        with pytest.raises(UserError, match=r"^https://a/x: it redirects to [a-z]+:[^?]*x\.$"):
            download_module._Redirects().redirect_request(*arguments)
