"""Random access to the records of ArrayRecord and TFRecord files, without TensorFlow."""

from __future__ import annotations

import os
import resource
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from vit_jax.data.sources import Part, Parts, map_threads
from vit_jax.errors import PassingError, UserError, as_user_error, one_line
from vit_jax.files.paths import cached_copy, is_bucket, size_of, to_path


class TFRecordReader:
    """Reads `[length: u64][crc: u32][payload][crc: u32]`... as ArrayRecordReader does."""

    def __init__(self, filename: str, offsets: np.ndarray):
        self._offsets = offsets
        self._file = os.open(filename, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def num_records(self) -> int:
        return len(self._offsets) - 1

    def read(self, numbers: Sequence[int]) -> list[bytes]:
        ends = [self._offsets[number : number + 2].tolist() for number in numbers]
        return [os.pread(self._file, stop - start - 16, start + 12) for start, stop in ends]


def index_tfrecord(filename: str) -> np.ndarray:
    """Offsets of the records of a TFRecord file, int64 [N + 1]; ValueError where it is none."""
    with open(filename, "rb") as file:
        descriptor = file.fileno()
        if hasattr(os, "posix_fadvise"):  # 8 bytes are wanted of each record: no read-ahead
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        size = os.fstat(descriptor).st_size
        offsets = [0]
        while offsets[-1] < size:
            header = os.pread(descriptor, 8, offsets[-1])
            offsets.append(offsets[-1] + 16 + int.from_bytes(header, "little"))
            if len(header) < 8 or offsets[-1] > size:
                raise ValueError(f"its {size} bytes end within record {len(offsets) - 2}")
    return np.array(offsets, np.int64)


class Records(Parts):
    """The serialized records of several extents (TFDS's FileInstructions), one after the other.

    Files are opened where and when they are read: pickling sends the TFRecord indices but no file
    descriptors. UserError for a damaged file, in `check` or when it is first read.
    """

    def __init__(self, file_format: str, extents: Sequence[Any]):
        super().__init__(
            Part(str(each.filename), each.skip, each.skip + each.take) for each in extents
        )
        self._lengths = {str(each.filename): each.examples_in_shard for each in extents}
        self._format = file_format
        self._offsets: dict[str, np.ndarray] = {}
        self._files: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def record(self, index: int) -> bytes:
        name, number = self.locate(index)
        try:
            return self._file(name).read([number])[0]
        except RuntimeError as error:
            if not is_bucket(name):
                raise
            raise PassingError(f"{self.describe(index)}: {one_line(error)}") from error

    def describe(self, index: int) -> str:
        return "{}, record {}".format(*self.locate(index))

    def identity(self) -> Iterator[str]:
        """Name, size and range of every extent."""
        sizes = map_threads(lambda part: size_of(to_path(part.name)), self.parts, chunk=1)
        for (name, start, stop), size in zip(self.parts, sizes, strict=True):
            yield f"{os.path.basename(name)} {size} {start} {stop - start}"

    def check(self, _on_bad_image: str) -> Self:
        """Opens every file; none is skipped, each holds thousands of examples."""
        list(map_threads(self._file, self._lengths, chunk=1))
        return self

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._open(name)  # by several threads perhaps: one is kept
        return self._files[name]

    def _open(self, name: str) -> Any:
        _allow_open_files(len(self._lengths))
        try:
            size_of(to_path(name))  # array_record does not say plainly that a file is missing
            if self._format == "array_record":
                from array_record.python import array_record_module

                # Random access: no read-ahead, and a buffer of about one small record.
                file: Any = array_record_module.ArrayRecordReader(
                    name, options="readahead_buffer_size:0", file_reader_buffer_size=32768
                )
            else:
                local = str(cached_copy(to_path(name))) if is_bucket(name) else name
                if name not in self._offsets:  # found by reading all of the file
                    self._offsets[name] = index_tfrecord(local)
                file = TFRecordReader(local, self._offsets[name])
            count, expected = file.num_records(), self._lengths[name]
            if count != expected:
                raise ValueError(f"it holds {count} records, the set's info says {expected}")
        except UserError:  # of the cache
            raise
        except OSError as error:
            raise as_user_error(f"{name}: {one_line(error)}.", error) from None
        except (ValueError, RuntimeError) as error:  # also array_record's
            reason = one_line(error)
            raise UserError(f"{name}: damaged ({reason}); copy or prepare it again.") from None
        return file


def _allow_open_files(count: int) -> None:
    """Raises the soft limit on open files: one per shard, and ImageNet has 1,024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # negative: no limit
    if 0 <= hard < count:
        raise UserError(f"{count} shards, but only {hard} open files are allowed: ulimit -Hn.")
    wanted = count + 1024 if hard < 0 else min(count + 1024, hard)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
