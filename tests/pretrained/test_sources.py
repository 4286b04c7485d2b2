"""Paths, addresses and names, against a bucket and a hub of this machine."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.file_server import FileServer, Served, pose_as_hub, serve_files
from tests.pretrained.test_zoo import write_index
from vit_jax.errors import TransientError, UserError
from vit_jax.files import network
from vit_jax.files.network import check_reachable
from vit_jax.pretrained.load import read_source
from vit_jax.pretrained.zoo import download as download_module
from vit_jax.pretrained.zoo import resolve as sources
from vit_jax.pretrained.zoo.resolve import (
    cache_dir,
    cache_path,
    describe_source,
    http_address,
    resolve,
)

BODY = bytes(range(256)) * 40
SMALL = "big_vision/vit_s16_i1k_90ep"  # an entry without a published size
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("STORAGE_EMULATOR_HOST", "http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PAUSE", 0.0)
    monkeypatch.setattr(download_module, "PAUSE", 0.0)
    monkeypatch.setattr(network, "_answered", set())


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    with serve_files() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.address)
        yield server


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("VIT_JAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "vit_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "vit_jax"


def test_a_file_of_a_bucket(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read over HTTPS; both addresses of one object are one file of the cache."""
    address = "gs://vit_models/imagenet21k+imagenet2012/R50+ViT-B_16.npz"
    https = (
        "https://storage.googleapis.com/vit_models/imagenet21k%2Bimagenet2012/R50%2BViT-B_16.npz"
    )
    assert http_address(address) == https
    assert cache_path(https) == cache_path(address)
    assert cache_path("gs://vit_models/sam/B.npz") == cache / "gs/vit_models/sam/B.npz"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:4443")
    assert http_address("gs://a/b.npz") == "http://localhost:4443/a/b.npz"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gs://some/file.npz", "^gs://some/file.npz: http://127.* cannot be reached"),
        ("gs://some/run", "^gs://some/run: http://127.* cannot be reached .* use a local copy"),
        ("gs://some/run/best", "^gs://some/run/best: http://127.* cannot be reached"),
        (SMALL, f"^{SMALL}: http://127.*/{SMALL}.npz: .* check .* the network"),
        ("augreg:B/16,adapt_ds=imagenet2012", "^augreg:B/16,adapt_ds=imagenet2012: the index"),
    ],
)
def test_without_a_network_one_line_names_what_was_asked(source, message, monkeypatch, caplog):
    with serve_files() as server:
        pass  # nobody listens at its port any more
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.address)
    with pytest.raises(UserError, match=message) as error:
        read_source(source)
    assert "\n" not in str(error.value)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_server_that_answers_with_an_error_is_there(bucket: FileServer) -> None:
    check_reachable("x", bucket.address)
    bucket.files["/"] = Served(b"", faults=[{"wait": True}])
    check_reachable("x", bucket.address)  # is not asked again
    assert len(bucket.requests) == 1


def test_no_address_of_a_file() -> None:
    for address in (
        "gs://bucket",
        "https://a/b/",
        "https://user:password@host/x",
        "https://host/\udcff",
        "gs://a/../../x",  # would leave the cache
    ):
        with pytest.raises(UserError, match="is not (the address of a file|a folder in a bucket)"):
            resolve(address)


def test_what_exists_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "B_16.npz"
    path.write_bytes(BODY)
    assert resolve(path) == path
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/B_16.npz") == path
    assert describe_source(path) is None
    # Before a name of the zoo, too.
    (tmp_path / "imagenet21k" / "ViT-B_16").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("imagenet21k/ViT-B_16") == Path("imagenet21k/ViT-B_16")


def test_a_name_is_fetched_once_and_known_afterwards(bucket: FileServer) -> None:
    address = "gs://big_vision/vit_s16_i1k_90ep.npz"
    bucket.files["/big_vision/vit_s16_i1k_90ep.npz"] = Served(BODY)
    path = resolve(SMALL)
    assert path == resolve(SMALL) == resolve(address)
    assert path.read_bytes() == BODY
    assert bucket.requests == ["/", "/big_vision/vit_s16_i1k_90ep.npz"]
    entry = describe_source(path)  # its copy in the cache
    assert entry is not None
    assert entry == describe_source(SMALL) == describe_source(address)
    stranger = path.parents[1] / "other" / path.name
    stranger.parent.mkdir()
    stranger.touch()
    assert describe_source(stranger) is None


def test_what_signs_an_address_names_no_file_and_the_rest_does() -> None:
    address = "https://host/b/a.npz"
    for signature in ("one", "two"):
        signed = f"{address}?X-Amz-Signature={signature}&X-Amz-Date=2&se=3&sig=4"
        assert cache_path(signed) == cache_path(address)
    others = {cache_path(f"{address}?id={number}&sig=5") for number in (1, 2)}
    assert len(others | {cache_path(address)}) == 3
    assert not any("?" in str(path) for path in others)


def test_what_the_zoo_knows_of_a_file_is_verified(bucket, monkeypatch):
    bucket.files["/vit_models/imagenet21k/ViT-B_16.npz"] = Served(BODY)
    with pytest.raises(UserError, match="has 10,240 bytes instead of 41"):
        resolve("imagenet21k/ViT-B_16")
    seen: dict[str, Any] = {}
    monkeypatch.setattr(sources, "download", lambda _, path, **known: seen.update(known) or path)
    resolve("https://dl.fbaipublicfiles.com/deit/deit_tiny_patch16_224-a1311bcf.pth")
    assert seen == {"size": None, "sha256": "a1311bcf"}


