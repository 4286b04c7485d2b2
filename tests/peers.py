"""PyTorch implementations that tests compare with; never a dependency of the package."""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from typing import Any


class _Anything(types.ModuleType):
    """A module whose every attribute is an empty class."""

    __path__ = ()  # it counts as a package
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


def _provide_torchvision() -> None:
    """The CPU build of torch has no torchvision that imports; models need only its import."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.meta_path.insert(0, _StandIn())


def import_timm() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, at import
        _provide_torchvision()
        import timm
    return timm


def import_transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _provide_torchvision()
        import transformers
        from transformers import DeiTForImageClassification, ViTForImageClassification  # noqa: F401
    return transformers
