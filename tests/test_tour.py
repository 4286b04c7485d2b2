"""docs/tour.ipynb runs from start to end, and shows what it says."""

import json
import os
from pathlib import Path

import pytest

from tests import forks, tiny

NOTEBOOK = tiny.ROOT / "docs" / "tour.ipynb"
# The same cells with fewer updates, a smaller model, fewer letters to evaluate and fewer scans.
TINY = '"duration.steps=2", "model.num_layers=1", "model.hidden_size=16", "model.mlp_dim=16", '
TINY += '"log.tensorboard=False"'
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
    assert program.count("300") == 6  # scans to train on and to test
    program = program.replace("300", "60")
    one_device = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    script, log = tmp_path / "tour.py", tmp_path / "log"
    script.write_text(f"import os\n\nos.chdir({str(tmp_path)!r})\n{program}")
    process = forks.Process([str(script)], log, tiny.environment(XLA_FLAGS=one_device))
    assert process.wait() == 0, log.read_text()
    assert "of digits written by other people" in log.read_text()
    assert "(1, 1, 4, 37, 37)" in log.read_text()


def test_its_outputs_are_kept() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if "outputs" in cell]
    assert all(cell["execution_count"] for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert "error" not in {output["output_type"] for output in outputs}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 5
    assert NOTEBOOK.stat().st_size < 1_000_000
