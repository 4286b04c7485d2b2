"""Several datasets in one training."""

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from vit_jax.data.datasets import create_dataset
from vit_jax.data.mixture import mix
from vit_jax.data.pipeline import train_batches
from vit_jax.errors import UserError
from vit_jax.train import train_and_evaluate

NAME, SPLITS = "glyphs(size=8, num_examples=80)", {"a": "train[:60]", "b": "train[60:]"}


def opened(name: str, ops: str = "decode(channels=1)") -> Any:
    return create_dataset(name=NAME, split=SPLITS[name], preprocess=ops)


def test_every_example_counts_and_the_shares_are_the_weights() -> None:
    mixture = mix(opened("a"), [(opened("b"), 3.0)])
    seen, order = collections.Counter(), []
    for rows in (None, np.arange(0, 40, 2), np.arange(1, 40, 2)):  # whole, and on two hosts
        batches = train_batches(mixture, batch_size=40, seed=1, total_steps=50, rows=rows)
        with batches as made:
            order.append([batch["image"] for batch in made])
    whole, even, odd = order
    for batch, *halves in zip(whole, even, odd, strict=True):
        np.testing.assert_array_equal(batch[::2], halves[0])
        np.testing.assert_array_equal(batch[1::2], halves[1])
    index = {}
    for i in range(80):
        pixels = mixture.example(i, np.random.default_rng(0))["image"].tobytes()
        index.setdefault(pixels, i)
    for batch in whole:
        seen.update(index[image.tobytes()] for image in batch)
    of_b = sum(count for i, count in seen.items() if i >= 60)
    assert of_b == 1500  # 3 of 4
    # 500 of 60 and 1,500 of 20: each is seen in every pass over its set.
    assert {seen[i] for i in range(60)} <= {8, 9}
    assert {seen[i] for i in range(60, 80)} == {75}
    assert mixture.passes(2000) == {f"{NAME} train[:60]": 500 / 60, f"{NAME} train[60:]": 75.0}
    with train_batches(mixture, batch_size=40, seed=1, start_step=30, total_steps=50) as resumed:
        np.testing.assert_array_equal(next(iter(resumed))["image"], whole[30])


def test_each_set_has_its_own_ops_and_its_epochs_are_said(tmp_path: Path, caplog: Any) -> None:
    config = tiny.config(
        dataset__name="digits",
        dataset__split="train[:64]",
        dataset__mixture=(
            ("digits", 0.5, "decode(channels=3)|resize(16)|flip_lr", "train[64:96]"),
        ),
    )
    with caplog.at_level("INFO"):
        train_and_evaluate(config, str(tmp_path))
    assert "digits train[:64] " in caplog.text
    assert "digits train[64:96] " in caplog.text


@pytest.mark.parametrize(
    ("further", "message"),
    [
        ([(opened("b"), 0.0)], "is 0.0; make it positive"),
        ([(opened("b"), 1e-5)], "has less than one of 1000 examples"),
        ([(opened("b", "decode(channels=3)"), 1.0)], r"\[8, 8, 3\].* give it ops of its own"),
    ],
)
def test_what_does_not_mix_is_named(further: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        mix(opened("a"), further)
    with pytest.raises(UserError, match="set one of them"):
        mix(opened("a"), [(opened("b"), 1.0)]).balanced(0.5)
