"""What stands in the journal's files: records, one behind the other, and zeros behind the last one.

Rule 1: this file knows bytes, never files. Whatever the bytes are, reading them gives records and
the place where they end, with the reason; nothing is raised.
Rule 2: a header has a checksum of its own, so that one may walk over records without reading them.
Rule 3: numbers are little-endian, and nothing is aligned.

    header   magic "sbj1"  kind  class  sizes of meta and frames  count  lot  first  time  checksums
    meta     MessagePack: whose the messages are; empty where they are nobody's
    frames   whole wire frames back to back; or, of another kind, what has changed
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from simplebus.core.commit_log import JournalEntry

MAGIC = b"sbj1"
"""The last character is the format's version."""

_HEADER = struct.Struct("<4sBBHIIIQQdI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
BODY_BYTES_MAX = (1 << 32) - 1

WRONG_CHECKSUM = "a record's checksum is wrong"

_KINDS = frozenset((1, 2, 3))
_publishers = msgspec.msgpack.Decoder(list[tuple[int, str]])


class Kind(enum.IntEnum):
    """What a record holds."""

    MESSAGES = 1
    CHANGES = 2
    """What has changed since the record before it."""
    SNAPSHOT = 3
    """All that changes are about."""


class Record(NamedTuple):
    """One record's header, and where it stands."""

    at: int
    """Where it begins."""
    kind: int
    """One of `Kind`."""
    class_id: int
    meta_bytes: int
    body_bytes: int
    """Of frames, or of what has changed."""
    messages: int
    """How many."""
    lot: int
    first: int
    """Sequence of the first message."""
    time: float
    """When they were accepted: seconds since 1970."""
    checksum: int
    """Of meta and body."""

    @property
    def last(self) -> int:
        """The sequence behind its last message."""
        return self.first + self.messages

    @property
    def body_at(self) -> int:
        return self.at + HEADER_BYTES + self.meta_bytes

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.body_at + self.body_bytes


@dataclass(frozen=True, slots=True)
class End:
    """No whole record stands here."""

    at: int
    problem: str = ""
    """Why not; empty where nothing was written."""


def read(data: memoryview, at: int, *, whole: bool = True) -> Record | End:
    """The record that begins at `at`. `whole` says whether its body is looked at, too."""
    record = read_header(data, at)
    if record is None:
        cut = bytes(data[at : at + HEADER_BYTES])
        if any(cut):
            return End(at, f"a header of {HEADER_BYTES} bytes is cut off after {len(cut)}")
        return End(at)
    if isinstance(record, End):
        return record
    if record.end > len(data):
        return End(at, f"a record of {record.end - at} bytes is cut off after {len(data) - at}")
    if whole and not is_whole(data, record):
        return End(at, WRONG_CHECKSUM)
    return record


def read_header(data: memoryview, at: int) -> Record | End | None:
    """The same of its header alone, whatever follows; None where that is not all there."""
    header = data[at : at + HEADER_BYTES]
    if len(header) < HEADER_BYTES:
        return None
    magic, kind, flags, class_id, meta_bytes, body_bytes, count, lot, first, time, checksum = (
        _HEADER.unpack_from(header)
    )
    if _CHECKSUM.unpack_from(header, _HEADER.size)[0] != zlib.crc32(header[: _HEADER.size]):
        if not any(header):
            return End(at)
        return End(at, "a header's checksum is wrong")
    if magic != MAGIC or flags or kind not in _KINDS:
        return End(
            at,
            f"a record of the format {magic!r}, kind {kind}, flags {flags} is none that is known",
        )
    return Record(at, kind, class_id, meta_bytes, body_bytes, count, lot, first, time, checksum)


def search(data: memoryview, at: int, *, class_id: int, first: int) -> Iterator[Record]:
    """The whole records of messages of this class from sequence `first` on that stand at `at` or
    behind it, whatever is between them."""
    content = bytes(data[at:])
    place = 0
    while (place := content.find(MAGIC, place)) >= 0:
        found = read(data, at + place)
        if (
            isinstance(found, Record)
            and (found.kind, found.class_id) == (Kind.MESSAGES, class_id)
            and found.first >= first
        ):
            yield found
            first, place = found.last, found.end - at
        else:
            place += 1


def is_whole(data: memoryview, record: Record) -> bool:
    """Whether a record's body is what was written."""
    return zlib.crc32(data[record.at + HEADER_BYTES : record.end]) == record.checksum


def publishers_of(data: memoryview, record: Record) -> list[tuple[int, str]]:
    """How many messages in a row are whose, as in `Entry.publishers`. The record is whole."""
    if not record.meta_bytes:
        return [(record.messages, "")]
    return _publishers.decode(data[record.at + HEADER_BYTES : record.body_at])


def of_entry(entry: JournalEntry, lot: int) -> list[bytes]:
    """Messages as a record, in pieces."""
    meta = b""
    if any(name for _, name in entry.publishers):
        meta = msgspec.msgpack.encode(entry.publishers)
    return _record(
        Kind.MESSAGES, entry.frames, entry.class_id, meta, entry.count, lot, entry.first, entry.time
    )


def of_changes(changes: bytes, lot: int, *, is_snapshot: bool = False) -> list[bytes]:
    """What has changed, or a snapshot, as a record."""
    kind = Kind.SNAPSHOT if is_snapshot else Kind.CHANGES
    return _record(kind, [changes], lot=lot)


def _record(
    kind: Kind,
    body: Sequence[bytes],
    class_id: int = 0,
    meta: bytes = b"",
    count: int = 0,
    lot: int = 0,
    first: int = 0,
    time: float = 0.0,
) -> list[bytes]:
    size = sum(map(len, body))
    assert size <= BODY_BYTES_MAX, size
    checksum = _crc([meta, *body])
    header = _HEADER.pack(
        MAGIC, kind, 0, class_id, len(meta), size, count, lot, first, time, checksum
    )
    return [header + _CHECKSUM.pack(zlib.crc32(header)) + meta, *body]


def _crc(parts: Iterable[bytes]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum
