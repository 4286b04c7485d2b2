"""A folder of classes from the stamps of Tux Paint, as Debian's package has them.

    apt-get download tuxpaint-stamps-default
    dpkg -x tuxpaint-stamps-default_*.deb stamps-package
    python benchmarks/stamps.py stamps-package/usr/share/tuxpaint/stamps stamps

286 PNG files with transparency: photographs and drawings, 10 to 67 of a class. A copy is named
after its folders, as names repeat. Each picture has a licence of its own. --split_seed=0 makes
`train/` and `test/`, with a fifth of each class: split 0 of benchmarks/transfer.py.
"""

import shutil
from pathlib import Path

import numpy as np

from vit_jax import arguments, launch
from vit_jax.errors import UserError

CLASSES = {
    "birds": "animals/birds",
    "fish": "animals/fish",
    "flowers": "plants/flowers",
    "fruit": "food/fruit",
    "houses": "town/houses",
    "insects": "animals/insects",
    "instruments": "hobbies/music",
    "mammals": "animals/mammals",
    "monuments": "town/monuments",
    "tools": "household/tools",
    "vegetables": "food/vegetables",
}


def is_tested(count: int, seed: int) -> np.ndarray:
    """Of the pictures of a class, in the order of their names: [count] bool, a fifth at random."""
    mask = np.arange(count) < -(-count // 5)
    return np.random.default_rng(seed).permutation(mask)


def copy_stamps(source: Path, folder: Path, split_seed: int | None) -> int:
    """Copies to `folder/CLASS/` and returns how many; UserError if a class has no pictures."""
    total = 0
    for name, place in CLASSES.items():
        below = source / place
        pictures = {"-".join(path.relative_to(below).parts): path for path in below.rglob("*.png")}
        if not pictures:
            raise UserError(f"{below}: no pictures; SOURCE is .../tuxpaint/stamps.")
        splits = [""] * len(pictures)
        if split_seed is not None:
            splits = np.where(is_tested(len(pictures), split_seed), "test", "train").tolist()
        for split, (copy, picture) in zip(splits, sorted(pictures.items()), strict=True):
            target = folder / split / name / copy
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(picture, target)
        total += len(pictures)
    return total


if __name__ == "__main__":
    parser = arguments.create_parser(__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help=".../usr/share/tuxpaint/stamps")
    add("folder", metavar="FOLDER", type=Path, help="to write to")
    add("--split_seed", type=int, help="make train/ and test/ (default: classes alone)")
    options = parser.parse_args()
    with launch.one_line_errors():
        print(f"{copy_stamps(**vars(options))} pictures in {options.folder}")
