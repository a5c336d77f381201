"""Parsing of server output in any chunks, compared with a line-by-line oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.protocol.frames import Bytes, Flags, Integers
from simplebus.nats.client.bulk_parser import BATCH_MESSAGES_MIN
from simplebus.nats.client.events import (
    ReceivedMessages,
    ServerError,
    ServerInfo,
    ServerPing,
    ServerPong,
)
from simplebus.nats.client.line_parser import LINE_BYTES_MAX
from simplebus.nats.client.parser import ClientParser
from simplebus.nats.numbers import PADDING_BYTES, parse_numbers, parse_similar_numbers

MOST = 5000
WRONG = "wrong"


def parse_with_oracle(data: bytes) -> list[object]:
    """Oracle: return the messages as tuples of sid, subject, reply, headers and payload."""
    messages: list[object] = []
    offset = 0
    while (feed := data.find(b"\r\n", offset)) >= 0:
        line = data[offset:feed]
        if b"\n" in line:
            return [*messages, WRONG]
        tokens = [token for token in line.split(b" ") if token]
        verb = tokens[0].upper() if tokens and line[0] != 0x20 else b""
        offset = feed + 2
        if verb in (b"MSG", b"HMSG"):
            has_header = 1 + (verb == b"HMSG")
            if not has_header + 3 <= len(tokens) <= has_header + 4 or line[-1] == 0x20:
                return [*messages, WRONG]
            sizes = tokens[-has_header:]
            if not all(s.isdigit() and len(s) <= 9 for s in sizes) or not tokens[2].isdigit():
                return [*messages, WRONG]
            head, size = int(sizes[0]) if has_header == 2 else 0, int(sizes[-1])
            if head > size or size > MOST or len(tokens[2]) > 18:
                return [*messages, WRONG]
            if len(data) < offset + size + 2:
                return messages
            if data[offset + size : offset + size + 2] != b"\r\n":
                return [*messages, WRONG]
            reply = tokens[3] if len(tokens) == has_header + 4 else b""
            body = data[offset : offset + size]
            messages.append((int(tokens[2]), tokens[1], reply, body[:head], body[head:]))
            offset += size + 2
        elif verb == b"PING":
            messages.append(ServerPing())
        elif verb == b"PONG":
            messages.append(ServerPong())
        elif verb != b"+OK":
            return [*messages, WRONG]
    return messages


def read(chunks: list[bytes]) -> list[object]:
    """Return the same tuples from the parser."""
    parser = ClientParser(MOST)
    messages: list[object] = []
    for chunk in chunks:
        passed = bytearray(chunk)
        try:
            for event in parser.receive(passed):
                passed[:] = bytes(len(passed))  # The buffer may be overwritten by then.
                messages += rows(event) if isinstance(event, ReceivedMessages) else [event]
        except RemoteProtocolError:
            return [*messages, WRONG]
    return messages


def rows(messages: ReceivedMessages) -> list[object]:
    assert messages.all_payloads() == [messages.payload(row) for row in range(messages.count)]
    return [
        (
            int(messages.sids[row]),
            messages.subject(row),
            messages.reply(row),
            messages.headers(row),
            messages.payload(row),
        )
        for row in range(messages.count)
    ]


def message(sid: int, subject: bytes, reply: bytes, head: bytes, payload: bytes) -> bytes:
    arguments = [b"HMSG" if head else b"MSG", subject, b"%d" % sid, *([reply] if reply else [])]
    arguments += [b"%d" % len(head)] if head else []
    return (
        b" ".join([*arguments, b"%d" % (len(head) + len(payload))])
        + b"\r\n"
        + head
        + payload
        + (b"\r\n")
    )


subject_tokens = st.sampled_from(
    [b"a", b"orders.eu", b"$JS.ACK.S.c.1.2.3.4.5", b"\xff\r", b"x" * 40]
)
bodies = st.one_of(
    st.binary(max_size=30),
    st.sampled_from([b"\r\n", b"\r\nMSG a 1 0\r\n\r\n", b"MSG a 1 5\r\n", b"  ", b"x" * 300]),
    st.lists(st.sampled_from([b"\r\nMSG a 1 ", b"3", b"\r\n", b" "]), max_size=6).map(b"".join),
)  # fmt: skip
messages = st.builds(
    message,
    st.one_of(st.integers(0, 20), st.integers(10**16, 10**18 - 1)),
    subject_tokens,
    st.one_of(st.just(b""), subject_tokens),
    st.sampled_from([b"", b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\nA: b\r\n\r\n"]),
    bodies,
)
odd_messages = st.sampled_from(
    [
        b"PING\r\n",
        b"PONG x\r\n",
        b"+OK\r\n",
        b"msg  a 1  3\r\nabc\r\n",
        b"MSG a 1 3\r\nabcd\r\n",
        b"MSG a x 3\r\nabc\r\n",
        b"MSG a 1 r r 3\r\nabc\r\n",
        b"HMSG a 1 4 3\r\nabc\r\n",
        b"HMSG a 1 3\r\nabc\r\n",
        b"MSG a 1 0000000003\r\nabc\r\n",
        b"MSG a 1 6000\r\n",
        b"MSG a 1 3 \r\nabc\r\n",
        b" MSG a 1 3\r\nabc\r\n",
        b"\r\n",
        b"PUB a 1\r\n",
    ]
)
streams = st.lists(
    st.tuples(st.lists(st.one_of(messages, messages, odd_messages), min_size=1, max_size=3),
              st.sampled_from([1, 2, 40, 150])),
    max_size=4,
).map(lambda parts: b"".join(b"".join(repeated) * count for repeated, count in parts))  # fmt: skip


@given(streams, st.data())
@settings(max_examples=60)
def test_any_chunking_matches_the_oracle(stream: bytes, data: st.DataObject) -> None:
    # 40 and more repetitions are enough messages for the array paths.
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    chunks = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert read(chunks) == parse_with_oracle(stream)


@given(st.binary(max_size=200), st.lists(messages, max_size=3))
def test_garbage_is_refused_or_incomplete(garbage: bytes, prefix: list[bytes]) -> None:
    head = b"".join(prefix)
    result = read([head + garbage])
    assert result[: len(prefix)] == parse_with_oracle(head)


def test_byte_by_byte_equals_one_read() -> None:
    stream = b"".join(message(n, b"a.b", b"r" * (n % 2), b"", b"p" * n) for n in range(40))
    stream += b"PING\r\n" + message(1, b"a", b"", b"NATS/1.0\r\n\r\n", b"")
    assert read([stream[n : n + 1] for n in range(len(stream))]) == parse_with_oracle(stream)


def test_many_messages_are_one_event() -> None:
    stream = b"".join(message(7, b"a.b", b"r.%d" % n, b"", b"p" * (n % 9)) for n in range(1000))
    events = list(ClientParser().receive(stream))
    assert [e.count for e in events if isinstance(e, ReceivedMessages)] == [1000]
    (batch,) = events
    assert isinstance(batch, ReceivedMessages)
    repeated = batch.pick(batch.ends - batch.payloads == 8)
    assert repeated.count == 111
    assert repeated.reply(0) == b"r.8"
    assert list(batch.split_by_sid()) == [7]


def test_too_long_message_is_refused_in_a_batch() -> None:
    batch = message(1, b"a", b"", b"", b"x" * 50) * 200
    long_message = message(1, b"a", b"", b"", b"x" * (MOST + 1))
    assert read([batch + long_message + batch]) == parse_with_oracle(batch + long_message + batch)
    assert read([batch + long_message + batch])[-1] == WRONG


def test_splits_messages_by_subscription() -> None:
    stream = b"".join(message(n % 3, b"a", b"", b"", b"%d" % n) for n in range(9))
    (batch,) = ClientParser().receive(stream)
    assert isinstance(batch, ReceivedMessages)
    found = {sid: group.all_payloads() for sid, group in batch.split_by_sid().items()}
    assert found == {0: [b"0", b"3", b"6"], 1: [b"1", b"4", b"7"], 2: [b"2", b"5", b"8"]}


def test_parses_info_and_errors() -> None:
    text = b'INFO {"server_id":"x","headers":true,"connect_urls":["a:1"],"nonce":"n","new":1} \r\n'
    info, error = ClientParser().receive(text + b"-ERR 'Authorization Violation'\r\n")
    assert info == ServerInfo(server_id="x", headers=True, connect_urls=["a:1"], nonce="n")
    assert error == ServerError("Authorization Violation")


@pytest.mark.parametrize("line", [b"INFO x\r\n", b'INFO {"headers":3}\r\n', b"INFO\r\n", b"XXX"])
def test_invalid_server_line_is_refused(line: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="the server sent"):
        list(ClientParser().receive(line))


def test_endless_line_is_refused() -> None:
    parser = ClientParser()
    with pytest.raises(RemoteProtocolError, match="longer than"):
        list(parser.receive(b"INFO " + b"x" * LINE_BYTES_MAX))


def test_long_message_is_parsed_when_complete() -> None:
    parser = ClientParser()
    assert list(parser.receive(b"MSG a 1 4000000\r\n")) == []
    for _ in range(400):
        assert list(parser.receive(bytes(10_000))) == []
    assert len(parser._tail) == 401  # A list of pieces, which is not joined.
    (event,) = parser.receive(b"\r\n")
    assert isinstance(event, ReceivedMessages)
    assert len(event.payload(0)) == 4_000_000
    assert parser.tail_bytes == 0


@given(st.sampled_from([parse_numbers, parse_similar_numbers]), st.lists(st.one_of(
    st.sampled_from([b"128", b"128", b"129", b"28", b"12x"]),
    st.integers(0, 2**63 + 9).map(lambda n: b"%d" % n), st.binary(max_size=21),
    st.integers(0, 10**6).map(lambda n: b"%010d" % n),
), max_size=40))  # fmt: skip
def test_parse_numbers_matches_int(
    read: Callable[[Bytes, Integers, Integers], tuple[Integers, Flags]], texts: list[bytes]
) -> None:
    lengths = [len(text) for text in texts]
    ends = np.cumsum(np.array(lengths, np.int64)) + PADDING_BYTES
    data = np.frombuffer(bytes(PADDING_BYTES) + b"".join(texts), np.uint8)
    found, valid = read(data, ends - np.array(lengths, np.int64), ends)
    is_one = [t.isdigit() and len(t) <= 19 and int(t) < 2**63 for t in texts]
    assert valid.tolist() == is_one
    assert found.tolist() == [
        int(t) if is_it else 0 for t, is_it in zip(texts, is_one, strict=True)
    ]


def test_bulk_parser_is_used_for_many_messages() -> None:
    data = message(1, b"a", b"", b"", b"x" * 400) * BATCH_MESSAGES_MIN
    assert len(list(ClientParser().receive(data + b"PING\r\n"))) == 2
