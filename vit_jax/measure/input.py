"""Images per second and processor time of the input pipeline, beside those of others, in turn.

All read the same JPEGs, decode them, cut an inception crop to 224 pixels and mirror half of them.
Each measurement is a process of its own; the files are in the page cache, so storage is not
measured. On a machine that others use too, processor time (user + system of the process and its
workers) is the fairer figure: big_vision's 48 threads get a larger share of a busy core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module

from vit_jax.data.datasets import create_dataset
from vit_jax.data.ops import InceptionCrop
from vit_jax.data.pipeline import train_batches
from vit_jax.data_preparation import shards
from vit_jax.data_preparation.shards import image_of, serialize, shrink
from vit_jax.errors import check_known, missing_package
from vit_jax.measure.photos import photographs

NUM_SHARDS = 8
_NAME, _VERSION = "benchmark", "1.0.0"

INPUT_PEERS = ("big_vision", "dataloader", "resized")

# As in its configs/vit_i1k.py, without one-hot labels.
_PEER = 'decode_jpeg_and_inception_crop(224)|flip_lr|value_range(-1, 1)|keep("image", "label")'


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every measurement has in common."""

    batch_size: int = 128
    num_images: int = 4096  # that are timed, after as many as fill the buffers
    num_threads: int = 2  # of our pipeline, per process
    num_workers: int = 0  # its processes


@dataclasses.dataclass(frozen=True)
class Speed:
    """One measurement."""

    images_per_second: float
    cpu_ms_per_image: float


