"""Resolves a path, an address, or a zoo name to a local path.

A file keeps its whole address in the cache, gs/BUCKET/NAME; to download it again, delete it.
Hugging Face's client has its own; it reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE.
"""

import hashlib
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any

from vit_jax.errors import UserError, import_extra, naming, one_line
from vit_jax.files.network import check_reachable
from vit_jax.files.paths import GOOGLE, cache_dir, http_server, is_bucket, to_path
from vit_jax.pretrained.formats.stored import OTHER_FILES
from vit_jax.pretrained.zoo import augreg
from vit_jax.pretrained.zoo.download import download
from vit_jax.pretrained.zoo.entries import ZooEntry, find_entry, get_entry
from vit_jax.wording import unsigned

_HUB = "hf://"
_SCHEMES = ("gs://", "https://", "http://", _HUB)
_SUFFIXES = (".npz", ".npy", ".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".json", ".msgpack")
_HUB_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?")
_CONFIGS = ["config.json", "preprocessor_config.json", "open_clip_config.json"]
_CONFIGS += ["tokenizer.json", "tokenizer_config.json", "spiece.model"]
# Safe to read, so preferred; a repository may also hold half-precision and other variants.
_SAFETENSORS = ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
_PICKLED = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"]


def http_address(url: str) -> str:
    """The HTTP address of a public gs:// object; https:// and http:// stay unchanged."""
    match = re.fullmatch(r"(gs|https?)://([\w.-]+(?::\d{1,5})?(?:/[^/]+)+)", url.partition("#")[0])
    if match is None or not url.isprintable() or {".", ".."} & {*url.split("/")}:
        raise UserError(f"{url!r} is not the address of a file, such as gs://BUCKET/NAME.")
    if match[1] != "gs":
        return urllib.parse.quote(url, safe="%/:?&=+@,;~!$'()*[]")
    return f"{http_server()}/{urllib.parse.quote(match[2])}"


def cache_path(url: str) -> Path:
    """The cache path of a gs://, https:// or http:// address; else UserError."""
    url = _canonical(url)
    http_address(url)  # raises for other addresses
    url, _, query = unsigned(url).partition("#")[0].partition("?")
    named = urllib.parse.parse_qsl(query, True)
    scheme, _, path = url.partition("://")
    if named:
        path += f"-{hashlib.sha256(repr(named).encode()).hexdigest()[:12]}"
    return cache_dir().joinpath(scheme, *path.split("/"))


def resolve(source: str | os.PathLike[str]) -> Path:
    """A local file or folder for `source`, downloaded if necessary; else UserError.

    This is a path, if it exists; else gs://, https://, http://, hf://OWNER/NAME[@REVISION][/FILE],
    `augreg:B/16[,ds=i21k][,adapt_ds=imagenet2012][,resolution=384]` (selected by accuracy, see
    `augreg.select`), or a zoo name.
    """
    path = _existing(source)
    if path is not None:
        return path
    text = os.fspath(source)
    if is_bucket(text) and not text.partition("#")[0].endswith(_SUFFIXES):
        return to_path(text)  # a bucket folder, with the user's credentials
    is_address = text.startswith(_SCHEMES)
    if "://" in text and not is_address:
        known = ", ".join(_SCHEMES)
        raise UserError(f"{text!r}: unknown scheme; known: {known}, paths and zoo names.")
    entry = describe_source(text)
    if entry is None and not is_address:
        if text.startswith(("/", "./", "../", "~")) or text.endswith(_SUFFIXES):
            entry = find_entry(text.removesuffix(".npz"))
            hint = f" The zoo has {entry.name!r}." if entry else ""
            raise UserError(f"{text!r} does not exist.{hint}")
        entry = get_entry(text)
    url = entry.url if entry else text
    if url.startswith(_HUB):
        return fetch_from_hub(url)
    size, sha256 = (entry.size_bounds, entry.sha256) if entry else (None, "")
    with naming("the weights" if text.startswith("http") else text):
        return download(http_address(url), cache_path(url), size=size, sha256=sha256)


def describe_source(source: str | os.PathLike[str]) -> ZooEntry | None:
    """The zoo's entry for `source`, a name, an address or its cached copy; else None."""
    text = os.fspath(source)
    path = _existing(source)
    if path is not None:
        for scheme in ("gs", "https"):
            folder = cache_dir().absolute() / scheme
            if path.absolute().is_relative_to(folder):
                return find_entry(f"{scheme}://{path.absolute().relative_to(folder)}")
        return None
    if text.startswith("augreg:"):
        choice = augreg.parse_choice(text.removeprefix("augreg:"))
        with naming(f"{text}: the index that names its file"):
            index = download(http_address(augreg.INDEX), cache_path(augreg.INDEX))
        return augreg.select(augreg.read_index(index), **choice)
    return find_entry(_canonical(text))


def _canonical(url: str) -> str:
    """Maps both addresses of an object in Google's storage to one."""
    if url.startswith(GOOGLE + "/"):
        return "gs://" + urllib.parse.unquote(url.removeprefix(GOOGLE + "/"))
    return url


def _existing(source: str | os.PathLike[str]) -> Path | None:
    path = os.path.expanduser(source)
    return Path(path) if os.path.exists(path) else None  # also None if the name is too long


def fetch_from_hub(address: str) -> Path:
    """Downloads `hf://owner/name[@revision][/file]` and returns its local path.

    A whole repository becomes a folder with its configs and the first of `FOLDER_FILES` that it
    has, with its shards. A revision is a branch, tag or commit; write a slash in it as %2F.
    """
    match = _HUB_ADDRESS.fullmatch(address)
    if match is None:
        raise UserError(f"{address!r} must be like hf://OWNER/NAME[@REVISION][/FILE].")
    repository, revision, file = match.groups()
    revision = urllib.parse.unquote(revision) if revision else None
    huggingface_hub = import_extra(address, "huggingface_hub", "hf")
    from huggingface_hub import constants

    options: dict[str, Any] = {"revision": revision}
    unreachable = None
    try:
        if not constants.HF_HUB_OFFLINE:
            check_reachable(address, constants.ENDPOINT)
    except UserError as error:
        options["local_files_only"], unreachable = True, error
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repository, file, **options))
        for weights in (_SAFETENSORS, _PICKLED, *([file] for file in OTHER_FILES)):
            options["allow_patterns"] = [*_CONFIGS, *weights]
            folder = Path(huggingface_hub.snapshot_download(repository, **options))
            if any(path for pattern in weights for path in folder.glob(pattern)):
                return folder
    except Exception as error:  # from the client, its HTTP library or the disk
        hint = "if it needs a login: `hf auth login`, or set HF_TOKEN"
        raise unreachable or UserError(f"{address}: {one_line(error)} ({hint})") from error
    text = f"{address} has neither model.safetensors nor pytorch_model.bin"
    raise unreachable or UserError(f"{text}; name a file of it as {_HUB}{repository}/FILE.")
