"""Errors meant for the person at the keyboard."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in a config, a path or a file that the user can put right.

    The message is one line that names the key, the value and the way out; the launcher prints it
    without a traceback and exits with status 2.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` for the closest known name, or an empty string."""
    lowered = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return f" Did you mean {lowered[matches[0]]!r}?" if matches else ""


def check_known(key: str, value: object, known: Iterable[str]) -> None:
    """Raises a UserError that lists the known names, unless `value` is one of them."""
    known = list(known)
    if value not in known:
        raise UserError(
            f"{key}={value!r} is unknown.{nearest(str(value), known)} Known: {', '.join(known)}."
        )


class PreemptedError(Exception):
    """The run was asked to stop and has saved its state: the same command goes on from there."""
