"""What all files of named arrays share: the container, errors in one line, writing in one move."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from vit_jax.errors import UserError, as_user_error

_READING_THREADS = 4
_MAX_NAME = 1024

_FLOATS = {"float16", "bfloat16", "float32", "float64"}
_DTYPES = _FLOATS | {"bool"} | {np.dtype(code).name for code in np.typecodes["AllInteger"]}


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """Shape and type (its name in numpy) of an array as stored, known before its data is read."""

    shape: tuple[int, ...]
    dtype: str


class BadFile(ValueError):
    """What is wrong with a file, to follow "cannot read FILE: "; see `reading`."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever goes wrong inside into a UserError of one line that names the file.

    Everything, because a hostile file makes the libraries raise anything.
    """
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise as_user_error(f"cannot read {path}: {error.strerror or error}.", error) from error
    except BadFile as error:
        raise UserError(f"cannot read {path}: {error}.") from error
    except Exception as error:
        reason = shorten(f"{type(error).__name__}: {error}")
        raise UserError(
            f"cannot read {path}: it is incomplete or damaged, fetch it again ({reason})."
        ) from error


class Container:
    """A file, or several, of named arrays. Threads may read from it at the same time.

    Attributes:
      path: the file.
      arrays: name to shape and type as stored, in the file's order.
    """

    def __init__(
        self,
        path: Path,
        arrays: dict[str, ArrayInfo],
        read_stored: Callable[[str], np.ndarray],
        close: Callable[[], object],
    ) -> None:
        """Takes the functions of a format: one gives an array as stored, one closes the file.

        Raises:
          BadFile: no arrays at all, odd names, or types other than plain numbers.
        """
        self.path = path
        self.arrays = arrays
        self.close = close
        self._read_stored = read_stored
        if not arrays:
            raise BadFile("it holds no arrays")
        for name, info in arrays.items():
            if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) < _MAX_NAME:
                raise BadFile(f"{shorten(name)} is no name of an array")
            if info.dtype not in _DTYPES:
                raise BadFile(f"array {shorten(name)} has type {info.dtype}; only numbers are read")

    def read(self, name: str) -> np.ndarray:
        """One array, contiguous and owned by the caller; floats as float32, the rest as stored.

        Raises:
          UserError: damaged data, or a float64 beyond the range of float32.
        """
        with reading(self.path):
            array = self._read_stored(name)
            if array.dtype == bool:
                array = array.view(np.uint8) != 0  # a damaged file has bytes other than 0 and 1
            target = np.float32 if self.arrays[name].dtype in _FLOATS else array.dtype.type
            with np.errstate(over="raise", under="ignore", invalid="ignore"):
                return np.require(array, target, ["C", "W"])

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_arrays(container: Container, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Several arrays at once, with threads: most of the work leaves the interpreter free."""
    names = list(names)
    with ThreadPoolExecutor(_READING_THREADS) as pool:
        return dict(zip(names, pool.map(container.read, names), strict=True))


def shorten(value: object) -> str:
    """`value` as shown in an error: in one short line, whatever a hostile file put into it."""
    if not isinstance(value, str | bytes):
        return f"a value of type {type(value).__name__}"
    return repr(value) if len(value) <= 80 else repr(value[:77]) + "..."
