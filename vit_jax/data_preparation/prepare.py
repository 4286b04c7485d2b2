"""`prepare_data`: images as they are downloaded to a TFDS set of random-access shards.

Beside the set's own folder `NAME/VERSION` lies `NAME/VERSION.incomplete` until it is finished:

    plan.json     what is being made of what; a second call has to ask for the same
    listing/      where each image lies in the source
    unpacked/     class tars out of a compressed tar
    receipts/     one file per finished shard
    prepared/     the shards and, at last, their metadata: this is renamed to NAME/VERSION

Every shard is written under another name, synced and renamed, so a preparation can be killed at
any moment; the same command goes on with the shards that are missing. Which examples a shard holds
follows from the listing alone, and its bytes do not depend on workers or interruptions.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.data.tfds_reader import NAME, default_data_dir
from vit_jax.data_preparation import metadata
from vit_jax.data_preparation.listing import Listing, fingerprint
from vit_jax.data_preparation.metadata import UNREADABLE, SplitSizes, shard_name
from vit_jax.data_preparation.origins import ORIGINS, Origin
from vit_jax.data_preparation.parallel import Map, Progress, worker_processes
from vit_jax.data_preparation.readers import RECORDS, open_reader
from vit_jax.data_preparation.shards import Shard, Shrink, read_receipt, write_shard
from vit_jax.data_preparation.work_folder import begin, there_already, work_folder
from vit_jax.errors import UserError, check_known, check_local
from vit_jax.files.manifest import UNFINISHED, sync, write_atomically, write_manifest

Receipts = dict[str, list[tuple[Shard, dict[str, Any]]]]  # of each split, in order


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
    """Prepares a set, or goes on with a preparation that was interrupted.

    Args:
      kind: a key of `origins.ORIGINS`.
      source: file or folder.
      data_dir: TFDS root to write to; "" for TFDS's default.
      name: of the set; by default that of the source, with `_RESIZE` where it is resized.
      num_workers: processes.
      resize: short side, in pixels, of larger images; 0 keeps every image byte for byte.
      quality: of the JPEGs that `resize` writes, 1 to 100.
      on_bad_image: `error` (at the end, with a list) or `skip` images that cannot be decoded.
      shard_megabytes: of images, in the source, that go into a shard; a worker holds one.

    Returns:
      The prepared folder.

    Raises:
      UserError: see the message; what was done so far is kept.
    """
    check_known("on_bad_image", on_bad_image, ("error", "skip"))
    check_known("source kind", kind, ORIGINS)
    source = os.path.abspath(os.path.expanduser(source))
    if not os.path.exists(source):
        raise UserError(f"{source}: No such file or directory.")
    _check_range("num_workers", num_workers, 1)
    _check_range("resize", resize, 0)
    _check_range("quality", quality, 1, 100)
    _check_range("shard_megabytes", shard_megabytes, 1e-6, 1e6)
    check_local("--data_dir", data_dir)
    origin = ORIGINS[kind](source)
    if resize and origin.no_resize:
        raise UserError(f"{source}: {origin.no_resize}; prepare it without --resize.")
    name = name or origin.name + (f"_{resize}" if resize else "")
    if NAME.fullmatch(name) is None or "/" in name:
        raise UserError(f"--name={name!r}: takes letters, digits and underscores, a letter first.")
    plan = {
        "kind": kind,
        "source": source,
        "source_fingerprint": fingerprint(origin.files(), origin.root),
        "resize": resize,
        "quality": quality if resize else 0,
        "shard_megabytes": shard_megabytes,
    }
    root = Path(data_dir or default_data_dir()).expanduser().absolute()
    folder = root / name / origin.version
    if folder.is_relative_to(source):
        raise UserError(
            f"{folder} would be inside of its own source; give another --name or --data_dir."
        )
    if folder.exists():
        return there_already(folder, plan)
    with work_folder(folder) as work:
        if folder.exists():  # another process has finished it before this one got the lock
            return there_already(folder, plan)
        begin(work, plan)
        with worker_processes(num_workers) as run:
            _list_source(origin, work, run)
            receipts = _write_shards(origin, work, name, plan, run)
        _handle_unreadable(receipts, work, on_bad_image)
        if fingerprint(origin.files(), origin.root) != plan["source_fingerprint"]:
            raise UserError(f"{source}: changed while it was read; delete {work} and begin again.")
        _finish(origin, work, name, plan, receipts)
        (work / "prepared").rename(folder)
        sync(folder.parent)
    return folder


def _check_range(flag: str, value: float, low: float, high: float = math.inf) -> None:
    if not low <= value <= high:
        fitting = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise UserError(f"--{flag}={value} must be {fitting}.")


def _list_source(origin: Origin, work: Path, run: Map) -> None:
    final = work / "listing"
    if final.exists():
        return
    temporary = work / f"listing{UNFINISHED}"
    origin.make_listing(work, run).save(temporary)
    temporary.rename(final)
    sync(work)


def _write_shards(
    origin: Origin, work: Path, name: str, plan: dict[str, Any], run: Map
) -> Receipts:
    """Writes the shards that are missing; returns the receipts of all."""
    shards = _shards(origin, work, name, plan)
    receipts = {shard.path: read_receipt(shard) for shard in shards}
    missing = [shard for shard in shards if receipts[shard.path] is None]
    if len(missing) < len(shards):
        logging.info("%d of %d shards are there already", len(shards) - len(missing), len(shards))
    total = sum(shard.size for shard in missing)
    free = shutil.disk_usage(work).free
    if not plan["resize"] and total > free:
        raise UserError(
            f"{work}: {total / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free there."
        )
    logging.info("writing %d shards, %.1f GB of images", len(missing), total / 1e9)
    progress = Progress("writing", total, "bytes")
    try:
        for shard, receipt in zip(missing, run(write_shard, missing), strict=True):
            receipts[shard.path] = receipt
            progress.add(shard.size)
    finally:
        open_reader.cache_clear()  # it maps a listing that is about to be deleted
    by_split: Receipts = {}
    for shard in shards:
        receipt = receipts[shard.path]
        assert receipt is not None
        by_split.setdefault(shard.split, []).append((shard, receipt))
    return by_split


def _shards(origin: Origin, work: Path, name: str, plan: dict[str, Any]) -> list[Shard]:
    """Cuts the splits into shards of about the same size: neighbours in the listing's order."""
    listing = Listing.load(work / "listing")
    shrink = Shrink(plan["resize"], plan["quality"]) if plan["resize"] else None
    shards = []
    for split, rows in listing.splits.items():
        ends = np.cumsum(rows["size"], dtype=np.int64)
        count = max(1, round(int(ends[-1]) / (plan["shard_megabytes"] * 1e6)))
        cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count)
        bounds = np.unique([0, *cuts, len(rows)])
        for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
            file = shard_name(name, split, number, len(bounds) - 1)
            shards.append(
                Shard(
                    path=str(work / "prepared" / file),
                    receipt=str(work / "receipts" / f"{file}.json"),
                    reader=origin.reader,
                    listing=str(work / "listing"),
                    split=split,
                    start=int(start),
                    stop=int(stop),
                    size=int(rows["size"][start:stop].sum()),
                    shrink=shrink,
                )
            )
    return shards


