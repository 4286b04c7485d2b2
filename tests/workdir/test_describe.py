"""What a run says of its data: the splits that it has drawn."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

import pytest

from tests import tiny
from tests.fixtures_data import encoded, picture
from vit_jax.train import train_and_evaluate


def test_splits_that_were_drawn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    photos, workdir = tmp_path / "photos", tmp_path / "run"
    for name in ("cat", "dog"):
        (photos / name).mkdir(parents=True)
        for i in range(10):
            (photos / name / f"{i}.png").write_bytes(encoded(picture(i, size=(16, 16)), "PNG"))

    config = tiny.config(
        dataset__name=str(photos),
        dataset__split="train",
        dataset__batch_size=8,
        dataset__preprocess="decode|resize(16)",
        evaluators__test__split="test",
        duration__steps=1,
    )
    with caplog.at_level(logging.INFO):
        train_and_evaluate(config, str(workdir))
    rows = list(csv.DictReader((workdir / "splits.csv").read_text().splitlines()))
    assert {row["file"] for row in rows} == {
        f"{c}/{i}.png" for c in ("cat", "dog") for i in range(10)
    }
    for name in ("train", "test"):
        assert {row["file"][:3] for row in rows if row["split"] == name} == {"cat", "dog"}
    counts = [sum(row["split"] == name for row in rows) for name in ("train", "test")]
    assert f"{photos} has no splits; drawn: train {counts[0]}, test {counts[1]} (see" in caplog.text
