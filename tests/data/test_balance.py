"""Balanced sampling: how often classes come, and that batches stay a function of (seed, step)."""

import numpy as np
import pytest

from tests import tiny
from vit_jax.data.datasets import Dataset
from vit_jax.data.pipeline import train_batches
from vit_jax.data.preprocess import parse
from vit_jax.data.sources import Source
from vit_jax.errors import UserError
from vit_jax.parameters.sharding import create_mesh
from vit_jax.run import create_run

LABELS = np.repeat([0, 2, 3], [60, 9, 3])  # class 1 has no example


class Numbered(Source):
    """Images whose first two values are their label and number."""

    def __len__(self):
        return len(LABELS)

    def __getitem__(self, index):
        image = np.array([LABELS[index], index, 0], np.uint8).reshape(1, 1, 3)
        return {"image": image, "label": int(LABELS[index])}


def dataset(balance):
    data = Dataset("numbered", "train", Numbered(), parse("decode"), ("a", "b", "c", "d"))
    return data.balanced(balance)


def draw(balance, steps, start=0, batch_size=8, **options):
    """(label, number) of each row [steps * batch_size, 2]."""
    options = {"seed": 3, "start_step": start, "total_steps": start + steps, **options}
    with train_batches(dataset(balance), batch_size=batch_size, **options) as batches:
        return np.concatenate([batch["image"][:, 0, 0, :2] for batch in batches])


@pytest.mark.parametrize(
    ("balance", "slots"), [(1.0, [24, 24, 24]), (0.5, [45, 17, 10]), (0.0, [60, 9, 3])]
)
def test_a_pass_has_its_share_of_each_class(balance, slots):
    for start in (0, 5):  # any pass
        labels = draw(balance, 1, start, batch_size=72)[:, 0]
        assert [int(np.sum(labels == label)) for label in (0, 2, 3)] == slots


def test_no_example_comes_again_before_its_whole_class_has():
    drawn = draw(1.0, 1, batch_size=5 * 72)
    for label, members in ((0, 60), (2, 9), (3, 3)):
        counts = np.bincount(drawn[drawn[:, 0] == label, 1], minlength=72)[label == LABELS]
        assert counts.sum() == 5 * 24
        assert counts.max() - counts.min() <= 1
        assert (counts > 0).sum() == members


def test_batches_are_a_function_of_seed_and_step():
    whole = draw(1.0, 40)
    np.testing.assert_array_equal(whole[8 * 25 :], draw(1.0, 15, start=25))
    np.testing.assert_array_equal(whole, draw(1.0, 40, num_threads=3))
    parts = [draw(1.0, 40, rows=np.arange(4 * i, 4 * i + 4)).reshape(40, 4, 2) for i in range(2)]
    np.testing.assert_array_equal(whole, np.concatenate(parts, axis=1).reshape(-1, 2))
    assert not np.array_equal(whole, draw(1.0, 40, seed=4))
    assert not np.array_equal(whole[:72], whole[72:144])
    twice = draw(1.0, 9, repeated_augmentation=2).reshape(9, 2, 4, 2)
    np.testing.assert_array_equal(twice[:, 0], twice[:, 1])


def test_the_config_key_reaches_training_alone():
    run = create_run(tiny.config(dataset__balance=1.0), create_mesh(data=-1, fsdp=1, tensor=1))
    assert [data.balance for data in run.datasets.values()] == [1.0, 0.0]
    options = {"batch_size": 100, "seed": 0, "total_steps": 1}
    with train_batches(run.dataset, **options) as batches:
        assert np.bincount(next(batches)["label"]).tolist() == [10] * 10
    assert np.bincount(run.dataset.labels()).tolist() != [10] * 10


@pytest.mark.parametrize(
    ("balance", "label", "message"),
    [
        (1.5, 0, r"dataset.balance=1.5 must be between 0 and 1"),
        (float("nan"), 0, "dataset.balance=nan must be"),
        (0.5, None, "needs one label per image; set it to 0"),
        (0.5, np.ones(3, np.uint8), "needs one label per image; set it to 0"),
    ],
)
def test_what_cannot_be_balanced_is_refused(balance, label, message):
    example = {"image": np.zeros((2, 2, 3), np.uint8)}
    source = [example if label is None else {**example, "label": label}]
    data = Dataset("x", "train", source, parse("decode"), ())
    with pytest.raises(UserError, match=message):
        data.balanced(balance)
