"""Fuzz targets: functions that check a parser with any bytes.

The first byte of an input selects how the rest is split into reads. A target raises an exception
other than the documented ones, or an AssertionError, if the parser has a fault.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.protocol import envelope, frames
from simplebus.storage import records
from simplebus.storage.directory import open_directory
from simplebus.storage.errors import JournalError
from simplebus.storage.file_names import file_name
from tests.behaviour.wire_peer import BrokerHarness, WirePeer
from tests.core.protocol.test_envelope import oracle_decode
from tests.nats.protocol.parser_driver import parse_with_oracle, read
from tests.storage.journaled_broker import KeptBus

CLASS_ID = 1
CONNECT = frames.encode(frames.CONNECT, content=b'{"version":2,"name":"fuzz","classes":[1,2]}')
_HEADER = struct.Struct("<4sBBHIIIQQdI")
_BODY_CHECKSUM_OFFSET = _HEADER.size - 4


def check_envelope(data: bytes) -> None:
    """Compare the decoder of envelopes with the oracle, and encode the decoded envelope again."""
    expected, found = oracle_decode(data), _decode_envelope(data)
    assert found == expected
    if not isinstance(found, str):
        assert envelope.decode(envelope.encode(*found)) == found


def check_nats(data: bytes) -> None:
    """Compare the parser of NATS commands with the oracle, for whole and for split reads."""
    size, data = _split_size(data)
    expected = parse_with_oracle(data)
    assert read([data]).found == expected
    assert read(_split(data, size)).found == expected


def check_version1(data: bytes) -> None:
    """Check that a broker processes split reads of any peer like one read."""
    size, data = _split_size(data)
    assert _run_broker([data]) == _run_broker(list(_split(data, size)))


def check_version2(data: bytes) -> None:
    """Check that a broker processes split reads of a version 2 peer like one read."""
    size, data = _split_size(data)
    whole = _run_broker([CONNECT, data])
    assert whole == _run_broker([CONNECT, *_split(data, size)])


def check_journal(data: bytes) -> None:
    """Recover a journal of any files, twice, with the same result.

    The first byte divides the rest into the segment of a class and the state file. Checksums are
    set to the right values, so that the fields behind them are reached.
    """
    directory = Path(tempfile.mkdtemp(prefix="simplebus-fuzz-"))
    try:
        KeptBus(directory).crash()
        (directory / "classes" / f"{CLASS_ID:05}").mkdir()
        share, data = (data[0] if data else 0), data[1:]
        middle = len(data) * share // 255
        salt = open_directory(directory).salt
        segment = directory / "classes" / f"{CLASS_ID:05}" / file_name(0)
        state = directory / "state" / file_name(1)
        for path, content in (segment, data[:middle]), (state, data[middle:]):
            if content:
                path.write_bytes(_set_checksums(content, salt))
        try:
            states = []
            for _ in range(2):
                bus = KeptBus(directory)
                bus.check_invariants()
                states.append(_broker_state(bus))
                bus.crash()
            assert states[0] == states[1]
        except JournalError:
            pass
    finally:
        shutil.rmtree(directory)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "version1": check_version1,
    "version2": check_version2,
    "nats": check_nats,
    "envelope": check_envelope,
    "journal": check_journal,
}


def _decode_envelope(data: bytes) -> tuple[envelope.Envelope, bytes] | str:
    """Return the decoded envelope and the payload, or the reason code of its refusal."""
    try:
        return envelope.decode(data)
    except RemoteProtocolError as error:
        return error.reason


def _split_size(data: bytes) -> tuple[int, bytes]:
    """Return the size of reads that the first byte selects, and the rest."""
    return (data[0] % 32 + 1 if data else 1), data[1:]


def _split(data: bytes, size: int) -> Iterator[bytes]:
    return (data[begin : begin + size] for begin in range(0, len(data), size))


def _run_broker(reads: list[bytes]) -> tuple[str, Any]:
    """Return the error and the state of a broker after these reads of one peer."""
    bus = BrokerHarness()
    bus.skips_checks = True
    peer: WirePeer = bus.peer()
    refused = ""
    try:
        peer.send(*reads)
    except RemoteProtocolError as error:
        refused = error.reason
        peer.disconnect()
    bus.broker.check_invariants()
    return refused, _broker_state(bus)


def _broker_state(bus: BrokerHarness) -> Any:
    """Return the classes of a broker and their positions."""
    return {
        class_id: (
            cls.name,
            cls.first_sequence,
            cls.ring.head,
            sorted((position.window.floor, position.window.cursor) for position in cls.positions),
        )
        for class_id, cls in bus.broker.classes.items()
    }


def _set_checksums(content: bytes, salt: int) -> bytes:
    """Return the content of a file with right checksums in everything that looks like a record."""
    data = bytearray(content)
    at = 0
    while (at := data.find(records.MAGIC, at)) >= 0 and at + records.HEADER_BYTES <= len(data):
        fields = _HEADER.unpack_from(data, at)
        body = data[at + records.HEADER_BYTES :][: fields[4] + fields[5]]
        struct.pack_into("<I", data, at + _BODY_CHECKSUM_OFFSET, zlib.crc32(body))
        header = data[at : at + _HEADER.size]
        struct.pack_into("<I", data, at + _HEADER.size, zlib.crc32(header, salt))
        at += records.HEADER_BYTES
    return bytes(data)
