"""Retrieval: the texts of an image among all texts, and the image of a text among all images."""

from typing import Any

import jax
import numpy as np

from vit_jax.data.labelled import LabelledSource
from vit_jax.errors import UserError
from vit_jax.evaluators.stream import Hook, Reader, compile_outputs, nothing

RANKS = (1, 5, 10)
_ROWS = 1024  # of similarities that the host holds at a time


class RetrievalEvaluator:
    """Recall at 1, 5 and 10 of two towers on pairs, as for Flickr30k and COCO (2103.00020, 3.1).

    Rows of the same file are one image with several captions, of which any may be found.
    """

    example_keys = ("image", "text")
    metric_names = (
        *(f"image_to_text_recall_{rank}" for rank in RANKS),
        *(f"text_to_image_recall_{rank}" for rank in RANKS),
        "num_examples",
    )

    def __init__(self, objective: Any, reader: Reader):
        """UserError without a text tower.

        Args:
          objective: has `embed`.
          reader: of images and texts.
        """
        if not hasattr(objective, "embed_texts"):
            raise UserError("evaluators.*.name='retrieval' needs objective.name='contrastive'.")
        self._reader = reader
        self._step = compile_outputs(objective.embed, reader.mesh)
        source = reader.dataset.source  # type: ignore[attr-defined]
        files = source.file_ids() if isinstance(source, LabelledSource) else np.arange(len(source))
        self._image_of = np.unique(files, return_inverse=True)[1]  # [N]: the image of each text

    def __call__(self, params: Any, *, on_batch: Hook = nothing) -> dict[str, float]:
        """See `ObjectiveEvaluator`."""
        outputs = self._reader.outputs(self._step, params, on_batch)
        images, texts = (np.asarray(x, np.float32) for x in jax.tree.leaves(outputs))
        return recalls(images, texts, self._image_of)


def recalls(images: np.ndarray, texts: np.ndarray, image_of: np.ndarray) -> dict[str, float]:
    """The metrics from unit vectors.

    A rank counts others that are as similar: a collapsed model finds nothing.

    Args:
      images, texts: [N, D], of each pair; an image may be there several times.
      image_of: [N], numbers of the images, from 0 on.
    """
    first = np.unique(image_of, return_index=True)[1]
    images, num_images = images[first], len(first)
    of_texts, of_images = np.empty(len(texts), int), np.empty(num_images, int)
    for start in range(0, len(texts), _ROWS):
        rows = slice(start, start + _ROWS)
        scores = texts[rows] @ images.T
        own = np.take_along_axis(scores, image_of[rows, None], axis=1)
        of_texts[rows] = np.sum(scores >= own, axis=1) - 1
    for start in range(0, num_images, _ROWS):
        rows = slice(start, start + _ROWS)
        scores = images[rows] @ texts.T
        is_own = image_of[None] == np.arange(num_images)[rows, None]
        best = np.max(scores, axis=1, where=is_own, initial=-np.inf)  # of its own texts
        of_images[rows] = np.sum((scores >= best[:, None]) & ~is_own, axis=1)
    ranks = {"image_to_text": of_images, "text_to_image": of_texts}
    return {
        **{f"{way}_recall_{k}": float(np.mean(x < k)) for way, x in ranks.items() for k in RANKS},
        "num_examples": len(texts),
    }
