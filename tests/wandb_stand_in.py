"""As much of the package wandb as `workdir/metrics.py` uses, with a server in this process.

The package itself is 62 MB and brings sixteen others, so CI does without. Signatures and behaviour
are those of wandb 0.31: rows of a step that is past are dropped, a row of the same step adds to
it, a resumed run starts after its last step.
"""

import sys
import types
from typing import Any

import pytest


class Config(dict[str, Any]):
    def update(self, d: dict[str, Any], allow_val_change: bool = False) -> None:  # type: ignore[override]
        assert allow_val_change or {**self, **d} == {**d, **self}
        super().update(d)


class Record:
    """A run, as `init` returns it, and what the server knows of it."""

    def __init__(self) -> None:
        self.config = Config()
        self.rows: dict[int, dict[str, Any]] = {}
        self.dropped: list[int] = []
        self.exit_codes: list[int] = []
        self.preempting = False
        self.init: dict[str, Any] = {}
        self.starting_step = 0
        self.error: Exception | None = None  # of every call once W&B's own process is dead

    def log(self, data: dict[str, Any], step: int) -> None:
        if self.error is not None:
            raise self.error
        if step < max([self.starting_step, *self.rows]):
            self.dropped.append(step)
            return
        self.rows.setdefault(step, {}).update(data)

    def mark_preempting(self) -> None:
        self.preempting = True

    def finish(self, exit_code: int) -> None:
        if self.error is not None:
            raise self.error
        self.exit_codes.append(exit_code)


def install(patch: pytest.MonkeyPatch, *, fails: Exception | None = None) -> dict[str, Record]:
    """Makes `import wandb` give the stand-in; returns its runs as `project/id`.

    `fails`: what `init` raises.
    """
    runs: dict[str, Record] = {}

    def init(project: str, dir: str, id: str, name: str, resume: str, settings: Any) -> Record:
        if fails is not None:
            raise fails
        assert resume == "allow"  # else a known id is another run
        record = runs.setdefault(f"{project}/{id}", Record())
        record.starting_step = max(record.rows, default=-1) + 1
        record.init = {"dir": dir, "name": name, "finish_timeout": settings.finish_timeout}
        return record

    module = types.ModuleType("wandb")
    module.__file__ = __file__
    vars(module).update(init=init, Settings=types.SimpleNamespace)
    patch.setitem(sys.modules, "wandb", module)
    return runs
