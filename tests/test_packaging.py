"""What a fresh clone installs, and that the commands of the README are there and runnable."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED = ("3.11", "3.12", "3.13")
THIS_PYTHON = "{}.{}".format(*sys.version_info)
INSTALLED_EXTRAS = ("embedded", "dev", "export", "hf", "peers")  # by setup.sh --tests
# Who brings a module that is not installed here.
ABSENT = {"tensorflow": "tensorflow-cpu"}


def setup_value(name: str) -> object:
    """A literal of setup.py, which cannot be imported without running setuptools."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"setup.py has no {name}")


def requirements() -> list[Requirement]:
    extras = setup_value("EXTRAS_REQUIRE")
    assert isinstance(extras, dict)
    lines = [*setup_value("INSTALL_REQUIRES")]
    for extra in INSTALLED_EXTRAS:
        lines += extras[extra]
    found = [Requirement(line) for line in lines]
    return [each for each in found if each.marker is None or each.marker.evaluate()]


def pins(version: str) -> dict[str, str]:
    """{canonical name: version} of a constraints file."""
    lines = (ROOT / "constraints" / f"py{version}.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): pin for name, pin in pairs}


@pytest.mark.parametrize("version", SUPPORTED)
def test_constraints_pin_exact_versions_and_name_no_place(version: str) -> None:
    lines = (ROOT / "constraints" / f"py{version}.txt").read_text().splitlines()
    assert lines[0].startswith("#")  # how the file is made
    for line in lines:
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line), line
        assert "://" not in line


@pytest.mark.parametrize("version", SUPPORTED)
def test_constraints_cover_what_setup_py_asks_for(version: str) -> None:
    pinned = pins(version)
    for requirement in requirements():
        pin = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement} but pinned {pin}"
    # Built by the pinned tool, not by the newest of the day.
    assert Version(pinned["setuptools"]) >= Version("77")


def test_setup_py_has_lower_bounds_only() -> None:
    for requirement in requirements():
        assert {s.operator for s in requirement.specifier} == {">="}, str(requirement)


def test_every_supported_python_has_constraints() -> None:
    files = sorted(path.name for path in (ROOT / "constraints").iterdir())
    assert files == sorted(f"py{version}.txt" for version in SUPPORTED)


def test_installed_versions_satisfy_setup_py() -> None:
    for requirement in requirements():
        version = importlib.metadata.version(requirement.name)
        assert requirement.specifier.contains(version), f"{requirement} but found {version}"


def test_third_party_imports_are_declared() -> None:
    """Whatever vit_jax/, configs/ and scripts/ import is in setup.py, under some extra or none."""
    extras = setup_value("EXTRAS_REQUIRE")
    assert isinstance(extras, dict)
    lines = [*setup_value("INSTALL_REQUIRES")]
    declared = {canonicalize_name(Requirement(x).name) for x in sum(extras.values(), lines)}
    providers = importlib.metadata.packages_distributions()
    known = {*sys.stdlib_module_names, "vit_jax", "configs"}
    undeclared = set()
    for top in ("vit_jax", "configs", "scripts"):
        for path in (ROOT / top).glob("**/*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                for name in {name.partition(".")[0] for name in names} - known:
                    owners = providers.get(name, [ABSENT.get(name, name)])
                    if not declared & {canonicalize_name(owner) for owner in owners}:
                        undeclared.add(f"{path.relative_to(ROOT)}: {name}")
    assert not undeclared


@pytest.mark.parametrize(
    "command",
    [
        "scripts/setup.sh",
        "scripts/test.sh",
        "scripts/quickstart.sh",
        "scripts/tpu_pod.sh",
        "scripts/slurm.sh",
        "scripts/gke.sh",
        "scripts/restart.sh",
        ".ci/run",
    ],
)
def test_shell_commands_are_executable_and_parse(command: str) -> None:
    assert os.access(ROOT / command, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / command], check=True)


def test_every_file_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:scripts|configs|constraints)/[\w.]+\.(?:py|sh|txt)\b", text))
    assert {"scripts/quickstart.sh", "scripts/test.sh"} <= named
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


def test_ci_runs_the_test_command() -> None:
    assert "./scripts/test.sh" in (ROOT / ".ci/run").read_text()


def fake_python(folder: Path, name: str, version: str) -> Path:
    """A program that answers as an interpreter of that version that lacks the venv module."""
    path = folder / name
    old = int(version.split(".")[1]) < 11
    path.write_text(
        f'#!/bin/sh\ncase "$2" in *version_info*) echo {version}; exit {int(old)};; esac\nexit 1\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def bare_clone(tmp_path: Path) -> Path:
    """What setup.sh reads, in a folder with a space, and a PATH with only basic tools on it."""
    clone = tmp_path / "a clone"
    for name in ("scripts/setup.sh", "setup.py", "pyproject.toml"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    shutil.copytree(ROOT / "constraints", clone / "constraints")
    tools = clone / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "cksum", "dirname", "rm", "sed", "touch"):
        found = shutil.which(tool)
        assert found is not None
        (tools / tool).symlink_to(found)
    return clone


def run_setup(clone: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    result = subprocess.run(
        [clone / "scripts/setup.sh", *arguments],
        env={"PATH": str(clone / "bin"), **environment},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stderr


def test_setup_without_a_usable_python_says_so(bare_clone: Path) -> None:
    code, message = run_setup(bare_clone)
    assert code == 1
    assert message.startswith("setup: error: no Python 3.11 or newer found")
    fake_python(bare_clone / "bin", "python3", "3.10")
    assert run_setup(bare_clone) == (code, message)


def test_setup_refuses_the_python_it_was_told_to_use(bare_clone: Path) -> None:
    old = fake_python(bare_clone / "bin", "old", "3.9")
    code, message = run_setup(bare_clone, PYTHON=str(old))
    assert code == 1
    assert message == f"setup: error: PYTHON={old} is Python 3.9; 3.11 or newer is needed.\n"
    code, message = run_setup(bare_clone, PYTHON="/no/such/python")
    assert code == 1
    assert message == "setup: error: PYTHON=/no/such/python is not a program.\n"


def test_setup_prefers_an_interpreter_with_constraints(bare_clone: Path) -> None:
    """python3 is too new to be pinned: 3.12 is used; its missing venv module ends the run."""
    fake_python(bare_clone / "bin", "python3", "3.99")
    code, message = run_setup(bare_clone)
    assert code == 1
    assert message.startswith("setup: error: Python 3.99 has no venv module")
    fake_python(bare_clone / "bin", "python3.12", "3.12")
    code, message = run_setup(bare_clone)
    assert code == 1
    assert message.startswith("setup: error: Python 3.12 has no venv module; on Debian")
    assert message.count("\n") == 1


def test_setup_names_the_arguments_it_knows(bare_clone: Path) -> None:
    code, message = run_setup(bare_clone, "--updat-constraints")
    assert code == 1
    assert message.endswith("known: --tests, --update-constraints, --help\n")
