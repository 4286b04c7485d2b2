"""The architecture, checked by reading the imports of every file (nothing is executed).

A file imports only from layers strictly below its own; files of one package (data, models, ...)
in one layer may import each other, but never in a circle. An import inside a function counts as
much as one at the top: it couples the two files all the same.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TOPS = ("vit_jax", "configs", "scripts", "benchmarks")

# A row names a module, or a package with all its files; the longest matching row decides.
LAYERS: dict[int, tuple[str, ...]] = {
    12: ("scripts", "benchmarks"),
    11: (
        "vit_jax.train",
        "vit_jax.cli",
        "vit_jax.launch",
        "vit_jax.plan",
        "vit_jax.export",
        "vit_jax.report",
        "vit_jax.sweep",
    ),
    # Recipes are plain numbers: they may look up names and sizes, and build nothing.
    10: ("vit_jax.session", "configs", "vit_jax.command_line"),
    9: ("vit_jax.run",),
    8: ("vit_jax.start", "vit_jax.task"),
    7: ("vit_jax.config", "vit_jax.inference", "vit_jax.data_preparation"),
    6: ("vit_jax.training", "vit_jax.pretrained"),
    5: ("vit_jax.workdir", "vit_jax.evaluators"),
    4: ("vit_jax.data", "vit_jax.parameters"),
    3: (
        "vit_jax.arguments",
        "vit_jax.console",
        "vit_jax.files",
        "vit_jax.hardware",
        "vit_jax.models",
        "vit_jax.multihost",
        "vit_jax.objectives",
    ),
    2: ("vit_jax.kinds", "vit_jax.patches", "vit_jax.trees"),
    1: ("vit_jax.errors",),
    0: ("vit_jax.wording",),
}

# Of rooms that a room above layer 2 imports there: folders and files directly in vit_jax/, and the
# other tops.
MOST_PAIRS = 136

# The loop hands these to each other.
STRANGERS = ("vit_jax.models", "vit_jax.objectives", "vit_jax.evaluators")

# Slow to import, or not installed everywhere: imported in the function that needs them.
HEAVY = ("PIL", "aiohttp", "flatbuffers", "fsspec", "gcsfs", "huggingface_hub", "matplotlib")
HEAVY += ("onnx", "onnxruntime", "sentencepiece", "sklearn", "tensorboardX", "tensorflow")
HEAVY += ("tokenizers", "torch", "wandb")


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer_of(module: str) -> int | None:
    """By the longest row that contains the module."""
    rows = [(len(row), layer) for layer in LAYERS for row in LAYERS[layer] if within(module, row)]
    return max(rows)[1] if rows else None


def package_of(module: str) -> str:
    """`vit_jax.data.sources` -> `vit_jax.data`; a file directly in vit_jax/ stands alone."""
    parts = module.split(".")
    if parts[0] == "vit_jax":
        return ".".join(parts[:2])
    return parts[0]


def imports_of(module: str, tree: ast.AST, modules: set[str]) -> Iterator[tuple[str, int]]:
    """(imported module, line) for every import anywhere in the file, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join(package + ([node.module] if node.module else []))
            for alias in node.names:
                member = f"{base}.{alias.name}"
                yield (member if member in modules else base), node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield str(argument.value), node.lineno


