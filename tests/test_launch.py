"""Scripts as a user meets them: their errors, their help, and power cuts at any moment."""

import errno
import io
import logging
import re
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path
from typing import Any

import jax
import pytest

from tests import tiny
from vit_jax import command_line, launch
from vit_jax import config as default
from vit_jax.arguments import create_parser, split_overrides
from vit_jax.errors import TrainingDivergedError, UserError, as_user_error
from vit_jax.multihost.watchdog import Watchdog
from vit_jax.wording import escaped

BAD_COMMANDS = {  # case -> script, arguments, what is said
    "misspelt flag": ("train.py", ["--wrkdir=x"], "Did you mean '--workdir'"),
    "stray argument": ("train.py", ["config.seed=3"], "config.seed=3"),
    "no workdir": ("train.py", ["--workdir="], "argument --workdir: it is empty (see --help)"),
    "no start": ("finetune.py", ["--distributed=off"], "--config.pretrained.source is missing"),
    "no cluster": ("train.py", ["--distributed=on"], "no cluster was found"),
    "no devices": ("train.py", ["--config.duration.epochs=0.5"], "JAX_PLATFORMS=cuda,cpu"),
}
BAD_OVERRIDES = [
    ("evaluators.test.splt=test", "Did you mean 'evaluators.test.split'"),
    (
        "optimizer.momentum=0.9",
        "not a key of optimizer.name='adamw'. Did you mean 'optimizer.momentum_dtype'",
    ),
    ("optimizer.name=adm", "Did you mean 'adamw'"),
    ("duration.steps=many", "duration.steps=many"),
]


@pytest.mark.parametrize("case", list(BAD_COMMANDS))
def test_mistakes_end_in_one_line_and_status_2(case, tmp_path, monkeypatch, script):
    name, arguments, message = BAD_COMMANDS[case]
    if case == "no devices":
        monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    if case in ("no cluster", "no devices"):  # JAX must not have started
        result = tiny.run(name, tmp_path / "run", *arguments)
    else:
        result = script(name, *tiny.command(name, tmp_path / "run", *arguments)[2:])
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


TIMEOUTS: dict[str, Any] = {
    "arrival_timeout_seconds": 5,
    "heartbeat_timeout_seconds": 1.0,
    "step_timeout_seconds": 1.0,
    "start_timeout_seconds": 1.0,
}
FLAGS = ("coordinator_address", "num_processes", "process_id")


def start_processes(distributed: str = "auto", **changes: Any) -> None:
    flags = {name: changes.get(name) for name in FLAGS}
    launch.start_processes(Watchdog(), distributed=distributed, flags_of_process=flags, **TIMEOUTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_processes": 2}, "given together: coordinator_address should be defined"),
        ({"coordinator_address": "a:1", "num_processes": 2}, "process id .* must be defined"),
        (dict(zip(FLAGS, ("a:1", 2, 2), strict=True)), "Got process_id=2, num_processes=2"),
        (dict(zip(FLAGS, ("a", 2, 0), strict=True)), "--coordinator_address=a must be HOST:PORT"),
        ({"distributed": "off", "process_id": 0}, "--distributed=off contradicts the process"),
    ],
)
def test_flags_of_processes_that_cannot_be_meant(changes, message, monkeypatch):
    # As in a new process: tests before this one may have started JAX in this one.
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    with pytest.raises(UserError, match=message):
        start_processes(**changes)


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("processes.heartbeat_timeout_seconds", 0.0, "more than 0"),
        ("processes.start_timeout_seconds", -1.0, "at least 0"),
        ("checkpoint.keep", 0, "at least 1"),
        ("model.num_layers", 10**9, "at most 10,000"),
        ("dataset.batch_size", 2**40, "at most 1,048,576"),
        ("mix.mixup_alpha", -0.1, "at least 0"),
        ("mix.cutmix_probability", 1.5, r"in \[0, 1\]"),
        ("gradient.alpha", -1.0, "at least 0"),
        ("gradient.rho_max", float("inf"), "a finite"),
        ("optimizer.b2", 1.0, r"in \[0, 1\)"),
        ("optimizer.eps", 0.0, "more than 0"),
        ("optimizer.clip_norm", float("nan"), "a finite"),
        ("schedule.decay_at", (0.5, 30), r"in \(0, 1\)"),
    ],
)
def test_numbers_out_of_range(key: str, value: Any, bound: str) -> None:
    kinds = {"gradient__name": "gsam", "schedule__name": "staircase"}
    config = tiny.config(**kinds, **{key.replace(".", "__"): value})
    with pytest.raises(UserError, match=rf"{key}={re.escape(str(value))} must be {bound}"):
        default.check_config(config)


def test_a_cluster_that_does_not_answer_may_do_so_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher starts it again after a TimeoutError; see `launch.one_line_errors`."""
    for error, raised in (
        (ConnectionError("metadata.google.internal does not answer"), TimeoutError),
        (jax.errors.JaxRuntimeError("UNKNOWN: Failed to start RPC server"), TimeoutError),
        (RuntimeError("initialize must be called before any computations"), RuntimeError),
    ):
        fails = unittest.mock.Mock(side_effect=error)
        monkeypatch.setattr("jax.distributed.initialize", fails)
        with pytest.raises(raised, match=str(error)):
            start_processes()


@pytest.mark.parametrize(("override", "message"), BAD_OVERRIDES)
def test_so_do_overrides(override: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        command_line.get_config("", override)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


ALLOCATES = """
import resource
import numpy as np
from vit_jax.hardware.devices import all_devices

