"""Writers of small, real data for tests: image files, image folders, prepared TFDS directories.

No TensorFlow and no network. `tiny_tfds` goes through the registered builder of a dataset, so
that the directory has its true features, label names and version.
"""

import contextlib
import io
import json
import os
import pathlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from PIL import Image


def picture(seed: int, *, size: tuple[int, int] = (40, 48), channels: int = 3) -> np.ndarray:
    """A smooth picture with some noise, uint8 [H, W, C]; [H, W] for one channel."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[: size[0], : size[1]]
    waves = [
        127 + 80 * np.sin(x / rng.uniform(4, 12) + k) * np.cos(y / rng.uniform(4, 12))
        for k in range(channels)
    ]
    noisy = np.stack(waves, -1) + rng.normal(0, 4, (*size, channels))
    image = noisy.clip(0, 255).astype(np.uint8)
    return image[..., 0] if channels == 1 else image


def encoded(image: np.ndarray | Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    as_image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    as_image.save(buffer, format, **options)
    return buffer.getvalue()


def write_folder(
    root: pathlib.Path, counts: Mapping[str, Mapping[str, int]], *, extension: str = ".jpg"
) -> pathlib.Path:
    """Writes `root/split/class/NNN.jpg` for `counts = {split: {class: number of images}}`."""
    format = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".webp": "WEBP"}[extension]
    seed = 0
    for split, classes in counts.items():
        for name, count in classes.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                seed += 1
                data = encoded(picture(seed, size=(16, 20)), format)
                (root / split / name / f"{number:03d}{extension}").write_bytes(data)
    return root


def odd_images() -> dict[str, bytes]:
    """Unusual but valid image files by file name, all of 40 x 48 pixels as stored."""
    colour, grey = picture(1), picture(2, channels=1)
    alpha = np.concatenate([colour, grey[..., None]], -1)
    orientation = Image.Exif()
    orientation[0x0112] = 6  # shown turned by 90 degrees
    return {
        "grey.jpg": encoded(grey),
        "cmyk.jpg": encoded(Image.fromarray(colour).convert("CMYK")),
        "progressive.jpg": encoded(colour, progressive=True),
        "exif.jpg": encoded(colour, exif=orientation.tobytes()),
        "palette.png": encoded(Image.fromarray(colour).quantize(32), "PNG"),
        "grey.png": encoded(grey, "PNG"),
        "alpha.png": encoded(alpha, "PNG"),
        "deep.png": encoded(grey.astype(np.uint16) * 257, "PNG"),
        "bits.png": encoded(Image.fromarray(grey).convert("1"), "PNG"),
        "lossy.webp": encoded(colour, "WEBP"),
        "alpha.webp": encoded(alpha, "WEBP"),
    }


def broken_images() -> dict[str, bytes]:
    """Files that no decoder should accept, by file name."""
    colour = picture(3)
    jpeg, png, webp = encoded(colour), encoded(colour, "PNG"), encoded(colour, "WEBP")
    lzw = bytearray(encoded(colour, "TIFF", compression="tiff_lzw"))
    lzw[200:400] = bytes(200)
    return {
        "lzw.tif": bytes(lzw),
        "half.jpg": jpeg[: len(jpeg) // 2],
        "tail.jpg": jpeg[:-20],
        "half.png": png[: len(png) // 2],
        "half.webp": webp[: len(webp) // 2],
        "empty.jpg": b"",
        "text.png": b"<html>404</html>",
        "header.jpg": jpeg[:20],
    }


def image_example(split: str, index: int) -> dict[str, Any]:
    """An example of `imagenet2012`: a JPEG, a label, a file name."""
    data = encoded(picture(index, size=(30 + index % 5, 40)))
    return {"image": io.BytesIO(data), "label": index % 1000, "file_name": f"{split}_{index}.JPEG"}


def cifar_example(split: str, index: int) -> dict[str, Any]:
    """An example of `cifar10`: a 32 x 32 PNG, a label, an id."""
    data = encoded(picture(index, size=(32, 32)), "PNG")
    return {"image": io.BytesIO(data), "label": index % 10, "id": f"{split}_{index:05d}"}


EXAMPLES: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "cifar10": cifar_example,
    "imagenet2012": image_example,
}


def tiny_tfds(
    name: str,
    data_dir: str | os.PathLike[str],
    sizes: Mapping[str, int],
    *,
    file_format: str = "array_record",
    shards: int = 1,
    example: Callable[[str, int], dict[str, Any]] | None = None,
) -> pathlib.Path:
    """Prepares a few examples of a registered dataset; returns the prepared directory.

    `sizes` has the number of examples of each split, each in `shards` files of `file_format`
    (`array_record` or `tfrecord`); `example` is `(split, index) -> example`.
    """
    make = example or EXAMPLES[name]
    real: Any = type(tfds.builder(name, data_dir=data_dir))

    class Tiny(real, skip_registration=True):  # type: ignore[call-arg, misc]
        pkg_dir_path = real.pkg_dir_path

        def _split_generators(self, _dl_manager: Any) -> dict[str, Any]:
            return {split: self._generate_examples(split, n) for split, n in sizes.items()}

        def _generate_examples(self, split: str, count: int) -> Any:  # type: ignore[override]
            for index in range(count):
                made = make(split, index)
                yield made.get("file_name", f"{split}{index:06d}"), made

    Tiny.name = real.name
    tfds.disable_progress_bar()
    builder = Tiny(data_dir=data_dir, file_format="array_record")
    with contextlib.redirect_stdout(io.StringIO()):
        builder.download_and_prepare()
    directory = pathlib.Path(builder.data_dir)
    if file_format != "array_record" or shards != 1:
        _rewrite(directory, name, file_format, shards)
    return directory


class Unlabelled(tfds.core.GeneratorBasedBuilder):
    """A set of TFDS that needs no network: 20 images and nothing else."""

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path = pathlib.Path(__file__).parent

    def _info(self) -> Any:
        features = tfds.features.FeaturesDict(
            {"image": tfds.features.Image(encoding_format="jpeg")}
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, _dl_manager: Any) -> Any:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Any:
        for seed in range(20):
            image = encoded(picture(seed, size=(16, 20)))
            yield str(seed), {"image": io.BytesIO(image)}


def _rewrite(directory: pathlib.Path, name: str, file_format: str, shards: int) -> None:
    """Writes the same records to `shards` files of another format, as TFDS would have."""
    info = json.loads((directory / "dataset_info.json").read_text())
    info["fileFormat"] = file_format
    for split in info["splits"]:
        (old,) = directory.glob(f"{name}-{split['name']}.array_record-*")
        reader = array_record_module.ArrayRecordReader(str(old))
        records = reader.read_all()
        reader.close()
        old.unlink()
        lots = np.array_split(np.arange(len(records)), shards)
        split["shardLengths"] = [str(len(lot)) for lot in lots]
        for number, lot in enumerate(lots):
            path = directory / (
                f"{name}-{split['name']}.{file_format}-{number:05d}-of-{shards:05d}"
            )
            write = write_tfrecord if file_format == "tfrecord" else write_array_record
            write(path, [records[index] for index in lot])
    (directory / "dataset_info.json").write_text(json.dumps(info))


def write_array_record(path: pathlib.Path, records: list[bytes]) -> None:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def write_tfrecord(path: pathlib.Path, records: list[bytes]) -> None:
    with open(path, "wb") as file:
        for record in records:
            crc = bytes(4)  # nobody looks at it
            file.write(struct.pack("<Q", len(record)) + crc + record + crc)
