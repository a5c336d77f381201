"""The client core against a broker: what programs are promised, without sockets or clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import ID_COUNT, build_frame, parse_ack, parse_frame, split_frames
from strategies import ACK, CONNECT, HEARTBEAT, MESSAGE, SUBSCRIBE, contents

from core.pair import Pair, payloads, take, take_batches
from simplebus.core import client as client_module
from simplebus.core.acks import AckWindow
from simplebus.core.broker import Settings
from simplebus.core.client import ClientCore
from simplebus.core.errors import LocalProtocolError, Reason, RemoteProtocolError
from simplebus.core.inbox import Inbox
from simplebus.core.limits import ACKS_MAX
from simplebus.core.receive import ReceiveBuffer

NUMBERED = [b"message %d" % number for number in range(200)]
SHORT = Settings(ack_timeout=2)


def said(pair: Pair, *kinds: int) -> list[tuple[int, int, bytes]]:
    """(type, class, content) of the frames of these kinds that the client has written."""
    parsed = [parse_frame(frame) for frame in split_frames(pair.said)[0]]
    return [(kind, cls, content) for kind, cls, _, _, content in parsed if kind in kinds]


def acked_ids(pair: Pair, class_id: int = 1) -> list[int]:
    ranges = [parse_ack(content) for _, cls, content in said(pair, ACK) if cls == class_id]
    return [message_id for pair_ in ranges if pair_ for message_id in range(*pair_)]


def settle_all(pair: Pair, *inboxes: Inbox) -> None:
    for inbox in inboxes:
        inbox.settle(current=True)
    pair.exchange()


# Publishing and receiving ------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 1 << 16])
def test_what_is_published_is_received_and_acknowledged(chunk: int) -> None:
    pair = Pair(chunk=chunk)
    inbox = pair.core.subscribe(1)
    for payload in NUMBERED[:50]:
        pair.core.publish(payload, 1)
    pair.core.publish_many(NUMBERED[50:], 1)
    assert pair.exchange() == [inbox]
    assert payloads(inbox) == NUMBERED
    settle_all(pair, inbox)
    assert acked_ids(pair) == list(range(200))
    assert pair.statistics().in_flight == 0
    statistics = pair.core.statistics()
    assert (statistics.published, statistics.received, statistics.acknowledged) == (200,) * 3
    assert (statistics.redelivered, statistics.ignored, statistics.queued_bytes) == (0, 0, 0)
    assert (statistics.session_id, statistics.buffered_bytes) == (0, 0)


@given(
    st.lists(contents(), max_size=150),
    st.lists(contents(), min_size=1, max_size=4),
    st.sampled_from([3, 100, 1 << 16]),
    st.booleans(),
)
def test_any_payload_without_a_delimiter_arrives_as_it_was(
    each: list[bytes], repeated: list[bytes], chunk: int, in_batches: bool
) -> None:
    pair = Pair(chunk=chunk)
    inbox = pair.core.subscribe(0x3C0D)
    for payload in each:
        pair.core.publish(payload, 0x3C0D)
    pair.core.publish_many(repeated * 40, 0x3C0D)
    pair.exchange()
    if in_batches:
        got = [payload for batch in take_batches(inbox) for payload in batch.payloads]
    else:
        got = payloads(inbox)
    assert got == each + repeated * 40
    settle_all(pair, inbox)
    assert pair.statistics(0x3C0D).in_flight == 0


def test_acks_of_a_busy_consumer_are_few() -> None:
    pair = Pair(chunk=1 << 20)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many([b"payload"] * 20_000, 1)
    pair.exchange()
    assert len(take(inbox)) == 20_000
    settle_all(pair, inbox)
    assert acked_ids(pair) == list(range(20_000))
    assert len(said(pair, ACK)) == 1


def test_acks_are_due_once_so_many_messages_are_processed() -> None:
    pair = Pair(chunk=1 << 20)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many([b""] * (ACKS_MAX + 100), 1)
    pair.exchange()
    take(inbox, ACKS_MAX)
    inbox.settle(current=False)
    assert not pair.core.acks_are_due
    inbox.settle(current=True)
    assert pair.core.acks_are_due


def test_settling_says_whether_a_consumer_still_holds_something() -> None:
    pair = Pair()
    inbox = pair.core.subscribe(1)
    pair.core.publish_many(NUMBERED[:3], 1)
    pair.exchange()
    assert not pair.core.settle_processed()
    take(inbox, 2)
    assert pair.core.settle_processed()
    inbox.settle(current=True)
    assert not pair.core.settle_processed()


def test_the_client_meets_the_wrap_of_the_ids() -> None:
    pair = Pair()
    pair.core.connect(1)
    pair.exchange()
    ring = pair.broker.classes[1].ring
    ring.head = ring.floor = 2 * ID_COUNT - 3
    pair.broker.classes[1].waiting = AckWindow(floor=ring.head)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many(NUMBERED[:6], 1)
    pair.exchange()
    messages = take(inbox)
    assert [message.payload for message in messages] == NUMBERED[:6]
    ids = [ID_COUNT - 3, ID_COUNT - 2, ID_COUNT - 1, 0, 1, 2]
    assert [message.message_id for message in messages] == ids
    assert not any(message.redelivered for message in messages)
    settle_all(pair, inbox)
    assert {content for *_, content in said(pair, ACK)} == {b"2147483645-2147483648", b"0-3"}
    assert pair.statistics().in_flight == 0


# Classes -----------------------------------------------------------------------------------------


def test_a_class_is_named_once_before_its_first_use() -> None:
    pair = Pair()
    pair.core.publish(b"", 5)
    pair.core.publish(b"", 5)
    pair.core.publish_many([b""], 5)
    pair.core.subscribe(5)
    pair.core.subscribe(6)
    pair.exchange()
    assert said(pair, CONNECT, SUBSCRIBE) == [
        (CONNECT, 0, b"[5]"),
        (SUBSCRIBE, 5, b""),
        (CONNECT, 0, b"[6]"),
        (SUBSCRIBE, 6, b""),
    ]


def test_an_answer_says_that_everything_before_is_applied() -> None:
    pair = Pair()
    pair.broker.open()
    other = Pair(broker=pair.broker)
    other.core.publish(b"", 1)
    asked = other.core.connect()
    assert other.core.answers < asked
    other.exchange()
    assert other.core.answers == asked == 2
    assert other.core.session_id == 2
    assert other.statistics().published == 1


@pytest.mark.parametrize("class_id", [-1, 65536, 1.5, "1", None, True])
def test_a_class_id_out_of_range_is_refused(class_id: int) -> None:
    core = ClientCore()
    for use in (
        lambda: core.publish(b"", class_id),
        lambda: core.publish_many([b""], class_id),
        lambda: core.subscribe(class_id),
        lambda: core.connect(1, class_id),
    ):
        with pytest.raises(ValueError, match=f"0 to 65535, got {class_id!r}"):
            use()
    assert core.outgoing.peek() == b""


def test_one_subscribe_serves_all_local_subscriptions() -> None:
    pair = Pair()
    inboxes = [pair.core.subscribe(1) for _ in range(3)]
    pair.core.publish_many(NUMBERED, 1)
    assert pair.exchange() == inboxes
    assert len(said(pair, SUBSCRIBE)) == 1
    for inbox in inboxes:
        assert payloads(inbox) == NUMBERED


# Several subscriptions of one class --------------------------------------------------------------


def test_a_message_is_acknowledged_when_every_subscription_has_acknowledged_it() -> None:
    pair = Pair()
    first, second = pair.core.subscribe(1), pair.core.subscribe(1, auto_ack=False)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    take(first)
    messages = take(second)
    settle_all(pair, first, second)
    assert acked_ids(pair) == []
    for number in (4, 2, 4, 7):
        messages[number].ack(second)
    pair.exchange()
    assert acked_ids(pair) == [4, 2, 7]
    assert pair.statistics().in_flight == 7


def test_a_subscription_that_leaves_leaves_the_decision_to_the_others() -> None:
    pair = Pair()
    staying, leaving = pair.core.subscribe(1), pair.core.subscribe(1)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    take(leaving, 3)
    pair.core.unsubscribe(leaving, processed=False)
    pair.core.unsubscribe(leaving, processed=True)
    assert acked_ids(pair) == []
    take(staying)
    settle_all(pair, staying)
    assert acked_ids(pair) == [0, 1, 3, 4, 5, 6, 7, 8, 9], "2 failed where it was processed"


def test_what_nobody_was_handed_waits_for_the_next_subscription() -> None:
    pair = Pair()
    inbox = pair.core.subscribe(1)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    take(inbox, 3)
    pair.core.unsubscribe(inbox, processed=True)
    pair.core.publish_many(NUMBERED[10:20], 1)
    pair.exchange()
    assert acked_ids(pair) == [0, 1, 2]
    again = pair.core.subscribe(1)
    assert payloads(again) == NUMBERED[3:20]
    settle_all(pair, again)
    assert acked_ids(pair) == list(range(20))
    assert len(said(pair, SUBSCRIBE)) == 1


@given(st.data())
def test_acknowledged_to_the_bus_is_exactly_what_all_subscriptions_acknowledged(
    data: st.DataObject,
) -> None:
    pair = Pair()
    inboxes = [pair.core.subscribe(1, auto_ack=False) for _ in range(data.draw(st.integers(1, 3)))]
    count = data.draw(st.integers(1, 30))
    pair.core.publish_many([b"x"] * count, 1)
    pair.exchange()
    expected = set(range(count))
    for inbox in inboxes:
        messages = take(inbox)
        chosen = data.draw(st.lists(st.integers(0, count - 1), max_size=60))
        for number in chosen:
            messages[number].ack(inbox)
        expected &= set(chosen)
    pair.exchange()
    assert set(acked_ids(pair)) == expected
    assert pair.statistics().in_flight == count - len(expected)


# Redelivery --------------------------------------------------------------------------------------


def test_what_was_not_acknowledged_comes_again_and_is_marked() -> None:
    pair = Pair(SHORT)
    inbox = pair.core.subscribe(1, auto_ack=False)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    messages = take(inbox)
    for message in messages[:4] + messages[6:]:
        message.ack(inbox)
    inbox.settle(current=True)
    pair.tick(2)
    pair.core.publish(b"new", 1)
    pair.exchange()
    again = take(inbox)
    assert [(m.message_id, m.payload, m.redelivered) for m in again] == [
        (4, NUMBERED[4], True),
        (5, NUMBERED[5], True),
        (10, b"new", False),
    ]
    for message in again:
        message.ack(inbox)
    pair.exchange()
    assert pair.statistics().in_flight == 0
    assert pair.core.statistics().redelivered == 2


def test_a_run_that_is_old_at_first_and_then_new_is_cut_there() -> None:
    """As from a bus that sends its redeliveries and what follows them in one piece."""
    core = connected()
    inbox = core.subscribe(1)
    hear(core, *[message(number) for number in range(3)])
    take(inbox)
    inbox.settle(current=True)
    hear(core, *[message(number) for number in range(1, 6)])
    batches = take_batches(inbox)
    assert [(list(b.message_ids), b.redelivered) for b in batches] == [
        ([1, 2], True),
        ([3, 4, 5], False),
    ]


def test_a_copy_of_what_still_waits_here_is_dropped() -> None:
    pair = Pair(SHORT)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    take(inbox, 4)
    pair.tick(2)
    assert pair.statistics().redelivered == 10
    assert payloads(inbox) == NUMBERED[4:10], "0 to 2 were settled, but not yet acknowledged"
    settle_all(pair, inbox)
    assert pair.core.statistics().ignored == 10
    assert pair.statistics().in_flight == 0


def test_a_failed_message_comes_again_although_others_still_wait() -> None:
    pair = Pair(SHORT)
    inbox = pair.core.subscribe(1)
    pair.core.publish_many(NUMBERED[:10], 1)
    pair.exchange()
    take(inbox, 4)
    inbox.give_up()
    pair.tick(2)
    assert payloads(inbox) == [*NUMBERED[4:10], NUMBERED[3]]
    settle_all(pair, inbox)
    assert pair.statistics().in_flight == 0


# Room --------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(client_module, "BUFFERED_BYTES_MAX", 1000)
    return 1000


def fill(core: ClientCore, class_id: int, *, first: int = 0, count: int = 50) -> None:
    hear(core, *[message(number, class_id) for number in range(first, first + count)])


def test_a_slow_consumer_makes_reading_pause_until_there_is_room(small: int) -> None:
    core = connected()
    inbox = core.subscribe(1)
    fill(core, 1, count=20)
    assert (core.is_full, core.has_room) == (False, True)
    fill(core, 1, first=20, count=30)
    assert (core.is_full, core.has_room) == (True, False)
    take(inbox, 1)
    assert (core.is_full, core.has_room) == (False, False)
    take(inbox)
    assert (core.is_full, core.has_room) == (False, True)


def test_an_awaited_answer_is_always_read(small: int) -> None:
    core = connected()
    core.subscribe(1)
    fill(core, 1)
    assert core.is_full
    core.connect()
    assert not core.is_full
    hear(core, build_frame(CONNECT, content=bytes(4)))
    assert core.is_full


def test_a_consumer_that_stands_still_does_not_starve_another(small: int) -> None:
    core = connected()
    still, waiting = core.subscribe(1), core.subscribe(2)
    fill(core, 1)
    core.find_still(core.progress())
    assert core.is_full, "nobody waits yet"
    waiting.is_awaited = True
    core.find_still(core.progress())
    assert not core.is_full
    fill(core, 1, first=50)
    fill(core, 2, count=3)
    assert len(take(waiting)) == 3
    assert [m.message_id for m in take(still)] == list(range(50))
    assert core.statistics().ignored == 50
    fill(core, 1, first=100)
    assert core.is_full, "it moves again"


def test_a_consumer_that_moves_is_waited_for(small: int) -> None:
    core = connected()
    slow, waiting = core.subscribe(1), core.subscribe(2)
    waiting.is_awaited = True
    fill(core, 1)
    fill(core, 1, first=50)
    before = core.progress()
    take(slow, 1)
    core.find_still(before)
    assert core.is_full


def test_without_any_subscription_nothing_is_dropped_and_reading_pauses(small: int) -> None:
    core = connected()
    core.unsubscribe(core.subscribe(1), processed=True)
    for first in range(0, 200, 50):
        fill(core, 1, first=first)
    assert core.is_full
    assert len(take(core.subscribe(1))) == 200


def test_what_nobody_wants_does_not_fill_the_memory_while_others_read_on(small: int) -> None:
    core = connected()
    core.subscribe(2)
    core.unsubscribe(core.subscribe(1), processed=True)
    for first in range(0, 200, 50):
        fill(core, 1, first=first)
    assert not core.is_full
    assert core.statistics().ignored == 150
    assert len(take(core.subscribe(1))) == 50


# What cannot be sent, and what should not come ---------------------------------------------------


def test_a_payload_with_the_delimiter_is_refused_and_nothing_is_sent() -> None:
    core = connected()
    with pytest.raises(LocalProtocolError, match="at offset 3; protocol version 1 cannot"):
        core.publish(b"abc<\r\n>", 1)
    with pytest.raises(LocalProtocolError, match=r"at index 2 holds the delimiter .* offset 0"):
        core.publish_many([b"", b"<\r\n", b"<\r\n><\r\n>"], 1)
    assert core.outgoing.peek() == b""
    core.publish(b"abc<\r\n", 1)
    core.publish(b"\r\n>", 1)


def test_a_payload_too_long_for_a_frame_is_refused_and_the_longest_is_not() -> None:
    core = connected(frame_bytes_max=100)
    with pytest.raises(LocalProtocolError, match=r"has 88 bytes; .* at most 87"):
        core.publish(b"x" * 88, 1)
    with pytest.raises(LocalProtocolError, match="at index 1 has 88 bytes"):
        core.publish_many([b"x" * 87, b"x" * 88], 1)
    assert core.outgoing.peek() == b""
    core.publish(b"x" * 87, 1)
    core.publish_many([b"x" * 87] * 3, 1)
    assert len(core.outgoing.peek()) == 100


@pytest.mark.parametrize("payload", ["text", None, 3, [1, 2]])
def test_a_payload_that_is_no_bytes_is_refused(payload: object) -> None:
    core = connected()
    expected = f"a payload is bytes, got {type(payload).__name__}"
    with pytest.raises(TypeError, match=expected):
        core.publish(payload, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=expected):
        core.publish_many([b"", payload], 1)  # type: ignore[list-item]
    assert core.outgoing.peek() == b""


def test_whatever_holds_bytes_is_copied() -> None:
    pair = Pair()
    inbox = pair.core.subscribe(1)
    changing = bytearray(b"before")
    pair.core.publish(changing, 1)
    pair.core.publish_many([changing, memoryview(b"view")], 1)  # type: ignore[list-item]
    changing[:] = b"after!"
    pair.exchange()
    assert payloads(inbox) == [b"before", b"before", b"view"]


def test_frames_that_no_bus_sends_are_ignored_and_counted() -> None:
    core = connected()
    inbox = core.subscribe(1)
    hear(
        core,
        build_frame(HEARTBEAT),
        build_frame(ACK, class_id=1, content=b"0-1"),
        build_frame(SUBSCRIBE, class_id=1),
        build_frame(ord("9"), class_id=1, content=b"?"),
        build_frame(MESSAGE, class_id=1, message_id=ID_COUNT),
        message(0, class_id=2),
        message(0),
    )
    assert [m.message_id for m in take(inbox)] == [0]
    assert core.statistics().ignored == 2


@pytest.mark.parametrize("content", [b"", b"123", b"12345"])
def test_an_answer_without_a_session_id_is_refused(content: bytes) -> None:
    core = connected()
    with pytest.raises(RemoteProtocolError, match="expected a session id of 4 bytes"):
        hear(core, build_frame(CONNECT, content=content))


def test_a_frame_longer_than_agreed_is_refused() -> None:
    core = connected(frame_bytes_max=100)
    with pytest.raises(RemoteProtocolError) as caught:
        hear(core, build_frame(HEARTBEAT, content=b"x" * 200))
    assert caught.value.reason == Reason.FRAME_TOO_LONG


@given(st.binary(max_size=300))
def test_any_bytes_are_taken_or_refused_as_the_bus_s_fault(data: bytes) -> None:
    core = ClientCore(frame_bytes_max=200)
    inbox = core.subscribe(1)
    try:
        hear(core, data)
    except RemoteProtocolError:
        return
    take(inbox)
    inbox.check()


def test_messages_and_batches_say_what_they_are() -> None:
    core = connected()
    inbox = core.subscribe(1)
    hear(core, message(0), message(1, payload=b"x" * 100))
    hear(core, message(0), message(1))
    first, second, *_ = take(inbox)
    assert repr(first) == "<Message 0 of class 1: b'7 bytes'>"
    assert repr(second) == "<Message 1 of class 1: 100 bytes>"
    inbox.settle(current=True)
    hear(core, message(0), message(1))
    batch = inbox.take_batch()
    assert batch is not None
    assert repr(batch) == "<Batch of class 1: messages 0 to 1, redelivered>"
    assert (batch.class_id, batch.first_id, len(batch)) == (1, 0, 2)
    assert bytes(batch.data) == message(0) + message(1)
    assert [m.redelivered for m in batch] == [True, True]
    assert "redelivered" in repr(next(iter(batch)))


def message(message_id: int, class_id: int = 1, payload: bytes = b"7 bytes") -> bytes:
    return build_frame(MESSAGE, class_id=class_id, message_id=message_id, content=payload)


def connected(*, frame_bytes_max: int = 1 << 20) -> ClientCore:
    """A core that has named classes 1 and 2, was answered, and has nothing left to write."""
    core = ClientCore(frame_bytes_max=frame_bytes_max)
    core.connect(1, 2)
    core.outgoing.sent(len(core.outgoing.peek()))
    hear(core, build_frame(CONNECT, content=bytes(4)))
    return core


def hear(core: ClientCore, *frames: bytes) -> None:
    """These bytes come in one read."""
    data = b"".join(frames)
    buffer = ReceiveBuffer(len(data) + 1)
    core.receive(buffer, buffer.fill(data))