def test_a_choice_by_accuracy_reads_the_index(bucket: FileServer, tmp_path: Path) -> None:
    index = write_index(tmp_path / "index.csv").read_bytes()
    bucket.files["/vit_models/augreg/index.csv"] = Served(index)
    best = "Ti_16-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0"
    tuned = f"{best}--imagenet2012-steps_20k-lr_0.03-res_384"
    bucket.files[f"/vit_models/augreg/{best}.npz"] = Served(BODY)
    bucket.files[f"/vit_models/augreg/{tuned}.npz"] = Served(BODY[::-1])
    assert resolve("augreg:Ti/16").name == f"{best}.npz"
    path = resolve("augreg:Ti/16,adapt_ds=imagenet2012,resolution=384")
    assert path.name == f"{tuned}.npz"
    assert path.read_bytes() == BODY[::-1]
    assert bucket.requests.count("/vit_models/augreg/index.csv") == 1
    assert resolve(f"augreg/{tuned}") == resolve(f"augreg/{tuned}.npz") == path


def test_mistakes_are_explained() -> None:
    for source, message in (
        ("", "'' is not in the zoo"),
        ("ViT-B_16", "'imagenet21k/ViT-B_16' or 'imagenet21k.imagenet2012/ViT-B_16' or 'sam/"),
        ("imagenet21k/ViT-B16", "Did you mean 'imagenet21k/ViT-B_16'\\? .*scripts/zoo.py list"),
        ("imagenet21k/ViT-B_16.npz", "does not exist. The zoo has 'imagenet21k/ViT-B_16'"),
        ("./" + "x" * 300, "x' does not exist"),
        ("s3://bucket/file", "unknown scheme; known: gs://"),
        ("augreg/B_16-i22k-300ep", "is not an AugReg file"),
        ("augreg:B/16,resolution=big", "resolution='big' must be a number"),
        ("hf://only-an-owner", "must be like hf://OWNER/NAME"),
    ):
        with pytest.raises(UserError, match=message) as error:
            resolve(source)
        assert "\n" not in str(error.value)


def serve_repository(server: FileServer, name: str, files: dict[str, bytes]) -> None:
    """What the hub answers about a repository with one commit."""
    api, is_json = f"/api/models/{name}", {"Content-Type": "application/json"}
    siblings = [{"rfilename": file} for file in files]
    described = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
    for revision in ("main", COMMIT):
        server.files[f"{api}/revision/{revision}"] = Served(described, is_json)
    tree = []
    for i, (file, body) in enumerate(files.items(), 1):
        tree.append({"type": "file", "path": file, "size": len(body), "oid": f"{i:040x}"})
        headers = {"ETag": f'"{i:040x}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        for revision in ("main", COMMIT):
            server.files[f"/{name}/resolve/{revision}/{file}"] = Served(body, headers)
    for query in ("", "?recursive=True&expand=False", "?recursive=true&expand=false"):
        content = json.dumps(tree).encode()
        server.files[f"{api}/tree/{COMMIT}{query}"] = Served(content, is_json)


def refuse(server: FileServer, path: str, status: int, code: str) -> None:
    """The hub names the reason in a header."""
    fault = {"status": status, "headers": {"X-Error-Code": code}}
    server.files[path] = Served(b"", faults=[fault] * 3)


VIT = "google/vit-base-patch16-224"


def test_repositories_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    safe = {**both, "model.safetensors": b"tensors", "model.fp16.safetensors": b"half"}
    with serve_files() as server:
        pose_as_hub(server, monkeypatch, tmp_path / "hub")
        serve_repository(server, VIT, safe)
        serve_repository(server, "old/vit", both)
        serve_repository(server, "some/dataset", {"README.md": b"text"})
        refuse(server, "/api/models/some/gated/revision/main", 403, "GatedRepo")
        refuse(server, f"/{VIT}/resolve/main/params.npz", 404, "EntryNotFound")
        for source in (VIT, f"hf://{VIT}@{COMMIT}"):
            names = sorted(path.name for path in resolve(source).iterdir())
            assert names == ["config.json", "model.safetensors"]
        assert (resolve("hf://old/vit") / "pytorch_model.bin").read_bytes() == b"pickle"
        assert resolve(f"hf://{VIT}/config.json").read_bytes() == b"{}"
        for source, message in (
            ("hf://some/dataset", "has neither model.safetensors nor pytorch_model.bin"),
            ("hf://some/gated", "HF_TOKEN"),
            (f"hf://{VIT}/params.npz", "Entry Not Found"),
        ):
            with pytest.raises(UserError, match=f"^{source}.*{message}"):
                resolve(source)
    network._answered.clear()  # now it is off: what is in the cache is used, the rest is one line
    assert (resolve(VIT) / "model.safetensors").read_bytes() == b"tensors"
    for source in ("hf://another/vit", f"hf://{VIT}/another.npz", "hf://old/vit/x.safetensors"):
        message = f"^{source}: {server.address} cannot be reached .*refused.*use a local copy"
        with pytest.raises(TransientError, match=message):
            resolve(source)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # it is optional
    with pytest.raises(UserError, match=r"huggingface_hub: .*'.\[hf\]'"):
        resolve(VIT)
