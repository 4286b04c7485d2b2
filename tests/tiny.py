"""The smallest runs that still go through everything."""

import logging
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from vit_jax import config as default

ROOT = Path(__file__).resolve().parents[1]

# The fixture `script` of conftest.py.
Script = Callable[..., subprocess.CompletedProcess[str]]

SCHEMA = "../vit_jax/config.py"  # the defaults, as a recipe

# Overrides as a command line gives them.
OVERRIDES: dict[str, Any] = {
    "dataset.name": "digits",
    "dataset.split": "train[:100]",
    "dataset.batch_size": 16,
    "dataset.preprocess": "decode|resize(16)|random_affine(degrees=10)",
    "dataset.eval_preprocess": "decode|resize(16)",
    "loader.num_threads": 1,
    "model.patch_size": 8,
    "model.hidden_size": 16,
    "model.num_layers": 1,
    "model.mlp_dim": 16,
    "model.num_heads": 2,
    "duration.steps": 8,
    "schedule.warmup_steps": 2,
    "checkpoint.every_steps": 100,  # the last step is saved in any case
    "log.every_steps": 1,
    "log.tensorboard": False,
    "evaluators.test.split": "test[:50]",
}


def config(**overrides: Any) -> ConfigDict:
    """The tiny config; `section__key=value` overrides one more key."""
    result = default.get_config()
    values = {name.replace("__", "."): value for name, value in overrides.items()}
    for section in default.KINDS:  # the keys of another kind, as the command line does
        if (kind := values.get(f"{section}.name")) is not None:
            default.set_kind(result, section, kind, values)
            del values[f"{section}.name"]
    for name, value in {**OVERRIDES, **values}.items():
        *sections, key = name.split(".")
        node = result
        for part in sections:
            node = node[part]
        if name in values or key in node:  # a ResNet has no patches
            node[key] = value
    return result


def command(script: str, workdir: Path, *arguments: str, recipe: str = SCHEMA) -> list[str]:
    """The command line of the tiny run."""
    overrides = [f"--config.{name}={value}" for name, value in OVERRIDES.items()]
    start = [sys.executable, str(ROOT / "scripts" / script)]
    config_flag = f"--config={ROOT / 'configs' / recipe}"
    return [*start, config_flag, f"--workdir={workdir}", *overrides, *arguments]


def environment(**variables: str) -> dict[str, str]:
    """For subprocesses: they import the package from here, whatever is installed."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def run(
    script: str, workdir: Path, *arguments: str, **kwargs: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(script, workdir, *arguments, **kwargs),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_here(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> int:
    """Runs a script in this process, which costs no imports; returns its exit status."""
    path, root = str(ROOT / "scripts" / script), logging.getLogger()
    monkeypatch.setattr(sys, "argv", [path, *arguments])
    handlers = root.handlers[:]
    loggers = [root, *map(logging.getLogger, root.manager.loggerDict)]
    levels = [logger.level for logger in loggers]
    on_closed_pipe = signal.getsignal(signal.SIGPIPE)
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:  # it has set up a log of its own
        # At its default, which zoo.py wants, a closed connection ends the process without a word.
        signal.signal(signal.SIGPIPE, on_closed_pipe)
        root.handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    return 0
