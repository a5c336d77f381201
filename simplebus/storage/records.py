"""Record format of the journal's files.

A file contains records back to back, followed by zeros. Decoding never raises: it returns records,
or the offset and reason of the end. The header has a separate checksum, so that readers can skip
bodies. Numbers are little-endian and unaligned.

    header   magic "sbj2"  kind  class  sizes of meta and body  count  batch  first  time  checksums
    meta     MessagePack: publishers of the messages; empty without publisher names
    body     wire frames back to back; or encoded changes or a snapshot; empty in a gap

The checksum of the header is seeded with the salt of the journal, a secret random number. So after
damage, a reader finds the next record: bytes in a payload that look like a record do not have the
checksum.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from simplebus.core.commit_log import JournalEntry

MAGIC = b"sbj2"
"""The last character is the version of the format."""

_HEADER = struct.Struct("<4sBBHIIIQQdI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
BODY_BYTES_MAX = (1 << 32) - 1
_COUNT_MAX = (1 << 32) - 1
"""Messages of one record."""
GAP_MESSAGES_MAX = 1 << 40
"""Maximum messages of a gap. A record that is farther away is treated as damaged."""

CHECKSUM_MISMATCH = "checksum mismatch"

_KINDS = frozenset((1, 2, 3, 4))
_publishers = msgspec.msgpack.Decoder(list[tuple[int, str]])


class RecordKind(enum.IntEnum):
    """Content of a record."""

    MESSAGES = 1
    CHANGES = 2
    """Changes since the previous record."""
    SNAPSHOT = 3
    """Complete state."""
    GAP = 4
    """Messages that are missing. Damaged bytes were moved to another file."""


class Record(NamedTuple):
    """Header of a record, and its place."""

    offset: int
    kind: int
    """A `RecordKind`."""
    class_id: int
    meta_bytes: int
    body_bytes: int
    message_count: int
    batch_number: int
    first: int
    """Sequence of the first message."""
    time: float
    """Acceptance time of the messages: seconds since 1970."""
    checksum: int
    """Checksum of meta and body."""

    @property
    def last(self) -> int:
        """Sequence after the last message."""
        return self.first + self.message_count

    @property
    def body_offset(self) -> int:
        return self.offset + HEADER_BYTES + self.meta_bytes

    @property
    def end(self) -> int:
        """Offset of the next record."""
        return self.body_offset + self.body_bytes


@dataclass(frozen=True, slots=True)
class EndOfRecords:
    """Place without an intact record."""

    offset: int
    problem: str = ""
    """Damage at this place; empty if nothing was written."""


def read_record(
    data: memoryview, at: int, *, salt: int = 0, verify_body: bool = True
) -> Record | EndOfRecords:
    """Return the record at an offset, or the end of the records.

    With `verify_body`, the checksum of the body is verified.
    """
    record = read_header(data, at, salt=salt)
    if record is None:
        header_start = bytes(data[at : at + HEADER_BYTES])
        if any(header_start):
            return EndOfRecords(
                at, f"incomplete header ({len(header_start)} of {HEADER_BYTES} bytes)"
            )
        return EndOfRecords(at)
    if isinstance(record, EndOfRecords):
        return record
    if record.end > len(data):
        return EndOfRecords(at, f"incomplete record ({len(data) - at} of {record.end - at} bytes)")
    if verify_body and not is_intact(data, record):
        return EndOfRecords(at, CHECKSUM_MISMATCH)
    return record


def read_header(data: memoryview, at: int, *, salt: int = 0) -> Record | EndOfRecords | None:
    """Return the record of a header, without its body; None if the header is incomplete."""
    header = data[at : at + HEADER_BYTES]
    if len(header) < HEADER_BYTES:
        return None
    (
        magic,
        kind,
        flags,
        class_id,
        meta_bytes,
        body_bytes,
        count,
        batch_number,
        first,
        time,
        checksum,
    ) = _HEADER.unpack_from(header)
    if _CHECKSUM.unpack_from(header, _HEADER.size)[0] != zlib.crc32(header[: _HEADER.size], salt):
        if not any(header):
            return EndOfRecords(at)
        return EndOfRecords(at, "header checksum mismatch")
    if magic != MAGIC or flags or kind not in _KINDS:
        return EndOfRecords(
            at,
            f"unknown record format {magic!r}, kind {kind}, flags {flags}",
        )
    return Record(
        at, kind, class_id, meta_bytes, body_bytes, count, batch_number, first, time, checksum
    )


def find_records(
    data: memoryview,
    at: int,
    *,
    class_id: int,
    first: int,
    salt: int = 0,
    kinds: Collection[int] = (RecordKind.MESSAGES,),
) -> Iterator[Record]:
    """Yield the intact records of a class from sequence `first` on, wherever they begin.

    Args:
        data: Content of a file, or a part of it.
        at: Offset from which on records are searched.
        class_id: Class of the records.
        first: Lowest sequence.
        salt: Salt of the journal.
        kinds: Kinds of the records.
    """
    content = bytes(data[at:])
    place = 0
    while (place := content.find(MAGIC, place)) >= 0:
        found = read_record(data, at + place, salt=salt)
        if (
            isinstance(found, Record)
            and found.kind in kinds
            and found.class_id == class_id
            and found.first >= first
        ):
            yield found
            first, place = found.last, found.end - at
        else:
            place += 1


def is_intact(data: memoryview, record: Record) -> bool:
    """Return True if the checksum of the record's body matches."""
    return zlib.crc32(data[record.offset + HEADER_BYTES : record.end]) == record.checksum


