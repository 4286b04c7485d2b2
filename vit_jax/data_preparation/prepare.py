"""`prepare_data`: images as they are downloaded to a TFDS set of random-access shards.

Beside the set's own folder `NAME/VERSION` lies `NAME/VERSION.incomplete` until it is finished:

    plan.json     what is being made of what; a second call has to ask for the same
    listing.npz   where each image lies in the source
    receipts/     one file per finished shard
    prepared/     the shards and, at last, their metadata: this is renamed to NAME/VERSION

Every shard is written under another name, synced and renamed, so a preparation can be killed at
any moment; the same command resumes with the shards that are missing. Which examples a shard holds
follows from the listing alone, and its bytes do not depend on threads or interruptions.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.tfds_reader import NAME, default_data_dir
from vit_jax.data.threads import map_threads
from vit_jax.data_preparation.examples import read_images
from vit_jax.data_preparation.listing import Listing, fingerprint
from vit_jax.data_preparation.metadata import SplitSizes, shard_name, write_image_metadata
from vit_jax.data_preparation.origins import ORIGINS
from vit_jax.data_preparation.progress import Progress
from vit_jax.data_preparation.shards import Shard, Shrink, read_receipt, write_shard
from vit_jax.data_preparation.work_folder import begin, check_finished, work_folder
from vit_jax.errors import UserError, check_known, check_local, counted, size_text
from vit_jax.files.atomic import sync, write_atomically
from vit_jax.files.manifest import write_manifest

UNREADABLE = "unreadable_images.txt"

Receipts = dict[str, dict[str, dict[str, Any]]]  # {split: {file name of a shard: its receipt}}


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
    """Prepares a set, or resumes a preparation that was interrupted; returns its folder.

    `kind` is a key of `origins.ORIGINS`, `source` a file or folder; the others are the flags of
    scripts/prepare_data.py.

    Raises:
      UserError: see the message; what was done so far is kept.
    """
    check_known("on_bad_image", on_bad_image, ("error", "skip"))
    check_known("source kind", kind, ORIGINS)
    check_local("--data_dir", data_dir)
    source = os.path.abspath(os.path.expanduser(source))
    if not os.path.exists(source):
        raise UserError(f"{source}: No such file or directory.")
    if num_workers < 1 or resize < 0 or not 1 <= quality <= 100 or not shard_megabytes > 0:
        raise UserError(
            f"{num_workers=}, {resize=}, {quality=}, {shard_megabytes=}: flags out of range; "
            "quality is from 1 to 100."
        )
    origin = ORIGINS[kind](source)
    name = name or origin.name + (f"_{resize}" if resize else "")
    if NAME.fullmatch(name) is None or "/" in name:
        raise UserError(f"--name={name!r}: takes letters, digits and underscores, a letter first.")
    plan = {
        "kind": kind,
        "source": source,
        "source_fingerprint": fingerprint(source, origin.parts),
        "resize": resize,
        "quality": quality if resize else 0,
        "shard_megabytes": shard_megabytes,
    }
    root = Path(os.path.expanduser(data_dir or default_data_dir())).absolute()
    folder = root / name / origin.version
    if folder.is_relative_to(source):
        raise UserError(f"{folder} would be inside its own source; give another --data_dir.")
    if check_finished(folder, plan):
        return folder
    with work_folder(folder) as work:
        if check_finished(folder, plan):  # by another process, before this one got the lock
            return folder
        begin(work, plan)
        if not (work / "listing.npz").exists():
            origin.make_listing().save(work / "listing.npz")
        listing = Listing.load(work / "listing.npz")
        receipts = _write_shards(listing, work, name, plan, num_workers)
        _handle_unreadable(receipts, work, on_bad_image)
        if fingerprint(source, origin.parts) != plan["source_fingerprint"]:
            raise UserError(f"{source}: changed while it was read; delete {work} and begin again.")
        _finish(work / "prepared", origin.version, listing.class_names, plan, receipts)
        (work / "prepared").rename(folder)
        sync(folder.parent)
    return folder


def _write_shards(
    listing: Listing, work: Path, name: str, plan: dict[str, Any], num_workers: int
) -> Receipts:
    """Writes the shards that are missing; returns the receipts of all."""
    shrink = Shrink(plan["resize"], plan["quality"]) if plan["resize"] else None
    shards = _shards(listing, work, name, plan["shard_megabytes"])
    receipts = {shard.path: read_receipt(shard) for shard in shards}
    missing = [shard for shard in shards if receipts[shard.path] is None]
    if len(missing) < len(shards):
        logging.info("%d of %d shards are there already", len(shards) - len(missing), len(shards))
    total, free = sum(shard.size for shard in missing), shutil.disk_usage(work).free
    if shrink is None and total > free:
        raise UserError(f"{work}: {size_text(total)} needed, {size_text(free)} free there.")
    logging.info("writing %d shards, %.1f GB of images", len(missing), total / 1e9)
    progress = Progress("writing", total / 1e6, "MB")

    def write(shard: Shard) -> dict[str, Any]:
        examples = read_images(listing, shard.split, shard.start, shard.stop)
        return write_shard(shard, examples, shrink)

    written = map_threads(write, missing, chunk=1, num_threads=num_workers)
    for shard, receipt in zip(missing, written, strict=True):
        receipts[shard.path] = receipt
        progress.add(shard.size / 1e6)
    by_split: Receipts = {split: {} for split in listing.splits}
    for shard in shards:
        by_split[shard.split][shard.path.name] = receipts[shard.path] or {}
    return by_split


def _shards(listing: Listing, work: Path, name: str, megabytes: float) -> list[Shard]:
    """Cuts the splits into shards of about the same size: neighbours in the listing's order."""
    shards = []
    for split, rows in listing.splits.items():
        ends = np.cumsum(rows["size"], dtype=np.int64)
        count = max(1, round(int(ends[-1]) / (megabytes * 1e6)))
        cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count)
        bounds = np.unique([0, *cuts, len(rows)]).tolist()
        for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
            file = shard_name(name, split, number, len(bounds) - 1)
            size = int(rows["size"][start:stop].sum())
            path, receipt = work / "prepared" / file, work / "receipts" / f"{file}.json"
            shards.append(Shard(path, receipt, split, start, stop, size))
    return shards


def _handle_unreadable(receipts: Receipts, work: Path, on_bad_image: str) -> None:
    """Lists the images that were left out, and refuses them unless they are to be skipped."""
    bad: list[str] = []
    for split, shards in receipts.items():
        bad += [where for receipt in shards.values() for where in receipt["unreadable"]]
        if not any(receipt["records"] for receipt in shards.values()):
            raise UserError(f"no image of split {split!r} can be decoded, such as {bad[-1]}.")
    if not bad:
        return
    path = work / "prepared" / UNREADABLE
    write_atomically(path, "\n".join(bad) + "\n")
    report = f"{counted(len(bad), 'image')} cannot be decoded, such as {bad[0]}; all in {path}"
    if on_bad_image == "error":
        raise UserError(
            f"{report}. --on_bad_image=skip finishes without them; to mend them, delete the folder "
            f"{work.name} too."
        )
    logging.warning("%s, and left out", report)


def _finish(
    folder: Path,
    version: str,
    class_names: Sequence[str],
    plan: dict[str, Any],
    receipts: Receipts,
) -> None:
    """Writes the metadata and the checksums, all safe on disk at the end."""
    sizes = {}
    for split, shards in receipts.items():
        lengths = [receipt["records"] for receipt in shards.values()]
        sizes[split] = SplitSizes(lengths, sum(each["num_bytes"] for each in shards.values()))
        logging.info("%s: %d examples in %d shards", split, sum(lengths), len(lengths))
    description = f"Prepared from {plan['source']} ({plan['kind']})."
    if plan["resize"]:
        description += (
            f" Short sides above {plan['resize']} pixels were scaled down to that (area "
            f"interpolation), as JPEG of quality {plan['quality']}."
        )
    write_image_metadata(
        folder, version=version, description=description, class_names=class_names, sizes=sizes
    )
    written = {file: receipt for shards in receipts.values() for file, receipt in shards.items()}
    for path in folder.iterdir():
        if path.name not in written:  # shards are synced already
            sync(path)
    write_manifest(
        folder,
        {"plan": plan, "records": {file: each["records"] for file, each in written.items()}},
        known={file: [each["bytes"], each["sha256"]] for file, each in written.items()},
    )
