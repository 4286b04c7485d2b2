"""The table of many plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from vit_jax.errors import UserError
from vit_jax.plan import table
from vit_jax.plan.topology import Topology


def test_a_cell_of_the_table_without_a_plan_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_cell(model: str, text: str, topology: Topology, config: Any) -> table.Cell:
        if model == "odd":
            raise UserError("dataset.batch_size=7 does not divide")
        return table.Cell(model, text, "", 15.0, 15.75, 2.0, 2048.0, 1.0, 0.0)

    monkeypatch.setattr(table, "plan_cell", plan_cell)
    results = tmp_path / "results.jsonl"

    def make(topologies: list[str]) -> str:
        return table.make_table(
            ["odd", "even"], topologies, get_config=lambda model: tiny.config(), results=results
        )

    text = make(["v5e-4", "H100:8"])
    assert "| odd | no plan | | | | dataset.batch_size=7 does not divide |" in text
    assert text.count("| even | 15.00 close |") == 1  # the TPU's, compiled fast
    assert "Batch 4096," in text
    assert "at 35% of the peak" in text
    assert "at 29% of the peak" in text
    assert [json.loads(line)["model"] for line in results.read_text().splitlines()] == ["even"] * 2
    with pytest.raises(UserError, match="name accelerators"):
        make(["cpu:8"])
