"""Message numbers of version 2 publishers: confirms, duplicates, gaps and refusals."""

from __future__ import annotations

from collections import deque

import pytest

from simplebus.core.broker.broker import Broker, FullPolicy
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import PRODUCER_STATE_SECONDS, RECEIVE_BYTES
from simplebus.core.producer_state import NumberBitmap
from simplebus.core.protocol.frames import Flags, Integers
from tests.behaviour import wire_peer_v2
from tests.behaviour.wire_peer import LARGE_BATCH_COUNT, BrokerHarness, create_small_bus, numbered
from tests.behaviour.wire_peer_v2 import (
    MESSAGE,
    Version2Peer,
    ack,
    channel_envelope,
    connect_request,
    connect_version2,
    publish,
    publish_envelopes,
    subscribe,
)
from tests.support.oracles import ID_COUNT, build_frame, parse_frame


def receive_confirms(peer: Version2Peer) -> list[int]:
    return [reply.message_id for reply in peer.receive_replies() if reply.kind == "confirm"]


def interleaved_messages(count: int, *, first: int = 0, classes: tuple[int, ...] = (1, 2)) -> bytes:
    """Return messages for the classes in turn. The payloads are their numbers."""
    return b"".join(
        publish(classes[n % len(classes)], n % ID_COUNT, b"%d" % n)
        for n in range(first, first + count)
    )


def stored_numbers(bus: BrokerHarness, class_id: int) -> list[int]:
    """Return the payloads of `interleaved_messages` that a class stores."""
    ring = bus.broker.classes[class_id].ring
    return [int(parse_frame(ring.copy_frame(s))[4]) for s in range(ring.floor, ring.head)]


def test_stored_messages_are_confirmed() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, publish(1, 0, b"a"))
    assert receive_confirms(peer) == [1]
    peer.send(publish(1, 1, *numbered(LARGE_BATCH_COUNT)))
    assert receive_confirms(peer) == [1 + LARGE_BATCH_COUNT]


@pytest.mark.parametrize("count", [2, LARGE_BATCH_COUNT])
def test_message_numbers_wrap(count: int) -> None:
    bus = BrokerHarness()
    publishers = bus.broker.subscription_manager.producer_states
    publisher = publishers.claim_name("a", "", 99).producer
    publisher.next_number = ID_COUNT - 1
    publishers.mark_disconnected(publisher, 0.0)
    peer = connect_version2(bus, classes=(1, 2), name="a")
    peer.send(interleaved_messages(count, first=ID_COUNT - 1))
    assert receive_confirms(peer) == [count - 1]
    peer.send(interleaved_messages(2, first=ID_COUNT - 1))
    assert receive_confirms(peer) == [count - 1]
    assert len(stored_numbers(bus, 1)) + len(stored_numbers(bus, 2)) == count


@pytest.mark.parametrize("count", [1, 3, LARGE_BATCH_COUNT])
def test_duplicate_is_confirmed_and_counted(count: int) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, publish(1, 0, *numbered(LARGE_BATCH_COUNT)))
    assert receive_confirms(peer) == [LARGE_BATCH_COUNT]
    peer.send(publish(1, LARGE_BATCH_COUNT - count, *numbered(count)))
    assert receive_confirms(peer) == [LARGE_BATCH_COUNT]
    assert bus.broker.refusal_counts == {Reason.DUPLICATE: count}
    assert bus.statistics(1).published == LARGE_BATCH_COUNT


@pytest.mark.parametrize("before", [0, 1, LARGE_BATCH_COUNT])
@pytest.mark.parametrize(
    "number", [1, 100, ID_COUNT // 2 - LARGE_BATCH_COUNT, ID_COUNT, 2 * ID_COUNT - 3]
)
def test_number_gap_closes_session_after_storing_earlier_messages(before: int, number: int) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, publish(1, 0, *numbered(before)), name="a")
    wrong = before + number if number < ID_COUNT // 2 else number
    good = publish(1, before, b"good")
    assert peer.send_refused(good + publish(1, wrong + 1, b"gap", b"behind")) is Reason.NUMBER_GAP
    assert bus.statistics(1).published == before + 1
    successor = Version2Peer(bus, bus.broker.open_session())
    successor.send(connect_request(name="a"))
    assert successor.receive_replies()[0].content["next"] == before + 1


