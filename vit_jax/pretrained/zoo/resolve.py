"""Where parameters come from: a path, an address, or a name of the zoo; all end as a local path.

The cache is $VIT_JAX_CACHE, else $XDG_CACHE_HOME/vit_jax, else ~/.cache/vit_jax. A file keeps its
whole address there, gs/BUCKET/NAME; one that is to be renewed has to be removed.

Repositories of Hugging Face's hub are fetched by its own client into its own cache; it reads
HF_TOKEN, HF_HOME, HF_ENDPOINT (a mirror) and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import hashlib
import os
import re
import urllib.parse
from pathlib import Path

from vit_jax.errors import UserError, import_extra, one_line, unsigned
from vit_jax.files.paths import cache_dir, is_bucket, to_path
from vit_jax.pretrained.zoo import augreg
from vit_jax.pretrained.zoo.download import download
from vit_jax.pretrained.zoo.entries import ZooEntry, find_entry, get_entry

_GOOGLE = "https://storage.googleapis.com"
_HUB = "hf://"
_SCHEMES = ("gs://", "https://", "http://", _HUB)
_SUFFIXES = (".npz", ".npy", ".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".json")
_HUB_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?")
_CONFIGS = ["config.json", "preprocessor_config.json"]
# Safe to read, so preferred; a repository may also hold half-precision and other variants.
_SAFETENSORS = ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
_PICKLED = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"]


def http_address(url: str) -> str:
    """Where a gs:// object is read without credentials; https:// and http:// stay as they are.

    STORAGE_EMULATOR_HOST, the variable of Google's clients, replaces Google's server.
    """
    match = re.fullmatch(r"(gs|https?)://([\w.-]+(?::\d{1,5})?(?:/[^/]+)+)", url.partition("#")[0])
    if match is None or not url.isprintable() or {".", ".."} & {*url.split("/")}:
        raise UserError(f"{url!r} is no address of a file, such as gs://BUCKET/NAME.")
    if match[1] != "gs":
        return urllib.parse.quote(url, safe="%/:?&=+@,;~!$'()*[]")
    server = os.environ.get("STORAGE_EMULATOR_HOST") or _GOOGLE
    server = server if "://" in server else f"http://{server}"
    return f"{server.rstrip('/')}/{urllib.parse.quote(match[2])}"


def cache_path(url: str) -> Path:
    """Where the file at a gs://, https:// or http:// address is kept; else UserError."""
    url = _canonical(url)
    http_address(url)  # says what is no address
    url, _, query = unsigned(url).partition("#")[0].partition("?")
    named = urllib.parse.parse_qsl(query, True)
    scheme, _, rest = url.partition("://")
    if named:
        rest += f"-{hashlib.sha256(repr(named).encode()).hexdigest()[:12]}"
    return cache_dir().joinpath(scheme, *rest.split("/"))


def resolve(source: str | os.PathLike[str]) -> Path:
    """A local file or folder with what `source` names, fetched if it has to be; else UserError.

    That is a path, if it exists; else gs://, https://, http://, hf://OWNER/NAME[@REVISION][/FILE],
    `augreg:B/16[,ds=i21k][,adapt_ds=imagenet2012][,resolution=384]` (chosen by accuracy, see
    `augreg.select`), or a name of the zoo.
    """
    path = _existing(source)
    if path is not None:
        return path
    text = os.fspath(source)
    if is_bucket(text) and not text.partition("#")[0].endswith(_SUFFIXES):
        return to_path(text)  # a folder, with the user's own rights
    is_address = text.startswith(_SCHEMES)
    if "://" in text and not is_address:
        known = ", ".join(_SCHEMES)
        raise UserError(f"{text!r}: no such scheme; known: {known}, paths and names of the zoo.")
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
    return download(http_address(url), cache_path(url), size=size, sha256=sha256)


def describe_source(source: str | os.PathLike[str]) -> ZooEntry | None:
    """What the zoo knows of `source`, a name, an address or the cached copy of one; else None.

    UserError for `augreg:` with a choice that its index, which is fetched, does not have.
    """
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
        index = download(http_address(augreg.INDEX), cache_path(augreg.INDEX))
        return augreg.select(augreg.read_index(index), **choice)
    return find_entry(_canonical(text))


def _canonical(url: str) -> str:
    """One name for the two addresses that an object of Google's has."""
    if url.startswith(_GOOGLE + "/"):
        return "gs://" + urllib.parse.unquote(url.removeprefix(_GOOGLE + "/"))
    return url


def _existing(source: str | os.PathLike[str]) -> Path | None:
    path = os.path.expanduser(source)
    return Path(path) if os.path.exists(path) else None  # not for a name too long, either


def fetch_from_hub(address: str) -> Path:
    """The local copy of `hf://owner/name[@revision][/file]`.

    A whole repository becomes a folder with its config.json, preprocessor_config.json and weights:
    model.safetensors (or its shards and their index), else pytorch_model.bin. A revision is a
    branch, tag or commit; a slash in it is written %2F.
    """
    match = _HUB_ADDRESS.fullmatch(address)
    if match is None:
        raise UserError(f"{address!r} must be as hf://OWNER/NAME[@REVISION][/FILE].")
    repository, revision, file = match.groups()
    revision = urllib.parse.unquote(revision) if revision else None
    huggingface_hub = import_extra(address, "huggingface_hub", "hf")
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision))
        for weights in (_SAFETENSORS, _PICKLED):
            wanted = {"revision": revision, "allow_patterns": [*_CONFIGS, *weights]}
            folder = Path(huggingface_hub.snapshot_download(repository, **wanted))
            if any(path for pattern in weights for path in folder.glob(pattern)):
                return folder
    except Exception as error:  # of the client, of its HTTP library, of the disk
        raise UserError(
            f"{address}: {one_line(error)} (where it asks for a login: `hf auth login`, or set "
            "HF_TOKEN)"
        ) from error
    raise UserError(
        f"{address} holds neither model.safetensors nor pytorch_model.bin; name a file of it as "
        f"{_HUB}{repository}/FILE."
    )
