"""A folder of classes, or of masks, from the stamps of Tux Paint, as Debian's package has them.

    apt-get download tuxpaint-stamps-default
    dpkg -x tuxpaint-stamps-default_*.deb stamps-package
    python benchmarks/stamps.py stamps-package/usr/share/tuxpaint/stamps stamps

286 PNG files with transparency: photographs and drawings, 10 to 67 of a class. A copy is named
after its folders, as names repeat. Each picture has a licence of its own. --split_seed=0 makes
`train/` and `test/`, with a fifth of each class: split 0 of benchmarks/transfer.py.

--masks makes a set for configs/segmentation.py instead: pictures of 224 pixels, a stamp of random
size and place on a part of scikit-learn's two photographs (the right third of each is for `test`);
its opacity is the mask. A stamp to train on is in four pictures.
"""

import shutil
from pathlib import Path

import cv2
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


def find_stamps(source: Path, split_seed: int | None) -> list[tuple[str, str, str, Path]]:
    """Split, class, name and file of each; UserError if a class has no pictures."""
    found = []
    for name, place in CLASSES.items():
        below = source / place
        pictures = {"-".join(path.relative_to(below).parts): path for path in below.rglob("*.png")}
        if not pictures:
            raise UserError(f"{below}: no pictures; SOURCE is .../tuxpaint/stamps.")
        splits = [""] * len(pictures)
        if split_seed is not None:
            splits = np.where(is_tested(len(pictures), split_seed), "test", "train").tolist()
        rows = zip(splits, sorted(pictures.items()), strict=True)
        found += [(split, name, copy, picture) for split, (copy, picture) in rows]
    return found


def copy_stamps(source: Path, folder: Path, split_seed: int | None) -> int:
    """Copies to `folder/CLASS/` and returns how many."""
    for split, name, copy, picture in (stamps := find_stamps(source, split_seed)):
        target = folder / split / name / copy
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, target)
    return len(stamps)


def compose_stamps(source: Path, folder: Path, split_seed: int, side: int = 224) -> int:
    """Writes `images/`, `masks/` and `classes.txt`, and returns how many pictures."""
    from sklearn.datasets import load_sample_images

    photos, rng, total = load_sample_images().images, np.random.default_rng(split_seed), 0
    for split, name, copy, file in find_stamps(source, split_seed):
        stamp = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)  # [H, W, BGR and opacity]
        if stamp is None or stamp.shape[2] < 4 or stamp[..., 3].min() > 127:
            continue
        for number in range(4 if split == "train" else 1):
            photo = photos[rng.integers(len(photos))][..., ::-1]
            edge = photo.shape[1] * 2 // 3
            photo = photo[:, :edge] if split == "train" else photo[:, edge:]
            top, left = (rng.integers(0, n - min(n, side) + 1) for n in photo.shape[:2])
            picture = photo[top : top + side, left : left + side].copy()
            picture = cv2.resize(picture, (side, side))
            scale = side * rng.uniform(0.4, 0.9) / max(stamp.shape[:2])
            height, width = (max(1, round(n * scale)) for n in stamp.shape[:2])
            small = cv2.resize(stamp, (width, height), interpolation=cv2.INTER_AREA)
            top, left = rng.integers(0, side - height + 1), rng.integers(0, side - width + 1)
            opacity = small[..., 3:] / 255
            place = picture[top : top + height, left : left + width]
            place[:] = opacity * small[..., :3] + (1 - opacity) * place
            mask = np.zeros((side, side), np.uint8)
            value = 1 + list(CLASSES).index(name)
            mask[top : top + height, left : left + width] = value * (small[..., 3] > 127)
            for kind, pixels in (("images", picture), ("masks", mask)):
                target = folder / kind / split / f"{name}-{number}-{copy}"
                target.parent.mkdir(parents=True, exist_ok=True)
                cv2.imwrite(str(target), pixels)
            total += 1
    (folder / "classes.txt").write_text("\n".join(["background", *CLASSES]) + "\n")
    return total


if __name__ == "__main__":
    parser = arguments.create_parser(__doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help=".../usr/share/tuxpaint/stamps")
    add("folder", metavar="FOLDER", type=Path, help="to write to")
    add("--split_seed", type=int, help="make train/ and test/ (default: classes alone)")
    add("--masks", action="store_true", help="write images and masks (split 0 by default)")
    options = parser.parse_args()
    with launch.one_line_errors():
        source, folder, seed = options.source, options.folder, options.split_seed
        count = (
            compose_stamps(source, folder, seed or 0)
            if options.masks
            else copy_stamps(source, folder, seed)
        )
        print(f"{count} pictures in {folder}")
