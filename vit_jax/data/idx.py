"""IDX files, as MNIST has: Fashion-MNIST, KMNIST, EMNIST and others, as they are downloaded.

`dataset.name` is a folder with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the same of
`t10k` or `test`, each also as .gz; of several sets in a folder, FOLDER/emnist-letters. EMNIST's
pictures are turned upright, and its mapping.txt names the classes; Fashion-MNIST's names are known.
The format is that of yann.lecun.com/exdb/mnist.
"""

import collections
import dataclasses
import functools
import glob
import gzip
import hashlib
import math
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from vit_jax.data.labelled import LabelledSource, Listing, number_images
from vit_jax.data.sources import Request, naming_splits
from vit_jax.errors import UserError, one_line
from vit_jax.files.paths import LARGEST, LARGEST_TEXT, check_file, read_file, reading
from vit_jax.wording import list_names

_IMAGES = re.compile(r"(.*?)(train|t10k|test)-images[-.]idx3-ubyte(?:\.gz)?")
_FASHION = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
# SHA-256 of its labels: its files are called as MNIST's.
_FASHION_LABELS = {
    "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",  # train
    "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",  # test
}


@dataclasses.dataclass(frozen=True, eq=False)
class IdxSource(LabelledSource):
    """Grey images, uint8 [H, W, 1]; `places` are those of `number_images`."""

    files: Mapping[str, str]  # the images of each split

    def read(self, index: int) -> np.ndarray:
        split, row = self.places[index].item()
        pixels = read_idx(self.files[split])[row]
        is_turned = os.path.basename(self.files[split]).startswith("emnist")
        return (pixels.T if is_turned else pixels)[..., None]

    def identity(self) -> Iterable[str]:
        """Split, name and size of every file, and a checksum of the labels."""
        yield f"labels {zlib.crc32(self.columns.get('label', np.empty(0)).tobytes())}"
        for split in dict.fromkeys(self.places["split"].tolist()):
            file = self.files[split]
            yield f"{split} {os.path.basename(file)} {os.path.getsize(file)}"


@functools.lru_cache(maxsize=8)  # per process: a split is read once
def read_idx(path: str) -> np.ndarray:
    """The array of bytes in an IDX file, also compressed; UserError: no such file, or damaged."""
    try:
        check_file(path)
        with open(path, "rb") as plain:
            is_compressed = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_compressed else open(path, "rb") as file:
            magic = file.read(4)
            if magic[:3] != b"\0\0\x08" or len(magic) < 4:
                raise ValueError("it is no IDX file of bytes")
            sizes = file.read(4 * magic[3])
            shape = np.frombuffer(sizes[: len(sizes) // 4 * 4], ">u4").tolist()
            if len(shape) < magic[3] or (size := math.prod(shape)) > LARGEST:
                raise ValueError("its header is damaged")
            content = file.read(size + 1)
        if len(content) != size:
            raise ValueError(f"its size is not that of {shape}; copy it again")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}.") from error
    return np.frombuffer(content, np.uint8).reshape(shape)


def find_idx(name: str) -> dict[str, dict[str, str]]:
    """Files of images by split, of each set that `dataset.name` refers to."""
    path = os.path.abspath(os.path.expanduser(name))
    folder, start = (path, "") if os.path.isdir(path) else os.path.split(path)
    sets: dict[str, dict[str, str]] = collections.defaultdict(dict)
    # Unlike a listing, a pattern finds nothing in a folder that cannot be read.
    for file in sorted(glob.glob(f"{glob.escape(start)}*", root_dir=folder)) if name else ():
        if match := _IMAGES.fullmatch(file):
            split = match[2].replace("t10k", "test")
            sets[match[1]].setdefault(split, os.path.join(folder, file))  # not the .gz beside it
    return sets


def open_idx(request: Request) -> tuple[IdxSource, tuple[str, ...]]:
    """Returns source and class names; UserError for damaged files, and see `Listing`."""
    where, sets = f"dataset.name={request.path!r}", find_idx(request.path)
    if len(sets) > 1:
        raise UserError(f"{where} has several sets: add one of {list_names(sets)} to the path.")
    [(prefix, files)] = sets.items()
    images = {split: read_idx(file) for split, file in files.items()}
    labels = classes = None
    if request.needs_label:
        marks = {split: read_idx(_beside(file)) for split, file in files.items()}
        mapping = Path(next(iter(files.values()))).with_name(f"{prefix}mapping.txt")
        names = _class_names(mapping, marks)
        labels = [names.get(mark, str(mark)) for array in marks.values() for mark in array.flat]
        known = np.unique(np.concatenate(naming_splits(marks)))
        classes = [names.get(mark, str(mark)) for mark in known.tolist()]
        for split, array in images.items():
            if array.ndim != 3 or marks[split].shape != array.shape[:1]:
                text = f"images {list(array.shape)} but labels {list(marks[split].shape)}"
                raise UserError(f"{where}: {split!r} has {text}.")
    places, rows = number_images({split: len(array) for split, array in images.items()})
    source = IdxSource(places, {}, files)
    return Listing(where, source, rows, labels, classes=classes).open(request.split)


def _beside(images: str) -> str:
    """The file of labels of a file of images."""
    folder, file = os.path.split(images)
    return os.path.join(folder, file.replace("images", "labels").replace("idx3", "idx1"))


def _class_names(mapping: Path, labels: Mapping[str, np.ndarray]) -> dict[int, str]:
    """What the labels of known data mean; EMNIST lists a label and its letters as numbers."""
    if mapping.exists():
        with reading(str(mapping), "is no table of labels and letters"):
            lines = read_file(mapping, LARGEST_TEXT).decode().splitlines()
            return {int(line.split()[0]): chr(int(line.split()[1])) for line in lines if line}
    digests = {hashlib.sha256(array.tobytes()).hexdigest() for array in labels.values()}
    return dict(enumerate(_FASHION.split(", "))) if digests & _FASHION_LABELS else {}
