"""Local and bucket paths, and atomic writes: a file has its old content or its new one.

A bucket is gs://BUCKET/FOLDER, through etils.epath and gcsfs, with the methods of pathlib. It has
no rename, but objects are replaced as a whole, and the server knows their MD5.
"""

import base64
import csv
import errno
import importlib.util
import io
import itertools
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import Any, cast

import numpy as np

from vit_jax.errors import UserError, as_user_error, missing_package, one_line
from vit_jax.files.network import check_reachable

BUCKET = "gs://"
GOOGLE = "https://storage.googleapis.com"
_ADDRESS = re.compile(r"gs://[a-z0-9][a-z0-9._-]{1,220}[a-z0-9](/[^/?#*\[\]]+)+")
# The last object that Orbax writes of a step, in place of a rename.
COMMITTED = "commit_success.txt"
LARGEST = 1 << 30  # bytes of a file that is read as a whole, such as an image
LARGEST_TEXT = 64 << 20  # the same for settings and vocabularies


def is_bucket(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).startswith(BUCKET)


def to_path(path: str | os.PathLike[str]) -> Path:
    """A path with pathlib's methods, also of gs://; expands `~`. UserError: malformed, no gcsfs."""
    if "\0" in os.fspath(path):
        raise UserError(f"{path} is no path: it has a NUL character.")
    if not is_bucket(path):
        return Path(os.path.expanduser(path))
    text = os.fspath(path).rstrip("/")
    if not _ADDRESS.fullmatch(text) or not text.isprintable() or {".", ".."} & {*text.split("/")}:
        raise UserError(f"{text!r} is not a folder in a bucket, such as gs://BUCKET/FOLDER.")
    if importlib.util.find_spec("gcsfs") is None:
        raise missing_package(text, "gcsfs", "gcs")
    check_reachable(text, http_server())
    os.environ.setdefault("EPATH_USE_TF", "0")  # not TensorFlow's client, even if installed
    # Plain buckets: the API that detects other kinds needs extra permissions.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec
    from etils import epath

    # Other processes write too, so do not cache folder listings.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return cast(Path, epath.Path(text))


def http_server() -> str:
    """The address at which Google's storage, or what stands for it, answers."""
    server = os.environ.get("STORAGE_EMULATOR_HOST") or GOOGLE
    return (server if "://" in server else f"http://{server}").rstrip("/")


def full_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path with links resolved."""
    # Not Path.resolve, which raises RuntimeError for a circle of links.
    return to_path(path) if is_bucket(path) else Path(os.path.realpath(to_path(path)))


def bucket_files() -> Any:
    """The fsspec file system for all buckets."""
    import fsspec

    return fsspec.filesystem("gcs", finalize_on_close=True)  # the same cached instance as epath's


def make_folder(path: Path) -> None:
    """Creates a folder and its parents; not in a bucket, where gcsfs would create the bucket."""
    if not is_bucket(path):
        path.mkdir(parents=True, exist_ok=True)


def size_of(path: Path) -> int:
    """Size of a file in bytes."""
    return bucket_files().size(str(path)) if is_bucket(path) else path.stat().st_size


def move(source: Path, target: Path) -> None:
    """Moves a file or folder, also across disks; within a bucket the server does it."""
    if not is_bucket(source):
        shutil.move(source, target)
        return
    names = bucket_files().find(str(source))
    base = str(source).removeprefix(BUCKET)
    bucket_files().copy(names, [f"{target}{name.removeprefix(base)}" for name in names])
    remove(source)


def remove(path: Path) -> None:
    """Removes a file, or a folder with its contents."""
    if is_bucket(path):
        with suppress(FileNotFoundError):  # a request retried after a lost reply
            bucket_files().rm(str(path), recursive=True)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def uploaded(path: Path) -> Iterator[Path]:
    """A local file or new folder that is uploaded to `path` in a bucket at the end."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / path.name
        yield local
        if local.is_dir():
            bucket_files().put(f"{local}/", f"{path}/", recursive=True)
        elif local.exists():
            bucket_files().put_file(str(local), str(path))


