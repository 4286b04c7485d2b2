"""The directory of a zip file, read with suspicion, and its members as checked streams of bytes.

Not `zipfile`: that takes whatever a directory claims (twice the same name, members that lie over
each other, any size), copies data several times, and cannot be read by several threads. Here a
file is either exactly what a zip writer makes, or refused before anything large is allocated.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib

from vit_jax.errors import UserError
from vit_jax.pretrained.files.array_file import (
    CHUNK_BYTES,
    FREE_EXPANSION_BYTES,
    ByteFile,
    check_name,
    shorten,
)

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_COMMENT = 0xFFFF
_IN_EXTRA = 0xFFFFFFFF  # the true number is in the "zip64" extra field
# Many times more than any model needs.
_MAX_DIRECTORY_BYTES = 4 << 20

_ENCRYPTED = 0x1 | 0x40 | 0x2000
_UTF8 = 0x800
_STORED, _DEFLATED = 0, 8
# No deflate stream grows more than this; zeros come close to it.
_DEFLATE_LIMIT = 1032
# Above FREE_EXPANSION_BYTES: trained weights shrink to 0.9, a file half full of zeros to 0.5.
_MAX_EXPANSION = 20


@dataclasses.dataclass(frozen=True)
class Member:
    """One file inside a zip file.

    Attributes:
      start: position of its local header; `offset`: of its data.
      stored_size: bytes in the zip file; `size`: bytes of its content.
      crc: CRC-32 of the content.
    """

    name: str
    start: int
    offset: int
    stored_size: int
    size: int
    crc: int
    deflated: bool


def read_members(file: ByteFile) -> list[Member]:
    """The members of a zip file, in the directory's order.

    Compressed members may claim 512 MiB together, whatever the size of the file, and beyond that
    up to 20 times the size of the file. Members that are not compressed lie in the file one after
    the other and so cannot claim more than it has.

    Raises:
      UserError: anything but a complete zip file, with nothing before or after it, of unencrypted
        members that are stored or deflated, do not overlap, and have different relative names.
    """
    start, directory, count = _find_directory(file)
    members: list[Member] = []
    position = 0
    while position < len(directory):
        member, position = _parse_entry(file, directory, position, start)
        members.append(member)
    if len(members) != count:
        raise file.error(f"its zip directory lists {len(members)} members and announces {count}")
    if len({member.name for member in members}) != count:
        raise file.error("its zip directory lists a name twice")
    end = 0
    for member in sorted(members, key=lambda member: member.start):
        if member.start < end:
            raise file.error(f"its zip member {shorten(member.name)} overlaps another")
        end = member.offset + member.stored_size
    expanded = sum(member.size for member in members if member.deflated)
    if expanded > max(FREE_EXPANSION_BYTES, _MAX_EXPANSION * file.size):
        raise file.error(
            f"its {file.size} bytes claim to expand to {expanded}, more than weights ever do"
        )
    return members


def _find_directory(file: ByteFile) -> tuple[int, bytes, int]:
    """(position, content, number of entries) of the central directory."""
    tail_size = min(file.size, _END64_LOCATOR.size + _END.size + _MAX_COMMENT)
    tail = file.read(file.size - tail_size, tail_size)
    at = len(tail)
    while True:
        at = tail.rfind(b"PK\5\6", 0, at)
        if at < 0:
            raise file.error(
                "it begins like a zip file (npz or pth) and has no directory at its end; it is "
                "incomplete or damaged, fetch it again"
            )
        if len(tail) - at >= _END.size:
            _, disk, first_disk, _, count, size, start, comment = _END.unpack_from(tail, at)
            if at + _END.size + comment == len(tail):
                break
    end = file.size - tail_size + at
    locator = tail[max(at - _END64_LOCATOR.size, 0) : at]
    # PyTorch writes it even where nothing needs 64 bits.
    if len(locator) == _END64_LOCATOR.size and locator.startswith(b"PK\6\7"):
        _, _, end, _ = _END64_LOCATOR.unpack(locator)
        record = _END64.unpack(file.read(end, _END64.size))
        narrow, wide = (disk, first_disk, count, size, start), (*record[4:6], *record[7:])
        fits = (a == b or a in (0xFFFF, _IN_EXTRA) for a, b in zip(narrow, wide, strict=True))
        length = file.size - tail_size + at - _END64_LOCATOR.size - end
        if record[0] != b"PK\6\6" or record[1] + 12 != length or not all(fits):
            raise file.error("its zip directory is damaged")
        disk, first_disk, count, size, start = wide
    if disk or first_disk or start + size != end:
        raise file.error("its zip directory is not where it should be")
    if size > _MAX_DIRECTORY_BYTES:
        raise file.error(f"its zip directory takes {size} bytes, more than {_MAX_DIRECTORY_BYTES}")
    return start, file.read(start, size), count


def _parse_entry(file: ByteFile, directory: bytes, position: int, end: int) -> tuple[Member, int]:
    """The member at `position` of the directory, and the position of the next one."""
    damaged = file.error("its zip directory is damaged")
    if position + _ENTRY.size > len(directory):
        raise damaged
    fields = _ENTRY.unpack_from(directory, position)
    magic, _, _, flags, method, _, _, crc, stored_size, size = fields[:10]
    name_size, extra_size, comment_size, disk = fields[10:14]
    start = fields[-1]
    name_end = position + _ENTRY.size + name_size
    extra_end = name_end + extra_size
    if magic != b"PK\1\2" or disk or extra_end + comment_size > len(directory):
        raise damaged
    raw_name = directory[position + _ENTRY.size : name_end]
    name = _check_member_name(file, raw_name, flags)
    if flags & _ENCRYPTED:
        raise file.error(f"its zip member {shorten(name)} is encrypted")
    if method not in (_STORED, _DEFLATED):
        raise file.error(f"its zip member {shorten(name)} uses compression method {method}")
    wide = _wide_numbers(directory[name_end:extra_end])
    try:
        size, stored_size, start = (
            wide.pop(0) if number == _IN_EXTRA else number for number in (size, stored_size, start)
        )
    except IndexError as error:
        raise damaged from error
    deflated = method == _DEFLATED
    if size > stored_size * _DEFLATE_LIMIT if deflated else size != stored_size:
        raise file.error(f"its zip member {shorten(name)} cannot have {size} bytes")
    offset = _data_offset(file, start, raw_name, method)
    if offset + stored_size > end:
        raise file.error(f"its zip member {shorten(name)} reaches beyond its place")
    member = Member(name, start, offset, stored_size, size, crc, deflated)
    return member, extra_end + comment_size


def _check_member_name(file: ByteFile, raw: bytes, flags: int) -> str:
    try:
        name = check_name(file, raw.decode("utf-8" if flags & _UTF8 else "cp437"))
    except UnicodeDecodeError as error:
        raise file.error("a name in its zip directory is damaged") from error
    if "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise file.error(f"{shorten(name)} is no name of an array")
    return name


def _wide_numbers(extra: bytes) -> list[int]:
    """The 64-bit numbers of the zip64 field among the extra fields of an entry."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        position += 4
        if kind == 1 and position + size <= len(extra):
            count = size // 8
            return list(struct.unpack_from(f"<{count}Q", extra, position))
        position += size
    return []


