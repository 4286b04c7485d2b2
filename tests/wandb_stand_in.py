"""As much of the package wandb as `workdir/metrics.py` uses, with a server in this process.

The package itself is 62 MB and brings sixteen others, so CI does without. Signatures and behaviour
are those of wandb 0.31: rows of a step that is past are dropped, a row of the same step adds to
it, a resumed run starts after its last step.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest


@dataclasses.dataclass
class Record:
    """What the server knows of one run."""

    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    dropped: list[int] = dataclasses.field(default_factory=list)
    exit_codes: list[int] = dataclasses.field(default_factory=list)
    preempting: bool = False
    init: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: Exception | None = None  # what every call raises once W&B's own process is dead


@dataclasses.dataclass
class Settings:
    finish_timeout: float = 0.0


class Run:
    def __init__(self, record: Record):
        self._record = record
        self.starting_step = self._step = max(record.rows, default=-1) + 1
        self.config = types.SimpleNamespace(update=self._update)

    def _update(self, d: dict[str, Any], allow_val_change: bool = False) -> None:
        changed = {**self._record.config, **d} != {**d, **self._record.config}
        if changed and not allow_val_change:
            raise ValueError("the config would change")
        self._record.config.update(d)

    def log(self, data: dict[str, Any], step: int) -> None:
        if self._record.error is not None:
            raise self._record.error
        if step < self._step:
            self._record.dropped.append(step)
            return
        self._step = step
        self._record.rows.setdefault(step, {}).update(data)

    def mark_preempting(self) -> None:
        self._record.preempting = True

    def finish(self, exit_code: int) -> None:
        if self._record.error is not None:
            raise self._record.error
        self._record.exit_codes.append(exit_code)


def install(patch: pytest.MonkeyPatch, *, fails: Exception | None = None) -> dict[str, Record]:
    """Makes `import wandb` give the stand-in; returns its runs as `project/id`.

    `fails`: what `init` raises.
    """
    runs: dict[str, Record] = {}

    def init(project: str, dir: str, id: str, name: str, resume: str, settings: Settings) -> Run:
        if fails is not None:
            raise fails
        assert resume == "allow"  # else a known id is another run
        record = runs.setdefault(f"{project}/{id}", Record())
        record.init = {"dir": dir, "name": name, "finish_timeout": settings.finish_timeout}
        return Run(record)

    module = types.ModuleType("wandb")
    module.__file__ = __file__
    vars(module).update(init=init, Settings=Settings)
    patch.setitem(sys.modules, "wandb", module)
    return runs
