import dataclasses
import threading

import cv2
import numpy as np
import pytest

from vit_jax.data.datasets import Dataset
from vit_jax.data.pipeline import eval_batches, example_rng, order, train_batches
from vit_jax.data.preprocess import parse
from vit_jax.data.sources import Source
from vit_jax.errors import UserError

SPEC = "decode(1)|random_affine(10, translate=0.1)|random_crop(6)|flip_lr"


@dataclasses.dataclass(frozen=True)
class Digits(Source):
    """PNG files of 8 x 8 noise, whose label is their index; `broken` ones do not decode."""

    size: int
    broken: tuple[int, ...] = ()
    large: tuple[int, ...] = ()

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        side = 9 if index in self.large else 8
        noise = np.random.default_rng(index).integers(0, 256, (side, side), np.uint8)
        data = cv2.imencode(".png", noise)[1].tobytes()
        return {"image": data[:40] if index in self.broken else data, "label": index}


def dataset(size=23, spec=SPEC, **kwargs):
    return Dataset("noise", "train", Digits(size, **kwargs), parse(spec), ())


def collect(batches):
    with batches as opened:
        out = list(opened)
    return {key: np.stack([batch[key] for batch in out]) for key in out[0]}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype
        np.testing.assert_array_equal(one[key], other[key])


def train(data, **kwargs):
    arguments = {"batch_size": 8, "seed": 5, "start_step": 0, "total_steps": 7} | kwargs
    return collect(train_batches(data, **arguments))


@pytest.mark.parametrize("start", [0, 10**9])
def test_train_batches_are_what_the_order_says(start):
    batches = train(dataset(), start_step=start, total_steps=start + 7)
    assert batches["image"].shape == (7, 8, 6, 6, 1)
    assert batches["image"].dtype == np.uint8
    assert batches["label"].dtype == np.int32
    expected = order(5, 23, np.arange(56) + 8 * start)
    np.testing.assert_array_equal(batches["label"].ravel(), expected)
    assert batches["mask"].dtype == np.float32
    assert batches["mask"].min() == 1


def test_augmentation_changes_from_epoch_to_epoch_and_with_the_seed():
    one = train(dataset(4), batch_size=4, total_steps=30)
    labels, images = one["label"].ravel(), one["image"].reshape(120, -1)
    for label in range(4):
        assert len(np.unique(images[labels == label], axis=0)) > 25
    # The order is fixed by the labels; what differs for the same index is the augmentation.
    other = train(dataset(1), batch_size=4, seed=6)
    assert not np.array_equal(train(dataset(1), batch_size=4)["image"], other["image"])


@pytest.mark.parametrize("hosts", [2, 4])
def test_rows_of_all_processes_make_the_global_batch(hosts):
    expected = train(dataset())
    for split in (np.arange(8).reshape(hosts, -1), np.arange(8).reshape(-1, hosts).T):
        for rows in split:
            part = train(dataset(), rows=rows)
            assert_equal(part, {key: value[:, rows] for key, value in expected.items()})


@pytest.mark.parametrize("start", [1, 3, 6])
def test_any_start_continues_the_run(start):
    expected = {key: value[start:] for key, value in train(dataset()).items()}
    assert_equal(train(dataset(), start_step=start, num_threads=2), expected)


@pytest.mark.parametrize("repeats", [2, 4])
def test_repeated_augmentation_draws_each_example_so_often_in_a_batch(repeats):
    batches = train(dataset(), repeated_augmentation=repeats, total_steps=23)
    distinct = 8 // repeats
    labels = batches["label"].reshape(23, repeats, distinct)
    np.testing.assert_array_equal(
        labels, np.broadcast_to(labels[:, :1], labels.shape)
    )  # the draws of an example are B / m rows apart
    expected = order(5, 23, np.arange(23 * distinct)).reshape(23, distinct)
    np.testing.assert_array_equal(labels[:, 0], expected)
    # Augmentation is that of the position, so every draw is another picture.
    images = batches["image"].reshape(23, repeats, distinct, -1)
    assert np.mean(np.any(images[:, 0] != images[:, 1], axis=-1)) > 0.9
    # 8 epochs of 23 positions show every example 8 times, as without.
    assert set(np.bincount(batches["label"].ravel())) == {8}


