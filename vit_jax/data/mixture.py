"""Several datasets in one training, by weight, each with its own ops.

In every `_BLOCK` examples a set has its share of them, in an order drawn by the seed; its k-th
example of the run is the k-th of its own epochs. So each set is seen whole in every pass over it,
and a run resumes from its step alone.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vit_jax.data.datasets import Dataset
from vit_jax.data.sources import describe
from vit_jax.errors import UserError

_BLOCK = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture(Dataset):
    """Looks like a dataset of all examples, one set after the other; created by `mix`.

    `source` is that of the first.
    """

    parts: tuple[Dataset, ...] = ()
    counts: tuple[int, ...] = ()  # of each in a block

    @functools.cached_property
    def ends(self) -> list[int]:
        return list(itertools.accumulate(part.num_examples for part in self.parts))

    @property
    def num_examples(self) -> int:
        return self.ends[-1]

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        number = bisect.bisect_right(self.ends, index)
        part = self.parts[number]
        return part.example(index - self.ends[number] + part.num_examples, rng)

    @property
    def summary(self) -> str:
        return "\n".join(part.summary for part in self.parts)

    @functools.cached_property
    def fingerprint(self) -> str:
        text = " ".join((*(part.fingerprint for part in self.parts), *map(str, self.counts)))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def passes(self, num_examples: int) -> dict[str, float]:
        passes: dict[str, float] = collections.defaultdict(float)
        for part, count in zip(self.parts, self.counts, strict=True):
            share = num_examples * count / sum(self.counts)
            passes[f"{part.name} {part.split}"] += share / part.num_examples
        return dict(passes)

    def targets(self, label_key: str) -> tuple[tuple[str, ...], np.ndarray]:
        parts = [part.targets(label_key) for part in self.parts]
        return parts[0][0], np.concatenate([values for _, values in parts])

    def labels(self) -> np.ndarray:
        raise UserError("objective.class_weights and dataset.mixture: set one of them.")

    def of_lengths(self) -> list[Dataset]:
        parts = zip(*(part.of_lengths() for part in self.parts), strict=True)
        return [dataclasses.replace(self, parts=row, preprocess=row[0].preprocess) for row in parts]

    def balanced(self, balance: float) -> Dataset:
        if balance:
            raise UserError(f"dataset.balance={balance} and dataset.mixture: set one of them.")
        return self


def mix(first: Dataset, others: Iterable[tuple[Dataset, float]]) -> Mixture:
    """`first` has weight 1.

    UserError for a weight that is not positive or below a thousandth of all, or datasets whose
    examples, classes or tokenizers differ.
    """
    parts, weights = zip((first, 1.0), *others, strict=True)
    key = "dataset.mixture"
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        if not 0 < weight < np.inf:
            raise UserError(f"{key}: the weight of {part.name!r} is {weight}; make it positive.")
        if part.class_names != first.class_names:
            raise UserError(f"{key}: the classes of {part.name!r} are not those of {first.name!r}.")
        specs = [{k: describe(x) for k, x in d.element_spec.items()} for d in (first, part)]
        if specs[0] != specs[1]:
            text = f"{key}: examples of {part.name!r} are {specs[1]}, of {first.name!r} {specs[0]}"
            raise UserError(f"{text}; give it ops of its own that end alike.")
        if len(part.of_lengths()) != len(first.of_lengths()):
            raise UserError(f"{key}: as many lengths of patchify for {part.name!r}, please.")
        theirs, ours = _tokenizers(part), _tokenizers(first)
        if theirs != ours:
            raise UserError(f"{key}: {part.name!r} is read by {theirs}, {first.name!r} by {ours}.")
    return Mixture(
        name=" + ".join(part.name for part in parts),
        split=first.split,
        source=first.source,
        preprocess=first.preprocess,
        class_names=first.class_names,
        on_bad_image=first.on_bad_image,
        parts=parts,
        counts=_counts(parts, np.array(weights)),
    )


def _tokenizers(dataset: Dataset) -> list[str]:
    """Those of its ops, whatever columns they read."""
    texts = [op for op in dataset.preprocess.ops if op.columns]
    return [repr(dataclasses.replace(op, column="")) for op in texts]  # type: ignore[type-var]


def _counts(parts: Sequence[Dataset], weights: np.ndarray) -> tuple[int, ...]:
    shares = weights / np.sum(weights) * _BLOCK
    counts = np.floor(shares).astype(int)
    largest = np.argsort(counts - shares, kind="stable")[: _BLOCK - counts.sum()]
    counts[largest] += 1
    if not counts.all():
        name = parts[int(np.argmin(counts))].name
        text = f"dataset.mixture: {name!r} has less than one of {_BLOCK} examples"
        raise UserError(f"{text}; raise its weight.")
    return tuple(counts.tolist())
