"""Batches of the parser equal single messages.

Generated streams must reach each parser; the tests check that they do. Payloads contain bytes that
look like messages.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.protocol.frames import Bytes
from simplebus.nats import limits as bounds
from simplebus.nats.limits import NatsLimits
from simplebus.nats.protocol import parser as parsers
from simplebus.nats.protocol.bulk_parser import BulkParser, find_line_feeds
from simplebus.nats.protocol.subject_table import SubjectTable
from tests.nats.protocol.parser_driver import Reading, parse_with_oracle, read

LOOKS_LIKE = [
    b"\r\nPUB a 1\r\n",
    b"\nPUB ",
    b"\r\nPUB b 3\r\nxyz\r\n",
    b"PUB a 1\r\nx\r\n",
    b"\r\n",
    b" ",
]
"""Parts of payloads that look like several messages."""


def pub(random: Random, subject: bytes, payload: bytes) -> bytes:
    return b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload)


def plain_payload(random: Random) -> bytes:
    return random.randbytes(random.choice([0, 1, 2, 3, 5, 8, 30, 120]))


def tricky_payload(random: Random) -> bytes:
    return b"".join(random.choices(LOOKS_LIKE, k=random.randrange(8)))


def a_run(random: Random) -> bytes:
    """Strategy for messages with one line: a UniformBatch from 8 messages on."""
    size, reply = random.choice([0, 1, 7, 40]), random.choice([b"", b"", b" r.1"])
    verb = random.choice([b"PUB a", b"pub\ta.b", b"HPUB a", b"PUB " + b"s" * 30])
    sizes = b" %d %d" % (size // 2, size) if verb[0] in b"H" else b" %03d" % size
    return b"".join(
        verb + reply + sizes + b"\r\n" + random.randbytes(size) + b"\r\n"
        for _ in range(random.choice([7, 8, 9, 300]))
    )


def a_mix(random: Random) -> bytes:
    """Strategy for many subjects and sizes: a MixedBatch from 48 messages or 8 KiB on."""
    payload = random.choice([plain_payload, tricky_payload])
    return b"".join(
        pub(random, random.choice(SUBJECTS), payload(random))
        for _ in range(random.choice([15, 49, 50, 200]))
    )


def an_oddity(random: Random) -> bytes:
    """Strategy for commands that end a batch; only the last one ends the stream."""
    return random.choice(ODDITIES)


SUBJECTS = [b"a", b"b.c", b"eight.88", b"nine.9999", b"s.%d" % 10**14, b"t" * 40, b"\xff\0.\r"]
ODDITIES = [
    *(b"PING\r\n", b"SUB a 1\r\n", b"+OK\r\n", b"HPUB a 0 1\r\nx\r\n", b"PUB a r 1\r\nx\r\n"),
    *(b"PUB  a 1\r\nx\r\n", b"PUB a  1\r\nx\r\n", b"PUB a 1 \r\nx\r\n", b"pub a 1\r\nx\r\n"),
    *(b"PUB\ta 1\r\nx\r\n", b"PUB a\t1\r\nx\r\n", b"PUB a 1\nx\r\n", b"PUB a\t\t1\r\nx\r\n"),
    *(b"PUB a 0000002\r\nxy\r\n", b"PUB a 000001\r\nx\r\n", b"PUB " + b"l" * 50 + b" 2\r\nxy\r\n"),
    *(b"PUB \na 1\r\nx\r\n", b"PUB a\rb 3\r\nxyz\r\n", b"PUB a b\t 1\r\nx\r\n"),
]
ENDS = [
    *(
        b"PUB a x\r\n",
        b"PUB a 301\r\n",
        b"PUB a 1\r\nxx",
        b"PUB a 1\r\nx\n",
        b"\r\n",
        b"PUB a -1\r\n",
    ),
    *(b"PUB a 0000000001\r\nx\r\n", b"PUB " + b"l" * 80 + b" 2\r\nxy\r\n", b"XPUB a 1\r\nx\r\n"),
    *(
        b"PUB a 12\r\nPUB a 1\r\nx",
        b"PUB a 3\r\nPUB a 1\r\nx\r\n",
        b"PUB 1\r\nx\r\nPUB",
        b"PUB a 9",
    ),
    b"PUB a b c 1\r\nx\r\n",
]


def stream(random: Random) -> bytes:
    parts: list[Callable[[Random], bytes]] = [a_run, a_mix, an_oddity]
    built = [random.choice(parts)(random) for _ in range(random.randrange(1, 7))]
    return b"".join([*built, random.choice([b"", *ENDS])])


@pytest.mark.parametrize("seed", range(40))
def test_batches_match_the_oracle(seed: int) -> None:
    random = Random(seed)
    data = stream(random)
    expected = parse_with_oracle(data)
    table = SubjectTable()
    assert read([data], table=table).found == expected
    offset, chunks = 0, []
    while offset < len(data):
        chunks.append(data[offset : offset + random.randrange(1, 6000)])
        offset += len(chunks[-1])
    assert read(chunks, table=table).found == expected


def test_generated_streams_use_every_parser() -> None:
    closed = 0
    total = Reading()
    for seed in range(40):
        reading = read([stream(Random(seed))])
        total.kinds += reading.kinds
        total.batched += reading.batched
        closed += reading.is_closed
    kinds, batched = total.kinds, total.batched
    assert kinds["UniformBatch"] > 25
    assert batched["UniformBatch"] > 3000
    assert kinds["MixedBatch"] > 30
    assert batched["MixedBatch"] > 3000
    assert kinds["Pub"] > 150
    assert 10 < closed < 40


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(SUBJECTS), min_size=50, max_size=70),
    st.lists(st.lists(st.sampled_from(LOOKS_LIKE), max_size=5).map(b"".join), min_size=1),
    st.sampled_from([b"", *ENDS]),
    st.integers(0, 5000),
)
def test_command_lines_in_payloads_are_payload(
    subjects: list[bytes], payloads: list[bytes], end: bytes, offset: int
) -> None:
    lines = [pub(Random(), s, payloads[n % len(payloads)]) for n, s in enumerate(subjects)]
    data = b"".join(lines) + end
    reading = read([data])
    assert reading.found == parse_with_oracle(data)
    assert reading.kinds["MixedBatch"] + reading.kinds["UniformBatch"] > 0
    assert read([data[:offset], data[offset:]]).found == parse_with_oracle(data)


@pytest.mark.parametrize(
    "invalid_line",
    [
        b"PUB a 15\nx\r\nPUB b 1\r\ny\r\nz\r\n",  # The size field is not the 1.
        b"PUB a 1x\nx\r\n",
        b"PUB a 301\r\n%b\r\n" % bytes(301),
        b"PUB a 2\r\nxyz",
        b"PUB a 1\r\nxyz",
    ],
)
def test_invalid_line_in_a_batch_is_found(invalid_line: bytes) -> None:
    valid = [pub(Random(), subject, b"x" * n) for n, subject in enumerate(SUBJECTS * 12)]
    data = b"".join([*valid, invalid_line, *valid])
    reading = read([data])
    assert reading.found == parse_with_oracle(data)
    assert reading.kinds["MixedBatch"] > 0


@pytest.mark.parametrize(
    "invalid_line",
    [
        b"PUB aaaa 35\r\n0123456789\r\nPUB aaaa 10\r\n0123456789\r\n",
        b"PUB aaaa 10\r\n0123456789xx",
        b"PUB aaaa 10\r\n0123456789\r\t",
        b"PUB aaab 10\r\n0123456789\r\n",
        b"PUB aaaa 10\t\n0123456789\r\n",
        b"PUB  aaa 10\r\n0123456789\r\n",
    ],
)
def test_different_line_ends_a_uniform_batch(invalid_line: bytes) -> None:
    valid = b"PUB aaaa 10\r\n0123456789\r\n"
    for valid_count in (1, 7, 8, 9, 300):
        data = valid * valid_count + invalid_line + valid * 30
        reading = read([data])
        assert reading.found == parse_with_oracle(data)
        assert reading.kinds["UniformBatch"] + reading.kinds["MixedBatch"] > 0 or reading.is_closed


def test_payloads_of_command_lines_stay_in_one_batch() -> None:
    invalid_line = b"PUB a 1\r\nx\r\n" * 20
    data = b"".join(pub(Random(), subject, invalid_line) for subject in SUBJECTS * 20)
    reading = read([data])
    assert reading.kinds == {"MixedBatch": 1}
    assert reading.batched["MixedBatch"] == 20 * len(SUBJECTS)


def test_read_is_searched_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = {"scan": 0, "stretch": 0}

    class Counted(BulkParser):
        def __init__(self, *arguments: object) -> None:
            calls["scan"] += 1
            super().__init__(*arguments)  # type: ignore[arg-type]

        def parse_batch(self, offset: int) -> object:  # type: ignore[override]
            calls["stretch"] += 1
            return super().parse_batch(offset)

    monkeypatch.setattr(parsers, "BulkParser", Counted)
    for length in (10, 20, 40):
        calls.update(scan=0, stretch=0)
        data_part = b"".join(pub(Random(), s, b"x") for s in (SUBJECTS * 6)[:length])
        data = (data_part + b"PUB a r 1\r\nx\r\n") * 100
        reading = read([data])
        assert len(reading.found) == 100 * (length + 1)
        assert calls["scan"] == 1
        assert calls["stretch"] <= max(200, 100 * length // bounds.SINGLE_MESSAGES_MAX)
        assert reading.kinds["MixedBatch"] == (
            100 if length > bounds.MIXED_BATCH_MESSAGES_MIN else 0
        )


def test_short_uniform_batch_is_not_compared_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    original = parsers._count_matching

    def count_same(data: Bytes, line: bytearray, stride: int, count: int) -> int:
        compared.append(count)
        return original(data, line, stride, count)

    monkeypatch.setattr(parsers, "_count_matching", count_same)
    for length, times in ((20, 500), (4000, 10)):
        compared.clear()
        run = b"HPUB a 0 1\r\nx\r\n" * length + b"HPUB b 0 1\r\nx\r\n"
        reading = read([run * times])
        assert reading.kinds["UniformBatch"] == times
        assert sum(compared) <= times * (5 * length + bounds.UNIFORM_BLOCK_MESSAGES)


def test_mixed_batch_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.nats.protocol.bulk_parser.MIXED_BATCH_MESSAGES_MAX", 100)
    for payload in (b"x", LOOKS_LIKE[0]):
        data = b"".join(pub(Random(), subject, payload) for subject in SUBJECTS * 40)
        reading = read([data])
        assert reading.found == parse_with_oracle(data)
        assert reading.kinds["MixedBatch"] == 3


def test_acks_are_not_added_to_the_subject_table() -> None:
    table = SubjectTable()
    data = b"".join(pub(Random(), b"$JS.ACK.1.d.1.%d.1.0.0" % n, b"+ACK") for n in range(300))
    reading = read([data], table=table)
    assert reading.found == parse_with_oracle(data)
    assert reading.kinds["MixedBatch"] == 0
    assert table.names == []


def test_new_subjects_of_a_mixed_batch_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.nats.protocol.bulk_parser.NEW_SUBJECT_MESSAGES_MAX", 30)
    for payload in (b"x", LOOKS_LIKE[0]):
        table = SubjectTable()
        data = b"".join(pub(Random(), b"subject.%d" % (n % 100), payload) for n in range(300))
        reading = read([data], table=table)
        assert reading.found == parse_with_oracle(data)
        assert reading.kinds["MixedBatch"] == 10  # Subjects are looked up once per read.
        assert read([data], table=table).kinds["MixedBatch"] == 1


def test_few_subjects_are_added_at_once_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.nats.protocol.subject_table.SUBJECTS_MAX", 150)
    monkeypatch.setattr("simplebus.nats.protocol.bulk_parser.NEW_SUBJECT_MESSAGES_MAX", 30)
    added_counts: list[int] = []
    original = SubjectTable.assign_numbers

    def assign_numbers(table: SubjectTable, subjects: list[bytes], *where: Any) -> list[int]:
        added_counts.append(len(subjects))
        return original(table, subjects, *where)

    monkeypatch.setattr(SubjectTable, "assign_numbers", assign_numbers)
    table = SubjectTable()
    old = b"".join(pub(Random(), b"s.%d" % n, b"x" * (n % 7)) for n in range(140))
    new = b"".join(pub(Random(), b"t.%d" % n, b"x" * (n % 7)) for n in range(15))
    assert read([old, old + new], table=table).found == parse_with_oracle(old + old + new)
    assert table.generation > 0
    assert max(added_counts) == 30


def test_subject_table_is_reset_between_events_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.nats.protocol.subject_table.SUBJECTS_MAX", 150)
    monkeypatch.setattr("simplebus.nats.protocol.bulk_parser.MIXED_BATCH_MESSAGES_MAX", 100)
    table = SubjectTable()
    data = b"".join(pub(Random(), b"s.%d" % (n * n % 997), b"x" * (n % 7)) for n in range(1000))
    reading = read([data, data], table=table)
    assert reading.found == parse_with_oracle(data + data)
    assert table.generation >= 3
    assert reading.batched["MixedBatch"] > 1900
    first_messages = b"".join(pub(Random(), b"s.%d" % (n % 90), b"x" * (n % 7)) for n in range(60))
    new_messages = b"".join(pub(Random(), b"t.%d" % n, b"x" * (n % 7)) for n in range(140))
    for _ in range(3):  # Subjects that were known at the start of the read are reset within it.
        reading = read(
            [first_messages, first_messages + new_messages + first_messages], table=table
        )
        assert reading.found == parse_with_oracle(
            first_messages + first_messages + new_messages + first_messages
        )


def test_control_line_limit_bounds_batch_subjects() -> None:
    limits = NatsLimits(max_control_line=64, max_payload=9)
    subjects = [b"s" * n for n in range(55, 64)]
    data = b"".join(pub(Random(), s, b"x" * (n % 10)) for n, s in enumerate(subjects * 20))
    expected = parse_with_oracle(data, limits=limits)
    assert expected[-1][0] == "CLOSE"
    long_lines = [b"PUB %b 000001\r\nx\r\n" % (b"s" * n) for n in (57, 58)]
    for first_messages in (
        long_lines[:1] * 60,
        [*long_lines[:1] * 30, *long_lines, *long_lines[:1] * 30],
    ):
        mixed = b"".join([pub(Random(), b"a", b"x"), *first_messages])
        assert read([mixed], limits=limits).found == parse_with_oracle(mixed, limits=limits)
    valid = data[: data.index(b"s" * 63) - 4]
    assert read([data], limits=limits).found == expected
    assert read([valid * 20], limits=limits).found == parse_with_oracle(valid * 20, limits=limits)


@given(st.lists(st.sampled_from([b"\n", b"\n\n", b"x", b"xxxxxxxx"]), max_size=60), st.data())
def test_finds_every_line_feed(parts: list[bytes], draw: st.DataObject) -> None:
    data = b"".join(parts)
    raw = bytearray(data + b"\n" * 16)
    first = draw.draw(st.integers(0, len(data)))
    last = draw.draw(st.integers(first, len(data)))
    expected = [offset for offset in range(first, last) if data[offset] == 0x0A]
    assert find_line_feeds(raw, first, last).tolist() == expected


def test_finds_line_feeds_across_blocks() -> None:
    raw = bytearray(Random(1).randbytes(700_000) + bytes(16))
    expected = [offset for offset in range(3, 700_000) if raw[offset] == 0x0A]
    assert find_line_feeds(raw, 3, 700_000).tolist() == expected