all_devices()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**26, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("variables", "kept"), [({}, True), ({"MALLOC_ARENA_MAX": "2"}, False)])
def test_memory_that_was_freed_is_kept_on_cpus(variables: dict[str, str], kept: bool) -> None:
    """The kernel need not clear pages anew; settings of the user's have precedence."""
    environment = {**tiny.environment(), "NUMPY_MADVISE_HUGEPAGE": "0", **variables}
    command = [sys.executable, "-c", ALLOCATES]
    faults = int(subprocess.check_output(command, env=environment, cwd=tiny.ROOT, text=True))
    assert (faults < 100) == kept
    assert (faults >= 2**26 // 4096) == (not kept)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("model.depth=x"), 2),
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (OSError(errno.ESTALE, "Stale file handle"), 75),
        (TrainingDivergedError("step 4: loss=nan"), 1),
        (as_user_error("step 4 could not be written", OSError(errno.ESTALE, "Stale")), 75),
        # As TensorStore tells it.
        (as_user_error("step 4 could not be read", ValueError("x [os_error_code='116']")), 75),
        (as_user_error("step 4 could not be read", ValueError("x [os_error_code='28']")), 2),
    ],
)
def test_the_status_says_whether_to_try_again(error, status, capsys):
    with pytest.raises(SystemExit) as ended, launch.one_line_errors():
        raise error
    assert ended.value.code == status
    assert capsys.readouterr().err == f"error: {error}\n"


def test_out_of_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, launch.one_line_errors():
        jax.block_until_ready(jax.numpy.zeros(2**46))
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r'error: RESOURCE_EXHAUSTED: .* See "Make it fit" in docs/speed.md\.', line)


def test_what_is_given_as_none_is_unset_and_a_length_replaces_the_recipes() -> None:
    for overrides, expected in (
        (["optimizer.clip_norm=None"], {"optimizer.clip_norm": None}),
        (["optimizer.clip_norm=2.0"], {"optimizer.clip_norm": 2.0}),
        (["dataset.name=None"], {"dataset.name": "None"}),  # a name like any other
        (["duration.epochs=3"], {"duration.epochs": 3.0, "duration.steps": None}),
        (["duration.steps=None"], {"duration.steps": None}),
        (["duration.epochs=3", "duration.steps=4"], {"duration.epochs": None, "duration.steps": 4}),
    ):
        config = default.get_config()
        config.optimizer.clip_norm, config.duration.steps = 1.0, 100
        flat = default.flatten(command_line.override(config, overrides))
        assert {key: flat[key] for key in expected} == expected


def test_a_kind_on_the_command_line_brings_its_keys() -> None:
    arguments = [
        "--config.optimizer.name=sgd",
        "--config.optimizer.momentum=0.5",
        "--config.schedule.name",
        "linear",
        "--config.schedule.linear_end=0.001",
        "--config.evaluators.test.name=few_shot",
        "--config.optimizer.clip_norm=None",
        "--workdir=x",
    ]
    overrides, others = split_overrides(arguments)
    assert others == ["--workdir=x"]
    config = command_line.override(default.get_config(), overrides)
    assert (config.optimizer.name, config.optimizer.momentum) == ("sgd", 0.5)
    assert "b1" not in config.optimizer
    assert config.schedule.linear_end == 0.001
    assert config.optimizer.clip_norm is None
    assert "shots" in config.evaluators.test


def test_an_unknown_variant_and_a_missing_recipe() -> None:
    with pytest.raises(UserError, match="B16"):
        command_line.get_config("configs/finetune.py:B16,cifar10")
    with pytest.raises(UserError, match="there is no recipe"):
        command_line.get_config("nowhere.py")


def test_names_forge_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\n12:00:00 step 9\x1b[2J\udcff.jpg"
    assert escaped(name) == "a\\n12:00:00 step 9\\x1b[2J\\udcff.jpg"
    handlers = logging.getLogger().handlers[:]
    launch.start_logging()
    logging.warning("%s is damaged", name)
    logging.getLogger().handlers[:] = handlers
    _, second = capsys.readouterr().out.splitlines()
    assert second == "  12:00:00 step 9\\x1b[2J\\udcff.jpg is damaged"
    with pytest.raises(SystemExit), launch.one_line_errors():
        raise UserError(f"{name} is damaged.")
    assert capsys.readouterr().err == f"error: {escaped(name)} is damaged.\n"


def test_a_terminal_that_knows_ascii_only_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "ascii"))
    create_parser("Draws caf\u00e9s.").parse_args([])
    print("caf\u00e9 \u732b")
    with pytest.raises(SystemExit), launch.one_line_errors():
        raise UserError("caf\u00e9 is damaged.")
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == b"caf\\xe9 \\u732b\n"
    assert sys.stderr.buffer.getvalue() == b"error: caf\\xe9 is damaged.\n"


def test_sigterm_before_the_loop_listens_asks_for_another_start(tmp_path: Path) -> None:
    command = tiny.command("train.py", tmp_path / "run")
    with subprocess.Popen(command, env=tiny.environment(), stderr=subprocess.PIPE) as process:
        time.sleep(1.0)  # it imports
        process.terminate()
        _, err = process.communicate()
    assert (process.returncode, err.count(b"\n")) == (75, 1)