@pytest.mark.parametrize("options", [{}, {"num_threads": 2}])
def test_repeated_augmentation_is_the_same_for_any_hosts_and_start(options):
    expected = train(dataset(), repeated_augmentation=4)
    assert not np.array_equal(expected["label"], train(dataset())["label"])
    for rows in (np.arange(4), np.arange(1, 8, 2)):
        part = train(dataset(), repeated_augmentation=4, rows=rows, start_step=2, **options)
        assert_equal(part, {key: value[2:, rows] for key, value in expected.items()})


@pytest.mark.parametrize("hosts", [1, 2, 8])
@pytest.mark.parametrize("size", [1, 7, 8, 9, 23])
def test_eval_batches_count_every_example_once(size, hosts):
    data = dataset(size)
    parts = [collect(eval_batches(data, batch_size=8, rows=np.arange(8)[h::hosts]))
             for h in range(hosts)]  # fmt: skip
    assert {len(part["label"]) for part in parts} == {-(-size // 8)}
    labels = np.concatenate([part["label"][part["mask"] == 1] for part in parts])
    np.testing.assert_array_equal(np.sort(labels), np.arange(size))
    assert sum(part["mask"].sum() for part in parts) == size
    if hosts == 1:
        np.testing.assert_array_equal(labels, np.arange(size))
        padding = parts[0]["mask"] == 0
        assert np.all(parts[0]["label"][padding] == size - 1)
        for image in parts[0]["image"][padding]:
            np.testing.assert_array_equal(image, parts[0]["image"][~padding][-1])


@pytest.mark.parametrize("batch_size", [8, 1])
def test_images_of_different_shapes_are_named(batch_size):
    """A batch of one is fine in itself, but a compiled step would be compiled again."""
    data = dataset(spec="decode(1)", large=(9,))
    message = r"uint8 \[8, 8, 1\] and uint8 \[9, 9, 1\] \(example 9\); .* such as resize"
    with pytest.raises(UserError, match=message):
        collect(eval_batches(data, batch_size=batch_size))


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_bad_example_is_named(num_threads):
    data = dataset(broken=(12,))
    message = r"^example 12 of noise train \(\[12\]\): .* cannot be decoded"
    with pytest.raises(UserError, match=message) as e:
        collect(eval_batches(data, batch_size=8, num_threads=num_threads))
    assert "\n" not in str(e.value)


def test_threads_end_with_the_context():
    def ours():
        return [t for t in threading.enumerate() if t.name.startswith("grain-prefetch")]

    before = ours()
    arguments = {"batch_size": 8, "seed": 0, "total_steps": 10**6}
    with train_batches(dataset(), **arguments, num_threads=2) as batches:
        next(batches)
        threads = [thread for thread in ours() if thread not in before]
        assert threads
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


STABLE = ([233, 979, 241, 977, 396, 386], [15092, 36275, 40929, 45539, 18933, 761])


@pytest.mark.parametrize("num_examples", [1, 2, 3, 5, 16, 17, 300, 1797, 65536, 65537])
def test_every_epoch_holds_every_example_once(num_examples):
    indices = order(0, num_examples, np.arange(2 * num_examples))
    for epoch in indices.reshape(2, num_examples):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(num_examples))


def test_stays_what_it_is():
    """A change of these numbers changes every run, also one that is resumed."""
    assert order(0, 1000, np.arange(6)).tolist() == STABLE[0]
    assert order(7, 50000, np.arange(10**12, 10**12 + 6)).tolist() == STABLE[1]


def test_example_rng_is_philox_with_seed_and_position_as_key():
    expected = np.random.Generator(np.random.Philox(key=np.array([5, 9], np.uint64)))
    np.testing.assert_array_equal(example_rng(5, 9).random(8), expected.random(8))
    draws = {example_rng(s, p).random() for s in (0, 1, -1, 2**40) for p in (0, 1, 2, 2**40)}
    assert len(draws) == 16
