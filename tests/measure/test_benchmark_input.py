"""The input benchmark measures what it says; how fast is no test's business."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import fixtures_data
from tests.peers import import_timm
from vit_jax.data.datasets import create_dataset
from vit_jax.errors import UserError
from vit_jax.measure import input as bench
from vit_jax.measure.input import Settings, benchmark_input
from vit_jax.measure.photos import SIZES, photographs


def test_every_image_of_the_set_is_read(tmp_path: Path) -> None:
    examples = [(fixtures_data.encoded(fixtures_data.picture(i)), i) for i in range(16)]
    settings = Settings(batch_size=4, num_images=16, num_threads=1)
    [(name, [turn])] = benchmark_input(tmp_path, settings, examples=examples, rounds=1).items()
    assert name == "vit_jax"
    assert turn.images_per_second > 0
    assert turn.cpu_ms_per_image >= 0
    directory = str(tmp_path / "ours" / "benchmark" / "1.0.0")
    dataset = create_dataset(name=directory, split="train", preprocess="decode").check()
    labels = [dataset.example(i, np.random.default_rng(0))["label"] for i in range(16)]
    assert sorted(labels) == list(range(16))


def test_beside_torch_and_a_resized_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_timm()  # so that torch is here
    in_process = bench._in_process

    def only_torch(function: Any, *arguments: Any) -> Any:  # its workers fork, and JAX is here
        if function is bench._measure_dataloader:
            return in_process(function, *arguments)
        return function(*arguments)

    monkeypatch.setattr(bench, "_in_process", only_torch)
    settings = Settings(batch_size=4, num_images=8, num_threads=1)
    names = ["dataloader", "resized"]
    found = benchmark_input(tmp_path, settings, examples=photographs(32), against=names, rounds=1)
    assert list(found) == ["vit_jax", *names]
    assert min(turns[0].images_per_second for turns in found.values()) > 0
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).rglob("*array_record*"))
        for name in ("ours", "resized")
    ]
    assert sizes[1] < 0.7 * sizes[0]


def test_time_is_taken_of_running_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the warm-up, and per image."""
    clock = iter([100.0, 104.0])
    cpu = iter([1.0, 3.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(bench, "cpu_seconds", lambda: next(cpu))
    taken = []

    def batches() -> Any:
        for number in range(100):
            taken.append(number)
            yield np.zeros((8, 2))

    speed = bench._time(batches(), Settings(batch_size=8, num_images=80))
    assert len(taken) == 4 + 10
    assert (speed.images_per_second, speed.cpu_ms_per_image) == (20.0, 25.0)


def test_processor_time_counts_this_process() -> None:
    start, own = bench.cpu_seconds(), sum(os.times()[:2])
    while sum(os.times()[:2]) < own + 0.1:
        sum(range(10_000))
    assert bench.cpu_seconds() - start >= 0.08  # clock ticks of 10 ms


def test_without_tensorflow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(UserError, match=r"--against=big_vision needs .* tensorflow: .*'.\[tf\]'"):
        benchmark_input(tmp_path, Settings(), against=["big_vision"])
    with pytest.raises(UserError, match=r"--against='dalli'"):
        benchmark_input(tmp_path, Settings(), against=["dalli"])


def test_a_failing_measurement_says_why() -> None:
    with pytest.raises(UserError, match="no such dataset"):
        bench._in_process(bench._measure_ours, "glyph", "decode", Settings())


def test_photographs_are_like_those_of_imagenet() -> None:
    files = [data for data, _ in photographs(20)]
    assert next(photographs(1))[0] != next(photographs(1, seed=1))[0]
    sizes = {Image.open(io.BytesIO(data)).size[::-1] for data in files}
    assert sizes <= set(SIZES)
    assert 60_000 < np.mean(list(map(len, files))) < 130_000  # 94 KB; ImageNet's have 110 KB
