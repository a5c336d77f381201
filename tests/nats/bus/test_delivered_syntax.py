"""Syntax of the output to NATS clients, for arbitrary messages of bus clients.

The output is parsed by nats-py and by a strict parser in this file. The strict parser rejects
everything that at least one client library rejects.
"""

from __future__ import annotations

import asyncio
import re

import nats
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simplebus.core.channel.pattern import check_name
from simplebus.core.protocol.envelope_batch import Envelope, encode
from tests.behaviour.wire_peer_v2 import connect_version2, publish, publish_envelopes
from tests.nats.bus.two_listeners import NatsBrokerHarness

INFO = b'INFO {"server_id":"x","version":"2.15.1","headers":true,"max_payload":1048576}\r\n'
LINE = re.compile(rb"MSG ([^\s\0]+) ([12]) (?:([^\s\0]+) )?()(\d+)\r\n")
LINE_WITH_HEADERS = re.compile(rb"HMSG ([^\s\0]+) ([12]) (?:([^\s\0]+) )?(\d+) (\d+)\r\n")
HEADERS = re.compile(
    rb"NATS/1\.0(?: [1-9][0-9]{2}(?: [^\r\n\0]*)?)?\r\n(?:[!-9;-~]+:[^\r\n\0]*\r\n)*\r\n"
)


def parse_strictly(data: bytes) -> list[tuple[bytes, bytes, bytes, bytes]]:
    """Return sid, subject, reply subject and payload of each message."""
    offset, messages = 0, []
    while offset < len(data):
        line = LINE.match(data, offset) or LINE_WITH_HEADERS.match(data, offset)
        assert line is not None, data[offset:]
        subject, sid, reply, header_size, size = line.groups()
        start, end = line.end() + int(header_size or 0), line.end() + int(size)
        assert line.end() <= start <= end
        if header_size:
            assert HEADERS.fullmatch(data, line.end(), start), data[line.end() : start]
        for text in (subject, reply or b"", data[line.end() : start]):
            text.decode()
        assert data[end : end + 2] == b"\r\n"
        messages.append((sid, subject, reply or b"", data[start:end]))
        offset = end + 2
    return messages


async def parse_with_nats_py(data: bytes) -> list[tuple[bytes, bytes, bytes, bytes]]:
    """Return the messages that nats-py finds, as `parse_strictly` does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        while line := await reader.readline():
            if line.startswith(b"SUB second"):
                writer.write(data)
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    messages = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()[:2]
        client = await nats.connect(f"nats://{host}:{port}", allow_reconnect=False)
        subscriptions = [await client.subscribe(name) for name in ("first", "second")]
        await client.flush(timeout=20)  # Fails if the client's read loop has ended.
        for sid, subscription in enumerate(subscriptions, 1):
            while subscription.pending_msgs:
                message = await subscription.next_msg()
                fields = [str(sid), message.subject, message.reply]
                messages.append((*(field.encode() for field in fields), message.data))
        await client.close()
    return messages  # type: ignore[return-value]


def is_channel(text: str) -> bool:
    try:
        return bool(check_name(text))
    except ValueError:
        return False


TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.sampled_from(
        ["", " ", "503", "503 No Responders", "5x3", "é1 x", "NATS/1.0\r\n\r\n", "a\r\nb", "\0"]
        + [
            f"NATS/1.0{header}\r\n\r\n"
            for header in ("\r\nA: b", " 503", " x\r\nA: b", "\r\nA: \xff")
        ]
        + ["NATS/1.0\r\nA b\r\n\r\n", "garbage", "x" * 5000]
    ),
)
NAMES = st.one_of(
    st.sampled_from(["Nats-Header-Block", "Nats-Status", "Nats-Reply-To", "Status", "A", "From "]),
    TEXTS,
)
CHANNELS = st.one_of(st.just(""), st.text(min_size=1, max_size=8).filter(is_channel))
ENVELOPES = st.builds(
    lambda channel, key, headers: Envelope(channel, key, headers),
    CHANNELS,
    st.just(b"") | st.binary(max_size=4),
    st.lists(st.tuples(NAMES, TEXTS), max_size=3).map(tuple),
)


@settings(max_examples=2 * settings().max_examples)
@given(
    st.lists(st.tuples(ENVELOPES, st.binary(max_size=8)), min_size=1, max_size=12),
    st.sampled_from(["shop", "a b", "é", "x" * 200, "\r\nPUB x 0", ">"]),
)
@example([(Envelope(headers=(("Nats-Header-Block", "garbage"),)), b"x")], "shop")
@example([(Envelope(headers=(("Nats-Header-Block", ""),)), b"x")], "shop")
@example([(Envelope(headers=(("Nats-Status", "5\xe93 x"),)), b"x")], "shop")
@example([(Envelope(headers=(("Nats-Reply-To", "a b\r\n"),)), b"x")], "shop")
def test_clients_can_parse_whatever_is_published(
    published: list[tuple[Envelope, bytes]], class_name: str
) -> None:
    harness = NatsBrokerHarness()
    peer = connect_version2(harness, classes=[class_name])
    class_id = harness.broker.store.class_id_by_name[class_name]
    client = harness.client(b"SUB > 1\r\n", b"SUB $SB.SUB.%d 2\r\n" % class_id)
    contents = [encode(envelope, payload) for envelope, payload in published]
    peer.send(publish_envelopes(class_id, 0, *contents))
    peer.send(publish(class_id, len(contents), *[b"plain"] * 10))
    assert peer.receive_error_codes() == []
    data = client.drain()
    messages = parse_strictly(data)
    for sid in (b"1", b"2"):
        payloads = [payload for number, *_, payload in messages if number == sid]
        assert payloads == [payload for _, payload in published] + [b"plain"] * 10
    assert sorted(asyncio.run(parse_with_nats_py(data))) == sorted(messages)
