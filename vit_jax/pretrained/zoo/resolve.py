"""Where parameters come from: a path, an address, or a name of the zoo; all end as a local path.

The cache is $VIT_JAX_CACHE, else $XDG_CACHE_HOME/vit_jax, else ~/.cache/vit_jax. A file keeps its
whole address there, gs/BUCKET/NAME, since Google gives the same name to many models. Nothing in it
is ever fetched again; a file that is to be renewed has to be removed.
"""

from __future__ import annotations

import os
import urllib.parse
from pathlib import Path

from vit_jax.errors import UserError
from vit_jax.pretrained.zoo import augreg
from vit_jax.pretrained.zoo.download import download
from vit_jax.pretrained.zoo.entry import ZooEntry
from vit_jax.pretrained.zoo.hub import SCHEME as HUB
from vit_jax.pretrained.zoo.hub import fetch_from_hub
from vit_jax.pretrained.zoo.list import find_entry, get_entry
from vit_jax.pretrained.zoo.remote_file import http_address

_GOOGLE = "https://storage.googleapis.com/"
_CHOICE = "augreg:"
_SCHEMES = ("gs", "https", "http", "hf")
_SUFFIXES = (".npz", ".npy", ".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".json")


def cache_dir() -> Path:
    """The folder that downloads are kept in; it need not exist."""
    if folder := os.environ.get("VIT_JAX_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vit_jax"


def cache_path(url: str) -> Path:
    """Where the file at a gs://, https:// or http:// address is kept.

    Raises:
      UserError: no address of a file.
    """
    url = _canonical(url)
    http_address(url)  # says what is no address
    scheme, _, rest = url.partition("://")
    if scheme == "gs" and (server := os.environ.get("STORAGE_EMULATOR_HOST")):
        scheme = "gs-" + urllib.parse.quote(server.rpartition("://")[2], safe="")
    parts = rest.partition("#")[0].split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise UserError(f"{url!r} is no address of a file: it has empty or dotted parts.")
    return cache_dir().joinpath(scheme, *parts)


def resolve(source: str | os.PathLike[str]) -> Path:
    """A local file or folder with what `source` names, fetched if it has to be.

    Args:
      source: a path, if it exists; else gs://, https://, http://, hf://OWNER/NAME[@REVISION]
        [/FILE], `augreg:B/16[,ds=i21k][,adapt_ds=imagenet2012][,resolution=384]` (chosen by
        accuracy, see `augreg.select`), or a name of the zoo.

    Raises:
      UserError: none of these, or it cannot be fetched; the message says why and what to do.
    """
    path = _existing(source)
    if path is not None:
        return path
    text = os.fspath(source)
    scheme, separator, _ = text.partition("://")
    if separator and scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise UserError(f"{text!r}: no such scheme; known: {known}, paths and names of the zoo.")
    entry = describe_source(text)
    if entry is None and not separator:
        _complain_of_path(text)
        entry = get_entry(text)
    if entry is None:
        return fetch_from_hub(text) if text.startswith(HUB) else download(text, cache_path(text))
    if entry.url.startswith(HUB):
        return fetch_from_hub(entry.url)
    return download(entry.url, cache_path(entry.url), size=entry.size_bounds, sha256=entry.sha256)


def describe_source(source: str | os.PathLike[str]) -> ZooEntry | None:
    """What the zoo knows of `source`, a name, an address or the cached copy of one; else None.

    `augreg:` reads the collection's index for its answer, and fetches that if it has to be.

    Raises:
      UserError: `augreg:` with a choice that the index does not have, or no index to be had.
    """
    text = os.fspath(source)
    path = _existing(source)
    if path is not None:
        cached = path.absolute()
        folder = cache_dir().absolute() / "gs"
        if cached.is_relative_to(folder):
            return find_entry(f"gs://{cached.relative_to(folder)}")
        folder = cache_dir().absolute() / "https"
        if cached.is_relative_to(folder):
            return find_entry(f"https://{cached.relative_to(folder)}")
        return None
    if text.startswith(_CHOICE):
        choice = augreg.parse_choice(text.removeprefix(_CHOICE))
        return augreg.select(augreg_index(), **choice)
    return find_entry(_canonical(text))


def augreg_index() -> list[augreg.Row]:
    """The index of AugReg, from the cache or else from its bucket.

    Raises:
      UserError: it cannot be fetched, or is something else.
    """
    return augreg.read_index(download(augreg.INDEX, cache_path(augreg.INDEX)))


def _canonical(url: str) -> str:
    """One name for the two addresses that an object of Google's has."""
    if url.startswith(_GOOGLE):
        return "gs://" + urllib.parse.unquote(url.removeprefix(_GOOGLE))
    return url


def _existing(source: str | os.PathLike[str]) -> Path | None:
    path = Path(source).expanduser()
    try:
        # Path("") would be the current folder.
        return path if os.fspath(source) and path.exists() else None
    except OSError:  # a name too long for a path
        return None


def _complain_of_path(text: str) -> None:
    """Raises where `text` is clearly meant as a path, which then does not exist."""
    if text.startswith(("/", "./", "../", "~")) or text.endswith(_SUFFIXES):
        entry = find_entry(text.removesuffix(".npz"))
        hint = f" The zoo has {entry.name!r}." if entry else ""
        raise UserError(f"{text!r} does not exist.{hint}")