def _data_offset(file: ByteFile, start: int, raw_name: bytes, method: int) -> int:
    """Where the data of a member begins, from its local header."""
    header = file.read(start, _LOCAL.size)
    magic, _, _, local_method, *_, name_size, extra_size = _LOCAL.unpack(header)
    if (
        magic != b"PK\3\4"
        or local_method != method
        or name_size != len(raw_name)
        or file.read(start + _LOCAL.size, name_size) != raw_name
    ):
        raise file.error("a zip member and the zip directory contradict each other")
    return start + _LOCAL.size + name_size + extra_size


class MemberStream:
    """The content of a member. What was read is true only once `finish` has returned."""

    def __init__(self, file: ByteFile, member: Member) -> None:
        self._file = file
        self._member = member
        self._position = member.offset
        self._end = member.offset + member.stored_size
        self._left = member.size
        self._crc = 0
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS) if member.deflated else None
        self._pending = b""  # compressed, read from the file

    def read_into(self, view: memoryview) -> None:
        if len(view) > self._left:
            raise self._damaged()
        for start in range(0, len(view), CHUNK_BYTES):
            part = view[start : start + CHUNK_BYTES]
            if self._inflater is None:
                self._file.read_into(self._position, part)
                self._position += len(part)
            else:
                self._inflate_into(part)
            self._crc = zlib.crc32(part, self._crc)
        self._left -= len(view)

    def read(self, count: int) -> bytes:
        buffer = bytearray(min(count, self._left))
        self.read_into(memoryview(buffer))
        return bytes(buffer)

    def finish(self) -> None:
        """Raises a UserError unless all was read and is what had been written."""
        if self._left or self._crc != self._member.crc:
            raise self._damaged()
        if self._inflater is not None:
            while not self._inflater.eof:
                if self._inflate(1):
                    raise self._damaged()  # more than the directory says
            if self._inflater.unused_data or self._position != self._end:
                raise self._damaged()

    def verify(self) -> None:
        """Reads everything that is left, keeps nothing, and finishes."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, self._left)))
        while self._left:
            self.read_into(buffer[: self._left])
        self.finish()

    def _inflate_into(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            part = self._inflate(len(view) - done)
            view[done : done + len(part)] = part
            done += len(part)

    def _inflate(self, limit: int) -> bytes:
        """The next bytes, at most `limit`; none at all where only input was taken in."""
        assert self._inflater is not None
        if self._inflater.eof:
            raise self._damaged()
        if not self._pending:
            count = min(CHUNK_BYTES // 4, self._end - self._position)
            self._pending = self._file.read(self._position, count)
            self._position += count
        took_input = bool(self._pending)
        try:
            part = self._inflater.decompress(self._pending, limit)
        except zlib.error as error:
            raise self._damaged() from error
        self._pending = self._inflater.unconsumed_tail
        if not part and not took_input and not self._inflater.eof:
            raise self._damaged()  # the input has ended and the stream has not
        return part

    def _damaged(self) -> UserError:
        return self._file.error(
            f"{shorten(self._member.name)} is damaged (its checksum or its size is wrong); fetch "
            "the file again"
        )
