"""Local sessions: peers without a socket, and observers of stored messages."""

from __future__ import annotations

import zlib

import pytest

from simplebus.core.broker.broker import FullPolicy, Settings
from simplebus.core.dead_letters import is_dead_letter_class
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import Limits
from simplebus.core.protocol import frames
from simplebus.core.protocol.envelope_batch import Envelope, decode, encode
from simplebus.core.protocol.events import (
    AckedRange,
    NackReceived,
    PublishedBatch,
    SubscribeRequested,
    TerminateReceived,
    WorkingReceived,
)
from simplebus.core.protocol.requests import SubscribeRequest
from tests.behaviour.wire_peer import BrokerHarness, build_batch
from tests.behaviour.wire_peer import connect as connect1
from tests.behaviour.wire_peer import publish as publish1
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    channel_envelope,
    connect_version2,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    unsubscribe,
)

DEAD_1 = 0x8000 + zlib.crc32(b"dead.1") % 0x8000


def published_batch(class_id: int, *payloads: bytes) -> PublishedBatch:
    """Return the event of messages with these payloads, on the channel `a.b`."""
    whole = [
        frames.encode(frames.ENVELOPE, class_id=class_id, content=encode(Envelope("a.b"), p))
        for p in payloads
    ]
    return PublishedBatch(class_id, build_batch(*whole))


def open_local_peer(bus: BrokerHarness) -> Version2Peer:
    return Version2Peer(bus, bus.broker.open_local_session("local client"))


def subscribe_local(
    bus: BrokerHarness, peer: Version2Peer, number: int = 5, **options: object
) -> None:
    request = SubscribeRequest(**options)  # type: ignore[arg-type]
    bus.broker.apply_event(peer.session, SubscribeRequested(1, 1, number, request))
    bus.check_invariants()


def test_local_session_publishes_subscribes_and_acks() -> None:
    bus = BrokerHarness()
    bus.peer(connect1(1))
    local, binary = open_local_peer(bus), connect_version2(bus, subscribe(1, 3))
    subscribe_local(bus, local)
    bus.broker.apply_event(local.session, published_batch(1, b"x", b"y"))
    assert [decode(m.content)[1] for m in binary.receive_deliveries()] == [b"x", b"y"]
    messages, replies = local.receive_all()
    assert [reply.kind for reply in replies] == ["subscribe"]
    assert [(m.number, m.attempt, m.message_id) for m in messages] == [(5, 1, 0), (5, 1, 1)]
    bus.broker.apply_event(local.session, AckedRange(5, 0, 1))
    bus.broker.apply_event(local.session, WorkingReceived(5, 1, 2))
    bus.broker.apply_event(local.session, NackReceived(5, 1, 2, 0.0))
    assert [(m.attempt, m.message_id) for m in local.receive_deliveries()] == [(2, 1)]


def test_ack_timeouts_continue_while_a_local_session_reads_nothing() -> None:
    bus = BrokerHarness()
    bus.peer(connect1(1))
    local = open_local_peer(bus)
    subscribe_local(bus, local)
    bus.broker.apply_event(local.session, published_batch(1, b"x"))
    assert len(local.receive_deliveries()) == 1
    bus.broker.apply_event(local.session, published_batch(1, b"y"))
    bus.tick(8)
    assert [(m.attempt, m.message_id) for m in local.receive_deliveries()] == [(2, 0), (1, 1)]


def test_local_session_has_no_heartbeat_timeout() -> None:
    bus = BrokerHarness()
    local = open_local_peer(bus)
    assert bus.tick(100) == []
    assert local.read_bytes(1) == b""


def test_closed_local_session_returns_its_messages() -> None:
    bus = BrokerHarness()
    bus.peer(connect1(1), publish1(1, b"x"))
    local = open_local_peer(bus)
    subscribe_local(bus, local, group="g", durable="d")
    assert len(local.receive_deliveries()) == 1
    local.disconnect()
    successor = connect_version2(bus, subscribe(1, 3, group="g", durable="d"))
    assert [m.attempt for m in successor.receive_deliveries()] == [2]


def test_local_session_with_too_many_parked_bytes_is_refused() -> None:
    limits = Limits(class_messages=1, frame_bytes=1000, pending_bytes=2_100_000)
    bus = BrokerHarness(Settings(limits=limits))
    bus.peer(connect1(1))
    local = open_local_peer(bus)
    bus.broker.apply_event(local.session, published_batch(1, *[b"x"] * 3))
    assert local.session.is_reading_paused
    assert local.session.parked_bytes > 0
    large_batch = published_batch(1, *[b"x" * 900] * 3000)
    with pytest.raises(RemoteProtocolError) as caught:
        bus.broker.apply_event(local.session, large_batch)
    assert caught.value.reason is Reason.PENDING_LIMIT
    local.disconnect()


# Terminate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, "g"])
def test_terminated_message_becomes_dead_letter(group: str | None) -> None:
    bus = BrokerHarness()
    bus.peer(connect1(1), publish1(1, b"x", b"y", b"z"))
    local = open_local_peer(bus)
    subscribe_local(bus, local, group=group, durable="d")
    assert local.receive_message_ids() == [0, 1, 2]
    bus.broker.apply_event(local.session, NackReceived(5, 1, 2, 0.0))
    assert local.receive_message_ids() == [1]
    bus.broker.apply_event(local.session, TerminateReceived(5, 1, 2))
    bus.broker.apply_event(local.session, TerminateReceived(5, 1, 2))
    bus.broker.end_turn()
    bus.check_invariants()
    assert bus.statistics(1).dropped == {Reason.TERMINATED: 1}
    dead = bus.statistics(DEAD_1)
    assert dead.name == "dead.1"
    assert dead.published == 1
    read, payload = decode(bus.broker.classes[DEAD_1].ring.copy_frame(0)[9:-4])
    assert payload == b"y"
    assert ("dead-reason", "terminated") in read.headers
    assert ("dead-attempts", "2") in read.headers
    bus.broker.apply_event(local.session, AckedRange(5, 0, 1))
    bus.broker.apply_event(local.session, AckedRange(5, 2, 3))
    bus.broker.end_turn()
    assert bus.statistics(1).ring.message_count == 0
    bus.tick(100)
    assert local.receive_message_ids() == []


