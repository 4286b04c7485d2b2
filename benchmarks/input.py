"""Images per second of the input pipeline beside others, in turn, on the same JPEGs.

    python benchmarks/input.py --against=dataloader,tf_data,whole,reduced,resized
    taskset -c 0 python benchmarks/input.py             # on one core

All decode them, cut an inception crop to 224 pixels and mirror half of them. dataloader: torch's,
with Pillow and processes, as timm's loader is made; tf_data: TensorFlow's `decode_and_crop_jpeg`,
as in the official code, and `resize`. The others are ours: whole, with a decoding of all rows;
reduced, with `decode(reduced=True)`; resized, from a copy whose short sides are 256 pixels
(`prepare_data.py --resize=256`). --scale=2 doubles the sides of the photographs.

Each turn is a process of its own; the files are in the page cache, so storage is not measured. On a
machine that others use too, processor time (user + system of the process and its workers) is the
fairer figure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from vit_jax import ROOT, launch
from vit_jax.arguments import names

sys.path.append(str(ROOT))

from benchmarks import common
from vit_jax.data.datasets import create_dataset
from vit_jax.data.ops import Example, InceptionCrop
from vit_jax.data.pipeline import train_batches
from vit_jax.data.preprocess import Chain
from vit_jax.data_preparation.prepare import prepare_data
from vit_jax.errors import missing_package
from vit_jax.kinds import check_known

# (height, width): share. Of ImageNet's training images two thirds are 500 x 375 or so.
SIZES = {
    (375, 500): 0.50,
    (500, 375): 0.18,
    (333, 500): 0.14,
    (500, 500): 0.08,
    (600, 800): 0.05,
    (240, 320): 0.05,
}
PEERS = ("dataloader", "tf_data", "whole", "reduced", "resized")
OURS = "official_train(224)"
Turn = tuple[float, float]  # images per second, images per second of processor time


TICKS = os.sysconf("SC_CLK_TCK")  # a second: the finest that the system counts


def main(argv: Sequence[str]) -> None:
    parser = common.create_parser(__doc__, "input")
    parser.add_argument("--against", type=names, default=[], help=f"of {','.join(PEERS)}")
    parser.add_argument("--batch_size", type=int, default=128, help="images (default: 128)")
    parser.add_argument("--num_images", type=int, default=4096, help="per turn (default: 4096)")
    parser.add_argument("--num_files", type=int, default=1024, help="JPEGs (default: 1024)")
    parser.add_argument("--num_threads", type=int, default=2, help="per process (default: 2)")
    parser.add_argument("--num_workers", type=int, default=0, help="processes (default: none)")
    parser.add_argument("--scale", type=int, default=1, help="of the photographs' sides")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each (default: 8)")
    arguments = parser.parse_args(argv)
    for peer in arguments.against:
        check_known("--against", peer, PEERS)
    for peer, package, extra in (("dataloader", "torch", "peers"), ("tf_data", "tensorflow", "tf")):
        if peer in arguments.against and find_spec(package) is None:
            raise missing_package(f"--against={peer}", package, extra)
    count = max(1, arguments.num_images // arguments.batch_size)
    loader = {key: getattr(arguments, key) for key in ("batch_size", "num_threads", "num_workers")}

    def subject(open_batches: Callable[..., Any], directory: Path) -> Callable[[], Turn]:
        return functools.partial(in_process, open_batches, directory, loader, count)

    with tempfile.TemporaryDirectory() as folder:
        photographs = Path(folder) / "photographs"
        write_photographs(photographs, arguments.num_files, arguments.scale)

        def prepare(resize: int) -> Path:
            options: Any = {"data_dir": f"{folder}/prepared", "resize": resize}
            return prepare_data("folder", str(photographs), shard_megabytes=16, **options)

        stored = prepare(0)
        reduced = functools.partial(our_batches, preprocess="official_train(224, reduced=True)")
        peers: dict[str, tuple[Callable[..., Any], Path]] = {
            "dataloader": (dataloader_batches, photographs),
            "tf_data": (tf_data_batches, photographs),
            "whole": (functools.partial(our_batches, chain=OneByOne), stored),
            "reduced": (reduced, stored),
        }
        subjects = {"vit_jax": subject(our_batches, stored)}
        subjects |= {name: subject(*peers[name]) for name in peers if name in arguments.against}
        if "resized" in arguments.against:
            subjects["resized"] = subject(our_batches, prepare(256))
        turns_of = common.take_turns(subjects, arguments.rounds)
    cases = []
    for i, case in enumerate(("input pipeline", "input pipeline, per CPU second")):
        speeds = {name: [turn[i] for turn in turns] for name, turns in turns_of.items()}
        cases += common.compare("vit", case, "images/s", speeds)
    common.write_result(arguments.json, cases, argv)


def write_photographs(folder: Path, count: int, scale: int = 1) -> None:
    """A folder of JPEG files that cost a decoder what ImageNet's cost it (113 KB on average).

    A piece of a cloud whose spectrum falls as that of natural images does (1 / f), with a contrast
    and a brightness of its own and the noise of a camera.
    """
    rng, side = np.random.default_rng(0), 1200 * scale
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    frequency[0, 0] = np.inf
    phase = rng.normal(size=(2, 3, *frequency.shape))
    planes = np.fft.irfft2((phase[0] + 1j * phase[1]) / frequency, (side, side))
    planes[1:] = planes[0] + 0.3 * planes[1:]  # the channels of photographs differ little
    cloud = (planes / planes.std()).transpose(1, 2, 0).astype(np.float32)  # [S, S, 3]
    for number, size in enumerate(rng.choice(len(SIZES), size=count, p=list(SIZES.values()))):
        height, width = (scale * side for side in list(SIZES)[size])
        top, left = rng.integers(0, side - height), rng.integers(0, side - width)
        image = cloud[top : top + height, left : left + width] * rng.uniform(15, 60)
        image = image + rng.uniform(60, 190, 3)
        image += rng.uniform(0.5, 7.0) * rng.standard_normal((height, width, 1), np.float32)
        path = folder / "train" / f"class{number % 10}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        options = [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(88, 96))]
        cv2.imwrite(str(path), image.clip(0, 255).astype(np.uint8), options)


def in_process(*arguments: Any) -> Turn:
    """Calls `measure` in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def measure(
    open_batches: Callable[..., Any], directory: Path, loader: dict[str, int], count: int
) -> Turn:
    """Takes `count` batches out of an endless iterator that is running at full speed."""
    os.setsid()  # this process and its workers, for `cpu_seconds`
    with open_batches(directory, **loader) as batches:
        for _ in itertools.islice(batches, max(4, count // 4)):
            pass
        start, start_cpu = time.perf_counter(), cpu_seconds()
        for images in itertools.islice(batches, count):
            assert len(images) == loader["batch_size"]
        seconds = time.perf_counter() - start
        cpu = max(cpu_seconds() - start_cpu, 1 / TICKS)
    num_images = count * loader["batch_size"]
    return num_images / seconds, num_images / cpu


class OneByOne(Chain):
    """Ops that know nothing of each other: `decode` decodes the whole image."""

    def __call__(self, example: Example, rng: np.random.Generator) -> Example:
        for op in self.ops:
            example = op(example, rng)
        return example


@contextlib.contextmanager
def our_batches(
    directory: Path, preprocess: str = OURS, chain: type[Chain] = Chain, **loader: Any
) -> Iterator[Iterator[Any]]:
    dataset = create_dataset(name=str(directory), split="train", preprocess=preprocess)
    dataset = dataclasses.replace(dataset, preprocess=chain(dataset.preprocess.ops))
    with train_batches(dataset, seed=0, total_steps=2**31, **loader) as batches:
        yield (batch["image"] for batch in batches)


class PillowImages:
    """A data set for torch: [3, 224, 224] uint8, decoded, cropped and mirrored by Pillow."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.rglob("*.jpg"))

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, index: int) -> Any:
        import torch
        from PIL import Image

        rng = np.random.default_rng(index)
        with Image.open(self._paths[index % len(self._paths)]) as file:
            image = file.convert("RGB")
        top, left, height, width = InceptionCrop(224).sample_box(rng, image.height, image.width)
        box = (left, top, left + width, top + height)
        image = image.resize((224, 224), Image.Resampling.BILINEAR, box=box)
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@contextlib.contextmanager
def dataloader_batches(
    directory: Path, batch_size: int, num_threads: int, num_workers: int
) -> Iterator[Iterator[Any]]:
    from torch.utils.data import DataLoader

    images: Any = PillowImages(directory)
    workers = num_workers or num_threads
    yield iter(DataLoader(images, batch_size, num_workers=workers, drop_last=True))


@contextlib.contextmanager
def tf_data_batches(
    directory: Path, batch_size: int, num_threads: int, num_workers: int
) -> Iterator[Iterator[Any]]:
    import tensorflow as tf

    def load(path: Any) -> Any:
        data = tf.io.read_file(path)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(data),
            tf.zeros([0, 0, 4], tf.float32),
            area_range=(0.05, 1.0),
            min_object_covered=0.0,
            use_image_if_no_bounding_boxes=True,
        )
        box = tf.concat([begin[:2], size[:2]], axis=0)
        image = tf.image.decode_and_crop_jpeg(data, box, channels=3)
        image = tf.image.random_flip_left_right(tf.image.resize(image, [224, 224]))
        return tf.cast(tf.round(image), tf.uint8)

    threads = num_threads * max(1, num_workers)
    files = tf.data.Dataset.from_tensor_slices(sorted(map(str, directory.rglob("*.jpg"))))
    images = files.repeat().map(load, num_parallel_calls=threads)
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    batches = images.batch(batch_size, drop_remainder=True).prefetch(2).with_options(options)
    yield batches.as_numpy_iterator()


def cpu_seconds() -> float:
    """User and system time of the living processes of this session."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == os.getsid(0):
                ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


if __name__ == "__main__":
    with launch.one_line_errors():
        main(sys.argv[1:])
