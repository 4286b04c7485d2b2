"""From downloaded images to a TFDS dataset of random-access shards, and its check afterwards.

Until it is finished, `NAME/VERSION.incomplete` is beside the dataset's own folder `NAME/VERSION`:

    plan.json     what is being made from what; a second call has to ask for the same
    receipts/     one file per finished shard
    prepared/     the shards and finally their metadata: this is renamed to NAME/VERSION

After a kill the same command resumes with the missing shards. The contents of a shard depend only
on the listing, not on threads or interruptions.
"""

import contextlib
import fcntl
import functools
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import registered
from tqdm import tqdm

from vit_jax.data.sources import map_threads
from vit_jax.data.tfds_reader import NAME, data_root
from vit_jax.data_preparation.origins import ORIGINS, Listing, fingerprint
from vit_jax.data_preparation.shards import Shard, write_shard
from vit_jax.errors import UserError, missing_package, one_line
from vit_jax.files.manifest import MANIFEST, digest, read_manifest, write_manifest
from vit_jax.files.paths import UNFINISHED, check_local, read_object, sync, write_atomically
from vit_jax.kinds import check_known
from vit_jax.wording import counted, list_names, nearest

Receipts = dict[Shard, dict[str, Any]]  # see `write_shard`; split by split, in order


def prepare_data(
    kind: str,
    source: str,
    *,
    data_dir: str = "",
    name: str = "",
    num_workers: int = 1,
    resize: int = 0,
    quality: int = 95,
    on_bad_image: str = "error",
    shard_megabytes: float = 256,
) -> Path:
    """Prepares a dataset, or resumes an interrupted preparation; returns its folder.

    `kind` is a key of `origins.ORIGINS`, `source` a file or folder; the others are the flags of
    scripts/prepare_data.py. Work done before an error is kept.
    """
    check_known("on_bad_image", on_bad_image, ("error", "skip"))
    check_known("source kind", kind, ORIGINS)
    check_local("--data_dir", data_dir)
    source = os.path.abspath(os.path.expanduser(source))
    if not os.path.exists(source):
        raise UserError(f"{source}: No such file or directory.")
    if num_workers < 1 or resize < 0 or not 1 <= quality <= 100 or not shard_megabytes > 0:
        flags = f"{num_workers=}, {resize=}, {quality=}, {shard_megabytes=}"
        raise UserError(f"{flags}: flags out of range; quality is from 1 to 100.")
    origin = ORIGINS[kind]
    parts = origin.parts(source)
    if not name:
        name = origin.name or re.sub(r"\W", "_", os.path.basename(source), flags=re.ASCII)
        name = name if re.match(r"[A-Za-z]", name) else f"images_{name}"
        name += f"_{resize}" if resize else ""
    if NAME.fullmatch(name) is None or "/" in name:
        raise UserError(f"--name={name!r}: use letters, digits and underscores, a letter first.")
    plan = {
        "kind": kind,
        "source": source,
        "source_fingerprint": fingerprint(source, parts),
        "resize": resize,
        "quality": quality if resize else 0,
        "shard_megabytes": shard_megabytes,
    }
    folder = Path(data_root(data_dir), name, origin.version)
    if folder.is_relative_to(source):
        raise UserError(f"{folder} would be inside its own source; give another --data_dir.")
    work = folder.with_name(f"{folder.name}.incomplete")
    if _is_finished(folder, plan):
        shutil.rmtree(work, ignore_errors=True)  # left by a kill between renaming and cleaning up
        return folder
    with _work_folder(work, plan):
        listing = origin.list_images(source)
        count, names = counted(len(listing.class_names), "class"), list_names(listing.class_names)
        logging.info("%s: %s: %s; splits %s", source, count, names, ", ".join(listing.splits))
        write_atomically(work / "plan.json", json.dumps(plan))
        receipts = _write_shards(listing, work, name, plan, num_workers)
        _list_unreadable(receipts, work, on_bad_image)
        if fingerprint(source, parts) != plan["source_fingerprint"]:
            raise UserError(f"{source}: changed while being read; delete {work} and start again.")
        _finish(work / "prepared", origin.version, listing.class_names, plan, receipts)
        (work / "prepared").rename(folder)
        sync(folder.parent)
    return folder


