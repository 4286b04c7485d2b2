"""Errors meant for users."""

import contextlib
import errno
import functools
import importlib
import inspect
import numbers
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from vit_jax.wording import escaped

_T = TypeVar("_T")

REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL: the same command resumes the run
# Disk or network errors that may be temporary.
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN)
# In the ValueErrors of TensorStore.
_OS_ERROR_CODE = re.compile(r"os_error_code='(\d+)'")
_TRANSIENT_STATUS = re.compile(r"\b(ABORTED|DEADLINE_EXCEEDED|UNAVAILABLE)\b")
_NETWORK = (
    "aiohttp",
    "gcsfs",
    "google",
    "httpx",
    "huggingface_hub",
    "requests",
)  # their errors have no common class
CLIENT_ERRORS = (400, 401, 403, 404, 410, 412, 416)
# Prefixes of XLA errors that may be caused by the loss of another process.
_PEER_ERRORS = re.compile(
    "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE"
    "|UNKNOWN): "
)


class UserError(ValueError):
    """A mistake in a config, a path or a file that the user can fix.

    The message is one line with the key, the value and the fix; the launcher prints it
    without a traceback and exits with status 2. Escaped: names in it may contain anything.
    """

    def __init__(self, message: str):
        super().__init__(escaped(message))


class TransientError(UserError):
    """A possibly temporary disk or network failure: the command may work later (status 75)."""


def is_transient(error: BaseException) -> bool:
    """Whether it is a disk or network error that may be temporary."""
    if is_network_error(error):
        return status_of(error) not in CLIENT_ERRORS
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


def is_network_error(error: BaseException) -> bool:
    """Whether a bucket client has given up."""
    return type(error).__module__.partition(".")[0] in _NETWORK


def as_user_error(message: str, cause: BaseException) -> UserError:
    """A UserError with this message; a TransientError if the cause may be temporary."""
    return TransientError(message) if is_transient(cause) else UserError(message)


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Puts `where`, such as a config key, in front of the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise as_user_error(f"{where}: {error}", error) from error


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


def status_of(error: BaseException) -> int | None:
    """The status that a server answered with, of the error of any client."""
    for of in (error, getattr(error, "response", None)):
        for name in ("status", "status_code", "code"):
            if isinstance(status := getattr(of, name, None), int):
                return status
    return None


class TrainingDivergedError(RuntimeError):
    """Loss, gradient or parameters are NaN or infinite; the message names the step."""


class PreemptedError(Exception):
    """The run was asked to stop and has saved its state: the same command resumes it."""


def accepts(hint: Any, value: Any) -> bool:
    """Whether a value is of an annotated kind, or like it; dicts are not looked into."""
    if isinstance(hint, types.UnionType):
        return any(accepts(kind, value) for kind in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    if kind in (int, float):  # numpy's too
        kind = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if kind in (tuple, list, Sequence):  # each for the others, also arrays
        is_list = hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping)
        return is_list and all(accepts(typing.get_args(hint)[0], item) for item in value)
    if kind is str:  # a path, too
        return isinstance(value, str | os.PathLike)
    if kind in (dict, Mapping):  # also a ConfigDict
        return hasattr(value, "keys")
    return kind is Any or isinstance(value, kind)


def _taken(who: str, parameter: inspect.Parameter, hints: Mapping[str, Any], value: Any) -> Any:
    """The value, a path as str if that is annotated; UserError for another kind."""
    hint = hints.get(parameter.name, Any)
    several = parameter.kind is inspect.Parameter.VAR_POSITIONAL
    if not all(accepts(hint, item) for item in (value if several else [value])):
        given = f"{parameter.name}={reprlib.repr(value)}"
        raise UserError(f"{who}: {given} must be {parameter.annotation}.")
    return os.fspath(value) if hint is str and not several else value


def with_short_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """A public function that raises errors for users from the caller's line, not from deep inside.

    Also for an argument of another kind than it is annotated with. VIT_LOG_LEVEL=debug shows where
    they come from.
    """
    signature = inspect.signature(function)
    hints = functools.cache(lambda: typing.get_type_hints(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # Python names what is missing, or too much
            for name, value in bound.arguments.items():
                taken = _taken(function.__name__, signature.parameters[name], hints(), value)
                bound.arguments[name] = taken
            return function(*bound.args, **bound.kwargs)
        except (UserError, TrainingDivergedError, PreemptedError) as error:
            if os.environ.get("VIT_LOG_LEVEL", "").lower() == "debug":
                raise
            raise error.with_traceback(None) from None

    return call


def methods_with_short_errors(kind: type[_T]) -> type[_T]:
    """`with_short_errors` for every public method of a class."""
    for name, value in list(vars(kind).items()):
        if inspect.isfunction(value) and not name.startswith("_"):
            setattr(kind, name, with_short_errors(value))
    return kind
