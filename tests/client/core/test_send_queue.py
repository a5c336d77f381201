"""What a client writes: the word on messages ahead of everything that is not begun."""

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


class Source:
    """A publisher with chunks to give, as many as it may."""

    def __init__(self) -> None:
        self.chunks: deque[PublishBatch] = deque()
        self.unreleased_bytes = 0
        self.released_position = self.next = 0
        self.holds_back = False

    def put(self, *payloads: bytes) -> bytes:
        """A chunk of messages that look like delimiters."""
        found = [
            build_frame(MESSAGE, class_id=0x3C0D, message_id=0x0A3E3C0D + n, content=payload)
            for n, payload in enumerate(payloads)
        ]
        bounds = [sum(map(len, found[:n])) for n in range(len(found) + 1)]
        chunk = PublishBatch(
            memoryview(bytearray(b"".join(found))), bounds, first_position=self.next
        )
        self.chunks.append(chunk)
        self.unreleased_bytes += chunk.size_bytes
        self.next = chunk.end_position
        return b"".join(found)

    def release_batch(self) -> PublishBatch | None:
        if self.holds_back or not self.chunks:
            return None
        chunk = self.chunks.popleft()
        self.unreleased_bytes -= chunk.size_bytes
        self.released_position = chunk.end_position
        return chunk


class Subscriber:
    decode = None


def an_outgoing() -> tuple[SendQueue, Source, AckBuffer]:
    source = Source()
    out = SendQueue(source)
    out.is_open = True
    log = AckBuffer(out.ack_sink, 7, can_span_gaps=False)
    log.attach()
    return out, source, log


def ack(log: AckBuffer, first: int, last: int) -> None:
    receipt = AckToken(Subscriber(), log, class_id=1, sequences=range(first, last), attempt=1)
    receipt.settle(ACKED, 0, last - first)


def take(out: SendQueue, most: int = 1 << 40) -> bytes:
    """Write up to so many bytes, as a socket that takes no more would."""
    taken = b""
    while len(taken) < most and (data := out.peek()):
        count = min(len(data), most - len(taken))
        taken += bytes(data[:count])
        out.mark_sent(count)
    return taken


def request(number: int) -> bytes:
    return build_frame(CONNECT, message_id=number, content=b"{}")


def test_frames_leave_in_the_order_in_which_they_were_put() -> None:
    out, source, _ = an_outgoing()
    expected = source.put(b"one", b"two") + source.put(b"three")
    out.append_frame(request(1))
    expected += request(1) + source.put(b"four")
    out.append_frame(request(2))
    out.append_frame(request(3))
    expected += request(2) + request(3) + source.put(b"five")
    assert out.queued_bytes == len(expected)
    assert take(out) == expected
    assert (out.queued_bytes, out.sent_bytes, out.is_idle) == (0, len(expected), True)
    assert out.peek() == b""


def test_until_the_bus_has_answered_nothing_but_the_connect_is_written() -> None:
    out, source, log = an_outgoing()
    out.is_open = False
    source.put(b"one")
    ack(log, 0, 1)
    out.append_frame(request(1))
    assert take(out) == request(1)
    assert out.encode_acks() == 0
    out.is_open = True
    assert len(split_frames(take(out))[0]) == 2


def test_requests_overtake_only_what_the_credit_holds_back() -> None:
    out, source, _ = an_outgoing()
    free = source.put(b"free")
    out.append_frame_after(1, request(1))
    source.holds_back = True
    held = source.put(b"held") + source.put(b"too")
    out.append_frame(request(2))
    out.append_frame_after(3, request(3))
    out.append_frame_after(3, request(4))
    assert take(out) == free + request(1) + request(2)
    assert out.queued_bytes == len(held)
    source.holds_back = False
    later = source.put(b"later")
    assert take(out) == held + request(3) + request(4) + later


@pytest.mark.parametrize("taken", range(2 * 17 + 1))
def test_acks_go_before_every_frame_that_is_not_begun(taken: int) -> None:
    out, source, log = an_outgoing()
    run = source.put(b"frst", b"scnd")
    first = take(out, taken)
    ack(log, 0, 3)
    found, rest = split_frames(first + take(out))
    assert rest == b""
    expected = build_frame(ACK, class_id=7, content=b"0-3")
    assert found.index(expected) == -(-taken // 17)
    assert [frame for frame in found if frame != expected] == split_frames(run)[0]


@given(st.data())
def test_whatever_comes_meanwhile_no_frame_is_cut_and_nothing_overtakes_its_like(
    data: st.DataObject,
) -> None:
    out, source, log = an_outgoing()
    written, messages, requests, acked = b"", b"", b"", 0
    for number in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from("mmraawww")):
            case "m":
                sizes = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=4))
                messages += source.put(*(bytes([n]) * size for n, size in enumerate(sizes)))
            case "r":
                out.append_frame(request(number))
                requests += request(number)
            case "a":
                ack(log, acked, acked + 3)
                acked += 3
            case "w":
                written += take(out, data.draw(st.integers(1, 90)))
    found, rest = split_frames(written + take(out))
    assert rest == b""
    assert b"".join(frame for frame in found if frame[0] == MESSAGE) == messages
    assert b"".join(frame for frame in found if frame[0] == CONNECT) == requests
    contents = [parse_frame(frame)[4] for frame in found if frame[0] == ACK]
    ids = [n for content in contents for n in range(*map(int, content.split(b"-")))]
    assert ids == list(range(acked))
    assert out.queued_bytes == 0


@given(st.data())
def test_a_mark_is_written_when_all_acks_before_it_are(data: st.DataObject) -> None:
    out, source, log = an_outgoing()
    source.put(b"before" * data.draw(st.integers(0, 9)))
    take(out, data.draw(st.integers(0, 40)))
    ack(log, 0, 1)
    mark = out.encode_acks()
    written = b""
    for first in range(1, 400):
        if out.has_written_acks(mark):
            break
        ack(log, first, first + 1)
        written += take(out, data.draw(st.integers(1, 7)))
    assert b"0-1<\r\n>" in written


def test_a_lost_connection_takes_what_was_encoded_with_it_and_leaves_no_mark_unreached() -> None:
    out, source, log = an_outgoing()
    source.put(b"message")
    out.append_frame(request(1))
    ack(log, 0, 1)
    mark = out.encode_acks()
    take(out, 3)
    out.close()
    assert out.has_written_acks(mark)
    assert (out.queued_bytes, out.peek()) == (0, b"")
    out.append_frame(request(2))
    assert take(out) == request(2)
