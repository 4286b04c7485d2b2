"""Data sets on servers: which files an address names, and an order that few fetched pieces serve.

`hf://datasets/OWNER/NAME[@REVISION][/FOLDER]` is a repository of Hugging Face with Parquet files,
or tars; `gs://BUCKET/FOLDER` is alike. A web server lists nothing:
`https://HOST/{000..099}.parquet`, or `.tar`. Images are read at random through a cache on disk of
`dataset.cache_gib`. If it has no room for all, training mixes the examples of as many blocks (the
pieces that are fetched) as fill half of it, see `Windows`.
"""

import dataclasses
import functools
import glob
import hashlib
import itertools
import logging
import math
import os
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vit_jax.data.folder import subfolders
from vit_jax.data.sources import SPLIT_WORDS, map_threads, split_word
from vit_jax.errors import UserError
from vit_jax.files.network import check_reachable
from vit_jax.files.paths import cache_dir, to_path
from vit_jax.files.remote import RemoteFile, asked, check_room, file_system, scheme_of
from vit_jax.wording import counted, list_names, unsigned

ENDINGS = (".parquet", ".tar")
_HUB = re.compile(r"hf://(datasets/[\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(/.*)?")
_MOST_FILES = 100_000
_LOGIN = "; if it needs a login: `hf auth login`, or set HF_TOKEN"


def expand(name: str) -> list[str]:
    """The names that `{000..099}` and `{train,val}` in it stand for; UserError for too many."""
    choices = list(map(_choices, re.split(r"(\{[^{}]*\})", name)))
    if not 0 < math.prod(map(len, choices)) <= _MOST_FILES:
        text = f"names no file, or over {_MOST_FILES:,}: check its braces"
        raise UserError(f"dataset.name={name!r} {text}.")
    return list(map("".join, itertools.product(*choices)))


def _choices(part: str) -> list[str]:
    """Expands `{000..099}` or `{train,val}`; other text is returned as it is."""
    if bounds := re.fullmatch(r"\{(\d{1,18})\.\.(\d{1,18})\}", part):
        first, last = bounds.groups()
        return [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)[: _MOST_FILES + 1]]
    return part[1:-1].split(",") if part.startswith("{") and part.endswith("}") else [part]


def parquet_files(name: str) -> list[str]:
    """Those of a folder, of `data` in it, or below all its subfolders; or of a pattern; sorted."""
    path = os.path.abspath(os.path.expanduser(name))
    if path.lower().endswith(".parquet"):
        return expand(path)
    if not os.path.isdir(path):
        return []

    def inside(folder: str) -> list[str]:
        return sorted(glob.glob(f"{glob.escape(folder)}/*.parquet"))

    if files := inside(path) or inside(f"{path}/data"):
        return files
    for folder in (f"{path}/{below}" for below in subfolders(path)):
        found = inside(folder)  # of a configuration, or in the folders of its splits
        found = found or [x for below in subfolders(folder) for x in inside(f"{folder}/{below}")]
        if not found:
            return []
        files += found
    return files


def splits_of(where: str, files: Sequence[str]) -> list[str]:
    """The split in the name of each file, or of its folder; else `train`, may be with a warning."""
    root = os.path.commonpath(list(map(os.path.dirname, files)))
    splits = {}
    for path in files:
        folder, file = os.path.split(path)
        word = split_word(os.path.splitext(file)[0]) or split_word(os.path.relpath(folder, root))
        splits[path] = word or SPLIT_WORDS.get(os.path.basename(folder).lower(), "")
    if any(splits.values()) and (others := [file for file, split in splits.items() if not split]):
        logging.warning(f"{where}: no split in the name of {list_names(others)}: used as 'train'.")
    return [split or "train" for split in splits.values()]


def find_files(name: str, cache_gib: float) -> list[RemoteFile]:
    """The files of an address, all Parquet or all tars, sorted; UserError if there are none.

    Those of a branch of Hugging Face are of the commit that it has now.
    """
    where, scheme = f"dataset.name={unsigned(name)!r}", scheme_of(name)
    limit = int(cache_gib * 2**30)
    if not scheme:
        return _local_files(where, name, limit)
    is_file = name.lower().endswith(ENDINGS)
    if not is_file and scheme.startswith("http"):
        text = "is no .parquet or .tar, and a web server lists no folder"
        raise UserError(f"{where} {text}; name files, as in https://HOST/{{000..099}}.tar.")
    if scheme == "gs":
        to_path(name)  # raises if it is malformed, or nothing answers
    if scheme.startswith("http"):
        check_reachable(where, "/".join(name.split("/")[:3]))
    address = _pinned(where, name) if scheme == "hf" else name
    client, hint = file_system(scheme), _LOGIN if scheme == "hf" else ""
    if is_file:
        addresses = expand(address)
        asks = [functools.partial(client.info, each) for each in addresses]
        infos = list(map_threads(lambda ask: asked(where, ask, hint), asks, chunk=1))
    else:
        list_all = functools.partial(client.find, address.rstrip("/"), detail=True)
        found = dict(sorted(asked(where, list_all, hint).items()))
        addresses, infos = [f"{scheme}://{path}" for path in found], list(found.values())
    sizes = [info.get("size") for info in infos]
    if any(size is None for size in sizes):
        raise UserError(f"{where}: the server does not tell the size of files; copy them.")
    keys = ("blob_id", "md5Hash", "ETag", "generation", "Content-MD5", "Digest", "Last-Modified")
    files = [
        RemoteFile(file, size, str(next(filter(None, map(info.get, keys)), "")), limit)
        for file, size, info in zip(addresses, sizes, infos, strict=True)
    ]
    for ending in ENDINGS:
        if chosen := [file for file in files if file.address.lower().endswith(ending)]:
            if not is_file:
                _check_one_set(where, name, address, [file.address for file in chosen])
            return chosen
    raise UserError(f"{where}: no .parquet or .tar among its {counted(len(files), 'file')}.")


