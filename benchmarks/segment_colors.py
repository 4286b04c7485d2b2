"""What colours alone say of a pixel's class: a baseline for configs/segmentation.py.

    python benchmarks/stamps.py stamps-package/usr/share/tuxpaint/stamps masks --masks
    python benchmarks/segment_colors.py masks

A cell of 14 pixels is described by the histogram of its colours, 4 levels a channel, and that of
the 5x5 cells around it; a logistic regression gives its class. mIoU and pixel accuracy on `test`.
"""

import json

import cv2
import numpy as np
from sklearn.linear_model import SGDClassifier

from vit_jax import arguments, launch
from vit_jax.data.datasets import Dataset, create_dataset
from vit_jax.evaluators.dense import overlap_means

CELL, LEVELS, AROUND = 14, 4, 5


def histograms(image: np.ndarray) -> np.ndarray:
    """[H, W, 3] -> [h, w, 2 * 64]: of each cell, and of those around it."""
    bins = (image // (256 // LEVELS)).astype(int) @ [LEVELS**2, LEVELS, 1]
    height, width = (side // CELL for side in bins.shape)
    cells = bins[: height * CELL, : width * CELL].reshape(height, CELL, width, CELL)
    cells = np.eye(LEVELS**3, dtype=np.float32)[cells].mean(axis=(1, 3))
    return np.concatenate([cells, cv2.blur(cells, (AROUND, AROUND))], axis=-1)


def labels_of(label_map: np.ndarray) -> np.ndarray:
    """The class in the middle of each cell."""
    return label_map[CELL // 2 :: CELL, CELL // 2 :: CELL]


def examples(data: Dataset) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    found = (data.example(i, rng) for i in range(data.num_examples))
    return [(example["image"], example["label_map"]) for example in found]


def measure(folder: str) -> dict[str, float]:
    opened = [
        create_dataset(name=folder, split=s, preprocess="decode", needs=("image", "label_map"))
        for s in ("train", "test")
    ]
    train, test = map(examples, opened)
    x = np.concatenate([histograms(image).reshape(-1, 2 * LEVELS**3) for image, _ in train])
    y = np.concatenate([labels_of(labels).ravel() for _, labels in train])
    classifier = SGDClassifier(loss="log_loss", alpha=1e-5, random_state=0).fit(x, y)
    count, rows = opened[0].num_classes, []
    for image, labels in test:
        features = histograms(image)
        guesses = classifier.predict(features.reshape(-1, features.shape[-1]))
        guesses = cv2.resize(
            guesses.reshape(features.shape[:2]), labels.shape[::-1], interpolation=cv2.INTER_NEAREST
        )
        pairs = np.bincount((count * labels.astype(int) + guesses).ravel(), minlength=count**2)
        table = pairs.reshape(count, count)
        rows.append((np.diag(table), table.sum(axis=1), table.sum(axis=0)))
    names = ("hits", "labelled", "predicted")
    arrays = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    return overlap_means(arrays)


if __name__ == "__main__":
    parser = arguments.create_parser(__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="as for configs/segmentation.py")
    options = parser.parse_args()
    with launch.one_line_errors():
        print(json.dumps(measure(options.folder)))