@pytest.mark.parametrize("count", [3, LARGE_BATCH_COUNT])
def test_next_number_matches_stored_messages_after_disconnect(count: int) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, classes=(1, 2), name="a")
    offence = build_frame(ord("x"))
    later_messages = interleaved_messages(count, first=count)
    assert (
        peer.send_refused(interleaved_messages(count) + offence + later_messages)
        is Reason.UNKNOWN_TYPE
    )
    successor = Version2Peer(bus, bus.broker.open_session())
    successor.send(connect_request(1, 2, name="a"))
    assert successor.receive_replies()[0].content["next"] == count
    assert sorted(stored_numbers(bus, 1) + stored_numbers(bus, 2)) == list(range(count))


@pytest.mark.parametrize("count", [4, LARGE_BATCH_COUNT])
def test_refused_messages_use_their_numbers(count: int) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus)
    peer.send(interleaved_messages(count, classes=(1, 9)))
    replies = peer.receive_replies()
    assert [reply.kind for reply in replies] == ["error"] * (count // 2) + ["confirm"]
    assert [reply.message_id for reply in replies] == [*range(1, count, 2), count]
    assert {(s.class_id, s.last_field, s.content["code"]) for s in replies[:-1]} == {
        (9, MESSAGE, "unknown_class")
    }
    assert stored_numbers(bus, 1) == list(range(0, count, 2))
    assert bus.broker.refusal_counts == {Reason.UNKNOWN_CLASS: count // 2}


def test_consecutive_refusals_share_one_error() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus)
    peer.send(
        publish(9, 0, *numbered(30)) + publish_envelopes(9, 30, b"\0") + publish(1, 31, b"good")
    )
    first, second, confirm = peer.receive_replies()
    assert (first.message_id, first.content["count"], first.last_field) == (0, 30, ord("1"))
    assert (second.message_id, second.content["count"], second.last_field) == (30, 1, ord("5"))
    assert confirm.message_id == 32


def test_errors_that_refuse_no_message_have_count_0() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus)
    peer.send(ack(1, 5, 5) + subscribe(9, number=1))
    bus.broker.send_fatal_error(peer.session, RemoteProtocolError(Reason.NUMBER_GAP, "ahead"))
    errors = [error.content for error in peer.receive_replies()]
    assert [error["code"] for error in errors] == ["bad_ack", "unknown_class", "number_gap"]
    assert [error["count"] for error in errors] == [0, 0, 0]


@pytest.mark.parametrize("count", [4, LARGE_BATCH_COUNT])
def test_illegal_acks_do_not_lose_messages(count: int) -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus, subscribe(1, 5), classes=(1, 2))
    peer.receive_replies()
    bad = build_frame(wire_peer_v2.ACK, class_id=5, content=b"5-5")
    frames = [interleaved_messages(1, first=n) + bad for n in range(count)]
    peer.send(b"".join(frames))
    assert sorted(stored_numbers(bus, 1) + stored_numbers(bus, 2)) == list(range(count))
    replies = peer.receive_replies()
    assert [s.content["code"] for s in replies if s.kind == "error"] == ["bad_ack"] * count
    assert [s.message_id for s in replies if s.kind == "confirm"] == [count]


def test_cost_of_illegal_frames_is_linear() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = connect_version2(bus, subscribe(1, 5))
    ack_frame = build_frame(wire_peer_v2.ACK, class_id=5, content=b"1")
    peer.send(ack_frame * 20_000)
    peer.send(interleaved_messages(20_000, classes=(1, 9)))
    peer.send(b"".join(publish_envelopes(1, n, b"\xff") for n in range(20_000, 40_000)))
    assert bus.broker.refusal_counts == {
        Reason.BAD_ACK: 20_000,
        Reason.UNKNOWN_CLASS: 10_000,
        Reason.BAD_ENVELOPE: 20_000,
    }
    assert bus.statistics(1).published == 10_000


