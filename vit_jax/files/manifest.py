"""A manifest of a folder: size and hash of each file, so that changed bytes are noticed.

The hash is SHA-256; in a bucket it is the MD5 of which the server keeps account, as `md5:HEX`.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from vit_jax.errors import may_pass
from vit_jax.files.paths import known_digests, names_below, write_atomically

MANIFEST = "checksums.json"
_THREADS = 8
T = TypeVar("T")


def write_manifest(
    folder: Path, note: dict[str, Any], known: Mapping[str, list[Any]] | None = None
) -> None:
    """Writes `folder/checksums.json` over all files below the folder, with a note to go with it.

    The file is {"files": {relative name: [bytes, hash]}, "note": note, "sha256": of the rest},
    written last, and whole or not at all: a folder with a manifest is a finished one.

    Args:
      folder: where the files are, and the manifest will be; an old one is replaced.
      note: anything that JSON can hold.
      known: digests of files that the caller has read itself; the others are read here.
    """
    known = known or known_digests(folder)
    names = names_below(folder)
    names = [name for name in names if not name.startswith(MANIFEST)]  # nor what a kill left of one
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda name: known.get(name) or digest(folder / name), names)
        content = {"files": dict(zip(names, digests, strict=True)), "note": note}
    manifest = {**content, "sha256": _digest_of_json(content)}
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, or None where it is missing or damaged itself.

    Raises:
      OSError: it cannot be read now, which says nothing about what it holds.
    """
    try:
        manifest = json.loads(read_or_none((folder / MANIFEST).read_bytes) or b"")
        intact = manifest.pop("sha256") == _digest_of_json(manifest)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if intact else None


def read_or_none(read: Callable[[], T]) -> T | None:
    """What `read` gives, or None for a file that is missing or unreadable.

    Raises:
      OSError: the disk or the network may be back in a moment, or this process has too many files
        open: an intact file must not be taken for a damaged one.
    """
    for _ in range(2):
        try:
            return read()
        except OSError as error:
            if error.errno == errno.EIO:  # a bad sector, if it says so again
                continue
            if may_pass(error) or error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            if error.errno is None and not isinstance(error, FileNotFoundError):
                raise  # a bucket refuses
            break
    return None


def damaged_files(folder: Path) -> list[str]:
    """Names, relative to the folder, of files that are missing, unreadable or changed.

    Files that the manifest does not list are not looked at.

    Raises:
      OSError: one cannot be read now, which says nothing about what it holds.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return [MANIFEST]
    known, wanted = known_digests(folder), manifest["files"]

    def intact(name: str) -> bool:
        if known.get(name) == wanted[name]:
            return True
        kind = "md5" if "md5:" in wanted[name][1] else "sha256"
        return read_or_none(functools.partial(digest, folder / name, kind)) == wanted[name]

    names = sorted(wanted)
    with ThreadPoolExecutor(_THREADS) as pool:
        return [name for name, good in zip(names, pool.map(intact, names), strict=True) if not good]


def digest(path: Path, kind: str = "sha256") -> list[Any]:
    """[size in bytes, hash in hex] of a file; `md5:` goes before an MD5."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, kind).hexdigest()  # type: ignore[arg-type]
        return [file.tell(), f"md5:{found}" if kind == "md5" else found]


def _digest_of_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