def _is_finished(folder: Path, plan: dict[str, Any]) -> bool:
    """Whether a dataset is already prepared; UserError if it was made with another plan."""
    if not folder.exists():
        return False
    manifest = read_manifest(folder)
    if manifest is None or manifest["note"].get("plan") != plan:
        made = f"{folder} already exists, made from something else or with other options"
        raise UserError(f"{made}; delete it, or give another --name or --data_dir.")
    logging.info("%s is already prepared; verify it with --check", folder)
    return True


@contextlib.contextmanager
def _work_folder(work: Path, plan: dict[str, Any]) -> Iterator[None]:
    """Locks a folder for this preparation, by this plan and process; removed at the end."""
    try:
        for name in ("receipts", "prepared"):
            (work / name).mkdir(parents=True, exist_ok=True)
        lock = open(work / "lock", "a")  # noqa: SIM115 - closed below; NFS wants it writable
    except OSError as error:
        raise UserError(f"{work}: cannot be written ({error.strerror}); see --data_dir.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(f"{work}: another process is working there.") from None
        except OSError as error:  # not every file system has locks
            logging.warning("%s: no lock (%s); run one preparation at a time", work, error)
        for stale in work.rglob(f"*{UNFINISHED}"):  # left half-written by a kill
            stale.unlink()
        path = work / "plan.json"
        begun = read_object(path) if path.exists() else plan
        for key, value in plan.items():
            if value != begun.get(key):
                how = f"{work} was started with {key}={begun.get(key)!r}, not {value!r}"
                raise UserError(f"{how}; use the same, or delete it to start again.")
        yield
    # NFS keeps a deleted open file under another name, so the lock is closed first.
    shutil.rmtree(work, ignore_errors=True)


def _write_shards(
    listing: Listing, work: Path, name: str, plan: dict[str, Any], num_workers: int
) -> Receipts:
    """Writes the missing shards, of similar size and consecutive examples; receipts of all."""
    shards = []
    for split, rows in listing.splits.items():
        ends = np.cumsum(rows["size"], dtype=np.int64)
        count = max(1, round(int(ends[-1]) / (plan["shard_megabytes"] * 1e6)))
        cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count)
        bounds = np.unique([0, *cuts, len(rows)]).tolist()
        for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
            file = f"{name}-{split}.array_record-{number:05d}-of-{len(bounds) - 1:05d}"
            path, receipt = work / "prepared" / file, work / "receipts" / f"{file}.json"
            shards.append(Shard(path, receipt, split, rows[start:stop]))
    write = functools.partial(write_shard, short_side=plan["resize"], quality=plan["quality"])
    written = map_threads(write, shards, chunk=1, num_threads=num_workers)
    progress = tqdm(written, "writing shards", len(shards), mininterval=10)
    return dict(zip(shards, progress, strict=True))


def _list_unreadable(receipts: Receipts, work: Path, on_bad_image: str) -> None:
    """Lists the images that were left out; UserError unless they are to be skipped."""
    bad = [where for receipt in receipts.values() for where in receipt["unreadable"]]
    if not bad:
        return
    path = work / "prepared" / "unreadable_images.txt"
    write_atomically(path, "\n".join(map(str, bad)) + "\n")
    report = f"{counted(len(bad), 'image')} cannot be decoded, such as {bad[0]}; all in {path}"
    if on_bad_image == "error":
        fix = f"to fix them, also delete the folder {work.name}"
        raise UserError(f"{report}. --on_bad_image=skip finishes without them; {fix}.")
    logging.warning("%s; skipped", report)


