"""Tables of kinds by name, and what is said of a name that is in none."""

import collections
import importlib
from collections.abc import Iterable
from typing import Any

from vit_jax.errors import UserError
from vit_jax.wording import nearest


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


def check_known(key: str, value: object, known: Iterable[object]) -> None:
    """Raises a UserError that lists the known values, unless `value` is one of them."""
    known = list(known)
    if value not in known:
        names = list(map(str, known))
        raise UserError(
            f"{key}={value!r} is unknown.{nearest(str(value), names)} Known: {', '.join(names)}."
        )


def check_keys(section: str, kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises a UserError for a key of a config section that its kind does not have."""
    known = list(known)
    for key in given:
        if key not in known:
            raise UserError(
                f"{section}.{key} is not a key of {section}.name={kind!r}.{nearest(key, known)} "
                f"Known: {', '.join(known)}."
            )
