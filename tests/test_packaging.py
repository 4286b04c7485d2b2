"""What a fresh clone installs, and what setup.sh does when things go wrong: with the real pip
and uv, a package index of tiny wheels, and no network."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import uv
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


def on(python: str) -> dict[str, str]:
    return {"python_version": python, "python_full_version": f"{python}.0"}


def requirements(python: str = THIS_PYTHON) -> list[Requirement]:
    extras = setup_value("EXTRAS_REQUIRE")
    assert isinstance(extras, dict)
    lines = [*setup_value("INSTALL_REQUIRES")]
    for extra in INSTALLED_EXTRAS:
        lines += extras[extra]
    found = [Requirement(line) for line in lines]
    return [each for each in found if each.marker is None or each.marker.evaluate(on(python))]


@pytest.mark.parametrize("python", SUPPORTED)
def test_constraints_pin_what_setup_py_asks_for(python: str) -> None:
    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)  # raises for links to hosts and files without a name
        assert pin.url is None
        assert [s.operator for s in pin.specifier] == ["=="], line
        if pin.marker is None or pin.marker.evaluate(on(python)):
            name = canonicalize_name(pin.name)
            assert name not in pins, f"two versions of {name}"
            pins[name] = next(iter(pin.specifier)).version
    for requirement in requirements(python):
        pinned = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), f"{requirement} but pinned {pinned}"
    # Built by the pinned tool, not by the newest of the day.
    assert Version(pins["setuptools"]) >= Version("77")


def test_setup_py_has_lower_bounds_only() -> None:
    for requirement in requirements():
        assert {s.operator for s in requirement.specifier} == {">="}, str(requirement)


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


def test_every_file_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:scripts|configs)/[\w.]+\.(?:py|sh)\b", text))
    assert {"scripts/quickstart.sh", "scripts/test.sh"} <= named
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


# Builds vit_jax in place of setuptools; says that it was asked, and may hang or fail.
BACKEND = """
import pathlib, shutil, time

def build_editable(folder, config_settings=None, metadata_directory=None):
    with open("builds", "a") as file:
        file.write("x")
    while pathlib.Path("hang").exists():
        time.sleep(0.1)
    if pathlib.Path("full").exists():
        raise OSError(28, "No space left on device")
    return shutil.copy("index/vit_jax-1-py3-none-any.whl", folder).rpartition("/")[2]
"""


# Stands for an interpreter: copies an environment, since making one takes seconds.
PYTHON = """#!/bin/sh
case "$2" in
  import*) echo "VERSION $0" ;;
  venv) exec cp -R "${0%/*}/environment" "$3" ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python")
    made = [sys.executable, "-m", "venv", "--without-pip", folder / "environment"]
    subprocess.run(made, check=True)
    packages = folder / f"environment/lib/python{THIS_PYTHON}/site-packages"
    for tool in ("pip", "uv"):
        found = importlib.metadata.distribution(tool)
        for name in (tool, f"{tool}-{found.version}.dist-info"):
            (packages / name).symlink_to(str(found.locate_file(name)))
    (folder / "environment/bin/uv").symlink_to(uv.find_uv_bin())
    (folder / "python").write_text(PYTHON.replace("VERSION", THIS_PYTHON))
    (folder / "python").chmod(0o755)
    return folder / "python"


class Clone:
    """setup.sh in a folder with a space, next to a vit_jax that needs tiny wheels only."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.root = folder / "a clone"
        (self.root / "scripts").mkdir(parents=True)
        (self.root / "index").mkdir()
        shutil.copy(ROOT / "scripts/setup.sh", self.root / "scripts")
        self.write("setup.py", "")
        self.write("constraints.txt", "setuptools==84\n")
        self.write("backend.py", BACKEND)
        self.write("pyproject.toml", '[build-system]\nrequires = []\nbuild-backend = "backend"\n')
        with (self.root / "pyproject.toml").open("a") as file:
            file.write('backend-path = ["."]\n')
        self.wheel("vit_jax", export="data", dev="tools")
        for name in ("data", "tools"):
            self.wheel(name)
        self.wheel("setuptools", version="84")
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHON": str(python),
            "PYTHONPATH": "/no/such/folder",  # must not reach pip
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": "index",
            "PIP_NO_INDEX": "1",
        }

    def write(self, name: str, text: str = "") -> None:
        (self.root / name).write_text(text)

    def wheel(self, name: str, version: str = "1", **extras: str) -> None:
        metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        for extra, package in extras.items():
            metadata += [
                f"Provides-Extra: {extra}",
                f"Requires-Dist: {package}; extra == '{extra}'",
            ]
        info = f"{name}-{version}.dist-info"
        path = self.root / f"index/{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.root / "scripts/setup.sh", *arguments],
            env=self.environment | environment,
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def setup(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit status, stdout, stderr."""
        process = self.start(*arguments, **environment)
        stdout, stderr = process.communicate()
        return process.returncode, stdout, stderr

    def hold(self) -> subprocess.Popen[str]:
        """A call that is in the middle of its installation."""
        self.write("hang")
        process = self.start()
        while not (self.root / "builds").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        return process

    def packages(self) -> set[str]:
        found = self.root.glob(".venv/lib/python3*/site-packages/*.dist-info")
        return {path.name.partition("-")[0] for path in found} - {"pip", "setuptools", "uv"}


@pytest.fixture
def clone(tmp_path: Path, python: Path) -> Clone:
    return Clone(tmp_path, python)


