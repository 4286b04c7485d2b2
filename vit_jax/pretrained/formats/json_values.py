"""Values of other people's JSON files, checked where they are read."""

from __future__ import annotations

import contextlib
import math
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


def number(name: str, value: Any, *, positive: bool = False) -> float:
    """A finite number, not a bool; else TypeError."""
    if type(value) not in (int, float) or not abs(value) < math.inf or (positive and value <= 0):
        raise TypeError(f"{name}={value!r} is no {'positive' if positive else 'finite'} number")
    return float(value)


def finite_numbers(name: str, values: Any, *, positive: bool = False) -> tuple[float, ...]:
    """A list of such numbers."""
    return tuple(number(name, value, positive=positive) for value in values)


def pair(value: Any) -> tuple[int, int]:
    """(height, width) of one number, of two, or of {"height": ..., "width": ...}."""
    if isinstance(value, dict):
        value = [value["height"], value["width"]]
    height, width = value if isinstance(value, list) else [value, value]
    return positive(height), positive(width)
