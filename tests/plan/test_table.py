"""The table of many plans; `test_tpu.py` computes a cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from tests import tiny
from vit_jax.errors import UserError
from vit_jax.plan.table import make_table


def no_plan(model: str) -> ConfigDict:
    assert model == "odd"  # the others stand in the file
    return tiny.config(dataset__batch_size=7)


def test_the_table_is_made_of_results_and_goes_on_after_a_cell_without_a_plan(
    tmp_path: Path,
) -> None:
    results = tmp_path / "results.jsonl"
    figures = {"gib": 15.0, "step_seconds": 2.0, "images_per_second": 2048.0, "chip_days": 1.0}
    rows = [
        {"model": "even", "topology": "v5e-4", "settings": "--config.mesh.fsdp=1", **figures},
        {"model": "even", "topology": "H100:8", "settings": "", **figures},
        {"model": "huge", "topology": "v5e-4", "settings": "--config.model.scan=True"},
        {"model": "huge", "topology": "H100:8", "settings": ""},
    ]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = ["odd", "even", "huge"]
    text = make_table(models, ["v5e-4", "H100:8"], get_config=no_plan, results=results)
    assert text.count("| odd | no plan | | | | ") == 2
    assert "| even | 15.00 close | 2.00 s | 2,048 | 1 | mesh.fsdp=1 |" in text
    assert "| even | 15.00 | 2.00 s | 2,048 | 1 | - |" in text  # a GPU is compiled in one way
    assert "| huge | does not fit | | | | model.scan=True |" in text
    assert "Batch 4096." in text
    assert "at 35% of the peak" in text
    assert "at 29% of the peak" in text
    assert len(results.read_text().splitlines()) == 4  # what had no plan is tried again
    with pytest.raises(UserError, match="name accelerators"):
        make_table(["even"], ["cpu:8"], get_config=no_plan, results=results)


def test_the_table_in_the_docs_is_made_of_its_results() -> None:
    """Nothing is computed: every cell stands in the file."""
    docs = tiny.ROOT / "docs"
    cells = [json.loads(line) for line in (docs / "plan_table.jsonl").read_text().splitlines()]
    models, topologies = ({cell[key]: None for cell in cells} for key in ("model", "topology"))
    results = docs / "plan_table.jsonl"
    text = make_table(list(models), list(topologies), get_config=no_plan, results=results)
    assert text == (docs / "plan_table.md").read_text()
