"""Tests of the send queue: acks precede every frame that is not partly sent."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplebus.client.core.acks import ACKED, AckBuffer, AckToken
from simplebus.client.core.publish_batch import PublishBatch
from simplebus.client.core.send_queue import SendQueue
from tests.support.oracles import build_frame, parse_frame, split_frames

MESSAGE, ACK, CONNECT = b"134"


class FakeSource:
    """Source that releases given batches."""

    def __init__(self) -> None:
        self.batches: deque[PublishBatch] = deque()
        self.unreleased_bytes = 0
        self.released_position = self.next = 0
        self.is_out_of_credit = False

    def append_batch(self, *payloads: bytes) -> bytes:
        """Append a batch of messages that look like delimiters."""
        found = [
            build_frame(MESSAGE, class_id=0x3C0D, message_id=0x0A3E3C0D + n, content=payload)
            for n, payload in enumerate(payloads)
        ]
        bounds = [sum(map(len, found[:n])) for n in range(len(found) + 1)]
        batch = PublishBatch(
            memoryview(bytearray(b"".join(found))), bounds, first_position=self.next
        )
        self.batches.append(batch)
        self.unreleased_bytes += batch.size_bytes
        self.next = batch.end_position
        return b"".join(found)

    def release_batch(self) -> PublishBatch | None:
        if self.is_out_of_credit or not self.batches:
            return None
        batch = self.batches.popleft()
        self.unreleased_bytes -= batch.size_bytes
        self.released_position = batch.end_position
        return batch

    @property
    def has_unreleased(self) -> bool:
        return bool(self.batches)

    def require_credit(self) -> bool:
        return False


class Subscriber:
    decode = None


def create_send_queue() -> tuple[SendQueue, FakeSource, AckBuffer]:
    source = FakeSource()
    send_queue = SendQueue(source)
    send_queue.is_open = True
    ack_buffer = AckBuffer(send_queue.ack_sink, 7, can_span_gaps=False)
    ack_buffer.attach()
    return send_queue, source, ack_buffer


def append_ack(ack_buffer: AckBuffer, first: int, last: int) -> None:
    receipt = AckToken(
        Subscriber(), ack_buffer, class_id=1, sequences=range(first, last), attempt=1
    )
    receipt.settle(ACKED, 0, last - first)


def send(send_queue: SendQueue, max_bytes: int = 1 << 40) -> bytes:
    """Send up to `most` bytes, as a socket with a full buffer would."""
    sent = b""
    while len(sent) < max_bytes and (data := send_queue.peek()):
        count = min(len(data), max_bytes - len(sent))
        sent += bytes(data[:count])
        send_queue.mark_sent(count)
    return sent


def request(number: int) -> bytes:
    return build_frame(CONNECT, message_id=number, content=b"{}")


def test_frames_are_sent_in_order() -> None:
    send_queue, source, _ = create_send_queue()
    expected = source.append_batch(b"one", b"two") + source.append_batch(b"three")
    send_queue.append_frame(request(1))
    expected += request(1) + source.append_batch(b"four")
    send_queue.append_frame(request(2))
    send_queue.append_frame(request(3))
    expected += request(2) + request(3) + source.append_batch(b"five")
    assert send_queue.queued_bytes == len(expected)
    assert send(send_queue) == expected
    assert (send_queue.queued_bytes, send_queue.sent_bytes, send_queue.is_idle) == (
        0,
        len(expected),
        True,
    )
    assert send_queue.peek() == b""


def test_only_connect_is_sent_before_its_reply() -> None:
    send_queue, source, ack_buffer = create_send_queue()
    send_queue.is_open = False
    source.append_batch(b"one")
    append_ack(ack_buffer, 0, 1)
    send_queue.append_frame(request(1))
    assert send(send_queue) == request(1)
    assert send_queue.encode_acks() == 0
    send_queue.is_open = True
    assert len(split_frames(send(send_queue))[0]) == 2


def test_requests_overtake_only_messages_without_credit() -> None:
    send_queue, source, _ = create_send_queue()
    free = source.append_batch(b"free")
    send_queue.append_frame_after(1, request(1))
    source.is_out_of_credit = True
    blocked = source.append_batch(b"held") + source.append_batch(b"too")
    send_queue.append_frame(request(2))
    send_queue.append_frame_after(3, request(3))
    send_queue.append_frame_after(3, request(4))
    assert send(send_queue) == free + request(1) + request(2)
    assert send_queue.queued_bytes == len(blocked)
    source.is_out_of_credit = False
    later_frame = source.append_batch(b"later")
    assert send(send_queue) == blocked + request(3) + request(4) + later_frame


@pytest.mark.parametrize("sent_bytes", range(2 * 17 + 1))
def test_acks_precede_every_frame_that_is_not_begun(sent_bytes: int) -> None:
    send_queue, source, ack_buffer = create_send_queue()
    run = source.append_batch(b"frst", b"scnd")
    first = send(send_queue, sent_bytes)
    append_ack(ack_buffer, 0, 3)
    found, incomplete = split_frames(first + send(send_queue))
    assert incomplete == b""
    expected = build_frame(ACK, class_id=7, content=b"0-3")
    assert found.index(expected) == -(-sent_bytes // 17)
    assert [frame for frame in found if frame != expected] == split_frames(run)[0]


@given(st.data())
def test_frames_stay_whole_and_ordered_within_their_kind(
    data: st.DataObject,
) -> None:
    send_queue, source, ack_buffer = create_send_queue()
    written, messages, requests, acked = b"", b"", b"", 0
    for number in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from("mmraawww")):
            case "m":
                sizes = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=4))
                messages += source.append_batch(
                    *(bytes([n]) * size for n, size in enumerate(sizes))
                )
            case "r":
                send_queue.append_frame(request(number))
                requests += request(number)
            case "a":
                append_ack(ack_buffer, acked, acked + 3)
                acked += 3
            case "w":
                written += send(send_queue, data.draw(st.integers(1, 90)))
    found, incomplete = split_frames(written + send(send_queue))
    assert incomplete == b""
    assert b"".join(frame for frame in found if frame[0] == MESSAGE) == messages
    assert b"".join(frame for frame in found if frame[0] == CONNECT) == requests
    contents = [parse_frame(frame)[4] for frame in found if frame[0] == ACK]
    ids = [n for content in contents for n in range(*map(int, content.split(b"-")))]
    assert ids == list(range(acked))
    assert send_queue.queued_bytes == 0


@given(st.data())
def test_has_written_acks_after_all_earlier_acks_are_sent(data: st.DataObject) -> None:
    send_queue, source, ack_buffer = create_send_queue()
    source.append_batch(b"before" * data.draw(st.integers(0, 9)))
    send(send_queue, data.draw(st.integers(0, 40)))
    append_ack(ack_buffer, 0, 1)
    mark = send_queue.encode_acks()
    written = b""
    for first in range(1, 400):
        if send_queue.has_written_acks(mark):
            break
        append_ack(ack_buffer, first, first + 1)
        written += send(send_queue, data.draw(st.integers(1, 7)))
    assert b"0-1<\r\n>" in written


def test_lost_connection_drops_encoded_acks_and_counts_them_as_written() -> None:
    send_queue, source, ack_buffer = create_send_queue()
    source.append_batch(b"message")
    send_queue.append_frame(request(1))
    append_ack(ack_buffer, 0, 1)
    mark = send_queue.encode_acks()
    send(send_queue, 3)
    send_queue.close()
    assert send_queue.has_written_acks(mark)
    assert (send_queue.queued_bytes, send_queue.peek()) == (0, b"")
    send_queue.append_frame(request(2))
    assert send(send_queue) == request(2)