def decode_producer_runs(data: memoryview, record: Record) -> list[tuple[int, str]]:
    """Return runs of messages of one publisher, as in `JournalEntry.producer_runs`."""
    if not record.meta_bytes:
        return [(record.message_count, "")]
    return _publishers.decode(data[record.offset + HEADER_BYTES : record.body_offset])


def encode_entry(entry: JournalEntry, batch_number: int, *, salt: int = 0) -> list[bytes]:
    """Encode messages as a record, in pieces."""
    meta = b""
    if any(name for _, name in entry.producer_runs):
        meta = msgspec.msgpack.encode(entry.producer_runs)
    return _record(
        RecordKind.MESSAGES,
        entry.frames,
        entry.class_id,
        meta,
        entry.message_count,
        batch_number,
        entry.first_sequence,
        entry.accepted_at,
        salt=salt,
    )


def encode_gap(
    class_id: int, first: int, count: int, batch_number: int, time: float, *, salt: int = 0
) -> bytes:
    """Encode up to GAP_MESSAGES_MAX missing messages as records. `time` is Unix time."""
    encoded = b""
    for begin in range(first, first + count, _COUNT_MAX):
        part = min(_COUNT_MAX, first + count - begin)
        encoded += b"".join(
            _record(RecordKind.GAP, [], class_id, b"", part, batch_number, begin, time, salt=salt)
        )
    return encoded


def encode_changes(
    changes: bytes, batch_number: int, *, is_snapshot: bool = False, salt: int = 0
) -> list[bytes]:
    """Encode changes or a snapshot as a record, in pieces."""
    kind = RecordKind.SNAPSHOT if is_snapshot else RecordKind.CHANGES
    return _record(kind, [changes], batch_number=batch_number, salt=salt)


def _record(
    kind: RecordKind,
    body: Sequence[bytes],
    class_id: int = 0,
    meta: bytes = b"",
    count: int = 0,
    batch_number: int = 0,
    first: int = 0,
    time: float = 0.0,
    *,
    salt: int,
) -> list[bytes]:
    size = sum(map(len, body))
    assert size <= BODY_BYTES_MAX, size
    checksum = _crc([meta, *body])
    header = _HEADER.pack(
        MAGIC, kind, 0, class_id, len(meta), size, count, batch_number, first, time, checksum
    )
    return [header + _CHECKSUM.pack(zlib.crc32(header, salt)) + meta, *body]


def _crc(parts: Iterable[bytes]) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum
