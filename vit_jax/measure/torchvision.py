"""An empty stand-in for torchvision, where that does not import."""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any


class _Anything(types.ModuleType):
    """A module whose every attribute is an empty class."""

    __path__: Any = ()  # it counts as a package
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            members = (
                "NEAREST",
                "NEAREST_EXACT",
                "BILINEAR",
                "BICUBIC",
                "BOX",
                "HAMMING",
                "LANCZOS",
            )
            return enum.Enum("InterpolationMode", {key: key.lower() for key in members})
        return type(name, (), {})


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `torchvision` and everything below it, and loads nothing."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def provide_torchvision() -> None:
    """The CPU build of torch has no torchvision that imports; models need only its import."""
    try:
        importlib.import_module("torchvision")  # timm brings it
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.meta_path.insert(0, _StandIn())
