"""Parsing of client bytes in any chunks, compared with a byte-by-byte oracle.

Tests of memory and repeated searches, which the oracle cannot check, are at the end.
"""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.limits import HEADROOM_BYTES
from simplebus.nats.errors import NatsError
from simplebus.nats.limits import NatsLimits
from simplebus.nats.protocol.events import Connect, Pub
from simplebus.nats.protocol.line_parser import LineParser
from simplebus.nats.protocol.parser import NatsParser
from simplebus.nats.protocol.subject_table import SubjectTable
from tests.nats.protocol.parser_driver import BUFFER, LIMITS, Reading, parse_with_oracle, read
from tests.nats.protocol.parser_oracle import Oracle
from tests.support.cases import for_each

LINES = [
    b"PING\r\nping\nPING x\r\nPiNGx\r\nPING\r\r\nPONG\r\npongabc\n+OK\r\n+ok junk\r\nPONG \t\n",
    b"CONNECT {}\r\nCONNECT{}\r\nconnect \t {} \r\nCONNECT\n{}\nCONNECT\r\nCONNECT {}\rx\r\n",
    b'INFO {}\r\ninfo{"a":[1,{}]}\nINFO null\r\nINFO \n{}\n',
    b"INFO\r\n",
    b"INFO x\r\n",
    b"INFO []\r\n",
    b"INFO {}\rx\r\n",
    b"-ERR 'x'\r\nPING\r\n",
    b"-err\t\t\n\n",
    b"-ERR\r\n",
    b"-ERRx\r\n",
    b"SUB a 1\r\nsub\ta\tq\t1\nSUB  a  1  \r\nSUB a.* > 22\r\nSUB > \r1\r\nSUB \na 1\r\n",
    b"SUB a\r1\r\nSUB a\r 12\r\nSUB a\r 12\nSUB a\x0b1 \x00\r\n",
    *(
        b"SUB" + arguments + b"\r\n"
        for arguments in (b"", b" ", b" a", b" a b c d", b"a 1", b" \r")
    ),
    b"SUB a\nb 1\r\n",
    b"UNSUB 1\r\nunsub\t1 \t2\nUNSUB 1 0\r\nUNSUB 1 x\r\nUNSUB 1 -1\r\nUNSUB 1 000000009\r\n",
    b"UNSUB 1 0000000009\r\nUNSUB 1\r2\r\nUNSUB \r1\r\nUNSUB 1 +1\n",
    *(b"UNSUB" + arguments + b"\r\n" for arguments in (b"", b" ", b" 1 2 3", b"x")),
    b"PUB a 1\r\nx\r\npub a 0\r\n\r\nPUB\ta\t1\t\nx\r\nPUB  a  r  2 \r\n\r\n\r\n",
    b"PUB a 002\r\nxy\r\nPUB a 000000001\r\nx\r\nPUB a\x0bb 1\nx\r\nPUB a\x00 1\nP\r\n",
    b"PUB a\r 12\nx\r\nPUB \ra 1\nx\r\nPUB \na 1\r\nx\r\nPUB a r\r 1\r\n1\r\n",
    b"PUB 7 3\r\nPUB\r\nPUB 7 7 11\r\n\r\nPUB a 1\r\n\r\nPUB a 10\r\n\0\xff\r\n\0\xff\r\n\r\n\r\n",
    *(
        b"PUB" + arguments + b"\r\nx\r\n"
        for arguments in (
            *(b"", b" ", b" a", b" 1", b" a b c 1", b"a 1", b" a -1", b" a +1", b" a 1x"),
            *(
                b" a 0000000001",
                b" a 1\r2",
                b" a \r1",
                b" a 1\r",
                b" a 1 \r ",
                b" a b c",
                b" a 1_0",
            ),
        )
    ),
    *(b"PUB a 1\r\n" + ending for ending in (b"x\n", b"xx\r\n", b"x\rx", b"\r\n", b"x\r\nx")),
    b"PUB a 300\r\n" + bytes(300) + b"\r\nPUB a 301\r\n",
    b"PUB a 999999999\r\n",
    b"PUB a b 301\n",
    b"HPUB a 2 3\r\nabc\r\nhpub a r 0 0\n\r\nHPUB\ta 02 003\r\nabc\r\nHPUB a\r 1 12\nx\r\n",
    *(
        b"HPUB" + arguments + b"\r\nx\r\n"
        for arguments in (
            *(b"", b" ", b" a", b" a 1", b" a b c 0 1", b" a 2 1", b" a -1 1", b" a 1 1x"),
            *(b" a 0000000001 1", b" a 0 301", b" a 302 301", b" a b 1 0000000001", b"a 0 1"),
        )
    ),
    *(first + b"\r\n" for first in (b"", b" ", b"X", b"PX", b"MSG a 1 1", b"HMSG", b"PUBLISH")),
    *(first + b"PING\r\n" for first in (b"\0", b"\n", b"\r", b"C", b"CONNEC", b"INF", b"+O", b"-")),
    *(b"SUB " + b"a" * n + b" 1" + end for n in (62, 63) for end in (b"\r\n", b"\n", b"\r\r\n")),
    *(b"PUB " + b"a" * n + b" 1\r\nx\r\n" for n in (62, 63)),
    *(b"PUB " + b"a" * n + b" x\r\nx\r\n" for n in (62, 63)),
    *(b"HPUB " + b"a" * n + b" 0 1\r\nx\r\n" for n in (60, 61)),
    *(b"SUB " + b"a" * n for n in (64, 65, 80)),
    *(b"SUB a\r" + b"a" * n for n in (62, 63, 64)),
    b"SUB \r" + b"a" * 64,
    b"PUB"
    + b" " * 100
    + b"a 1\r\nx\r\nPING"
    + b"x" * 100
    + b"\nCONNECT"
    + b" \t" * 50
    + b"{}\nSUBa",
    b"CONNECT {" + b" " * 100 + b"}\r\n",
    b"-ERR" + b" " * 100 + b"x\n",
    b"INFO" + b" " * 100 + b"{}\nINFO {" + b" " * 100,
]
EACH_LINE = for_each("data", {repr(data): data for data in LINES})


