"""Images per second and processor time of the input pipeline, beside big_vision's, in turn.

All variants read the same JPEGs, decode them, cut an inception crop to 224 pixels and mirror half
of them. Each measurement is a process of its own; the files are in the page cache, so storage is
not measured. On a machine that others use too, processor time (user + system of the process and
its workers) is the fairer figure: big_vision's 48 threads get a larger share of a busy core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module

from vit_jax.data.datasets import create_dataset
from vit_jax.data.pipeline import train_batches
from vit_jax.data_preparation import metadata
from vit_jax.data_preparation.examples import image_of, serialize
from vit_jax.data_preparation.shards import WRITER_OPTIONS, Shrink
from vit_jax.errors import UserError
from vit_jax.measure.photos import photographs

NUM_SHARDS = 8
QUALITY = 95  # of the resized copy
_NAME, _VERSION = "benchmark", "1.0.0"

# As in its configs/vit_i1k.py, without one-hot labels; and in uint8, which none of its recipes has.
_PEER_CROP = "decode_jpeg_and_inception_crop(224)|flip_lr"
PEERS = {
    "big_vision": f'{_PEER_CROP}|value_range(-1, 1)|keep("image", "label")',
    "big_vision uint8": f'{_PEER_CROP}|keep("image", "label")',
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every measurement has in common.

    Attributes:
      batch_size: images per batch.
      num_images: that are timed, after as many as fill the buffers.
      num_threads: reading threads of our pipeline, per process.
      num_workers: its processes.
      num_cores: cores to run on; 0 for all that there are.
    """

    batch_size: int = 128
    num_images: int = 4096
    num_threads: int = 2
    num_workers: int = 0
    num_cores: int = 0


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
    peer: str = "",
    resize: int = 0,
    rounds: int = 5,
) -> dict[str, list[Speed]]:
    """Measures our pipeline and, if asked for, big_vision's and ours on a resized copy, in turn.

    Args:
      folder: an empty folder for the images.
      settings: see `Settings`.
      examples: image files with labels below 1000; photographs are made by default.
      preprocess: of our pipeline.
      peer: a clone of big_vision; "" to leave it out. Needs TensorFlow.
      resize: short side of the images of the copy, in pixels; 0 to leave it out.
      rounds: how often each variant takes its turn.

    Returns:
      {variant: measurements, one per round}; `vit_jax` is first.

    Raises:
      UserError: a pipeline cannot be imported, or fails.
    """
    records = [serialize(image, label, b"") for image, label in examples or photographs(1024)]
    ours = _write(folder / "ours", records)
    variants: dict[str, tuple[Any, ...]] = {"vit_jax": (_measure_ours, ours, preprocess, settings)}
    if peer:
        if importlib.util.find_spec("tensorflow") is None:
            raise UserError('--peer needs TensorFlow; pip install "vit_jax[tf]".')
        if not (Path(peer) / "big_vision" / "input_pipeline.py").is_file():
            raise UserError(f"--peer={peer!r} is no clone of big_vision.")
        theirs = str(folder / "theirs")
        _in_process(0, _write_for_peer, ours, theirs)
        for name, steps in PEERS.items():
            variants[name] = (_measure_peer, theirs, steps, os.path.abspath(peer), settings)
    if resize:
        shrink = Shrink(resize, QUALITY)
        small = [serialize(shrink(image_of(each, "image")), 0, b"") for each in records]
        resized = _write(folder / "resized", small)
        variants[f"vit_jax on {resize} px"] = (_measure_ours, resized, preprocess, settings)
    speeds: dict[str, list[Speed]] = {name: [] for name in variants}
    for turn in range(rounds):
        names = list(variants)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            speeds[name].append(_in_process(settings.num_cores, *variants[name]))
    return speeds


def first_examples(dataset: Any, count: int = 1024) -> list[tuple[bytes, int]]:
    """Image files and labels of the first `count` examples of `config.dataset`.

    Raises:
      UserError: its images are not files.
    """
    source = create_dataset(
        name=dataset.name,
        split=dataset.split,
        preprocess=dataset.preprocess,
        data_dir=dataset.data_dir,
        label_key=dataset.label_key,
    ).source
    found = [source[index] for index in range(min(count, len(source)))]
    if not isinstance(found[0]["image"], bytes):
        raise UserError(f"dataset.name={dataset.name!r}: its images are drawn, not decoded.")
    return [(each["image"], each["label"] % 1000) for each in found]


def compare(speeds: dict[str, list[Speed]]) -> dict[str, tuple[float, float]]:
    """How many times faster `vit_jax` is than each other: (images/s, processor time); medians."""
    ours = speeds["vit_jax"]
    ratios = {}
    for name, theirs in speeds.items():
        pairs = list(zip(ours, theirs, strict=True))
        rates = [a.images_per_second / b.images_per_second for a, b in pairs]
        times = [b.cpu_ms_per_image / a.cpu_ms_per_image for a, b in pairs]
        ratios[name] = (statistics.median(rates), statistics.median(times))
    del ratios["vit_jax"]
    return ratios


def _write(folder: Path, records: list[bytes]) -> str:
    """Writes a prepared set; returns its directory."""
    directory = folder / _NAME / _VERSION
    directory.mkdir(parents=True)
    lots = [lot.tolist() for lot in np.array_split(np.arange(len(records)), NUM_SHARDS)]
    for number, lot in enumerate(lots):
        path = directory / metadata.shard_name(_NAME, "train", number, NUM_SHARDS)
        writer = array_record_module.ArrayRecordWriter(str(path), WRITER_OPTIONS)
        for index in lot:
            writer.write(records[index])
        writer.close()
    metadata.write_image_metadata(
        directory,
        version=_VERSION,
        description="",
        class_names=[str(number) for number in range(1000)],
        sizes={"train": metadata.SplitSizes([len(lot) for lot in lots], sum(map(len, records)))},
    )
    return str(directory)


def _in_process(num_cores: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of this file in a fresh process, on the first `num_cores` cores."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_pin, initargs=(num_cores,)) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{function.__name__}: {reason}") from error


def _pin(num_cores: int) -> None:
    if num_cores:  # before anything counts them
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_cores])


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


def _measure_peer(directory: str, steps: str, peer: str, settings: Settings) -> Speed:
    """big_vision's own `input_pipeline.training`, from its own files."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.path.insert(0, peer)
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
                "pp": steps,
            }
        )
    )
    images = (np.asarray(memoryview(batch["image"])) for batch in data)  # as it hands them to JAX
    return _time(images, settings)


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