def _finish(
    folder: Path, version: str, class_names: Sequence[str], plan: dict[str, Any], receipts: Receipts
) -> None:
    """Writes the metadata, like that of `imagenet2012`, and checksums; all synced at the end."""
    splits = []
    for split in dict.fromkeys(shard.split for shard in receipts):
        of_split = [receipt for shard, receipt in receipts.items() if shard.split == split]
        lengths = [receipt["records"] for receipt in of_split]
        if not sum(lengths):
            raise UserError(f"no images of split {split!r} can be decoded; see {folder}.")
        size = sum(receipt["num_bytes"] for receipt in of_split)
        splits.append(tfds.core.SplitInfo(name=split, shard_lengths=lengths, num_bytes=size))
        logging.info("%s: %d examples in %d shards", split, sum(lengths), len(lengths))
    features = {
        "image": tfds.features.Image(encoding_format="jpeg"),
        "label": tfds.features.ClassLabel(names=list(class_names)),
        "file_name": tfds.features.Text(),
    }
    tfds.folder_dataset.write_metadata(
        data_dir=folder,
        version=version,
        description=f"Prepared by vit_jax: {plan}",
        features=tfds.features.FeaturesDict(features),
        supervised_keys=("image", "label"),
        split_infos=splits,
        check_data=False,
    )
    for path in folder.iterdir():
        sync(path)
    known = {
        shard.path.name: [receipt["bytes"], receipt["sha256"]]
        for shard, receipt in receipts.items()
    }
    write_manifest(folder, {"plan": plan}, known)


def build_tfds(name: str, data_dir: str, manual_dir: str = "") -> str:
    """Lets TFDS download and prepare one of its datasets, adds checksums, returns the directory.

    `name` is `NAME[/CONFIG][:VERSION]`, `manual_dir` a folder with files that TFDS cannot download.
    """
    known = registered.list_imported_builders()
    if (match := NAME.fullmatch(name)) is None or match["name"] not in known:
        raise UserError(f"{name!r} is not a TFDS dataset.{nearest(name.split('/')[0], known)}")
    check_local("--data_dir", data_dir)
    root = data_root(data_dir)
    config = tfds.download.DownloadConfig(manual_dir=manual_dir or None, try_download_gcs=False)
    logging.info("TFDS is preparing %s in %s", name, root)
    try:
        builder = tfds.builder(name, data_dir=root, file_format="array_record")
        builder.download_and_prepare(download_config=config)
    except ImportError as error:
        raise missing_package(f"preparing {name}", str(error.name), "tf") from None
    except Exception as error:  # many kinds, with multi-line texts
        raise UserError(f"TFDS cannot prepare {name} ({one_line(error)}).") from error
    folder = Path(builder.data_dir)
    if not (folder / MANIFEST).exists():
        write_manifest(folder, {"plan": {"kind": "tfds", "source": name}})
    return str(folder)


def check_prepared(directory: str) -> list[tuple[str, str]]:
    """Damaged files of a prepared `.../NAME/VERSION`, and why; UserError: no intact checksums."""
    folder = Path(os.path.expanduser(directory)).absolute()
    if (manifest := read_manifest(folder)) is None:
        what = f"has no intact {MANIFEST}"
        raise UserError(f"{folder}: {what}; give a .../NAME/VERSION prepared by vit_jax.")
    files = manifest["files"]

    def reason(name: str) -> str:
        size, sha256 = files[name]
        try:
            size_now, sha256_now = digest(folder / name)
        except OSError as error:
            return one_line(error)
        if size_now != size:
            return f"has {size_now} bytes instead of {size}"
        return "" if sha256_now == sha256 else "its bytes have changed"

    checked = map_threads(reason, files, chunk=1)
    reasons = tqdm(checked, "checking files", len(files), mininterval=10)
    return sorted((name, why) for name, why in zip(files, reasons, strict=True) if why)