@EACH_LINE
def test_chunking_does_not_change_events(data: bytes) -> None:
    for headers in (True, False) if b"HPUB" in data.upper() else (True,):
        expected = parse_with_oracle(data, headers=headers)
        assert read([data], headers=headers).found == expected
        for offset in range(1, len(data)):
            assert read([data[:offset], data[offset:]], headers=headers).found == expected, data[
                :offset
            ]


@EACH_LINE
@pytest.mark.parametrize("event_count", [1, 2])
def test_reading_in_parts_does_not_change_events(data: bytes, event_count: int) -> None:
    expected = parse_with_oracle(data, headers=True)
    for offset in {0, 1, len(data) // 2}:
        reading = Reading()
        reading.feed(data[:offset])
        reading.feed_in_parts(data[offset:], event_count)
        assert reading.found == expected


@EACH_LINE
def test_errors_are_raised_at_the_first_invalid_byte(data: bytes) -> None:
    oracle = Oracle(
        max_payload=LIMITS.max_payload, max_control_line=LIMITS.max_control_line, headers=True
    )
    reading = Reading()
    for offset in range(len(data)):
        oracle.feed(data[offset : offset + 1])
        reading.feed(data[offset : offset + 1])
        assert reading.found == oracle.found, data[: offset + 1]


def test_error_texts_match_nats_server() -> None:
    error_texts = {
        b"X": ("Unknown Protocol Operation", "Protocol Violation"),
        b"PUB a\r\n": ("", "Protocol Violation"),
        b"PUB a 301\r\n": ("Maximum Payload Violation", "Maximum Message Payload Exceeded"),
        b"SUB " + bytes(65): ("maximum control line exceeded", "Maximum Control Line Exceeded"),
        b"-ERR 'x'\r\n": ("", "Parse Error"),
    }
    for data, arguments in error_texts.items():
        assert read([data]).found == [("CLOSE", *arguments)]


WORDS = st.sampled_from(
    [
        *(b"PUB", b"HPUB", b"SUB", b"UNSUB", b"PING", b"PONG", b"CONNECT", b"INFO", b"+OK"),
        *(b" ", b" ", b"\t", b"\r", b"\n", b"\r\n", b"\r\n", b"a", b"a.b", b">", b"{}", b"x" * 60),
        *(b"0", b"1", b"2", b"5", b"12", b"007", b"-1", b"301", b"999999999", b"pub", b"-ERR"),
        *(b"PUB a 1\r\nx\r\n", b"SUB a 1\r\n", b"PING\r\n", b"HPUB a 1 2\r\nxy\r\n"),
        *(b"PUB b r 3\r\n", b"PUB a 1\r\nx"),
    ]
)
ANYTHING = st.lists(WORDS | st.binary(max_size=3), max_size=25).map(b"".join)


def cut(data: bytes, offsets: list[int]) -> list[bytes]:
    """Return the bytes in pieces."""
    ends = sorted({offset_ % (len(data) + 1) for offset_ in offsets} | {len(data)})
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@settings(max_examples=250, deadline=None)
@given(ANYTHING, st.lists(st.integers(0, 1000), max_size=6), st.booleans())
def test_arbitrary_bytes_match_the_oracle(data: bytes, offsets: list[int], headers: bool) -> None:
    assert read(cut(data, offsets), headers=headers).found == parse_with_oracle(
        data, headers=headers
    )


def test_accepts_headers_applies_from_the_next_command() -> None:
    reading = Reading(headers=False)
    count = BUFFER.fill(b"CONNECT {}\r\nHPUB a 0 1\r\nx\r\nCONNECT {}\r\nHPUB a 0 1\r\nx\r\n")
    events = reading.parser.receive(BUFFER, count)
    assert isinstance(next(events), Connect)
    reading.parser.accepts_headers = True
    assert isinstance(next(events), Pub)
    assert isinstance(next(events), Connect)
    reading.parser.accepts_headers = False
    with pytest.raises(NatsError, match="did not announce headers"):
        next(events)


# Memory and repeated searches ---------------------------------------------------------------------


def counting_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of bytes of each attempt to parse a command."""
    read_sizes: list[int] = []
    original = LineParser.parse_command

    def read(self: LineParser, raw: bytearray, offset: int, last: int, searched: int = 0) -> int:
        read_sizes.append(last - offset)
        return original(self, raw, offset, last, searched)

    monkeypatch.setattr(LineParser, "parse_command", read)
    return read_sizes


@pytest.mark.parametrize("size", [HEADROOM_BYTES - 30, HEADROOM_BYTES + 30, 5 * HEADROOM_BYTES])
def test_long_payload_is_parsed_when_complete(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    read_sizes = counting_reads(monkeypatch)
    message = b"PUB a.b r %d\r\n" % size + b"\r\nPUB a 1\r\nx" * (size // 12 + 1)
    data = message[: -(len(message) - len(b"PUB a.b r %d\r\n" % size) - size)] + b"\r\n"
    limits = NatsLimits(max_payload=10 * HEADROOM_BYTES)
    for chunk in (1000, 7919, len(data) - 1):
        read_sizes.clear()
        stream = data + b"PING\r\n" + data
        reading = read(cut(stream, list(range(0, len(stream), chunk))), limits=limits)
        assert reading.found == [
            message_said := ("PUB", b"a.b", b"r", b"%d" % size, data[-2 - size : -2]),
            ("PING",),
            message_said,
        ]
        assert len(read_sizes) <= 10


def test_announced_size_allocates_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    read_sizes = counting_reads(monkeypatch)
    reading = Reading(NatsLimits(max_payload=999_999_999, max_pending=1 << 30))
    reading.feed(b"PUB a 999999999\r\n")
    for _ in range(2000):
        reading.feed(b"x" * 100)
    assert reading.found == []
    assert reading.parser.tail_bytes == 17 + 200_000
    assert len(read_sizes) == 1


def test_ignored_bytes_are_not_kept() -> None:
    for beginning, junk, kept_bytes in (
        (b"PING", b"x", 4),
        (b"+OK", b" ", 3),
        (b"HPUB ", b"\t ", 5),
    ):
        reading = Reading()
        reading.feed(beginning)
        for _ in range(50):
            reading.feed(junk * 1000)
            assert reading.parser.tail_bytes == kept_bytes
        assert reading.found == []


def test_long_line_is_searched_once() -> None:
    limits = NatsLimits(max_control_line=4 * HEADROOM_BYTES)
    options = b"{" + b" " * 3 * HEADROOM_BYTES + b"}"
    data = b"PING\r\nCONNECT " + options + b"\r\nPUB a 2\r\nxy\r\nPI"
    expected = [("PING",), ("CONNECT", options), ("PUB", b"a", b"", b"2", b"xy")]
    for chunk in (5000, len(data) - 20):
        found = read(cut(data, list(range(0, len(data), chunk))), limits=limits).found
        assert found == expected
    too_long = data.replace(b"}", b" " * HEADROOM_BYTES)
    found = read(cut(too_long, list(range(0, len(too_long), 5000))), limits=limits).found
    assert found[-1] == ("CLOSE", "maximum control line exceeded", "Maximum Control Line Exceeded")


def test_no_tail_between_commands() -> None:
    reading = Reading()
    reading.feed(b"PUB a 1\r\nx\r\nPING\r\n")
    assert reading.parser.tail_bytes == 0
    reading.feed(b"PUB a 1\r\nx\r")
    assert reading.parser.tail_bytes == 11


def test_long_message_is_freed_after_its_event() -> None:
    size = 2 * HEADROOM_BYTES
    data = b"PUB a %d\r\n%b\r\n" % (size, bytes(size))
    reading = Reading(NatsLimits(max_payload=size))
    bodies = []
    for chunk in (data[:-9], data[-9:]):
        for event in reading.parser.receive(BUFFER, BUFFER.fill(chunk)):
            assert isinstance(event, Pub)
            bodies.append(weakref.ref(event.body))
            del event
    gc.collect()
    assert [body() for body in bodies] == [None]


def test_parser_memory_is_its_tail() -> None:
    assert not hasattr(NatsParser(NatsLimits(), SubjectTable()), "__dict__")