@contextmanager
def local_copy(path: Path) -> Iterator[Path]:
    """A local file with the content of `path`; `path` itself outside buckets."""
    if not is_bucket(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / path.name
        bucket_files().get_file(str(path), str(local))
        yield local


def cache_dir() -> Path:
    """The folder for downloads; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(os.environ.get("VIT_JAX_CACHE") or f"{base}/vit_jax"))


def cached_copy(path: Path) -> Path:
    """A copy of a bucket's object in the cache, downloaded unless this version is there."""
    local = cache_dir() / "data" / str(path).removeprefix(BUCKET)
    info = bucket_files().info(str(path))
    # A replaced object has another MD5; a composite object has none.
    size, version = int(info["size"]), str(info.get("md5Hash") or info.get("generation", ""))
    note = local.with_name(f"{local.name}.version")
    is_known = local.exists() and note.exists() and note.read_text() == version
    if is_known and local.stat().st_size == size:
        return local
    local.parent.mkdir(parents=True, exist_ok=True)
    with replacing(local) as unfinished:
        bucket_files().get_file(str(path), str(unfinished))
    write_atomically(note, version)
    return local


def names_below(folder: Path) -> list[str]:
    """Relative names of all files below a folder."""
    if is_bucket(folder):
        return sorted(_objects(folder))
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def known_digests(folder: Path) -> dict[str, list[Any]]:
    """[size, "md5:HEX"] by relative name of files below a folder, if known by the bucket."""
    return {
        name: [int(info["size"]), f"md5:{base64.b64decode(info['md5Hash']).hex()}"]
        for name, info in (_objects(folder) if is_bucket(folder) else {}).items()
        if info.get("md5Hash")
    }


def _objects(folder: Path) -> Mapping[str, dict[str, Any]]:
    """Metadata of the objects below a folder, by relative name."""
    prefix = f"{folder}/".removeprefix(BUCKET)
    objects = bucket_files().find(str(folder), detail=True)
    return {name.removeprefix(prefix): info for name, info in objects.items()}


def check_file(path: str | os.PathLike[str]) -> None:
    """Raises OSError for what exists but is no file: a pipe may never answer."""
    if not is_bucket(path) and os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EISDIR, "it is a folder or a device, not a file", str(path))


def read_file(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """The bytes of a local file or an object; OSError also if it is no file or too large."""
    check_file(path)
    with to_path(path).open("rb") as file:
        content = file.read(most + 1)  # not by its size, which files of the kernel lack
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20:,} MiB", str(path))
    return content


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text; ValueError for another text, also one that is nested too deep."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


UNFINISHED = ".unfinished"  # ends the names of files that are being written


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a local path to write to, which replaces `path` once it is complete and on disk."""
    if is_bucket(path):
        with uploaded(to_path(path)) as local:
            yield local
        return
    path = Path(path)
    check_file(path)  # a rename would replace /dev/null, too
    temporary = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        yield temporary
        sync(temporary)
        temporary.rename(path)
        sync(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Writes text; file names in it, as on Linux, need not be valid UTF-8."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    write_atomically(to_path(path), json.dumps(value, indent=2) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file; UserError if it is missing, unreadable or not JSON."""
    try:
        return parse_json(read_file(path, LARGEST_TEXT))
    except OSError as error:
        raise as_user_error(f"{path} cannot be read: {one_line(error)}.", error) from error
    except ValueError as error:  # from JSON or UTF-8
        raise UserError(f"{path} is damaged, not a JSON file: {error}.") from error


def read_object(path: str | os.PathLike[str], **kinds: type | UnionType) -> dict[str, Any]:
    """Reads a JSON file with an object that has keys of these kinds; errors as `read_json`."""
    if not isinstance(value := read_json(path), dict):
        raise UserError(f"{path} is damaged, it is not a JSON object; restore or delete it.")
    for key, kind in kinds.items():
        found = value.get(key)
        if not isinstance(found, kind) or (type(found) is bool and kind is not bool):
            what = f"{key!r} is missing or has the wrong type"
            raise UserError(f"{path} is damaged, {what}; restore or delete it.")
    if odd := [k for k, x in value.items() if isinstance(x, float) and not math.isfinite(x)]:
        raise UserError(f"{path} is damaged, {odd[0]!r} is {value[odd[0]]}; restore or delete it.")
    return value


@contextmanager
def reading(name: str, problem: str = "has a value of the wrong type") -> Iterator[None]:
    """Turns what a value of the wrong type raises into a UserError that names its file."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise as_user_error(f"{error.filename or name}: {one_line(error)}.", error) from error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise UserError(f"{name} {problem} ({error!r}).") from error


def free_name(path: Path) -> Path:
    """`config.<n>.json` with the first n not taken."""
    numbered = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in itertools.count(1))
    return next(candidate for candidate in numbered if not candidate.exists())


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> Path:
    """Writes an `.npz` of named arrays; the same arrays give the same bytes. Returns `path`."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return to_path(path)


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """CSV in which spreadsheets see no formulas: cells like formulas are prefixed with '."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(
        [f"'{cell}" if str(cell).startswith(("=", "+", "@")) else cell for cell in row]
        for row in rows
    )
    return text.getvalue()


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network file systems cannot sync folders, and need not
            raise
    finally:
        os.close(descriptor)


def check_utf8(key: str, path: str | os.PathLike[str]) -> None:
    """Raises a UserError for a name that is not UTF-8: TensorStore takes no other."""
    full = os.path.abspath(path)
    if full.encode(errors="ignore").decode() != full:
        raise UserError(f"{key}={os.fspath(path)!r}: the names of folders must be UTF-8.")


def check_local(key: str, path: str) -> None:
    """Raises a UserError for `gs://bucket/x`, which would become a folder named `gs:`."""
    if "://" in path or "\0" in path:
        raise UserError(f"{key}={path!r}: only file system paths work; mount it first.")