def benchmark_input(
    folder: Path,
    settings: Settings,
    *,
    examples: Iterable[tuple[bytes, int]] | None = None,
    preprocess: str = "official_train(224)",
    against: Sequence[str] = (),
    clones: str = "",
    rounds: int = 5,
) -> dict[str, list[Speed]]:
    """Measures our pipeline and those that are asked for, in turn.

    Args:
      folder: an empty folder for the images.
      settings: see `Settings`.
      examples: image files with labels below 1000; photographs are made by default.
      preprocess: of our pipeline.
      against: some of `INPUT_PEERS`. `big_vision`: its own tf.data pipeline; `dataloader`: torch's,
        with Pillow and processes, as timm's loader is made; `resized`: ours, from a copy whose
        short sides are 256 pixels (`prepare_data --resize=256`).
      clones: folder with a clone of big_vision.
      rounds: how often each variant takes its turn.

    Returns:
      {variant: measurements, one per round}; `vit_jax` is first.

    Raises:
      UserError: a peer is unknown or not installed.
    """
    for peer in against:
        check_known("--against", peer, INPUT_PEERS)
    # Not imported: they are needed in their own processes only.
    if "big_vision" in against and importlib.util.find_spec("tensorflow") is None:
        raise missing_package("--against=big_vision", "tensorflow", "tf")
    if "dataloader" in against and importlib.util.find_spec("torch") is None:
        raise missing_package("--against=dataloader", "torch", "peers")
    files = list(examples or photographs(1024))
    ours = _write(folder / "ours", files)
    variants: dict[str, tuple[Any, ...]] = {"vit_jax": (_measure_ours, ours, preprocess, settings)}
    for peer in against:
        if peer == "big_vision":
            theirs = str(folder / "theirs")
            _in_process(_write_for_peer, ours, theirs)
            clone = os.path.abspath(Path(clones or ".") / "big_vision")
            variants[peer] = (_measure_big_vision, theirs, clone, settings)
        elif peer == "dataloader":
            variants[peer] = (_measure_dataloader, ours, settings)
        else:
            small = _write(
                folder / "resized", [(shrink(data, 256, 95), label) for data, label in files]
            )
            variants[peer] = (_measure_ours, small, preprocess, settings)
    speeds: dict[str, list[Speed]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, measurement in variants.items():
            speeds[name].append(_in_process(*measurement))
    return speeds


def _write(folder: Path, examples: Iterable[tuple[bytes, int]]) -> str:
    """Writes a prepared set; returns its directory."""
    records = [serialize(*each, b"") for each in examples]
    directory = folder / _NAME / _VERSION
    directory.mkdir(parents=True)
    sizes = []
    for number in range(NUM_SHARDS):
        path = directory / shards.shard_name(_NAME, "train", number, NUM_SHARDS)
        writer = array_record_module.ArrayRecordWriter(str(path), shards.WRITER_OPTIONS)
        for record in (shard := records[number::NUM_SHARDS]):
            writer.write(record)
        writer.close()
        sizes.append(len(shard))
    shards.write_image_metadata(
        directory,
        version=_VERSION,
        description="",
        class_names=[str(number) for number in range(1000)],
        sizes={"train": (sizes, sum(map(len, records)))},
    )
    return str(directory)


def _in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of this file in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _measure_ours(directory: str, preprocess: str, settings: Settings) -> Speed:
    dataset = create_dataset(name=directory, split="train", preprocess=preprocess)
    with train_batches(
        dataset,
        batch_size=settings.batch_size,
        seed=0,
        total_steps=2**31,
        num_threads=settings.num_threads,
        num_workers=settings.num_workers,
    ) as batches:
        return _time((batch["image"] for batch in batches), settings)


def _measure_big_vision(directory: str, clone: str, settings: Settings) -> Speed:
    """big_vision's own `input_pipeline.training`, from its own files."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.path.insert(0, clone)
    from ml_collections import ConfigDict

    pipeline = importlib.import_module("big_vision.input_pipeline")
    for name in ("ops_general", "ops_image"):
        importlib.import_module(f"big_vision.pp.{name}")
    data, _ = pipeline.training(
        ConfigDict(
            {
                "data": {"name": "from_data_dir", "split": "train", "data_dir": directory},
                "batch_size": settings.batch_size,
                "shuffle_buffer_size": 250_000,
                "prefetch": 8,
                "pp": _PEER,
            }
        )
    )
    images = (np.asarray(memoryview(batch["image"])) for batch in data)  # as it hands them to JAX
    return _time(images, settings)


class _PillowImages:
    """A data set for torch: [3, 224, 224] uint8, decoded, cropped and mirrored by Pillow."""

    def __init__(self, directory: str) -> None:
        self._files = [
            image_of(record, "image")
            for path in sorted(Path(directory).glob("*array_record*"))
            for record in array_record_module.ArrayRecordReader(str(path)).read_all()
        ]

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, index: int) -> Any:
        import torch
        from PIL import Image

        rng = np.random.default_rng(index)
        with Image.open(io.BytesIO(self._files[index % len(self._files)])) as file:
            image = file.convert("RGB")
        top, left, height, width = InceptionCrop(224).sample_box(rng, image.height, image.width)
        box = (left, top, left + width, top + height)
        image = image.resize((224, 224), Image.Resampling.BILINEAR, box=box)
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _measure_dataloader(directory: str, settings: Settings) -> Speed:
    from torch.utils.data import DataLoader

    images: Any = _PillowImages(directory)
    loader: Any = DataLoader(
        images,
        batch_size=settings.batch_size,
        num_workers=settings.num_workers or settings.num_threads,
        drop_last=True,
    )
    return _time(iter(loader), settings)


def _write_for_peer(source: str, folder: str) -> None:
    """The same records as TFRecords: TFDS reads ArrayRecords without tf.data only."""
    import tensorflow as tf

    target = Path(folder)
    target.mkdir()
    for path in sorted(Path(source).iterdir()):
        copy = target / path.name.replace("array_record", "tfrecord")
        if copy.name == path.name:
            copy.write_text(path.read_text().replace('"array_record"', '"tfrecord"'))
            continue
        reader = array_record_module.ArrayRecordReader(str(path))
        with tf.io.TFRecordWriter(str(copy)) as file:
            for record in reader.read_all():
                file.write(record)
        reader.close()


def _time(batches: Iterator[np.ndarray], settings: Settings) -> Speed:
    """Takes `num_images` images out of an endless iterator that is running at full speed."""
    count = max(1, settings.num_images // settings.batch_size)
    for _ in itertools.islice(batches, max(4, count // 4)):
        pass
    start, start_cpu = time.perf_counter(), cpu_seconds()
    for image in itertools.islice(batches, count):
        assert len(image) == settings.batch_size
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - start_cpu
    images = count * settings.batch_size
    return Speed(images / seconds, 1000 * cpu / images)


def cpu_seconds() -> float:
    """User and system time of this process and its living descendants."""
    times, parents = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            parents[int(name)] = int(fields[1])
            times[int(name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return sum(seconds for pid, seconds in times.items() if ours(pid))
