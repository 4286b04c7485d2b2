"""What is known of one published checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

from vit_jax.models.variants import get_variant

_UNITS = {"MiB": 2**20, "GiB": 2**30}


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """A published top-1 accuracy in percent; of the very file, unless `source` says otherwise."""

    percent: float
    source: str
    dataset: str = "imagenet2012"

    def __str__(self) -> str:
        return f"{self.percent:g} % {self.dataset} ({self.source})"


@dataclasses.dataclass(frozen=True)
class ZooEntry:
    """One checkpoint.

    Attributes:
      name: family/model, the name that scripts and `load_pretrained` take.
      url: gs://, https:// or hf:// address.
      format: npz_published (Google's), big_vision, timm or huggingface.
      variant: key of models/variants.py.
      resolution: side, in pixels, of the square images its position embeddings are for.
      preprocess: how its accuracy is measured, for `vit_jax.data.preprocess.parse`.
      num_classes: size of the head; 0 without a head.
      classifier: token or gap.
      representation_size: width of the tanh layer before the head; None without that layer.
      position_embedding: learned or sincos2d.
      labels: key of class_names.LABELS; "" where the names of the classes are not known.
      size: as published, such as "393.69 MiB"; "" where it is not.
      sha256: of the file in hex, or how it begins; "" where it is not published.
      accuracy: published results, first the one that an evaluation of this file should give.
      note: what a user has to know, and what could not be verified.
    """

    name: str
    url: str
    format: str
    variant: str
    resolution: int
    preprocess: str
    num_classes: int = 1000
    classifier: str = "token"
    representation_size: int | None = None
    position_embedding: str = "learned"
    labels: str = "imagenet2012"
    size: str = ""
    sha256: str = ""
    accuracy: tuple[Accuracy, ...] = ()
    note: str = ""

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]

    @property
    def imagenet_top1(self) -> float | None:
        """Published ImageNet top-1 in percent."""
        return next((a.percent for a in self.accuracy if a.dataset == "imagenet2012"), None)

    @property
    def size_bounds(self) -> tuple[int, int] | None:
        """Least and most bytes that `size` may stand for; None where it is unknown."""
        if not self.size:
            return None
        number, unit = self.size.split()
        last_digit = 10.0 ** -len(number.partition(".")[2])  # rounded by some, cut off by others
        low, high = float(number) - last_digit, float(number) + last_digit
        return int(low * _UNITS[unit]), int(high * _UNITS[unit])

    @property
    def model(self) -> dict[str, Any]:
        """Keyword arguments of `create_model` for these weights."""
        return get_variant(self.variant) | {
            "num_classes": self.num_classes,
            "classifier": self.classifier,
            "representation_size": self.representation_size,
            "position_embedding": self.position_embedding,
        }
