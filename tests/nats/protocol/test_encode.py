"""Encoded batches equal their messages encoded one by one."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from simplebus.nats.limits import NatsLimits
from simplebus.nats.protocol import encode
from simplebus.nats.protocol.events import Indexes, MixedBatch, Pub, UniformBatch, iter_messages
from tests.nats.protocol.parser_driver import BUFFER, Reading

SUBJECTS = [b"a", b"b.c.d", b"s" * 9, b"\xff.\0"]


def line(message: Pub, sid: bytes, *, headers: bool) -> bytes:
    """Oracle: build the line word by word."""
    body, arguments = bytes(message.body), [b"MSG", message.subject, sid]
    if message.reply:
        arguments.append(message.reply)
    if message.header_bytes and headers:
        arguments[0] = b"HMSG"
        arguments += [message.header_size, message.size]
    elif message.header_bytes:
        body = body[message.header_bytes :]
        arguments.append(str(len(body)).encode())
    else:
        arguments.append(message.size)
    return b" ".join(arguments) + b"\r\n" + body + b"\r\n"


def batch(data: bytes) -> tuple[UniformBatch | MixedBatch, list[bytes]]:
    """Return the single batch in these bytes, and the subjects by number."""
    reading = Reading(NatsLimits(max_payload=3000))
    [event] = reading.parser.receive(BUFFER, BUFFER.fill(data))
    assert isinstance(event, UniformBatch | MixedBatch)
    return event, reading.table.names


def some_rows(count: int) -> list[Indexes | None]:
    every = np.arange(count)
    return [None, every[:0], every[:1], every[-1:], every[::3], every[5:20], every]


def test_single_message_is_line_and_payload() -> None:
    def pub(*arguments: bytes, header_bytes: int = 0, body: bytes = b"xyz") -> Pub:
        return Pub(*arguments, header_bytes, memoryview(body))  # type: ignore[arg-type]

    plain = pub(b"a", b"", b"003", b"")
    assert encode.encode_message(plain, b"7", headers=False) == b"MSG a 7 003\r\nxyz\r\n"
    asking = pub(b"a", b"r.1", b"3", b"")
    assert encode.encode_message(asking, b"s", headers=True) == b"MSG a s r.1 3\r\nxyz\r\n"
    headed = pub(b"a", b"r", b"03", b"002", header_bytes=2)
    assert encode.encode_message(headed, b"1", headers=True) == b"HMSG a 1 r 002 03\r\nxyz\r\n"
    assert encode.encode_message(headed, b"1", headers=False) == b"MSG a 1 r 1\r\nz\r\n"
    message = pub(b"a", b"", b"03", b"00")
    assert encode.encode_message(message, b"1", headers=True) == b"MSG a 1 03\r\nxyz\r\n"
    for each in (plain, asking, headed, message):
        for headers in (True, False):
            pieces = encode.encode_shared(each.with_shared_end(), b"1", headers=headers)
            assert b"".join(pieces) == encode.encode_message(each, b"1", headers=headers)


@pytest.mark.parametrize("headers", [True, False])
@pytest.mark.parametrize("size", [2, 9, 150])
@pytest.mark.parametrize("verb", [b"PUB a.b", b"PUB a r", b"HPUB a", b"hpub a r", b"HPUB 0 a"])
def test_uniform_batch_encodes_like_single_messages(verb: bytes, size: int, headers: bool) -> None:
    random = Random(size)
    header_size = b" 0" if verb.startswith(b"HPUB 0") else b" 02"
    sizes = (header_size if verb[:1] in b"Hh" else b"") + b" %d\r\n" % size
    event, names = batch(
        b"".join(verb + sizes + random.randbytes(size) + b"\r\n" for _ in range(60))
    )
    assert isinstance(event, UniformBatch)
    messages = [*iter_messages(event, names)]
    for sid in (b"1", b"sid.22"):
        for rows in some_rows(event.count):
            chosen = messages if rows is None else [messages[row] for row in rows]
            expected = b"".join(line(message, sid, headers=headers) for message in chosen)
            written = encode.encode_uniform(event, sid, rows, headers=headers)
            assert bytes(written) == expected
            assert len(memoryview(written)) == len(expected)


def payloads(kind: str, random: Random) -> list[bytes]:
    sizes = [random.choice([0, 1, 2, 7, 8, 9, 30, 100, 299]) for _ in range(120)]
    if kind == "text":
        return [bytes(random.choices(b"abc {}\r\n", k=size)) for size in sizes]
    if kind == "all bytes":
        return [*(random.randbytes(size) for size in sizes), bytes(range(256))]
    if kind == "large":
        return [bytes(range(256)), *(random.randbytes(1000 + size) for size in sizes[:40])]
    return [b""] * 60


@pytest.mark.parametrize("kind", ["text", "all bytes", "large", "empty"])
@pytest.mark.parametrize("sid", [b"1", b"22", b"sid.4444", b"s" * 40])
def test_mixed_batch_encodes_like_single_messages(sid: bytes, kind: str) -> None:
    random = Random(kind)
    subjects = [random.choice(SUBJECTS) for _ in range(120)]
    bodies = payloads(kind, random)
    data = [
        b"PUB %b %d\r\n%b\r\n" % (subject, len(body), body)
        for subject, body in zip(subjects, bodies, strict=False)
    ]
    event, names = batch(b"".join(data))
    assert isinstance(event, MixedBatch)
    messages = [*iter_messages(event, names)]
    for rows in some_rows(event.count):
        chosen = messages if rows is None else [messages[row] for row in rows]
        expected = b"".join(line(message, sid, headers=False) for message in chosen)
        written = encode.encode_mixed(event, sid, rows)
        assert bytes(written) == expected


@pytest.mark.parametrize("headers", [True, False])
@pytest.mark.parametrize("kind", ["run", "run with headers", "mix"])
def test_several_subscriptions_receive_messages_in_order(kind: str, headers: bool) -> None:
    line_of = {"run": "PUB a r 3", "run with headers": "HPUB a 1 3", "mix": "PUB a{} 3"}[kind]
    event, names = batch(
        b"".join(b"%b\r\nx%02d\r\n" % (line_of.format(n).encode(), n) for n in range(60))
    )
    messages = [*iter_messages(event, names)]
    all_rows = np.arange(60)
    for parts in (
        [(b"1", None), (b"22", None)],
        [(b"1", None), (b"22", all_rows[3:30:2]), (b"3", all_rows[:0])],
        [(b"1", all_rows[20:]), (b"22", all_rows[:20])],
    ):
        expected = b"".join(
            line(message, sid, headers=headers)
            for row, message in enumerate(messages)
            for sid, rows in parts
            if rows is None or row in rows
        )
        assert bytes(encode.encode_for_subscriptions(event, parts, headers=headers)) == expected


def test_encoded_bytes_do_not_share_the_receive_buffer() -> None:
    for data in (
        b"PUB a 1\r\nx\r\n" * 40,
        b"".join(b"PUB a%d 1\r\nx\r\n" % n for n in range(60)),
    ):
        event, _ = batch(data)
        written = (
            encode.encode_uniform(event, b"1", None, headers=False)
            if isinstance(event, UniformBatch)
            else encode.encode_mixed(event, b"1", None)
        )
        bytes_before = bytes(written)
        BUFFER.fill(bytes(len(data)))
        assert bytes(written) == bytes_before
