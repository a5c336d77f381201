"""Conversion of NATS messages to envelopes and back; batches equal single messages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import HEADERS_MAX
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import Envelope, encode, scan_envelopes
from simplebus.nats.bus import convert
from simplebus.nats.bus.convert import (
    BLOCK_HEADER,
    REPLY_HEADER,
    STATUS_HEADER,
    MessageConverter,
    format_header_block,
    message_from_frame,
    parse_header_block,
)
from simplebus.nats.protocol.events import MixedBatch, Pub, UniformBatch, iter_messages
from simplebus.nats.subjects import class_subject

SUBJECTS = [b"a.b", b"<", b"orders.eu", b"a.*", b"caf\xe9", b"x" * 60]
PAYLOADS = st.sampled_from([b"", b"<", b"\r\n", b"<\r\n", b"<\r\n>", b"plain", b"y" * 40])


def run_of(subject: bytes, reply: bytes, block: bytes, payloads: list[bytes]) -> UniformBatch:
    """Return a uniform batch of messages with this header block."""
    size = len(block) + len(payloads[0])
    arguments = b" ".join(filter(None, [subject, reply, b"%d" % len(block) if block else b""]))
    line = b"%bPUB %b %d\r\n" % (b"H" if block else b"", arguments, size)
    data = b"".join(line + block + payload + b"\r\n" for payload in payloads)
    rows = np.frombuffer(data, np.uint8).reshape(len(payloads), -1)
    header_size = b"%d" % len(block) if block else b""
    body = memoryview(block + payloads[0])
    return UniformBatch(
        Pub(subject, reply, b"%d" % size, header_size, len(block), body), rows, len(line)
    )


def mix_of(messages: list[tuple[bytes, bytes]]) -> tuple[MixedBatch, list[bytes]]:
    """Return a mixed batch, and its subjects by number."""
    names = list(dict.fromkeys(subject for subject, _ in messages))
    data, bounds, ends, bodies = b"", [0], [], []
    for subject, payload in messages:
        ends.append(len(data) + 4 + len(subject))
        data += b"PUB %b %d\r\n" % (subject, len(payload))
        bodies.append(len(data))
        data += payload + b"\r\n"
        bounds.append(len(data))
    columns = [np.array(column, np.int64) for column in (bounds, ends, bodies)]
    numbers = np.array([names.index(subject) for subject, _ in messages], np.int32)
    return MixedBatch(np.frombuffer(data, np.uint8), *columns, numbers), names


def assert_converts_like_single_messages(
    packer: MessageConverter,
    event: UniformBatch | MixedBatch,
    rows: list[int] | None,
    names: list[bytes],
) -> None:
    """Check that a batch converts like its messages one by one."""
    chosen = list(iter_messages(event, names))
    expected, channels, refused = b"", list[str](), 0
    for row in range(event.count) if rows is None else rows:
        try:
            channel, frame = packer.convert_message(chosen[row])
        except RemoteProtocolError:
            refused += 1
            continue
        assert frame == oracle(chosen[row])
        expected += frame
        channels.append(channel)
    found = packer.convert_batch(event, None if rows is None else np.array(rows, np.int64), names)
    assert sum(each.count for each in found.refused) == refused
    if found.frames is None:
        assert expected == b""
    else:
        found.frames.check()
        assert found.frames.data.tobytes() == expected
        assert found.columns is not None
        numbers = np.broadcast_to(found.columns.channels, found.columns.count)
        assert [found.columns.names[number] for number in numbers] == channels
        scanned = scan_envelopes(found.frames)
        assert scanned.count == found.columns.count
        assert (scanned.expires, scanned.not_before) == (None, None)


def oracle(message: Pub) -> bytes:
    """Return the frame of a message by way of its whole envelope."""
    headers = parse_header_block(bytes(message.body[: message.header_bytes]))
    if message.reply:
        headers = ((REPLY_HEADER, message.reply.decode()), *headers)
    envelope = Envelope(message.subject.decode(), headers=headers)
    content = encode(envelope, bytes(message.body[message.header_bytes :]))
    return frames.encode(frames.ENVELOPE, class_id=7, content=content)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SUBJECTS),
    st.sampled_from([b"", b"reply", b"caf\xe9"]),
    st.sampled_from([b"", b"NATS/1.0\r\nA: b\r\n\r\n", b"NATS/1.0\r\nA: <\r\n\r\n", b"odd<\r\n"]),
    st.lists(st.sampled_from([b"plain", b"<\r\n>x", b"12345"]), min_size=1, max_size=30),
    st.sampled_from([60, 1000]),
)
@example(b"<", b"", b"", [b"\r\n"] * 20, 1000)
@example(b"a.b", b"", b"", [b"12<"] * 20, 1000)
def test_uniform_batch_converts_like_single_messages(
    subject: bytes, reply: bytes, block: bytes, payloads: list[bytes], max_bytes: int
) -> None:
    packer = MessageConverter(7, frame_bytes_max=max_bytes)
    run = run_of(subject, reply, block, payloads)
    assert_converts_like_single_messages(packer, run, None, [])
    assert_converts_like_single_messages(packer, run, list(range(0, len(payloads), 2)), [])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SUBJECTS), PAYLOADS), min_size=1, max_size=30),
    st.sampled_from([60, 1000]),
)
def test_mixed_batch_converts_like_single_messages(
    messages: list[tuple[bytes, bytes]], max_bytes: int
) -> None:
    mix, names = mix_of(messages)
    packer = MessageConverter(7, frame_bytes_max=max_bytes)
    assert_converts_like_single_messages(packer, mix, None, names)
    assert_converts_like_single_messages(packer, mix, list(range(1, mix.count, 2)), names)


def test_uniform_batch_with_different_headers_converts_singly() -> None:
    blocks = [b"NATS/1.0\r\nA: %d\r\n\r\n" % (n % 10) for n in range(20)]
    run = run_of(b"a", b"", blocks[0], [b"pay"] * 20)
    rows = run.rows.copy()
    for row, block in zip(rows, blocks, strict=True):
        row[run.body_column : run.body_column + len(block)] = np.frombuffer(block, np.uint8)
    run.rows = rows
    assert_converts_like_single_messages(MessageConverter(7, frame_bytes_max=1000), run, None, [])


def test_subject_cache_is_bounded() -> None:
    packer = MessageConverter(7, frame_bytes_max=1000)
    for number in range(5000):
        name = b"a.%d%b" % (number, b"x" * (number % 300))
        channel, _ = packer.convert_message(Pub(name, b"", b"1", b"", 0, memoryview(b"x")))
        assert channel.encode() == name
    assert len(convert._subjects) <= 4096
    assert max(map(len, convert._subjects)) < 300


def test_refused_messages_have_a_reason() -> None:
    packer = MessageConverter(7, frame_bytes_max=100)
    with pytest.raises(RemoteProtocolError, match=r"reply subject b'.xff' is not UTF-8") as caught:
        packer.convert_message(Pub(b"a", b"\xff", b"0", b"", 0, memoryview(b"")))
    assert caught.value.reason is Reason.BAD_ENVELOPE
    long_block = memoryview(b"NATS/1.0\r\nA: %b\r\n\r\n" % (b"x" * 0xFFFF))
    with pytest.raises(RemoteProtocolError, match="headers have at most 65535 bytes") as caught:
        packer.convert_message(Pub(b"a", b"", b"0", b"0", len(long_block), long_block))
    assert caught.value.reason is Reason.BAD_ENVELOPE
    lines = b"".join(b"%d:\r\n" % number for number in range(HEADERS_MAX + 1))
    many = memoryview(b"NATS/1.0\r\n%b\r\n" % lines)
    with pytest.raises(RemoteProtocolError, match="at most 1024 headers, got 1025") as caught:
        packer.convert_message(Pub(b"a", b"", b"0", b"0", len(many), many))
    assert caught.value.reason is Reason.BAD_ENVELOPE
    (refused,) = packer.convert_batch(run_of(b"a", b"", b"", [b"x" * 100] * 20), None, []).refused
    assert (refused.reason, refused.count) == (Reason.FRAME_TOO_LONG, 20)
    assert refused.sentence == "the message has 117 bytes as a frame, at most 100 are accepted"


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([b"a.b", b"<", "\u00e9".encode()]),
    st.sampled_from([b"", b"reply", b"_INBOX.<"]),
    st.one_of(
        st.sampled_from([b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0 503\r\n\r\n", b"<\r\n"]),
        st.binary(max_size=40),
        st.lists(
            st.sampled_from([b"A: b", b"A:  \xc3\xa9 ", b"B:\xff", b"Nats-Status: 1", b"C:<"]),
            max_size=4,
        ).map(lambda lines: b"\r\n".join([b"NATS/1.0", *lines, b"", b""])),
    ),
    PAYLOADS,
)
def test_message_is_encoded_like_its_envelope(
    subject: bytes, reply: bytes, block: bytes, payload: bytes
) -> None:
    body = memoryview(block + payload)
    message = Pub(subject, reply, b"%d" % len(body), b"%d" % len(block), len(block), body)
    channel, frame = MessageConverter(7, frame_bytes_max=1000).convert_message(message)
    assert channel.encode() == subject
    assert frame == oracle(message)


# Headers -----------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=40))
@example(b"NATS/1.0 \r\nA: b\r\n\r\n")
@example(b"NATS/1.0\r\nA: b\x0bc\r\n\r\n")
@example(b"NATS/1.0 404\r\nNats-Status: 1\r\n\r\n")
def test_any_header_block_round_trips_or_is_a_header(block: bytes) -> None:
    headers = parse_header_block(block)
    encode(Envelope(headers=headers), b"")
    formatted = format_header_block(headers)
    if formatted != block:
        ((_, value),) = headers
        assert value.encode("latin-1") == block
        value = value.replace("\r", "%0D").replace("\n", "%0A").replace("\0", "%00")
        assert formatted == f"NATS/1.0\r\nNats-Header-Block: {value}\r\n\r\n".encode()


def test_blanks_around_header_values_are_removed() -> None:
    assert parse_header_block(b"NATS/1.0\r\nA:b\r\nC: \t d \r\n\r\n") == (("A", "b"), ("C", "d"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_any_headers_make_an_unambiguous_block(
    headers: list[tuple[str, str]],
) -> None:
    block = format_header_block(tuple(headers))
    lines = block.split(b"\r\n")
    assert block.endswith(b"\r\n\r\n")
    assert len(lines) == len(headers) + 3
    assert all(b":" in line and b"\r" not in line and b"\n" not in line for line in lines[1:-2])


def test_invalid_header_characters_are_percent_encoded() -> None:
    block = format_header_block((("a b:c", "x\r\ny"), ("é", "é"), ("", "z")))
    assert block == "NATS/1.0\r\na%20b%3Ac: x%0D%0Ay\r\n%C3%A9: é\r\n%: z\r\n\r\n".encode()


def test_reserved_header_names_in_other_places_are_plain_headers() -> None:
    assert (
        format_header_block(((BLOCK_HEADER, "☃"),))
        == "NATS/1.0\r\nNats-Header-Block: ☃\r\n\r\n".encode()
    )
    assert format_header_block(((BLOCK_HEADER, "x"), ("A", "b"))).startswith(
        b"NATS/1.0\r\nNats-Header-Block: x\r\n"
    )
    assert format_header_block((("A", "b"), (STATUS_HEADER, "503"))).startswith(
        b"NATS/1.0\r\nA: b\r\nNats-Status"
    )


# From frames --------------------------------------------------------------------------------------


def framed(envelope: Envelope, payload: bytes) -> bytes:
    return frames.encode(frames.ENVELOPE, class_id=1, content=encode(envelope, payload))


def test_stored_message_has_channel_headers_and_reply() -> None:
    envelope = Envelope("a.ü", b"key", ((REPLY_HEADER, "r.1"), ("A", "b")), 1, 2, 3)
    message = message_from_frame(framed(envelope, b"<\r\n>"), b"class.x")
    block = b"NATS/1.0\r\nA: b\r\n\r\n"
    assert (message.subject, message.reply) == ("a.ü".encode(), b"r.1")
    assert bytes(message.body) == block + b"<\r\n>"
    assert (message.header_bytes, message.header_size) == (len(block), b"%d" % len(block))
    assert message.size == b"%d" % len(message.body)


@pytest.mark.parametrize(
    "reply", ["", "a b", "a\r\nPUB x 0", "\x00", "long" * 1000, "$JS.ACK.a.d.1.0.1.0.0"]
)
def test_invalid_reply_subject_stays_a_header(reply: str) -> None:
    message = message_from_frame(
        framed(Envelope(headers=((REPLY_HEADER, reply),)), b""), b"class.1"
    )
    assert message.reply == b""
    assert bytes(message.body).count(b"\r\n") == 3
    assert message.subject == b"class.1"


def test_plain_frame_has_payload_and_class_subject() -> None:
    frame = frames.encode(frames.MESSAGE, class_id=1, content=b"pay")
    message = message_from_frame(frame, b"class.1", b"$JS.ACK")
    assert message == Pub(b"class.1", b"$JS.ACK", b"3", b"", 0, memoryview(b"pay"))


def test_acked_delivery_keeps_the_reply_header() -> None:
    frame = framed(Envelope("a", headers=((REPLY_HEADER, "r.1"),)), b"")
    message = message_from_frame(frame, b"class.1", b"$JS.ACK")
    assert message.reply == b"$JS.ACK"
    assert b"Nats-Reply-To: r.1\r\n" in bytes(message.body)


@pytest.mark.parametrize(
    ("name", "subject"),
    [("orders", b"class.orders"), ("dead.orders", b"class.dead.orders"), ("", b"class.7")]
    + [(name, b"class.7") for name in ("a b", "*", "a..b", "a.>", "\n")],
)
def test_class_subject_uses_name_or_id(name: str, subject: bytes) -> None:
    assert class_subject(7, name) == subject
