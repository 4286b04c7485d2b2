"""The table of devices: nothing else in the models knows a chip, or what is private in JAX."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import vit_jax.models
from vit_jax.models.kernels.devices import ROWS, device_has

MODELS = Path(vit_jax.models.__file__).parent


def strings(file: Path) -> Iterator[str]:
    """Text in the code of a file, without docstrings."""
    tree = ast.parse(file.read_text())
    prose = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield node.value


def test_only_the_table_names_a_chip_and_each_row_says_what_it_gains() -> None:
    files = [file for file in MODELS.rglob("*.py") if file.name != "devices.py"]
    assert len(files) > 20
    asked = set()
    for file in files:
        text = file.read_text()
        asked |= set(re.findall(r'device_has\("(\w+)"\)', text))
        chips = [text for text in strings(file) if re.search("TPU v|NVIDIA|H100", text)]
        assert not chips, f"{file.name} names {chips}"
        private = re.search(r"^\s*(?:from|import) jax\._src", text, re.MULTILINE)
        assert not private, f"{file.name}: {private}"
    assert asked == {row.name for row in ROWS}
    for row in ROWS:
        assert row.source in ("measured", "counted")
        assert re.search(r"\d", row.figure), row.name
        assert isinstance(device_has(row.name), bool)
