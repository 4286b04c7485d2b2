"""Split expressions mean what they mean in TFDS, and sliced sources concatenate."""

from __future__ import annotations

import pickle

import pytest
import tensorflow_datasets as tfds

from vit_jax.data.sources import Part, SlicedSource, resolve_split
from vit_jax.errors import UserError

EXPRESSIONS = [
    "train",
    "train[:98%]",
    "train[98%:]",
    "train[33.3%:66.6%]",
    "train[-10%:]",
    "train[:-10%]",
    "train[50%:60]",
    "train[:50%]+test[50%:]",
    "test + train",
    "train[1_0:20]",
    "train[30:60]",
    "train[-7:]",
    "train[:-7]",
    "train[-20:-5]",
    "train[0:1]",
    "all",
    "train[10:20]+train[10:20]",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("sizes", [(60, 61), (1497, 300), (50000, 10000), (99, 7)])
def test_same_bounds_as_tfds(expression: str, sizes: tuple[int, int]) -> None:
    lengths = {"train": sizes[0], "test": sizes[1]}
    infos = {
        name: tfds.core.SplitInfo(name=name, shard_lengths=[count], num_bytes=0)
        for name, count in lengths.items()
    }
    expected = [
        (each.splitname, each.from_ or 0, lengths[each.splitname] if each.to is None else each.to)
        for each in tfds.core.ReadInstruction.from_spec(expression).to_absolute(infos)
    ]
    parts = resolve_split(expression, lengths, lengths.__getitem__)
    assert [(part.name, part.start, part.stop) for part in parts] == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("tran", r"unknown split 'tran'; known splits: train, test. Did you mean 'train'\?"),
        ("train+", "Unrecognized split format: ''; write 'train', "),
        ("", "Unrecognized split format: ''"),
        ("train[:]", "Unrecognized split format"),
        ("train[5]", "only support slice syntax"),
        ("train[:x%]", "Unrecognized split format"),
        ("train[:120%]", r"should be in \[-100, 100\]"),
        ("train[:101]", "incompatible with 100 examples"),
        ("train[:1.5]", "invalid literal"),
        ("train[:2shard]", "shards can only be named in a prepared set"),
        ("all[:50%]", "does not support slice"),
        ("train[50%:50%]", "selects no example"),
        ("train[20:10]", "selects no example"),
        ("test[:1%]", "selects no example"),
    ],
)
def test_bad_expressions_are_one_line_errors(expression: str, message: str) -> None:
    lengths = {"train": 100, "test": 10}
    with pytest.raises(UserError, match=message) as caught:
        resolve_split(expression, lengths, lengths.__getitem__)
    assert "\n" not in str(caught.value)
    assert "dataset.split=" in str(caught.value)


def test_only_named_splits_are_counted() -> None:
    asked = []

    def length(name: str) -> int:
        asked.append(name)
        return 10

    assert resolve_split("a[:5]", ["a", "b"], length) == [Part("a", 0, 5)]
    assert asked == ["a"]


class Numbers:
    def __init__(self, first: int, count: int):
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"label": self.first + index}


def test_sliced_source_reads_the_parts_in_turn() -> None:
    sources = {"a": Numbers(0, 10), "b": Numbers(100, 10)}
    parts = [Part("b", 8, 10), Part("a", 3, 6), Part("b", 0, 1)]
    source = pickle.loads(pickle.dumps(SlicedSource(sources, parts)))
    assert [source[i]["label"] for i in range(len(source))] == [108, 109, 3, 4, 5, 100]
