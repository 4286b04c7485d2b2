"""`digits`: the handwritten digits that ship with scikit-learn."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from vit_jax.data.sources import Request, SlicedSource
from vit_jax.errors import missing_package


def open_digits(request: Request) -> tuple[SlicedSource, tuple[str, ...]]:
    """1,797 real scans, in scikit-learn's order, and class names.

    uint8 [8, 8, 1] with 17 grey levels (UCI, "Optical Recognition of Handwritten Digits", its test
    part). The last 300, `test`, come from other writers than the rest, `train`: a random split
    would inflate accuracy by several points. UserError without scikit-learn.
    """
    # Read the file alone: importing scikit-learn takes longer than a small model's first update.
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise missing_package("dataset.name='digits'", "scikit-learn", "embedded")
    path = Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz"
    rows = np.loadtxt(path, np.int64, delimiter=",")  # 64 pixels from 0 to 16, and the label
    images = np.round(rows[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = rows[:, -1].tolist()
    scans = [{"image": image, "label": i} for image, i in zip(images, labels, strict=True)]
    splits = {"train": scans[:1497], "test": scans[1497:]}
    return SlicedSource(splits, request.split), tuple("0123456789")
