"""Several datasets in one training, by weight, each with its own ops.

In every `_BLOCK` examples a set has its share of them, in an order drawn by the seed; its k-th
example of the run is the k-th of its own epochs. So each set is seen whole in every pass over it,
and a run resumes from its step alone.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vit_jax.data.datasets import Dataset
from vit_jax.data.sources import Source, describe
from vit_jax.errors import UserError

_BLOCK = 1000


class MixedSource(Source):
    """The examples of all, one set after the other."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = tuple(sources)
        self.ends = list(itertools.accumulate(map(len, self.sources)))

    def __len__(self) -> int:
        return self.ends[-1]

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the set, and that of the example in it."""
        number = bisect.bisect_right(self.ends, index)
        return number, index - self.ends[number] + len(self.sources[number])

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, within = self.locate(index)
        return self.sources[number][within]

    def describe(self, index: int) -> str:
        number, within = self.locate(index)
        return self.sources[number].describe(within)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture(Dataset):
    """Looks like a dataset of all examples; created by `mix`."""

    parts: tuple[Dataset, ...] = ()
    counts: tuple[int, ...] = ()  # of each in a block

    def example(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        number, within = self.source.locate(index)  # type: ignore[attr-defined]
        return self.parts[number].example(within, rng)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(part.num_examples for part in self.parts)

    @property
    def summary(self) -> str:
        return "\n".join(part.summary for part in self.parts)

    @functools.cached_property
    def fingerprint(self) -> str:
        text = " ".join((*(part.fingerprint for part in self.parts), *map(str, self.counts)))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def balanced(self, balance: float) -> Dataset:
        if balance:
            raise UserError(f"dataset.balance={balance} and dataset.mixture: set one of them.")
        return self

    def labels(self) -> np.ndarray:
        return np.concatenate([part.labels() for part in self.parts])

    def shared(self, other: Dataset) -> int:
        return sum(part.shared(other) for part in self.parts)

    def check(self) -> Dataset:
        return _join([part.check() for part in self.parts], self.counts)

    def passes(self, num_examples: int) -> dict[str, float]:
        shares = np.array(self.counts) / sum(self.counts) * num_examples / np.array(self.sizes)
        names = (f"{part.name} {part.split}" for part in self.parts)
        return dict(zip(names, shares.tolist(), strict=True))


def mix(first: Dataset, others: Iterable[tuple[Dataset, float]]) -> Mixture:
    """`first` has weight 1.

    UserError for a weight that is not positive or below a thousandth of all, or datasets whose
    examples or classes differ.
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
    shares = np.array(weights) / np.sum(weights) * _BLOCK
    counts = np.floor(shares).astype(int)
    largest = np.argsort(counts - shares, kind="stable")[: _BLOCK - counts.sum()]
    counts[largest] += 1
    if not counts.all():
        name = parts[int(np.argmin(counts))].name
        raise UserError(
            f"{key}: {name!r} has less than one of {_BLOCK} examples; raise its weight."
        )
    return _join(parts, tuple(counts.tolist()))


def _join(parts: Sequence[Dataset], counts: tuple[int, ...]) -> Mixture:
    first, source = parts[0], MixedSource([part.source for part in parts])
    known = {f.name: getattr(first, f.name) for f in dataclasses.fields(Dataset)}
    name = " + ".join(part.name for part in parts)
    return Mixture(**{**known, "name": name, "source": source}, parts=tuple(parts), counts=counts)
