"""What a run says of its data: the splits that it has drawn."""

import csv
import logging
import re
from pathlib import Path

import pytest

from tests import tiny
from tests.fixtures_data import write_folder
from vit_jax.train import train_and_evaluate


def test_splits_that_were_drawn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    workdir = tmp_path / "run"
    photos = write_folder(tmp_path, {"photos": {"cat": 10, "dog": 10}}) / "photos"
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
    files = {f"{name}/{i:03}.jpg" for name in ("cat", "dog") for i in range(10)}
    assert {row["file"] for row in rows} == files
    for name in ("train", "test"):
        assert {row["file"][:3] for row in rows if row["split"] == name} == {"cat", "dog"}
    counts = [sum(row["split"] == name for row in rows) for name in ("train", "test")]
    assert f"{photos} has no train/test folders: held out {counts[1]} of 20 images" in caplog.text
    assert re.search(r"Images per class: cat \d \+ \d, dog \d \+ \d\.", caplog.text)