def test_waiting_redelivery_can_be_terminated_but_not_unsent() -> None:
    bus = BrokerHarness()
    bus.peer(connect1(1), publish1(1, b"x", b"y"))
    local = open_local_peer(bus)
    subscribe_local(bus, local, max_in_flight=1)
    assert local.receive_message_ids() == [0]
    bus.tick(6)
    bus.broker.apply_event(local.session, TerminateReceived(5, 0, 2))
    bus.check_invariants()
    assert bus.statistics(1).dropped == {Reason.TERMINATED: 1}
    assert local.receive_message_ids() == [1]


def test_member_terminates_only_its_own_messages() -> None:
    bus = BrokerHarness()
    bus.peer(connect1(1), publish1(1, b"x"))
    holder, other_member = open_local_peer(bus), open_local_peer(bus)
    subscribe_local(bus, holder, group="g")
    subscribe_local(bus, other_member, group="g")
    assert holder.receive_message_ids() == [0]
    bus.broker.apply_event(other_member.session, TerminateReceived(5, 0, 1))
    bus.check_invariants()
    assert bus.statistics(1).dropped == {}
    bus.broker.apply_event(holder.session, TerminateReceived(5, 0, 1))
    assert bus.statistics(1).dropped == {Reason.TERMINATED: 1}


# Observers ----------------------------------------------------------------------------------------


class RecordingObserver:
    """Records the stored messages as (peer, class, payload)."""

    def __init__(self, bus: BrokerHarness) -> None:
        self.seen: list[tuple[str, int, bytes]] = []
        bus.broker.store.on_stored = self._record

    def _record(self, session: object, cls: object, first: int, last: int) -> None:
        peer_name = "" if session is None else session.peer  # type: ignore[attr-defined]
        for sequence in range(first, last):
            frame = cls.ring.copy_frame(sequence)  # type: ignore[attr-defined]
            content = frame[9:-4]
            payload = decode(content)[1] if frame[0] == frames.ENVELOPE else content
            self.seen.append((peer_name, cls.class_id, payload))  # type: ignore[attr-defined]


def test_observer_sees_stored_messages_once_in_order() -> None:
    bus = BrokerHarness()
    observer = RecordingObserver(bus)
    first = bus.peer(connect1(1), publish1(1, b"lone"))
    first.session.peer = "one"
    first.send(publish1(1, b"a", b"bb"), publish1(1, b"c"))
    second = connect_version2(
        bus, publish_envelopes(1, 0, channel_envelope("x", b"d"), channel_envelope("x", b"e"))
    )
    second.session.peer = "two"
    second.send(publish_envelopes(1, 2, channel_envelope("x", b"f")))
    local = open_local_peer(bus)
    bus.broker.apply_event(local.session, published_batch(1, b"g"))
    payloads = b"lone a bb c d e f g".split()
    assert [payload for _, _, payload in observer.seen] == payloads
    assert [peer_name for peer_name, _, _ in observer.seen[1:4]] == ["one"] * 3
    assert observer.seen[-2:] == [("two", 1, b"f"), ("local client", 1, b"g")]


def test_observer_sees_parked_messages_when_stored() -> None:
    bus = BrokerHarness(class_messages=2)
    observer = RecordingObserver(bus)
    reader = connect_version2(bus, subscribe(1, 5))
    local = open_local_peer(bus)
    bus.broker.apply_event(local.session, published_batch(1, b"a", b"b", b"c"))
    assert [payload for _, _, payload in observer.seen] == [b"a", b"b"]
    reader.receive_message_ids()
    bus.broker.apply_event(reader.session, AckedRange(5, 0, 1))
    assert observer.seen[-1] == ("local client", 1, b"c")
    assert len(observer.seen) == 3


def test_observer_does_not_see_refused_messages() -> None:
    settings = Settings(limits=Limits(class_messages=2), full_policy=FullPolicy.DROP_NEWEST)
    bus = BrokerHarness(settings)
    observer = RecordingObserver(bus)
    bus.peer(connect1(1), publish1(1, b"a", b"b", b"c"))
    assert [payload for _, _, payload in observer.seen] == [b"a", b"b"]


def test_observer_sees_all_messages_with_drop_oldest() -> None:
    settings = Settings(limits=Limits(class_messages=2), full_policy=FullPolicy.DROP_OLDEST)
    bus = BrokerHarness(settings)
    observer = RecordingObserver(bus)
    bus.peer(connect1(1), publish1(1, b"a", b"b", b"c"), publish1(1, b"d"))
    assert [payload for _, _, payload in observer.seen] == [b"a", b"b", b"c", b"d"]


def test_observer_sees_dead_letters_without_publisher() -> None:
    bus = BrokerHarness()
    observer = RecordingObserver(bus)
    peer = connect_version2(bus, subscribe(1, 5, max_deliveries=1), publish(1, 0, b"x"))
    assert peer.receive_message_ids() == [0]
    peer.send(nack(5, 0, 1, 0))
    assert peer.receive_message_ids() == []
    assert observer.seen[-1] == ("", DEAD_1, b"x")
    assert is_dead_letter_class(bus.statistics(DEAD_1).name)
    peer.send(unsubscribe(5))
