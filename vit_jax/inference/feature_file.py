"""Arrays written row by row into one `.npz`, without ever being in memory as a whole."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from vit_jax.errors import UserError


class FeatureFile:
    """An `.npz` whose float32 arrays grow while it is open.

    Rows wait in one file per array, in a hidden folder beside the target; a clean exit packs them
    into the target, which is there as a whole or not at all. Until then twice the largest array
    is needed on disk besides the others.
    """

    def __init__(self, path: str | os.PathLike[str], shapes: dict[str, tuple[int, ...]]):
        """
        Args:
          path: ends in `.npz`; its folder is made, a file of that name is replaced.
          shapes: of every array, as [N, ...].

        Raises:
          UserError: another ending, no room on the disk, or a folder that cannot be written.
        """
        self._path = Path(path)
        self._shapes = shapes
        check_name(self._path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._path.parent).free
        except OSError as error:
            raise UserError(f"--output={path}: {error.strerror}.") from None
        sizes = [4 * math.prod(shape) for shape in shapes.values()]
        if sum(sizes) + max(sizes) > free:
            raise UserError(
                f"--output={path}: the features need {(sum(sizes) + max(sizes)) / 1e9:.1f} GB, the "
                f"disk has {free / 1e9:.1f} GB left; ask for fewer features or fewer images."
            )
        self._files: dict[str, Any] = {}
        self._num_rows = 0

    def __enter__(self) -> FeatureFile:
        self._folder = Path(tempfile.mkdtemp(dir=self._path.parent, prefix=f".{self._path.name}."))
        for name, shape in self._shapes.items():
            file = open(self._folder / f"{name}.npy", "wb")
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            self._files[name] = file
        return self

    def append(self, rows: dict[str, np.ndarray]) -> None:
        """The next rows of every array, [n, ...] each."""
        self._num_rows += len(next(iter(rows.values())))
        for name, file in self._files.items():
            file.write(np.ascontiguousarray(rows[name], "<f4").data)

    def finish(self, **arrays: np.ndarray) -> None:
        """Writes the `.npz`, with small arrays besides; every row must have been appended."""
        if {shape[0] for shape in self._shapes.values()} != {self._num_rows}:
            raise RuntimeError(f"{self._num_rows} rows were appended, not those of {self._shapes}.")
        packed = self._folder / "packed"
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, file in self._files.items():
                file.close()
                archive.write(file.name, f"{name}.npy")
                os.remove(file.name)  # so that the disk holds only one array twice
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        os.replace(packed, self._path)

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        shutil.rmtree(self._folder)


def check_name(path: str | os.PathLike[str]) -> None:
    """Raises UserError unless the name says that it is an `.npz`."""
    if Path(path).suffix != ".npz" or Path(path).is_dir():
        raise UserError(f"--output={path}: name a file that ends in .npz.")
