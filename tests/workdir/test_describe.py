"""What a run says of its data: drawn splits, and images that are newer than itself."""

from __future__ import annotations

import csv
import logging
import os
import time
from pathlib import Path

import pytest

from tests import tiny
from tests.fixtures_data import encoded, picture
from vit_jax.train import train_and_evaluate


def test_splits_that_were_drawn_and_images_that_are_newer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    photos, workdir = tmp_path / "photos", tmp_path / "run"
    for name in ("cat", "dog"):
        (photos / name).mkdir(parents=True)
        for i in range(10):
            (photos / name / f"{i}.png").write_bytes(encoded(picture(i, size=(16, 16)), "PNG"))

    def train() -> None:
        config = tiny.config(
            dataset__name=str(photos),
            dataset__split="train",
            dataset__batch_size=8,
            dataset__preprocess="decode|resize(16)",
            evaluators__test__split="test",
            duration__steps=2,
            checkpoint__every_steps=1,
        )
        train_and_evaluate(config, str(workdir))

    with caplog.at_level(logging.INFO):
        train()
    rows = list(csv.DictReader((workdir / "splits.csv").read_text().splitlines()))
    assert {row["file"] for row in rows} == {
        f"{c}/{i}.png" for c in ("cat", "dog") for i in range(10)
    }
    for name in ("train", "test"):
        assert {row["file"][:3] for row in rows if row["split"] == name} == {"cat", "dog"}
    counts = [sum(row["split"] == name for row in rows) for name in ("train", "test")]
    assert f"{photos} has no splits; drawn: train {counts[0]}, test {counts[1]} (see" in caplog.text
    assert "newer" not in caplog.text

    replaced = photos / rows[0]["file"]  # by another of the same size
    os.utime(replaced, (time.time() + 60,) * 2)
    (workdir / "results.json").unlink()
    train()
    assert f"1 image newer than this run: {rows[0]['file']}. Only names" in caplog.text
