"""ImageNet in small: tars of tars and folders with real JPEGs, laid out as the originals are."""

import functools
import io
import pathlib
import tarfile
from collections.abc import Mapping

from tests import fixtures_data
from vit_jax.data.class_names import wordnet_ids

IDS = wordnet_ids("imagenet2012")
CLASSES = {IDS[999]: 9, IDS[0]: 6, IDS[417]: 12}  # WordNet id: number of images
NUM_VALIDATION = 10


@functools.cache
def jpeg(seed: int) -> bytes:
    return fixtures_data.encoded(fixtures_data.picture(seed, size=(30 + seed % 7, 40)))


def tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def train_images(counts: Mapping[str, int] = CLASSES) -> dict[str, dict[str, bytes]]:
    """Class to file name to image."""
    seeds = iter(range(10_000))
    return {
        wordnet_id: {f"{wordnet_id}_{number}.JPEG": jpeg(next(seeds)) for number in range(count)}
        for wordnet_id, count in counts.items()
    }


def validation_images() -> dict[str, bytes]:
    return {
        f"ILSVRC2012_val_{number:08d}.JPEG": jpeg(20_000 + number)
        for number in range(1, NUM_VALIDATION + 1)
    }


def write_tars(root: pathlib.Path) -> pathlib.Path:
    """The two files that one downloads."""
    root.mkdir(parents=True)
    inner = {f"{name}.tar": tar(images) for name, images in train_images().items()}
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar(inner))
    (root / "ILSVRC2012_img_val.tar").write_bytes(tar(validation_images()))
    return root


def write_tree(root: pathlib.Path, labels: list[str] | None = None) -> pathlib.Path:
    """The unpacked folders; validation images in class folders where `labels` are given."""
    for wordnet_id, images in train_images().items():
        (root / "train" / wordnet_id).mkdir(parents=True)
        for name, data in images.items():
            (root / "train" / wordnet_id / name).write_bytes(data)
    for number, (name, data) in enumerate(validation_images().items()):
        folder = root / "val" / (labels[number] if labels else "")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return root
