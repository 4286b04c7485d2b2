"""Split expressions mean what they mean in TFDS, and parts of sources are read in turn."""

import pytest

from vit_jax.data.sources import resolve_split
from vit_jax.errors import UserError

LENGTHS = {"train": 99, "test": 10}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("train[:98%]", [("train", 0, 97)]),
        ("train[-10%:]", [("train", 89, 99)]),
        ("train[33.3%:66.6%]", [("train", 33, 66)]),
        ("train[:-7]", [("train", 0, 92)]),
        ("test + train[:1]", [("test", 0, 10), ("train", 0, 1)]),
        ("all", [("train", 0, 99), ("test", 0, 10)]),
        ("train[10:20]+train[10:20]", [("train", 10, 20)] * 2),
    ],
)
def test_what_an_expression_selects(expression, expected):
    assert resolve_split(expression, LENGTHS, LENGTHS.__getitem__) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("tran", r"unknown split 'tran'; known splits: train, test. Did you mean 'train'\?"),
        ("train+", "Unrecognized split format: ''; write 'train', "),
        ("train[5]", "only support slice syntax"),
        ("train[:120%]", r"should be in \[-100, 100\]"),
        ("train[:101]", "incompatible with 99 examples"),
        ("train[:2shard]", "shards can only be selected in a prepared TFDS dataset"),
        ("test[:1%]", "selects no examples"),
    ],
)
def test_bad_expressions_are_one_line_errors(expression, message):
    with pytest.raises(UserError, match=message) as caught:
        resolve_split(expression, LENGTHS, LENGTHS.__getitem__)
    assert "\n" not in str(caught.value)
    assert "dataset.split=" in str(caught.value)
