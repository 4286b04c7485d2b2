"""An `.npz` written row by row, without ever being in memory as a whole."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import numpy as np

from vit_jax.errors import UserError, size_text
from vit_jax.files.atomic import replacing


def write_rows(
    path: Path,
    specs: Mapping[str, jax.ShapeDtypeStruct],
    parts: Iterable[Mapping[str, np.ndarray]],
    **others: np.ndarray,
) -> None:
    """Writes an `.npz` whose large arrays arrive in parts; it appears as a whole or not at all.

    Rows wait in one file per array, in a hidden folder beside the target: while it is packed, the
    disk holds one of the arrays twice.

    Args:
      path: its folder is made, a file of that name is replaced.
      specs: shape [N, ...] and dtype of every large array.
      parts: the next rows [n, ...] of all of them; N in all.
      others: small arrays.

    Raises:
      UserError: no room on the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values()]
    needed, free = sum(sizes) + max(sizes), shutil.disk_usage(path.parent).free
    if needed > free:
        raise UserError(
            f"--output={path}: needs {size_text(needed)}, the disk has {size_text(free)} left."
        )
    with contextlib.ExitStack() as stack:
        folder = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")
        rows_folder, files = Path(stack.enter_context(folder)), {}
        for name, spec in specs.items():
            files[name] = stack.enter_context(open(rows_folder / name, "wb"))
            descr = np.lib.format.dtype_to_descr(spec.dtype)
            header = {"descr": descr, "fortran_order": False, "shape": spec.shape}
            np.lib.format.write_array_header_1_0(files[name], header)
        for part in parts:
            for name, file in files.items():
                file.write(np.ascontiguousarray(part[name], specs[name].dtype).data)
        with replacing(path) as unfinished, zipfile.ZipFile(unfinished, "w") as archive:
            for name, file in files.items():
                file.close()
                archive.write(file.name, f"{name}.npy")
                os.remove(file.name)
            for name, array in others.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