def test_unread_confirms_are_merged() -> None:
    bus = BrokerHarness()
    bus.skips_checks = True
    peer = connect_version2(bus)
    for number in range(1000):
        peer.send(publish(1, number, b"x"))
    assert peer.session.outbox.pending_bytes == 13
    assert receive_confirms(peer) == [1000]


def test_unread_errors_close_session() -> None:
    bus = BrokerHarness(frame_bytes=1000, pending_bytes=1000 + RECEIVE_BYTES)
    bus.skips_checks = True
    peer = connect_version2(bus)
    numbers = iter(range(100_000))
    with pytest.raises(RemoteProtocolError, match="pending_limit"):
        deque((peer.send(publish_envelopes(1, number, b"\xff")) for number in numbers), maxlen=0)
    assert next(numbers) > 1000


@pytest.mark.parametrize("unknown_class", [1, 3])
def test_interleaved_messages_are_kept_when_errors_close_session(unknown_class: int) -> None:
    """Messages are handled class by class, so errors of the lower or higher class close it."""
    bus = BrokerHarness(frame_bytes=1000, pending_bytes=1000 + RECEIVE_BYTES)
    bus.skips_checks = True
    peer = connect_version2(bus, classes=(2,), name="a", instance="one")
    messages = interleaved_messages(60_000, classes=(unknown_class, 2))
    assert peer.send_refused(messages) is Reason.PENDING_LIMIT
    assert len(stored_numbers(bus, 2)) < 30_000 or unknown_class == 3
    successor = Version2Peer(bus, bus.broker.open_session())
    successor.send(connect_request(1, 2, 3, name="a", instance="one"))
    first = successor.receive_replies()[0].content["next"]
    assert first < 60_000
    successor.send(interleaved_messages(60_000 - first, first=first, classes=(unknown_class, 2)))
    assert stored_numbers(bus, 2) == list(range(1, 60_000, 2))
    assert receive_confirms(successor) == [60_000]


# Full classes -------------------------------------------------------------------------------------


def test_parked_messages_are_confirmed_when_stored() -> None:
    bus = create_small_bus(FullPolicy.BLOCK)
    reader = connect_version2(bus, subscribe(1, 5))
    peer = connect_version2(bus, publish(1, 0, *numbered(14)))
    assert receive_confirms(peer) == [10]
    assert reader.receive_message_ids() == list(range(10))
    reader.send(ack(5, 0, 3))
    bus.broker.end_turn()
    assert receive_confirms(peer) == [13]
    reader.send(ack(5, 3, 4))
    bus.broker.end_turn()
    assert receive_confirms(peer) == [14]


def test_drop_newest_error_precedes_confirm() -> None:
    bus = create_small_bus(FullPolicy.DROP_NEWEST)
    peer = connect_version2(bus, publish(1, 0, *numbered(14)))
    error, confirm = peer.receive_replies()
    assert (error.message_id, error.content["count"]) == (10, 4)
    assert (error.content["code"], error.content["fatal"]) == ("drop_newest", False)
    assert confirm.message_id == 14


def test_drop_oldest_confirms() -> None:
    bus = create_small_bus(FullPolicy.DROP_OLDEST)
    peer = connect_version2(bus, publish(1, 0, *numbered(14)))
    assert receive_confirms(peer) == [14]
    assert bus.statistics(1).dropped == {Reason.DROP_OLDEST: 4}


def reconnect(bus: BrokerHarness, *classes: int) -> tuple[Version2Peer, int]:
    """Return the publisher `a` after a reconnect, and its next number."""
    peer = Version2Peer(bus, bus.broker.open_session())
    peer.send(connect_request(*classes, name="a", instance="i"))
    return peer, peer.receive_replies()[0].content["next"]


