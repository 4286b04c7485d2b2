"""The table of many plans."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tiny
from vit_jax.errors import UserError
from vit_jax.hardware.chips import GIB
from vit_jax.plan import table
from vit_jax.plan.topology import Topology, parse_topology


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
    assert "Batch 4096." in text
    assert "at 35% of the peak" in text
    assert "at 29% of the peak" in text
    assert [json.loads(line)["model"] for line in results.read_text().splitlines()] == ["even"] * 2
    with pytest.raises(UserError, match="name accelerators"):
        make(["cpu:8"])


@pytest.mark.parametrize(
    ("compute", "split", "copied", "copied_gib", "settings", "compiled"),
    [
        (1.0, 2.0, 1.5, 8, "--config.mesh.fsdp=1", [0, 1]),  # faster, and it fits
        (1.0, 2.0, 2.5, 8, "", [0, 1]),  # it would be slower
        (1.0, 2.0, 1.5, 99, "", [0, 1]),  # it would not fit
        (2.0, 2.0, 1.5, 8, "", [0]),  # nothing to gain
    ],
)
def test_the_state_is_copied_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
    compute: float,
    split: float,
    copied: float,
    copied_gib: int,
    settings: str,
    compiled: list[int],
) -> None:
    asked = []

    def compile_(config: Any, topology: Topology) -> Any:
        fsdp = config.mesh.fsdp
        asked.append(fsdp)
        memory = SimpleNamespace(total=(copied_gib if fsdp == 1 else 4) * GIB)
        return fsdp, SimpleNamespace(memory=memory)

    def step_time(fsdp: int, *_: Any) -> Any:
        return SimpleNamespace(compute=compute, predicted=copied if fsdp == 1 else split)

    def figures(fsdp: int, step: Any, seconds: Any, *_: Any) -> dict[str, float]:
        gib = step.memory.total / GIB
        figure = {"images_per_second": 1.0, "chip_days": 1.0}
        return {"gib": gib, "step_seconds": seconds.predicted, **figure}

    monkeypatch.setattr(table, "_compiled", compile_)
    monkeypatch.setattr(table, "_step_time", step_time)
    monkeypatch.setattr(table, "_figures", figures)
    cell = table.plan_cell("tiny", "v5e-4", parse_topology("v5e-4"), tiny.config())
    assert cell.settings == settings
    assert cell.step_seconds == (copied if settings else split)
    assert list(dict.fromkeys(asked)) == compiled
