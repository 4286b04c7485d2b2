"""Values of other people's JSON files, checked where they are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vit_jax.errors import UserError


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns a value of a wrong kind into a UserError that names the file."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        raise UserError(f"{name} holds a value of a wrong kind ({error!r}).") from error


def positive(value: Any) -> int:
    """A positive int, not a bool; else TypeError."""
    if type(value) is not int or value < 1:
        raise TypeError(f"{value!r} is no positive int")
    return value


def pair(value: Any) -> tuple[int, int]:
    """(height, width) of one number, of two, or of {"height": ..., "width": ...}."""
    if isinstance(value, dict):
        value = [value["height"], value["width"]]
    height, width = value if isinstance(value, list) else [value, value]
    return positive(height), positive(width)