@pytest.mark.parametrize("count", [30, LARGE_BATCH_COUNT])
def test_parked_messages_are_stored_once_after_reconnect(count: int) -> None:
    # One class is full, so later numbers are stored before earlier ones.
    bus = create_small_bus(FullPolicy.BLOCK, class_messages=count)
    reader = connect_version2(bus, subscribe(1, 5), classes=(1, 2))
    connect_version2(bus, publish(1, 0, *[b"0"] * (count - 3)))
    peer, _ = reconnect(bus, 1, 2)
    peer.send(interleaved_messages(count))
    confirms = receive_confirms(peer)
    successor, following = reconnect(bus, 1, 2)
    assert [following] == confirms
    assert following < count
    assert bus.broker.end_turn().close[0][1].reason is Reason.TAKEN_OVER
    assert len(reader.receive_message_ids()) == count
    reader.send(ack(5, 0, count))
    for _ in range(2):  # The publisher sends it twice, with a reconnect in between.
        successor.send(interleaved_messages(count - following, first=following))
        successor, following = reconnect(bus, 1, 2)
    assert following == count
    assert stored_numbers(bus, 1)[-3:] == list(range(count))[::2][-3:]
    assert stored_numbers(bus, 2) == list(range(1, count, 2))
    assert bus.statistics(1).published == count - 3 + count // 2


def test_error_among_duplicates_keeps_producer_state() -> None:
    bus = create_small_bus(FullPolicy.BLOCK, class_messages=200)
    reader = connect_version2(bus, subscribe(2, 5), classes=(1, 2))
    connect_version2(bus, publish(2, 0, *[b"0"] * 200))
    peer, _ = reconnect(bus, 1, 2)
    peer.send(interleaved_messages(100))
    peer.disconnect()
    peer, following = reconnect(bus, 1, 2)
    assert following == 1
    assert stored_numbers(bus, 1) == list(range(0, 100, 2))
    reader.receive_deliveries()
    reader.send(ack(5, 0, 200))
    with pytest.raises(Exception, match="unknown_type"):
        peer.send(interleaved_messages(50, first=1) + build_frame(ord("x")))
    peer.disconnect()
    peer, following = reconnect(bus, 1, 2)
    assert following == 51
    peer.send(interleaved_messages(49, first=51))
    assert stored_numbers(bus, 1) == list(range(0, 100, 2))
    assert stored_numbers(bus, 2) == list(range(1, 100, 2))
    assert not peer.session.decoder.producer.stored_ahead  # type: ignore[union-attr]


def test_out_of_order_producer_state_is_limited_per_publisher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked_about = []
    contains = NumberBitmap.contains

    def counted(self: NumberBitmap, numbers: Integers) -> Flags:
        asked_about.append(numbers.size)
        return contains(self, numbers)

    monkeypatch.setattr(NumberBitmap, "contains", counted)
    bus = create_small_bus(FullPolicy.BLOCK, class_messages=300_000)
    bus.skips_checks = True
    connect_version2(bus, publish(1, 0, b"x"), name="early", instance="one").disconnect()
    connect_version2(
        bus, *[publish(2, at, *[b""] * 100_000) for at in range(0, 300_000, 100_000)], classes=(2,)
    )
    for number in range(5):
        peer = connect_version2(bus, classes=(1, 2), name=f"{number}", instance="one")
        peer.send(interleaved_messages(110_000, classes=(2, 1)))
        peer.disconnect()
    bus.tick()
    successor = Version2Peer(bus, bus.broker.open_session())
    successor.send(connect_request(name="early", instance="one"))
    assert successor.receive_replies()[0].content["next"] == 1
    late_publisher = connect_version2(bus, name="4", instance="one")
    asked_about.clear()
    for _ in range(10):
        late_publisher.send(publish(1, ID_COUNT - 1, b""))
    assert bus.broker.refusal_counts[Reason.DUPLICATE] == 10
    assert sum(asked_about) == 10


def test_exceeding_credit_closes_session() -> None:
    bus = create_small_bus(FullPolicy.BLOCK, credit_bytes=5000, frame_bytes=10_000)
    peer = connect_version2(bus, publish(1, 0, *numbered(10)))
    peer.send(publish(1, 10, *numbered(10, size=400)))
    assert peer.send_refused(publish(1, 20, *numbered(20, size=400))) is Reason.OVER_CREDIT
    assert bus.statistics(1).published == 10


