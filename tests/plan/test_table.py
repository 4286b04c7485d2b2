"""The table of many plans; `test_tpu.py` computes a cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import plan_table
from scripts.plan_table import make_tables
from tests import tiny
from vit_jax.errors import UserError


@pytest.fixture(autouse=True)
def _never_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(plan_table, "plan_cell")  # every cell stands in the file


def test_what_fits_is_told_from_what_does_not_and_what_is_close(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    figures = {"gib": 15.0, "step_seconds": 2.0, "images_per_second": 2048.0, "chip_days": 1.0}
    rows = [
        {"model": "even", "topology": "v5e-4", "settings": "--config.mesh.fsdp=1", **figures},
        {"model": "even", "topology": "H100:8", **figures},
        {"model": "huge", "topology": "v5e-4", "settings": "--config.model.scan=True"},
        {"model": "huge", "topology": "H100:8"},
    ]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = make_tables(["even", "huge"], ["v5e-4", "H100:8"], results)
    assert "| even | 15.00 close | 2.00 s | 2,048 | 1 | mesh.fsdp=1 |" in text
    assert "| even | 15.00 | 2.00 s | 2,048 | 1 | - |" in text  # a GPU is compiled in one way
    assert "| huge | does not fit | | | | model.scan=True |" in text
    assert "at 35% of the peak" in text
    assert "at 29% of the peak" in text
    with pytest.raises(UserError, match="name accelerators"):
        make_tables(["even"], ["cpu:8"], results)


def test_the_tables_in_the_docs_are_made_of_their_results() -> None:
    results = tiny.ROOT / "docs" / "plan_table.jsonl"
    cells = [json.loads(line) for line in results.read_text().splitlines()]
    models, topologies = ({cell[key]: None for cell in cells} for key in ("model", "topology"))
    text = make_tables(list(models), list(topologies), results)
    assert (tiny.ROOT / "docs" / "plan_table.md").read_text().endswith(text)
