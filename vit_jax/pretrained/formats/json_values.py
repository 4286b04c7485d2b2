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
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TypeError(f"{value!r} is no positive int")
    return value


def pair(value: Any) -> tuple[int, int]:
    """(height, width) of one number or two; else TypeError."""
    sides = value if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2:
        raise TypeError(f"{value!r} is no number, nor two")
    return positive(sides[0]), positive(sides[1])


def triple(value: Any) -> tuple[float, ...]:
    """One number per channel; else TypeError."""
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise TypeError(f"{value!r} is no list of numbers")
    return tuple(float(each) for each in value)
