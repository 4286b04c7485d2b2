"""Image files of which some may turn out to be unreadable."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np

from vit_jax.data.folder import FolderSource
from vit_jax.data.preprocess import Chain


class ForgivingImages:
    """Examples for `pipeline.eval_batches` that go on where an image is damaged or missing.

    Such an image is black, and `failures` says what was wrong with it.

    Attributes:
      failures: what happened, by the example's index; filled while the examples are read.
    """

    def __init__(
        self, source: FolderSource, preprocess: Chain, shape: tuple[int, ...], dtype: np.dtype
    ):
        """`shape` and `dtype` are what `preprocess` has to give."""
        self.source = source
        self.failures: dict[int, str] = {}
        self._preprocess = preprocess
        self._shape = shape
        self._dtype = dtype

    @property
    def num_examples(self) -> int:
        return len(self.source)

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        try:
            example = self._preprocess(self.source[index], rng)
            image = example["image"]
            if image.shape == self._shape and image.dtype == self._dtype:
                return example
            self.failures[index] = (
                f"the preprocessing made {image.dtype} {list(image.shape)} of it, the model takes "
                f"{self._dtype} {list(self._shape)}"
            )
        except (ValueError, OSError, cv2.error) as error:
            self.failures[index] = str(error).removeprefix(f"{self.source.describe(index)}: ")
        return {"image": np.zeros(self._shape, self._dtype), "label": 0}
