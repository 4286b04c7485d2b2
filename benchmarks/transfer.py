"""Transfer of frozen features to a small labelled set, over random splits.

    python scripts/extract_features.py MODEL stamps --split=train+test --features=pre_logits \\
        --output=features.npz
    python benchmarks/transfer.py features.npz --features=pre_logits --splits=20

Prints a line per feature: the mean test accuracy of a linear probe, of 1 and 20 nearest neighbours
and of 10 images per class, in percent, with half the width of the 95 % interval of that mean over
the splits (Student's t). In a split a fifth of each class is tested. As the splits draw from the
same pictures, the interval says how much the draw matters, not what other pictures would give.

The feature `pixels` is the image itself at 16x16 pixels. --kinds=1-NN,10-shot leaves out the probe,
which takes most of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vit_jax import ROOT, arguments, launch

sys.path.append(str(ROOT))

from benchmarks.stamps import is_tested
from vit_jax.data.preprocess import parse
from vit_jax.errors import UserError
from vit_jax.evaluators import few_shot, probes
from vit_jax.evaluators.frozen_features import Split, accuracy
from vit_jax.kinds import check_known


def shots(train: Split, x: np.ndarray, num_classes: int) -> np.ndarray:
    """Classes [N] of features [N, D], predicted from 10 images per class."""
    chosen = few_shot.choose_shots(train.y, num_classes, 10, seed=0)
    fitted = few_shot.fit(train.x[chosen], train.y[chosen], num_classes, l2=1024.0)
    return few_shot.scores(x, *fitted).argmax(axis=1)


def neighbors(count: int) -> Callable[[Split, np.ndarray, int], np.ndarray]:
    return lambda train, x, num_classes: probes.vote(*train, x, num_classes, count, 0.07)


KINDS = {
    "probe": lambda *data: probes.probe(*data)[0],
    "1-NN": neighbors(1),
    "20-NN": neighbors(20),
    "10-shot": shots,
}


def pixels(names: np.ndarray) -> np.ndarray:
    """The images at 16x16 pixels, [N, 768], in [0, 1]."""
    chain = parse("decode|resize(16, 16, 'area')")
    rng = np.random.default_rng(0)
    images = [chain({"image": Path(name).read_bytes()}, rng)["image"] for name in names]
    return np.stack(images).reshape(len(names), -1) / np.float32(255)


def measure(x: np.ndarray, y: np.ndarray, kind: str, num_splits: int) -> list[float]:
    """Test accuracies of features [N, D] with labels [N], by split."""
    num_classes, results = y.max() + 1, []
    for seed in range(num_splits):
        test = np.zeros(len(y), bool)
        for k in range(num_classes):
            test[y == k] = is_tested(np.sum(y == k), seed)
        classes = KINDS[kind](Split(x[~test], y[~test]), x[test], num_classes)
        results.append(accuracy(classes, y[test]))
    return results


def main(file: str, features: list[str], kinds: list[str], splits: int) -> None:
    for kind in kinds:
        check_known("--kinds", kind, KINDS)
    with np.load(file) as arrays:
        order = np.argsort(arrays["names"], kind="stable")  # `is_tested` counts by name
        names, y = arrays["names"][order], arrays["labels"][order]
        print(f"| feature | {' | '.join(kinds)} |\n|---|{'---|' * len(kinds)}")
        for feature in features:
            if feature != "pixels":
                check_known("--features", feature, arrays.files)
            x = pixels(names) if feature == "pixels" else arrays[feature][order]
            if x.ndim != 2:
                raise UserError(f"--features: {feature} is not one vector per image.")
            cells = []
            for kind in kinds:
                values = measure(x, y, kind, splits)
                half = few_shot.confidence95(values)
                interval = f" ± {100 * half:.1f}" if half is not None else ""
                cells.append(f"{100 * np.mean(values):.1f}{interval}")
            print(f"| {feature} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = arguments.create_parser(__doc__)
    add = parser.add_argument
    add("file", metavar="FEATURES.npz", help="of scripts/extract_features.py, with a --split")
    add("--features", type=arguments.names, required=True, help="in the file, or pixels")
    add("--kinds", type=arguments.names, default=list(KINDS), help=f"of {', '.join(KINDS)}")
    add("--splits", type=arguments.at_least(1), default=20, help="random splits (default 20)")
    with launch.one_line_errors():
        main(**vars(parser.parse_args()))
