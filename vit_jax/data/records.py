"""Random access to the records of ArrayRecord and TFRecord files, without TensorFlow."""

import os
import resource
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.errors import UserError, as_user_error, one_line
from vit_jax.files.paths import cached_copy, check_file, is_bucket, size_of, to_path


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
    """Offsets of the records of a TFRecord file, int64 [N + 1]; ValueError if it is not one."""
    with open(filename, "rb") as file:
        descriptor = file.fileno()
        if hasattr(os, "posix_fadvise"):  # only 8 bytes per record are read: no read-ahead
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        size, offsets = os.fstat(descriptor).st_size, [0]
        while offsets[-1] < size:
            header = os.pread(descriptor, 8, offsets[-1])
            offsets.append(offsets[-1] + 16 + int.from_bytes(header, "little"))
            if len(header) < 8 or offsets[-1] > size:
                raise ValueError(f"its {size} bytes end inside record {len(offsets) - 2}")
    return np.array(offsets, np.int64)


def open_records(name: str, file_format: str, expected: int, offsets: dict[str, np.ndarray]) -> Any:
    """Opens a file that must hold `expected` records; UserError if it is missing or damaged."""
    try:
        check_file(name)
        size_of(to_path(name))  # array_record has no clear error for a missing file
        if file_format == "array_record":
            from array_record.python import array_record_module

            # Random access: no read-ahead, and a buffer of about one small record.
            file: Any = array_record_module.ArrayRecordReader(
                name, options="readahead_buffer_size:0", file_reader_buffer_size=32768
            )
        else:
            local = str(cached_copy(to_path(name))) if is_bucket(name) else name
            if name not in offsets:  # a cache: the whole file has to be read
                offsets[name] = index_tfrecord(local)
            file = TFRecordReader(local, offsets[name])
        if (count := file.num_records()) != expected:
            raise ValueError(f"it has {count} records, dataset_info.json says {expected}")
    except UserError:  # from the cache
        raise
    except OSError as error:
        raise as_user_error(f"{name}: {one_line(error)}.", error) from None
    except (ValueError, RuntimeError) as error:  # also array_record's
        raise UserError(f"{name}: {one_line(error)}; copy or prepare it again.") from None
    return file


def allow_open_files(count: int) -> None:
    """Raises the soft limit on open files: one per shard, and ImageNet has 1,024 shards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # negative: no limit
    if 0 <= hard < count:
        raise UserError(f"{count} shards, but at most {hard} open files (ulimit -Hn).")
    wanted = count + 1024 if hard < 0 else min(count + 1024, hard)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
