"""Finds image files that do not decode, before the training does."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence

from vit_jax.data.decode import decodes
from vit_jax.data.threads import map_threads
from vit_jax.files.manifest import read_or_none

# From this number of files on, the verdict is remembered: reading a big folder takes minutes, and
# a job that is preempted often would pay for it at every start.
REMEMBER_FROM = 20_000
LOG_EVERY = 20_000
_RULES = b"2"  # of `decodes`: a verdict by others is not remembered


def unreadable(paths: Sequence[bytes]) -> list[int]:
    """Positions of the files in `paths` that cannot be read or decoded, in order."""
    cache = _cache_file(paths) if len(paths) >= REMEMBER_FROM else None
    if cache is not None and os.path.exists(cache):
        with open(cache) as file:
            return json.load(file)
    bad = []
    unread = False
    for position, decoded in enumerate(map_threads(_decodes_file, paths)):
        unread = unread or decoded is None
        if not decoded:
            bad.append(position)
        if (position + 1) % LOG_EVERY == 0:
            logging.getLogger(__name__).info("checked %d of %d images", position + 1, len(paths))
    if cache is not None and not unread:  # that may be otherwise the next time
        _write(cache, json.dumps(bad))
    return bad


def _decodes_file(path: bytes) -> bool | None:
    """None for a file that cannot be read; an OSError that may pass is raised."""

    def read() -> bytes:
        with open(path, "rb") as file:
            return file.read()

    content = read_or_none(read)
    return None if content is None else decodes(content)


def _cache_file(paths: Sequence[bytes]) -> str:
    """Where the verdict on exactly these files (path, size and time of change) is kept."""
    digest = hashlib.blake2b(_RULES, digest_size=16)
    for path, stamp in zip(paths, map_threads(_stamp, paths), strict=True):
        digest.update(path + stamp + b"\n")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "vit_jax", "checked_images", f"{digest.hexdigest()}.json")


def _stamp(path: bytes) -> bytes:
    try:
        status = os.stat(path)
    except OSError:
        return b" gone"
    return f" {status.st_size} {status.st_mtime_ns}".encode()


def _write(path: str, text: str) -> None:
    """Writes atomically; a cache that cannot be written costs time, not the run."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.{os.getpid()}", "w") as file:
            file.write(text)
        os.replace(f"{path}.{os.getpid()}", path)
    except OSError as error:
        logging.getLogger(__name__).warning("cannot remember the image check: %s", error)
