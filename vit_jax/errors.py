"""Errors meant for users."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL: the same command resumes the run
# Disk or network errors that may be temporary.
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN)
# In the ValueErrors of TensorStore.
_OS_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")
_TRANSIENT_STATUS = re.compile(r"\b(ABORTED|DEADLINE_EXCEEDED|UNAVAILABLE)\b")
_NETWORK = ("aiohttp", "gcsfs", "google", "requests")  # their errors have no common class
_CLIENT_ERRORS = (400, 401, 403, 404)
# Prefixes of XLA errors that may be caused by the loss of another process.
_PEER_ERRORS = re.compile(
    "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE"
    "|UNKNOWN): "
)
_WITH_QUERY = re.compile(r"""(https?://[^\s?#'"]+)\?([^\s#'"]*)""")
# Keys of Amazon's, Google's and Azure's signed addresses.
_SIGNATURE = re.compile(
    r"(?i)x-(amz|goog)-.*|signature|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid"
    r"|token|sig|s[etprv]|spr|sks?|skoid|sktid|skt|ske|skv"
)

# Characters that change or reset the text direction.
_BIDI_CONTROLS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


class UserError(ValueError):
    """A mistake in a config, a path or a file that the user can fix.

    The message is one line with the key, the value and the fix; the launcher prints it
    without a traceback and exits with status 2.
    """


class TransientError(UserError):
    """A possibly temporary disk or network failure: the command may work later (status 75)."""


def is_transient(error: BaseException) -> bool:
    """Whether it is a disk or network error that may be temporary."""
    if is_network_error(error):
        return getattr(error, "code", None) not in _CLIENT_ERRORS
    if isinstance(error, OSError):
        return error.errno in _TRANSIENT or isinstance(error, TimeoutError)
    if isinstance(error, UserError):
        return isinstance(error, TransientError)
    code = _OS_ERROR_CODE.search(str(error))
    status = isinstance(error, ValueError) and _TRANSIENT_STATUS.search(str(error))
    return bool(status) or (code is not None and int(code[1]) in _TRANSIENT)


def may_be_caused_by_peer(error: BaseException) -> bool:
    """Whether another process of the run may be the cause, e.g. of a failed collective.

    By the text, because JAX raises the same error as JaxRuntimeError or as ValueError.
    """
    return type(error).__name__ == "JaxRuntimeError" or _PEER_ERRORS.match(str(error)) is not None


def one_line(error: BaseException) -> str:
    """The error's message in one line of bounded length."""
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    if code := _OS_ERROR_CODE.search(text):  # TensorStore gives the reason after long paths
        return os.strerror(int(code[1]))
    return " ".join(text.split())[:200]


def unsigned(text: str) -> str:
    """Removes signatures from addresses: they are secret, and change every day."""

    def without_signature(match: re.Match[str]) -> str:
        parts = match[2].split("&")
        kept = "&".join(each for each in parts if not _SIGNATURE.fullmatch(each.partition("=")[0]))
        return match[1] + (kept and f"?{kept}")

    return _WITH_QUERY.sub(without_signature, text)


def escaped(text: str, kept: str = "") -> str:
    """Escapes what would move a terminal's cursor, forge a line or is not valid UTF-8.

    Spaces and joiners of other scripts stay, address signatures do not.
    """
    text = unsigned(text)
    if text.isprintable():
        return text

    def is_harmless(c: str) -> bool:
        is_control = unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in _BIDI_CONTROLS
        return c in kept or not is_control

    return "".join(c if is_harmless(c) else c.encode("unicode_escape").decode() for c in text)


def is_network_error(error: BaseException) -> bool:
    """Whether a bucket client has given up."""
    return type(error).__module__.partition(".")[0] in _NETWORK


def as_user_error(message: str, cause: BaseException) -> UserError:
    """A UserError with this message; a TransientError if the cause may be temporary."""
    return TransientError(message) if is_transient(cause) else UserError(message)


def missing_package(purpose: str, package: str, extra: str) -> UserError:
    """Names the extra of setup.py that installs the package that `purpose` needs."""
    return UserError(
        f"{purpose} needs the package {package}: pip install -e '.[{extra}]' in the clone of "
        "vit_jax."
    )


def import_extra(purpose: str, package: str, extra: str) -> Any:
    """Imports an optional package; UserError if it is missing."""
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise missing_package(purpose, package, extra) from error
    if module.__file__ is None:  # a folder of that name, as created by W&B in its working directory
        raise missing_package(purpose, package, extra)
    return module


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` for the closest known name, or an empty string."""
    lowered = {candidate.lower(): candidate for candidate in known}
    begun = sorted((each for each in lowered if each.startswith(name.lower())), key=len)
    matches = (name and begun) or difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return f" Did you mean {lowered[matches[0]]!r}?" if matches else ""


def list_names(names: Iterable[str], shown: int = 4) -> str:
    """The first few names and the number of the rest."""
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def counted(count: int, noun: str) -> str:
    """`1 image`, `12,000 images`, `2 classes`."""
    plural = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{plural}"


def size_text(num_bytes: float) -> str:
    """`1.2 GB`, `340.0 MB`, `0.5 kB`."""
    power, name = (9, "GB") if num_bytes >= 1e9 else (6, "MB") if num_bytes >= 1e6 else (3, "kB")
    return f"{num_bytes / 10**power:.1f} {name}"


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


def check_local(key: str, path: str) -> None:
    """Raises a UserError for `gs://bucket/x`, which would become a folder named `gs:`."""
    if "://" in path:
        raise UserError(f"{key}={path!r}: only file system paths work; mount it first.")


class TrainingDivergedError(RuntimeError):
    """Loss, gradient or parameters are NaN or infinite; the message names the step."""


class PreemptedError(Exception):
    """The run was asked to stop and has saved its state: the same command resumes it."""
