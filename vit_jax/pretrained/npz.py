"""Parameters as an `.npz` file: one array per flat name, in the official code's current naming."""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError
from vit_jax.tree import flatten_names, unflatten_names, unstack_blocks


def write_npz(path: str | os.PathLike[str], params: Any) -> None:
    """Writes a parameter tree (either form of the blocks) as float32, atomically.

    The file appears under its name only when it is complete and on disk. The same parameters give
    the same bytes.
    """
    path = Path(path)
    flat = flatten_names(unstack_blocks(params))
    arrays: dict[str, Any] = {name: np.asarray(x, np.float32) for name, x in flat.items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def read_npz(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads an `.npz` file into a nested dict of float32 arrays. Pickled content is never loaded.

    Raises:
      UserError: not an `.npz`, damaged, empty, or holding something else than real arrays.
    """
    flat: dict[str, np.ndarray] = {}
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise UserError(f"{path} holds a single array, not an .npz of named parameters.")
            with archive:
                for name in archive.files:
                    flat[name] = archive[name]
    except UserError:
        raise
    except (
        OSError,
        ValueError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
    ) as e:
        raise UserError(f"cannot read {path} as an .npz of parameters: {e}.") from e
    if not flat:
        raise UserError(f"{path} holds no arrays.")
    for name, array in flat.items():
        if not np.issubdtype(array.dtype, np.floating):
            raise UserError(f"{path}: {name!r} has type {array.dtype}; parameters are floats.")
    return unflatten_names({name: np.asarray(array, np.float32) for name, array in flat.items()})
