"""docs/tour.ipynb runs from start to end, and shows what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny

NOTEBOOK = tiny.ROOT / "docs" / "tour.ipynb"
# The same cells with fewer updates and blocks, and fewer letters to evaluate.
TINY = '"duration.steps=2", "model.num_layers=1", "log.tensorboard=False"'
SHORTER = {
    '"duration.steps=400"': TINY + ', "evaluators.test.split=test[:300]"',
    '"duration.steps=100"': TINY,
}


@pytest.mark.slow
def test_the_tour_runs(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    program = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for steps, fewer in SHORTER.items():
        assert program.count(steps) == 1
        program = program.replace(steps, fewer)
    one_device = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=tiny.environment(XLA_FLAGS=one_device),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "of digits written by other people" in done.stdout
    assert "(1, 1, 4, 37, 37)" in done.stdout


def test_its_outputs_are_kept() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    pictures = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        outputs = cell["outputs"]
        assert cell["execution_count"], source
        assert all(each["output_type"] != "error" for each in outputs)
        shows = "print(" in source or source.splitlines()[-1].startswith(("Image.", "model"))
        assert shows == bool(outputs), source
        pictures += any("image/png" in each.get("data", {}) for each in outputs)
    assert pictures == 5
    assert NOTEBOOK.stat().st_size < 1_000_000