def test_two_calls_at_once_install_once_and_later_ones_what_is_missing(clone: Clone) -> None:
    first = clone.hold()
    second = clone.start()
    assert second.stdout is not None
    assert second.stdout.readline() == f"setup: waiting for another setup of {clone.root}\n"
    (clone.root / "hang").unlink()
    for process in (first, second):
        _, stderr = process.communicate()
        assert (process.returncode, stderr) == (0, "")
    assert (clone.root / "builds").read_text() == "x"
    assert clone.packages() == {"vit_jax", "data"}

    assert clone.setup() == (0, "", "")
    status, _, stderr = clone.setup("--tests")
    assert (status, stderr) == (0, "")
    assert clone.packages() == {"vit_jax", "data", "tools"}
    assert clone.setup() == clone.setup("--tests") == (0, "", "")
    clone.write("setup.py", "# another dependency")
    assert "vit-jax==1" in clone.setup("--tests")[1]


def test_a_killed_call_is_recovered_by_the_next(clone: Clone) -> None:
    process = clone.hold()
    (clone.root / ".venv/half a package").touch()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (clone.root / "hang").unlink()
    status, _, stderr = clone.setup()
    assert (status, stderr) == (0, "")
    assert clone.packages() == {"vit_jax", "data"}
    assert not (clone.root / ".venv/half a package").exists()


def test_no_network_or_a_full_disk_is_one_line(clone: Clone) -> None:
    assert clone.setup()[0] == 0
    assert clone.packages() == {"vit_jax", "data"}
    (clone.root / ".venv/what was there").touch()
    status, _, stderr = clone.setup(
        "--tests",
        PIP_NO_INDEX="0",
        PIP_FIND_LINKS="",
        PIP_INDEX_URL="http://127.0.0.1:9/",
        PIP_RETRIES="1",
        UV_HTTP_RETRIES="0",
    )
    assert status == 1
    assert stderr.startswith("setup: error: no network: pip cannot reach the package index")
    assert stderr.count("\n") == 1
    assert (clone.root / ".venv/what was there").exists()  # nothing was changed

    clone.write("full")
    message = "setup: error: the disk is full; about 3 GB are needed.\n"
    status, _, stderr = clone.setup("--tests")
    assert (status, stderr) == (1, message)
    (clone.root / "full").unlink()
    assert clone.setup("--tests")[0] == 0
    assert clone.packages() == {"vit_jax", "data", "tools"}
    assert not (clone.root / ".venv/what was there").exists()  # who knows what is half-written


def test_an_environment_of_another_make_is_not_removed(clone: Clone) -> None:
    (clone.root / ".venv").mkdir()
    clone.write(".venv/precious")
    for _ in range(2):
        status, _, stderr = clone.setup()
        assert status == 1
        assert stderr.endswith("was not made by this script; move it away.\n")
    assert (clone.root / ".venv/precious").exists()


def test_unknown_arguments_are_refused(clone: Clone) -> None:
    status, _, stderr = clone.setup("--test")
    assert (status, stderr) == (
        1,
        "setup: error: unknown argument '--test'; known: --tests, --help\n",
    )
    assert clone.setup("--help")[1].startswith("Makes .venv in the repository")


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({}, None),
        ({"python3": 10}, None),
        ({"python3": 12, "python3.13": 13}, "3.12"),
        ({"python3": 99, "python3.11": 11}, "3.11"),
        ({"python3": 10, "python3.13": 13, "python3.12": 12}, "3.13"),
        ({"python3": 99}, "3.99"),
    ],
)
def test_the_python_that_setup_chooses(
    clone: Clone, there: dict[str, int], chosen: str | None
) -> None:
    """Stand-ins for interpreters, which say their version and cannot make environments."""
    tools = clone.root / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "cksum", "dirname", "rm", "touch"):
        (tools / tool).symlink_to(shutil.which(tool) or pytest.fail(f"no {tool}"))
    for name, minor in there.items():
        (tools / name).write_text(
            f'#!/bin/sh\n[ "$1" = -c ] || exit 1\n'
            f'[ {minor} -lt 11 ] || [ {minor} -gt "$3" ] || echo 3.{minor} "$0"\n'
        )
        (tools / name).chmod(0o755)
    status, stdout, stderr = clone.setup(PATH=str(tools), PYTHON="")
    assert status == 1
    if chosen is None:
        assert stderr.startswith("setup: error: no Python 3.11 or newer")
    else:
        assert stdout.startswith(f"setup: Python {chosen} ")
    for name in ("/no/such/python", tools / "python3"):
        status, _, stderr = clone.setup(PATH=str(tools), PYTHON=str(name))
        assert status == 1
        if there.get("python3", 0) < 11:
            message = f"PYTHON={name} is not Python 3.11 or newer with its venv module ("
            assert stderr.startswith(f"setup: error: {message}")
            assert stderr.count("\n") == 1
            assert there or "such file" in stderr or "not found" in stderr  # the shell's own words


def test_the_dockerfile_installs_what_setup_py_and_the_constraints_name() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\w[\w-]*) AS (\w[\w-]*)$", text, re.MULTILINE)
    assert {"cpu", "cuda", "tpu"} <= {stage for _, stage in stages}
    assert stages[-1] == ("runtime", "cpu")  # without --target
    assert re.search(r"^FROM python:3\.1[123]\.\d+-slim-\w+ AS base$", text, re.MULTILINE)
    assert re.findall(r"^USER (\w+)", text, re.MULTILINE) == ["1000", "root"]  # root for TPUs
    assert all("-c constraints.txt" in line for line in re.findall(r"pip install .*", text))
    extras = setup_value("EXTRAS_REQUIRE")
    assert isinstance(extras, dict)
    for line in re.findall(r"-e '\.\[(.*)\]'", text):
        assert set(line.split(",")) <= set(extras)


def test_images_hold_no_more_than_what_runs() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert {"vit_jax", "configs", "scripts", "setup.py", "constraints.txt"} <= set(kept)
    assert not [name for name in kept if not (ROOT / name).exists()]
