"""Parquet files of Hugging Face `datasets` on a server: row groups are fetched as they are needed.

The ends of the files and the labels are read first. `datasets` writes images in groups of 100.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from vit_jax.data.arrow import ArrowSource, image_and_label, is_image, listing
from vit_jax.data.labelled import number_images, rows_by
from vit_jax.data.remote import Windows, announce, splits_of, windows
from vit_jax.data.sources import Request, map_threads
from vit_jax.errors import UserError, one_line
from vit_jax.files.paths import check_file
from vit_jax.files.remote import RemoteFile, scheme_of
from vit_jax.wording import unsigned


@dataclasses.dataclass(frozen=True, eq=False)
class ParquetSource(ArrowSource):
    """Images in a column of row groups."""

    groups: Mapping[str, Sequence[tuple[RemoteFile, int]]]  # of each split, and number in the file
    ends: Mapping[str, np.ndarray]  # of the rows of each

    def _stored(self, name: str, index: int) -> Any:
        split, row = self.places[index].item()
        group = int(np.searchsorted(self.ends[split], row, side="right"))
        file, number = self.groups[split][group]
        rows = _read(file, (self.image, *self.texts), number)
        return rows[name][row - int(self.ends[split][group])].as_py()  # counted from its end

    def read(self, index: int) -> bytes:
        content = (self._stored(self.image, index) or {}).get("bytes")
        if content is None:  # a path would be that of another machine
            raise ValueError("the image is missing")
        return content

    def identity(self) -> Iterable[str]:
        """Split, name, size and version of every file."""
        for split in dict.fromkeys(self.places["split"].tolist()):
            for file in dict.fromkeys(file for file, _ in self.groups[split]):
                version = file.version if scheme_of(file.address) else ""  # a time, of a copy
                yield f"{split} {os.path.basename(file.address)} {file.size} {version}"

    @functools.cached_property
    def windows(self) -> Windows | None:
        blocks, files, first = np.empty(len(self), np.int64), set[RemoteFile](), 0
        for split, rows in rows_by(self.places["split"].tolist()).items():
            ends = self.ends[split]
            blocks[rows] = first + np.searchsorted(ends, self.places["row"][rows], side="right")
            files |= {file for file, _ in self.groups[split]}
            first += len(ends)
        return windows(files, blocks)


def holds_images(path: str) -> bool:
    """Whether a file is of images, and no table of their paths, or nothing that can be read."""
    with contextlib.suppress(OSError, pyarrow.ArrowException):
        check_file(path)
        return any(map(is_image, parquet.read_schema(path)))
    return False


def open_parquet(
    request: Request, files: Sequence[RemoteFile]
) -> tuple[ParquetSource, tuple[str, ...]]:
    """Returns source and class names; the split of a file is in its name.

    UserError for a file that is no Parquet, and see `arrow.open_saved`.
    """
    where = f"dataset.name={unsigned(request.name)!r}"
    announce(where, files, "only their ends and labels are read now")
    footers = list(map_threads(_footer, files, chunk=1))
    schemas = [footer.schema.to_arrow_schema() for footer in footers]
    image, key, classes = image_and_label(where, request, schemas)
    read = functools.partial(_read, columns=(key,) if key else ())
    labels = list(map_threads(read, files, chunk=1))
    addresses = [file.address for file in files]
    by_split = rows_by(splits_of(where, addresses))
    groups, ends, tables = {}, {}, {}
    for split, numbers in by_split.items():
        parts = [(n, g) for n in numbers for g in range(footers[n].num_row_groups)]
        groups[split] = [(files[n], g) for n, g in parts]
        ends[split] = np.cumsum([footers[n].row_group(g).num_rows for n, g in parts], dtype=int)
        of_files = [labels[n] for n in numbers]
        try:
            tables[split] = pyarrow.concat_tables(of_files, promote_options="permissive")
        except pyarrow.ArrowException as error:
            raise UserError(f"{where}: files of {split!r} differ in the type of {key}.") from error
    lengths = {split: sum(footers[n].num_rows for n in ns) for split, ns in by_split.items()}
    places, splits = number_images(lengths)
    named = {split: tuple(addresses[n] for n in numbers) for split, numbers in by_split.items()}
    is_local = not scheme_of(addresses[0])
    stored: Any = {"groups": groups, "ends": ends, "is_checked": is_local}
    source = ParquetSource(places, {}, named, image, request.columns, **stored)
    return listing(where, source, splits, tables, key, classes).open(request.split)


@contextlib.contextmanager
def _damage_in(file: RemoteFile) -> Iterator[None]:
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:  # the first of pyarrow, too
        raise UserError(f"{unsigned(file.address)} is damaged: {one_line(error)}.") from error


def _footer(file: RemoteFile) -> Any:
    """What the end of a file says of it."""

    def fetch(path: Path) -> None:
        with _damage_in(file), file.open(file.fetch) as source:
            footer = parquet.read_metadata(source)
        footer.write_metadata_file(path)

    return file.keep("footer", fetch, parquet.read_metadata, is_small=True)


def _read(file: RemoteFile, columns: tuple[str, ...], group: int | None = None) -> Any:
    """Columns of a row group, or of all; fetched unless they are kept."""

    def fetch(path: Path) -> None:
        options: Any = {"metadata": _footer(file), "pre_buffer": True}
        options["page_checksum_verification"] = True
        with (
            _damage_in(file),
            file.open(file.fetch) as source,
            parquet.ParquetFile(source, **options) as whole,
        ):
            names = list(columns)
            table = whole.read(names) if group is None else whole.read_row_group(group, names)
            table.validate(full=True)
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)

    return file.keep(f"{columns} of group {group}", fetch, _load, is_small=group is None)


def _load(path: Path) -> Any:
    table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
    table.validate(full=True)  # wrong offsets end the process
    return table