def _local_files(where: str, name: str, limit: int) -> list[RemoteFile]:
    paths, files = parquet_files(name), []
    if os.path.isdir(root := os.path.abspath(os.path.expanduser(name))):
        _check_one_set(where, name, root, paths)
    if absent := [path for path in paths if not os.path.isfile(path)]:
        raise UserError(f"{where}: {list_names(absent)} cannot be read: No such file.")
    for path in paths:
        stat = os.stat(path)
        files.append(RemoteFile(path, stat.st_size, str(stat.st_mtime_ns), limit))
    return files


def _pinned(where: str, name: str) -> str:
    """The address at a commit."""
    if not (match := _HUB.fullmatch(name)):
        raise UserError(f"{where} must be like hf://datasets/OWNER/NAME[@REVISION][/FOLDER].")
    file_system("hf")  # raises if there is no client
    from huggingface_hub import HfApi, constants

    repository, revision, rest = match.groups()
    check_reachable(where, constants.ENDPOINT)
    name = repository.removeprefix("datasets/")
    revision = revision and revision.replace("%2F", "/")
    described = asked(where, lambda: HfApi().dataset_info(name, revision=revision), _LOGIN)
    return f"hf://{repository}@{described.sha}{rest or ''}"


def _check_one_set(where: str, name: str, root: str, files: Sequence[str]) -> None:
    """Raises a UserError for files of several configurations."""
    folders = {os.path.dirname(file).removeprefix(root.rstrip("/")).strip("/") for file in files}
    sets = {"/".join(part for part in f.split("/") if not split_word(part)) for f in folders}
    if len(sets) > 1:
        names = ", ".join(sorted(f"{name.rstrip('/')}/{part}" for part in sets))
        raise UserError(f"{where} has several sets; name one: {names}.")


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """An order in which the examples of a block are read near each other.

    Blocks are permuted, and an example is at its block's place plus a random number of up to
    `width` blocks: no more than that many are needed at a time.
    """

    blocks: np.ndarray  # [N] of each example
    width: float

    def examples(self, seed: Any, epoch: int, within: np.ndarray) -> np.ndarray:
        """The examples at places in an epoch, int64 [P]."""
        with _ONE:
            return _order(self, seed, epoch)[within]


_ONE = threading.Lock()  # threads want an epoch's order at the same time


@functools.lru_cache(maxsize=4)  # epochs: a batch may have the end of one and the start of another
def _order(of: Windows, seed: Any, epoch: int) -> np.ndarray:
    key = hashlib.blake2b(f"vit_jax windows {seed} {epoch}".encode(), digest_size=16).digest()
    rng = np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8")))
    ranks = rng.permutation(int(of.blocks.max()) + 1)
    return np.argsort(ranks[of.blocks] + of.width * rng.random(len(of.blocks)), kind="stable")


def windows(files: Iterable[RemoteFile], blocks: np.ndarray) -> Windows | None:
    """The order of examples in these blocks of files; None if all fit into half of the cache."""
    files = list(files)
    total, count = sum(file.size for file in files), len(np.unique(blocks))
    if total <= (room := files[0].limit / 2):
        return None
    return Windows(np.unique(blocks, return_inverse=True)[1], max(1.0, count * room / total))


def announce(where: str, files: Sequence[RemoteFile], indexing: str) -> None:
    """Says what will be fetched; UserError if the disk has no room for it."""
    total, limit = sum(file.size for file in files), files[0].limit
    check_room("dataset.cache_gib", min(total, limit))
    once = f"all are read once, and kept in {cache_dir()}"
    if total > limit / 2:
        share = f"at most {limit / 2**30:g} GiB are kept in {cache_dir()}"
        once = f"every pass over them reads them; {share}: dataset.cache_gib"
    size = f"{counted(len(files), 'file')}, {total / 2**30:.2f} GiB"
    _say_once(f"{where}: {size}; {indexing}, {once}.")


@functools.cache
def _say_once(text: str) -> None:  # not for every split
    logging.info(text)