def test_one_frame_may_exceed_credit() -> None:
    bus = create_small_bus(FullPolicy.BLOCK, credit_bytes=1, frame_bytes=10_000)
    peer = connect_version2(bus, publish(1, 0, *numbered(10)))
    peer.send(publish(1, 10, b"x" * 9000))
    assert receive_confirms(peer) == [10]


def test_parked_batches_are_confirmed_in_order() -> None:
    bus = create_small_bus(FullPolicy.BLOCK, class_messages=4)
    bus.skips_checks = True
    reader = connect_version2(bus, subscribe(1, 5), subscribe(2, 6), classes=(1, 2))
    peer = connect_version2(bus, classes=(1, 2))
    for n in range(300):
        peer.send(interleaved_messages(1, first=n))
    highest, received = 0, 0
    while received < 300:
        for message in reader.receive_deliveries():
            received += 1
            number = 5 if message.class_id == 1 else 6
            reader.send(ack(number, message.message_id, message.message_id + 1))
        bus.broker.end_turn()
        bus.broker.end_turn()
        for confirmed in receive_confirms(peer):
            assert confirmed > highest
            highest = confirmed
            published = sum(c.published for c in bus.broker.statistics().classes)
            assert confirmed == published
    assert highest == 300


# Publisher names ----------------------------------------------------------------------------------


def test_publisher_name_belongs_to_one_instance() -> None:
    bus = BrokerHarness()
    connect_version2(bus, name="a", instance="i")
    for options in ({"instance": "j"}, {}):
        peer = Version2Peer(bus, bus.broker.open_session())
        assert peer.send_refused(connect_request(name="a", **options)) is Reason.NAME_IN_USE


def test_connect_refused_for_publisher_name_creates_no_class() -> None:
    bus = BrokerHarness()
    connect_version2(bus, name="a", instance="i")
    peer = Version2Peer(bus, bus.broker.open_session())
    assert peer.send_refused(connect_request(7, "orders", name="a")) is Reason.NAME_IN_USE
    assert list(bus.broker.classes) == [1]
    assert bus.broker.store.class_id_by_name == {}


def test_producer_state_is_kept_for_an_hour() -> None:
    bus = BrokerHarness()
    for passed, expected in ((PRODUCER_STATE_SECONDS - 1, 1), (PRODUCER_STATE_SECONDS + 1, 0)):
        peer = connect_version2(bus, name="a")
        peer.send(publish(1, peer.session.decoder.next_number, b"x"))  # type: ignore[union-attr]
        peer.disconnect()
        bus.broker.clock.now += passed
        bus.tick()
        successor = Version2Peer(bus, bus.broker.open_session())
        successor.send(connect_request(name="a"))
        assert successor.receive_replies()[0].content["next"] == expected
        successor.disconnect()
        bus.broker.clock.now += 2 * PRODUCER_STATE_SECONDS
        bus.tick()


def test_unnamed_publisher_has_no_producer_state() -> None:
    bus = BrokerHarness()
    connect_version2(bus, publish(1, 0, b"x")).disconnect()
    assert len(bus.broker.subscription_manager.producer_states) == 0
    assert receive_confirms(connect_version2(bus, publish(1, 0, b"x"))) == [1]


def test_invalid_channel_is_refused_without_closing() -> None:
    bus = BrokerHarness()
    peer = connect_version2(bus)
    contents = [
        channel_envelope("a", b"x"),
        channel_envelope("a..b", b"x"),
        channel_envelope("b", b"y"),
    ]
    peer.send(publish_envelopes(1, 0, *contents))
    error, confirm = peer.receive_replies()
    assert (error.content["code"], error.message_id) == ("bad_channel", 1)
    assert confirm.message_id == 3
    assert bus.statistics(1).published == 2


def test_new_broker_has_refused_nothing() -> None:
    assert Broker().statistics().refused == {}
