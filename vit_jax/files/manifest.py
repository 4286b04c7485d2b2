"""A manifest of a folder: size and hash of each file, to detect changes.

The hash is SHA-256; in a bucket it is the MD5 stored by the server, as `md5:HEX`.
"""

import errno
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from vit_jax.files.paths import known_digests, names_below, parse_json, read_file, write_atomically

MANIFEST = "checksums.json"
_THREADS = 8
T = TypeVar("T")


def write_manifest(
    folder: Path, note: dict[str, Any], known: Mapping[str, list[Any]] | None = None
) -> None:
    """Writes `folder/checksums.json`, with a JSON-serialisable note; replaces an old one.

    The file is {"files": {relative name: [bytes, hash]}, "note": note, "sha256": of the rest},
    written last: a folder with a manifest is finished. `known` are digests of files that the
    caller has already read.
    """
    known = known or known_digests(folder)
    # Without the manifest and unfinished copies of it.
    names = [name for name in names_below(folder) if not name.startswith(MANIFEST)]
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda name: known.get(name) or digest(folder / name), names)
        content = {"files": dict(zip(names, digests, strict=True)), "note": note}
    manifest = {**content, "sha256": _digest_of_json(content)}
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, or None if it is missing or damaged."""
    try:
        manifest = parse_json(read_or_none(lambda: read_file(folder / MANIFEST)) or b"")
        intact = manifest.pop("sha256") == _digest_of_json(manifest)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if intact else None


def read_or_none(read: Callable[[], T]) -> T | None:
    """The result of `read`, or None for a file that is missing, inaccessible or on a bad sector.

    Any other OSError is raised: it may be temporary, and an intact file must not count as damaged.
    """
    for _ in range(2):
        try:
            return read()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError):
            return None
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ELOOP):  # a bad sector if it fails again
                raise
    return None


def damaged_files(folder: Path) -> list[str]:
    """Relative names of the listed files that are missing, unreadable or changed."""
    if (manifest := read_manifest(folder)) is None:
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
    """[size in bytes, hash in hex] of a file; an MD5 is prefixed with `md5:`."""
    with path.open("rb") as file:
        value = hashlib.file_digest(file, kind).hexdigest()  # type: ignore[arg-type]
        return [file.tell(), f"md5:{value}" if kind == "md5" else value]


def _digest_of_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
