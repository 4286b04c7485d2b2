"""The embedded digits."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from sklearn import datasets as sklearn_datasets

from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError


def test_the_scans_in_their_order() -> None:
    expected = sklearn_datasets.load_digits()
    rng = np.random.default_rng(0)
    splits = {"train": (0, 1497), "test": (1497, 1797), "train[300:600]": (300, 600)}
    for split, (start, stop) in splits.items():
        dataset = create_dataset(name="digits", split=split, preprocess="decode(channels=1)")
        assert (dataset.num_examples, dataset.num_classes) == (stop - start, 10)
        examples = [dataset.example(i, rng) for i in range(dataset.num_examples)]
        labels = [example["label"] for example in examples]
        assert labels == expected.target[start:stop].tolist()
        images = np.stack([example["image"][..., 0] for example in examples])
        np.testing.assert_allclose(images * (16 / 255), expected.images[start:stop], atol=0.04)
    assert images.dtype == np.uint8


def test_scikit_learn_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # importing it raises
    with pytest.raises(UserError, match=r"the package scikit-learn: .*'.\[embedded\]'"):
        create_dataset(name="digits", split="train", preprocess="decode")