def _handle_unreadable(receipts: Receipts, work: Path, on_bad_image: str) -> None:
    """Lists the images that were left out, and refuses them unless they are to be skipped."""
    bad = [
        where
        for each in receipts.values()
        for _, receipt in each
        for where in receipt["unreadable"]
    ]
    for split, each in receipts.items():
        if not any(receipt["records"] for _, receipt in each):
            raise UserError(f"no image of split {split!r} can be decoded, such as {bad[0]}.")
    if not bad:
        return
    path = work / "prepared" / UNREADABLE
    write_atomically(path, "\n".join(bad) + "\n")
    if on_bad_image == "error":
        raise UserError(
            f"{len(bad)} images cannot be decoded, such as {bad[0]}; all are listed in {path}. "
            "--on_bad_image=skip finishes without them; to mend them, delete the folder "
            f"{work.name} too."
        )
    logging.warning("%d images cannot be decoded and are left out, such as %s", len(bad), bad[0])


def _finish(
    origin: Origin, work: Path, name: str, plan: dict[str, Any], receipts: Receipts
) -> None:
    """Writes the metadata and the checksums, all safe on disk at the end."""
    folder = work / "prepared"
    sizes = {
        split: SplitSizes(
            [receipt["records"] for _, receipt in each],
            sum(receipt["num_bytes"] for _, receipt in each),
        )
        for split, each in receipts.items()
    }
    listing = Listing.load(work / "listing")
    description = f"Prepared from {plan['source']} ({plan['kind']})."
    if plan["resize"]:
        description += (
            f" Short sides above {plan['resize']} pixels were scaled down to that (area "
            f"interpolation), as JPEG of quality {plan['quality']}."
        )
    if origin.reader == RECORDS:
        metadata.copy_metadata(
            Path(plan["source"]), folder, name=name, description=description, sizes=sizes
        )
    else:
        metadata.write_image_metadata(
            folder,
            name=name,
            version=origin.version,
            description=description,
            class_names=listing.class_names,
            sizes=sizes,
        )
    written = {os.path.basename(s.path): r for each in receipts.values() for s, r in each}
    for path in folder.iterdir():
        if path.name not in written:  # shards are synced already
            sync(path)
    write_manifest(
        folder,
        {"plan": plan, "records": {shard: each["records"] for shard, each in written.items()}},
        known={shard: [each["bytes"], each["sha256"]] for shard, each in written.items()},
    )
    for split, each in sizes.items():
        logging.info(
            "%s: %d examples in %d shards", split, sum(each.shard_lengths), len(each.shard_lengths)
        )