def top_level_imports(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """What importing the file imports: all but function bodies and `if TYPE_CHECKING` blocks."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from top_level_imports(node.orelse)
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from top_level_imports(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from top_level_imports(handler.body)


def forbidden(source: str, target: str) -> str | None:
    """Why module `source` may not import module `target` (both ours), or None if it may."""
    source_layer, target_layer = layer_of(source), layer_of(target)
    if source_layer is None or target_layer is None:
        return None  # reported as a file without a layer
    for a in STRANGERS:
        for b in STRANGERS:
            if a != b and within(source, a) and within(target, b):
                return f"{a} and {b} never import each other"
    if target_layer > source_layer:
        return f"layer {source_layer} imports layer {target_layer}"
    if target_layer == source_layer and package_of(source) != package_of(target):
        return f"both are in layer {source_layer}"
    return None


def violations(sources: dict[str, str]) -> list[str]:
    """Every broken rule in {module name: source text}; packages are named `a.b.__init__`."""
    modules = set(sources)
    problems: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, text in sorted(sources.items()):
        name = module.rpartition(".")[2]
        if name == "__init__":
            if text.strip() and module != "vit_jax.__init__":  # names and where they live
                problems.append(f"{module}: is not empty")
            continue
        if name == "utils":
            problems.append(f"{module}: name the file after what it does")
        if layer_of(module) is None:
            problems.append(f"{module}: is in no layer; place it in LAYERS of tests/test_layers.py")
        tree = ast.parse(text)
        graph[module] = set()
        for target, line in sorted(set(imports_of(module, tree, modules))):
            if target.partition(".")[0] not in TOPS:
                continue
            if target in modules:
                graph[module].add(target)
            if reason := forbidden(module, target):
                problems.append(f"{module}:{line}: imports {target}, but {reason}")
        if within(module, "vit_jax"):
            for target, line in top_level_imports(tree.body):
                if target.partition(".")[0] in HEAVY:
                    problems.append(f"{module}:{line}: import {target} inside the function")
        problems.extend(f"{module}:{line}: .get( on a config" for line in config_gets(tree))
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        problems.append("import cycle: " + " -> ".join(reversed(error.args[1])))
    return problems


def config_gets(tree: ast.AST) -> Iterator[int]:
    """Lines with `config...get(`: a default outside config.py hides a misspelt key."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and "config" in ast.unparse(node.func.value).lower()
        ):
            yield node.lineno


def read_sources() -> dict[str, str]:
    files = [path for top in TOPS for path in ROOT.glob(f"{top}/**/*.py")]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in files
    }


def test_the_repository_keeps_its_layers() -> None:
    sources = read_sources()
    assert "vit_jax.models.vit" in sources  # the files were read at all
    assert not violations(sources), "\n" + "\n".join(violations(sources))
    rows = [row for layer in LAYERS.values() for row in layer]
    assert [row for row in rows if not any(within(module, row) for module in sources)] == []


def test_few_rooms_import_each_other() -> None:
    """A reader of one room needs few others; a new pair wants a reason, or one less elsewhere."""
    sources = read_sources()
    pairs = {
        (package_of(module), package_of(target))
        for module, text in sources.items()
        if module != "vit_jax.__init__"
        for target, _ in imports_of(module, ast.parse(text), set(sources))
        if target.partition(".")[0] in TOPS and (layer_of(target) or 0) > 2
    }
    assert len({(a, b) for a, b in pairs if a != b}) <= MOST_PAIRS


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("files.paths", "import vit_jax.data.b", ":1: .*data.b, but layer 3 imports layer 4"),
        ("files.paths", "def f():\n from .. import train", ":2: .*but layer 3 imports layer 11"),
        ("data.sources", "import vit_jax.parameters.table", ":1: .*but both are in layer 4"),
        ("objectives.loss", "import vit_jax.models.vit", ":1: .*vit_jax.models never import each"),
        ("data.a", "import vit_jax.data.b", "import cycle: vit_jax.data"),
        ("data.a", "try: import PIL\nexcept ImportError: ...", ":1: import PIL inside"),
        ("launch", "steps = config.model.get('steps', 3)", r":1: \.get\( on a config"),
        ("new", "", "vit_jax.new: is in no layer"),
    ],
)
def test_the_checker_sees(module: str, text: str, expected: str) -> None:
    others = {"vit_jax.train": "", "vit_jax.data.b": "from . import a"}
    [problem] = violations({**others, f"vit_jax.{module}": text})
    assert re.search(expected, problem)


def test_every_module_imports_without_the_heavy_packages() -> None:
    modules = sorted(m.removesuffix(".__init__") for m in read_sources() if within(m, "vit_jax"))
    program = f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"{{name}} is kept away by this test", name=name)

sys.meta_path.insert(0, Absent())
for name in {modules!r}:
    importlib.import_module(name)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_training_from_scratch_loads_no_reader_of_weights() -> None:
    program = "import sys, vit_jax.train; print(*(m for m in sys.modules if m[:8] == 'vit_jax.'))"
    output = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True)
    modules = [name for name in output.split() if (ROOT / f"{name.replace('.', '/')}.py").exists()]
    assert not [name for name in modules if within(name, "vit_jax.pretrained")]
    assert 40 < len(modules) < 100  # the order of what a reader of the loop may have to pass
