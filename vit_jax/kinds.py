"""Tables of kinds: models, objectives, evaluators by name."""

from __future__ import annotations

import collections
import importlib
from typing import Any


class Kinds(collections.UserDict[str, Any]):
    """Kinds by name, in the order in which errors list them.

    A value "module:attribute" is imported when its kind is first asked for, so that a run imports
    only what it uses.
    """

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if isinstance(value, str):
            module, _, attribute = value.partition(":")
            value = getattr(importlib.import_module(module), attribute)
            self[name] = value
        return value
