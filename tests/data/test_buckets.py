"""Prepared sets in a bucket: the same examples, read by ranges or from the cache."""

import numpy as np
import pytest

from tests import fixtures_data
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.files.paths import bucket_files, to_path

SIZES = {"train": 50, "test": 13}


def opened(data_dir, split="train[5:]"):
    return create_dataset(
        name="cifar10", split=split, preprocess="decode", data_dir=str(data_dir)
    ).check()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


def prepare(bucket, tmp_path, file_format):
    """Three shards on a disk and at BUCKET/tfds."""
    root = tmp_path / "disk"
    fixtures_data.tiny_tfds("cifar10", root, SIZES, file_format=file_format, shards=3)
    to_path(f"{bucket}/tfds")  # before the first use of the file system
    bucket_files().put(str(root / "cifar10"), f"{bucket}/tfds/cifar10", recursive=True)
    return root


@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_a_set_in_a_bucket_is_the_set_on_a_disk(
    bucket, bucket_server, tmp_path, cache, file_format
):
    root = prepare(bucket, tmp_path, file_format)
    there, here = opened(f"{bucket}/tfds/"), opened(root)
    assert there.fingerprint == here.fingerprint  # a run may be resumed with the other one
    assert there.class_names == here.class_names
    rng = np.random.default_rng(0)
    for index in range(here.num_examples):
        np.testing.assert_equal(there.example(index, rng), here.example(index, rng))
    fetched = {path.name for path in cache.rglob("*record-*") if path.suffix != ".version"}
    shards = {path.name for path in root.rglob("*-train.*record-*")}
    assert fetched == (shards if file_format == "tfrecord" else set())
    downloads = bucket_server.requests["GET /download/storage/v1"]
    opened(f"{bucket}/tfds")
    assert bucket_server.requests["GET /download/storage/v1"] - downloads <= 6  # metadata only


def test_an_object_that_was_replaced_by_one_of_its_size_is_fetched_again(bucket, cache):
    path = to_path(f"{bucket}/shard")
    for content in (b"abc", b"abd"):
        path.write_bytes(content)
        assert paths.cached_copy(path).read_bytes() == content
    note = cache.joinpath(*str(path).removeprefix("gs://").split("/")).with_name("shard.version")
    note.unlink()
    assert paths.cached_copy(path).read_bytes() == b"abd"
    assert note.exists()


def test_a_shard_that_is_missing_or_damaged(bucket, tmp_path):
    prepare(bucket, tmp_path, "array_record")
    (folder,) = to_path(f"{bucket}/tfds").glob("cifar10/*")
    shards = sorted(folder.glob("*-train.array_record-*"))
    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    with pytest.raises(UserError, match=rf"{shards[1]}: .*; copy or prepare it again"):
        opened(f"{bucket}/tfds")
    shards[1].unlink()
    with pytest.raises(UserError, match=rf"{shards[1]}: "):
        opened(f"{bucket}/tfds")
