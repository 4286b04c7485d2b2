"""The climate every test runs in; all of it must be in force before JAX is imported.

* CPU only, as 8 virtual devices, so that sharding is tested on any machine (a GPU box included).
* `jax_numpy_rank_promotion=raise`: [N] + [B, N] must be written out.
* XLA compiles fast, not fast programs; where numbers of the official codes are the question,
  `golden.jit` compiles as users do.
* Flax compares the shape of a parameter without tracing its initialiser again, a tenth of the time;
  in processes that tests start it is as users have it.
* Programs that several tests, or processes that tests start, compile are compiled once.
* TensorFlow Datasets reads and writes a folder of this session only, never the user's.
* libtpu, which reads its flags when it is first used, writes the code that `final_code` reads.
* No network: a connection to anything but this machine fails with a clear error.
* matplotlib draws without a display.
* PyTorch's global generator starts every test with the same seed: its models draw from it.
* A test's name never holds bytes: what the workers of pytest-xdist collect has to be the same.

The settings are environment variables, so processes that tests start live in the same climate.
"""

import gc
import gzip
import hashlib
import importlib.metadata
import ipaddress
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NUM_DEVICES = 8
_DEVICES_FLAG = "--xla_force_host_platform_device_count"
# A third of the time that XLA's defaults take. For a run as users have it give XLA_FLAGS the
# values in `golden.USERS_COMPILER`.
_FAST_COMPILATION = [
    "--xla_backend_optimization_level=0",
    # A program for LLVM, not 32 that share its functions: two thirds of the time, the same code.
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jaxlib") < "0.11":  # the flag is unknown to later ones
    _FAST_COMPILATION.append("--xla_cpu_use_fusion_emitters=false")
_TFDS_DIR = tempfile.TemporaryDirectory(prefix="vit_jax_tests_tfds_")
_CACHE_DIR = tempfile.TemporaryDirectory(prefix="vit_jax_tests_compiled_")


def _set_environment() -> None:
    # A flag given twice counts as given last: keep the caller's other flags, drop his count.
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_DEVICES_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join(
        [*_FAST_COMPILATION, *flags, f"{_DEVICES_FLAG}={NUM_DEVICES}"]
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    os.environ["TFDS_DATA_DIR"] = _TFDS_DIR.name
    # The workers of pytest-xdist inherit it from the process that starts them.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE_DIR.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # nobody reads where a product was written
    os.environ["MPLBACKEND"] = "Agg"
    os.environ["OMP_NUM_THREADS"] = "1"  # of PyTorch: threads that wait for one another spin


if "jax" in sys.modules:
    raise RuntimeError(
        "jax was imported before tests/conftest.py could choose its devices; "
        "find the pytest plugin that imports it and disable it with -p no:NAME."
    )
_set_environment()


class NetworkBlocked(RuntimeError):
    """A test tried to reach another machine. Not an OSError: fall-backs must not swallow it."""


def _is_local(address: Any) -> bool:
    """Whether an address of a socket, or a host, means this machine."""
    host = address[0] if isinstance(address, tuple) else address
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if host in (None, "", "localhost", socket.gethostname()) or "/" in host:  # a socket's path
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _guard(owner: Any, name: str, position: int) -> None:
    original = getattr(owner, name)

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not _is_local(args[position]):
            raise NetworkBlocked(f"Tests run without the network, but one asked for {args}.")
        return original(*args, **kwargs)

    setattr(owner, name, guarded)


_guard(socket.socket, "connect", 1)
_guard(socket.socket, "connect_ex", 1)
_guard(socket, "getaddrinfo", 0)


@pytest.fixture(scope="session", autouse=True)
def final_code_is_written() -> None:
    from benchmarks.final_code import write_final_code

    write_final_code()


@pytest.fixture(scope="session", autouse=True)
def shapes_are_compared_untraced() -> None:
    """Flax traces it for a shape that is its argument; one that differs is Flax's to report."""
    from flax.core import Scope

    original = Scope.param

    def param(self: Any, name: str, init_fn: Any, *args: Any, **kwargs: Any) -> Any:
        if args and self.has_variable("params", name):
            value = self.get_variable("params", name)
            if getattr(value, "shape", None) == args[0]:
                self.reserve(name, "params")
                return value
        return original(self, name, init_fn, *args, **kwargs)

    Scope.param = param


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    # Every worker makes its own parameters, and an archive holds the second in which it was made.
    return argname if isinstance(val, bytes) else None


# Tests that wait for processes to die, or for requests to be repeated, more than they compute.
_WAITING = ("tests/distributed/", "tests/multihost/", "tests/workdir/test_buckets.py")


def _waits(nodeid: str) -> bool:
    return nodeid.startswith(_WAITING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not _waits(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process does all the waiting, from the start, while others keep the cores busy.

    The tests of a file stay together, since they share what they made; in the longest file, those
    of a kind of model.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if _waits(nodeid):
                return "waiting"
            scope = super()._split_scope(nodeid)
            if scope != "tests/test_families.py":
                return scope
            kind = nodeid.partition("[")[2].rstrip("]").partition("-")[0]
            return f"{scope}[{kind}]"

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules stay: the collector need not look through them again and again
    gc.set_threshold(50_000, 10, 10)  # nor come after every 700 objects, as tracing makes millions


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if "torch" in sys.modules:  # a test that fails with some weights has to fail with them again
        sys.modules["torch"].manual_seed(0)


def pytest_unconfigure() -> None:
    _TFDS_DIR.cleanup()


@pytest.fixture
def script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`script("zoo.py", "list")`, in this process; for scripts that join no others."""
    from tests import tiny

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        status = tiny.run_here(monkeypatch, name, *arguments)
        return subprocess.CompletedProcess([name, *arguments], status, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def bucket_server() -> Iterator[Any]:
    """Google Cloud Storage on this machine, for all clients; they keep the first address they use.

    A test writes to a bucket of its own, and may set `faults`.
    """
    if sys.version_info[:3] in ((3, 12, 0), (3, 12, 1)):
        pytest.skip("gcsfs crashes this Python after a repeated request: CPython issue 111049")
    from tests.gcs_emulator import emulator

    with emulator() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def bucket(bucket_server: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """`gs://NAME` of an empty bucket."""
    name = "b" + hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    yield f"gs://{name}"
    bucket_server.faults = bucket_server.answers = 0


@pytest.fixture
def fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that passes for Fashion-MNIST, with 40 images to train on and 40 to test."""
    from tests.data.test_idx import encoded
    from vit_jax.data import idx

    folder, labels = tmp_path / "fashion, small", np.arange(40) % 10
    folder.mkdir()
    for split in ("train", "t10k"):
        images = np.arange(40 * 28 * 28).reshape(40, 28, 28)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{split}-{name}-ubyte.gz").write_bytes(gzip.compress(encoded(array)))
    digest = hashlib.sha256(labels.astype(np.uint8).tobytes()).hexdigest()
    monkeypatch.setattr(idx, "_FASHION_LABELS", {digest})
    return folder
