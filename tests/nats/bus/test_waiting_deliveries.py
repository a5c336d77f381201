"""Delivery of stored messages with many receivers in several turns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from simplebus.core.broker.broker import Settings
from simplebus.core.limits import Limits
from simplebus.core.protocol.envelope_batch import Envelope, encode
from simplebus.core.users.permissions import PermissionRule, PermissionRules, Permissions
from simplebus.core.users.users import User, Users
from simplebus.nats.nats_server import NatsServer
from simplebus.nats.protocol.events import Pub
from simplebus.nats.server import message_delivery
from simplebus.nats.server.session import NatsSession
from simplebus.nats.settings import NatsSettings
from tests.behaviour.wire_peer_v2 import (
    channel_envelope,
    connect_version2,
    publish,
    publish_envelopes,
)
from tests.nats.bus.two_listeners import Client, Msg, NatsBrokerHarness

PASSWORD: dict[str, Any] = {"pass": "p"}


@pytest.fixture(autouse=True)
def one_receiver_per_turn() -> Iterator[None]:
    """Let each turn end after the first receiver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 0)
        yield


@pytest.fixture(params=[False, True], ids=["batches", "singly"])
def delivers_singly(request: pytest.FixtureRequest) -> Iterator[None]:
    """Deliver batches at once to each client, or message by message."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setattr(message_delivery, "BATCH_COST_PER_CLIENT_MAX", 0)
        yield


class Published(NamedTuple):
    """Message of the publisher."""

    class_id: int
    subject: str
    payload: bytes


class Bus:
    """Broker with a binary publisher and a NATS server."""

    def __init__(self, harness: NatsBrokerHarness | None = None, *, can_wait: bool = True) -> None:
        self.harness = harness or NatsBrokerHarness()
        self.nats_server = self.harness.nats_server
        if can_wait:
            self.nats_server.allow_waiting_deliveries()
        self._publisher = connect_version2(self.harness, classes=[1, 2])
        self.published: list[Published] = []
        """All messages; the payload of each is its index."""

    def subscribers(self, count: int, *commands: bytes) -> list[Client]:
        return [self.harness.client(*commands or (b"SUB a.* 1\r\n",)) for _ in range(count)]

    def publish_plain(self, count: int, *, class_id: int = 1) -> None:
        """Publish messages of one size on the subject of the class."""
        first = len(self.published)
        payloads = [b"%04d" % (first + n) for n in range(count)]
        self.published += [Published(class_id, f"class.{class_id}", each) for each in payloads]
        self._send(publish(class_id, first, *payloads))

    def publish(self, *channels: str, class_id: int = 1, headers: bool = False) -> None:
        """Publish a message on each channel in one read."""
        contents, first = [], len(self.published)
        for number, channel in enumerate(channels, first):
            self.published.append(Published(class_id, channel, b"%d" % number))
            if headers:
                contents.append(encode(Envelope(channel, headers=(("A", "b"),)), b"%d" % number))
            else:
                contents.append(channel_envelope(channel, b"%d" % number))
        self._send(publish_envelopes(class_id, first, *contents))

    def _send(self, data: bytes) -> None:
        self.nats_server.begin_turn()
        self._publisher.send(data)
        self.harness.flush()

    def received_of_class(self, messages: list[Msg], class_id: int) -> list[Msg]:
        """Return the messages of one class."""
        return [each for each in messages if self.published[int(each.payload)].class_id == class_id]

    def take_turn(self) -> bool:
        """Take a later turn. Returns False if no delivery waits."""
        if not self.nats_server.has_waiting_deliveries:
            return False
        self.nats_server.deliver_waiting()
        self.harness.flush()
        return True

    def finish(self) -> None:
        while self.take_turn():
            pass


# Equality with delivery at once -------------------------------------------------------------------

_PATTERNS = (b"a.0", b"a.1", b"a.*", b">", b"class.1")
_CHANNEL = st.sampled_from(["a.0", "a.1", "a.2", "b"])
_CHANNELS = st.one_of(
    st.lists(_CHANNEL, min_size=1, max_size=7), st.lists(_CHANNEL, min_size=30, max_size=40)
)
"""Channels of single messages, or of a batch."""
_CLASS_ID = st.sampled_from([1, 2])
_ACTIONS = st.one_of(
    st.tuples(st.just("plain"), st.tuples(_CLASS_ID, st.sampled_from([1, 3, 20]))),
    st.tuples(st.just("channels"), st.tuples(_CLASS_ID, _CHANNELS)),
    st.tuples(st.just("headers"), st.tuples(_CLASS_ID, _CHANNELS)),
    st.tuples(st.just("turns"), st.integers(1, 5)),
    st.tuples(st.just("turns"), st.integers(1, 5)),
    st.tuples(st.just("join"), st.lists(st.sampled_from(_PATTERNS), min_size=1, max_size=3)),
    st.tuples(st.just("unsubscribe"), st.integers(0, 2)),
    st.tuples(st.just("limit"), st.tuples(st.integers(0, 2), st.integers(1, 20))),
    st.tuples(st.just("close"), st.integers(0, 2)),
)


def _sid(message: Msg) -> str:
    return message.sid


def is_match(pattern: bytes, subject: str) -> bool:
    return pattern in (b">", subject.encode(), subject[:2].encode() + b"*")


class Subscribers:
    """NATS clients of one bus, and what they have received."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.clients: list[Client] = []
        self.received: list[list[Msg]] = []
        self._ended: set[int] = set()
        self._limited: set[int] = set()

    def join(self, patterns: list[bytes]) -> None:
        commands = b"".join(b"SUB %s %d\r\n" % (p, sid) for sid, p in enumerate(patterns))
        self.clients.append(self.bus.harness.client(commands))
        self.received.append([])

    def read(self) -> None:
        """Read the output. Clients without subscriptions must not receive anything."""
        for number, client in enumerate(self.clients):
            if client.session.is_closed:
                continue
            messages = client.messages()
            assert not (messages and number in self._ended)
            self.received[number] += messages

    def apply(self, kind: str, argument: Any) -> None:
        """Apply an action to the bus or to the first clients."""
        if kind == "plain":
            class_id, count = argument
            self.bus.publish_plain(count, class_id=class_id)
        elif kind in ("channels", "headers"):
            class_id, channels = argument
            self.bus.publish(*channels, class_id=class_id, headers=kind == "headers")
        elif kind == "turns":
            for _ in range(argument):
                self.bus.take_turn()
        elif kind == "join":
            self.join(argument)
        else:
            self._change(kind, argument)
        self.read()

    def _change(self, kind: str, argument: Any) -> None:
        number, count = argument if kind == "limit" else (argument, 0)
        client = self.clients[number]
        if client.session.is_closed or (count and number in self._limited):
            return  # A limit that is raised later would apply to more of the waiting messages.
        if kind == "close":
            client.close()
            return
        limit = b" %d" % count if count else b""
        client.send(b"".join(b"UNSUB %d%s\r\n" % (sid, limit) for sid in range(3)))
        self.read()
        if kind == "limit":
            self._limited.add(number)
        else:
            self._ended.add(number)


@pytest.mark.usefixtures("delivers_singly")
@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(_PATTERNS), min_size=1, max_size=3), min_size=4, max_size=8),
    st.lists(_ACTIONS, max_size=20),
)
@example(
    [[b"a.0"], [b"a.0"] * 2, [b"a.0"] * 3, [b"a.0"] * 3],
    [("channels", (1, ["a.0"])), ("limit", (0, 1)), ("channels", (1, ["a.0"]))],
)
def test_each_subscriber_receives_the_same_as_with_delivery_at_once(
    patterns: list[list[bytes]], actions: list[tuple[str, Any]]
) -> None:
    split, at_once = Subscribers(Bus()), Subscribers(Bus(can_wait=False))
    changed: set[int] = set()
    for subscribers in (split, at_once):
        for each in patterns:
            subscribers.join(each)
        for kind, argument in actions:
            subscribers.apply(kind, argument)
            if kind in ("unsubscribe", "limit", "close"):
                changed.add(argument[0] if kind == "limit" else argument)
        subscribers.bus.finish()
        subscribers.read()
    assert split.bus.nats_server.delivery.waiting_bytes == 0
    for number, class_id in product(range(len(split.received)), (1, 2)):
        received, expected = (
            each.bus.received_of_class(each.received[number], class_id) for each in (split, at_once)
        )
        if number not in changed:  # The copies of a message for one client have no order.
            assert sorted(received, key=_sid) == sorted(expected, key=_sid)
        if number < len(patterns) and number not in changed:
            for index, pattern in enumerate(patterns[number]):
                assert [
                    (message.subject, message.payload)
                    for message in received
                    if message.sid == str(index)
                ] == [
                    (each.subject, each.payload)
                    for each in split.bus.published
                    if each.class_id == class_id and is_match(pattern, each.subject)
                ]
        for sid in "012":  # A client that leaves, or with a limit, receives only the first ones.
            received_by_sid = [message for message in received if message.sid == sid]
            expected_by_sid = [message for message in expected if message.sid == sid]
            count = min(len(received_by_sid), len(expected_by_sid))
            assert received_by_sid[:count] == expected_by_sid[:count]


@pytest.mark.usefixtures("delivers_singly")
@pytest.mark.parametrize("headers", [False, True])
def test_each_message_reaches_one_member_of_a_group(headers: bool) -> None:
    bus = Bus()
    members = bus.subscribers(3, b"SUB a.* group 1\r\n")
    plain = bus.subscribers(3)
    bus.publish(*["a.0", "a.1"] * 30, headers=headers)
    bus.finish()
    expected = [b"%d" % number for number in range(60)]
    assert [client.payloads() for client in plain] == [expected] * 3
    received = [client.payloads() for client in members]
    assert sorted(chain.from_iterable(received), key=int) == expected
    assert all(payloads == sorted(payloads, key=int) for payloads in received)


# Turns -------------------------------------------------------------------------------------------


@pytest.fixture(params=["single", "plain", "channels"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def publish_kind(bus: Bus, kind: str) -> int:
    """Publish one message or a batch. Returns the number of messages."""
    if kind == "plain":
        bus.publish_plain(20)
        return 20
    channels = ["a.0"] if kind == "single" else ["a.0", "a.1", "a.1"] * 10
    bus.publish(*channels)
    return len(channels)


def test_a_turn_reaches_few_receivers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 100 * 1024)
    bus = Bus()
    clients = bus.subscribers(100, b"SUB > 1\r\n")
    publish_kind(bus, kind)
    counts = [sum(bool(client.drain()) for client in clients)]
    while bus.take_turn():
        counts.append(sum(bool(client.drain()) for client in clients))
    assert sum(counts) == 100
    assert len(counts) >= 5
    assert max(counts) <= 20


def test_a_turn_searches_for_the_receivers_of_few_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 100 * 1024)
    monkeypatch.setattr(message_delivery, "SEARCHED_SINKS_PER_TURN_MAX", 1000)
    channels = [f"a.{number}" for number in range(60)]
    bus = Bus()
    routes = bus.nats_server.routes
    clients = bus.subscribers(
        3, *(b"SUB a.* 1\r\n", *(f"SUB {each} {each}\r\n".encode() for each in channels))
    )
    wide = bus.subscribers(400, b"SUB a.* 1\r\n")
    searched = [routes.statistics().searches]
    bus.publish(*channels)
    searched.append(routes.statistics().searches)
    while bus.take_turn():
        searched.append(routes.statistics().searches)
    assert searched[-1] >= len(channels)
    assert np.diff(searched).max() <= 4
    payloads = [b"%d" % number for number in range(60)]
    assert [client.payloads() for client in wide] == [payloads] * 400
    for client in clients:
        assert sorted(client.payloads(), key=int) == [each for each in payloads for _ in range(2)]


def test_cheap_delivery_does_not_wait(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 1 << 20)
    bus = Bus()
    clients = bus.subscribers(3, b"SUB > 1\r\n")
    count = publish_kind(bus, kind)
    assert not bus.nats_server.has_waiting_deliveries
    assert [len(client.messages()) for client in clients] == [count] * 3


def test_driver_that_does_not_continue_deliveries_gets_everything_at_once(kind: str) -> None:
    bus = Bus(can_wait=False)
    clients = bus.subscribers(3, b"SUB > 1\r\n")
    count = publish_kind(bus, kind)
    assert not bus.nats_server.has_waiting_deliveries
    assert [len(client.messages()) for client in clients] == [count] * 3


def test_message_for_one_subscriber_waits_behind_earlier_messages(kind: str) -> None:
    bus = Bus()
    bus.subscribers(3, b"SUB > 1\r\n")
    (late,) = bus.subscribers(1, b"SUB > 1\r\nSUB only 2\r\n")
    count = publish_kind(bus, kind)
    bus.publish("only")
    assert late.messages() == []
    bus.finish()
    assert [message.sid for message in late.messages()][:count] == ["1"] * count


def test_client_that_subscribes_between_two_turns_gets_only_later_messages(kind: str) -> None:
    bus = Bus()
    bus.subscribers(3, b"SUB > 1\r\n")
    publish_kind(bus, kind)
    assert bus.nats_server.has_waiting_deliveries
    (late,) = bus.subscribers(1, b"SUB > 1\r\n")
    bus.publish("a.0")
    bus.finish()
    assert len(late.messages()) == 1


def test_reply_of_the_bus_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 100 * 1024)
    bus = Bus()
    bus.harness.broker.store.class_registry.bind_subject("orders.>", 2)
    bus.subscribers(20)
    (requester,) = bus.subscribers(1, b"SUB in 1\r\n")
    bus.publish("a.0")
    assert bus.nats_server.has_waiting_deliveries
    requester.pub("orders.a", b"x", reply="in")
    assert [message.subject for message in requester.messages()] == ["in"]


def test_reply_of_the_bus_with_many_receivers_is_delivered_in_turns() -> None:
    bus = Bus()
    bus.harness.broker.store.class_registry.bind_subject("orders.>", 2)
    clients = bus.subscribers(3)
    (requester,) = bus.subscribers(1)
    requester.pub("orders.a", b"x", reply="a.0")
    assert bus.nats_server.has_waiting_deliveries
    bus.finish()
    assert [len(client.messages()) for client in (*clients, requester)] == [1] * 4


def test_messages_that_are_stored_while_a_client_publishes_a_batch_wait() -> None:
    bus = Bus(NatsBrokerHarness(class_messages=20))
    commands = b"SUB class.1 1\r\n", b"SUB noise 3\r\n"
    consumer, other = (bus.harness.client(*commands) for _ in range(2))
    consumer.sub("$SB.SUB.1", "2")
    bus.publish_plain(40)
    bus.finish()
    replies = [m.reply.encode() for m in consumer.messages() if m.sid == "2"]
    acks = [b"PUB %b 0\r\n\r\n" % reply for reply in replies]
    assert len(acks) == 20
    assert len(other.messages()) == 20
    consumer.send(b"".join(acks[1:17] + acks[18:]))
    noise = [b"PUB noise %d\r\n%b\r\n" % (n % 7, b"x" * (n % 7)) for n in range(2000)]
    # The first ack makes room for 17 messages, the second one for three.
    consumer.send(b"".join([*noise[:1500], acks[0], *noise[1500:1600], acks[17], *noise[1600:]]))
    assert bus.nats_server.has_waiting_deliveries
    bus.finish()
    assert bus.nats_server.drain_errors() == []
    for client in (consumer, other):
        messages = client.messages()
        noise_lengths = [len(m.payload) for m in messages if m.sid == "3"]
        assert noise_lengths == [n % 7 for n in range(2000)]
        assert [m.payload for m in messages if m.sid == "1"] == [b"%04d" % n for n in range(20, 40)]


def test_message_that_is_stored_during_a_later_turn_waits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = Bus()
    clients = bus.subscribers(3, b"SUB > 1\r\n")
    count = publish_kind(bus, kind)
    mark_ready, notices = NatsServer.mark_ready, [b"stored"]

    def store_and_mark_ready(nats_server: NatsServer, session: NatsSession) -> None:
        if notices:
            payload = memoryview(notices.pop())
            nats_server.deliver(Pub(b"notice", b"", b"%d" % len(payload), b"", 0, payload))
        mark_ready(nats_server, session)

    with monkeypatch.context() as patch:
        patch.setattr(NatsServer, "mark_ready", store_and_mark_ready)
        bus.finish()
    for client in clients:
        subjects = [message.subject for message in client.messages()]
        assert len(subjects) == count + 1
        assert subjects[-1] == "notice"


@pytest.mark.usefixtures("delivers_singly")
def test_permissions_of_the_class_apply_in_later_turns(kind: str) -> None:
    def subscribe_to(*classes: str) -> Permissions:
        return Permissions(subscribe=PermissionRules(allow=tuple(map(PermissionRule, classes))))

    users = Users(
        (
            User("allowed", "p", permissions=subscribe_to("1")),
            User("denied", "p", permissions=subscribe_to("2")),
        )
    )
    bus = Bus(NatsBrokerHarness(nats=NatsSettings(users=users)))
    names = ["allowed", "denied"] * 3
    clients = [
        bus.harness.client(b"SUB a.0 1\r\nSUB a.1 2\r\nSUB class.1 3\r\n", user=name, **PASSWORD)
        for name in names
    ]
    count = publish_kind(bus, kind)
    bus.finish()
    assert [len(client.messages()) for client in clients] == [count, 0] * 3


# Classes -----------------------------------------------------------------------------------------


def test_message_of_another_class_does_not_wait(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 100 * 1024)
    bus = Bus()
    bus.subscribers(20, b"SUB a.* 1\r\nSUB class.1 2\r\n")
    (bystander,) = bus.subscribers(1, b"SUB class.2 1\r\n")
    publish_kind(bus, kind)
    bus.publish_plain(1, class_id=2)
    assert bus.nats_server.has_waiting_deliveries
    assert len(bystander.messages()) == 1


def test_classes_take_turns(kind: str) -> None:
    bus = Bus()
    clients = bus.subscribers(3, b"SUB > 1\r\n")
    for _ in range(5):
        publish_kind(bus, kind)
    bus.publish("b", class_id=2)
    received: list[Msg] = []
    while not bus.received_of_class(received, 2):
        assert bus.take_turn()
        received += clients[-1].messages()
    assert len(received) < len(bus.published) / 2


def test_delivery_caused_by_another_class_keeps_the_class_of_the_messages(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = Bus()
    clients = bus.subscribers(3, b"SUB > 1\r\n")
    mark_ready, channels = NatsServer.mark_ready, ["b"]

    def publish_and_mark_ready(nats_server: NatsServer, session: NatsSession) -> None:
        if channels:
            bus.publish(channels.pop(), class_id=2)
        mark_ready(nats_server, session)

    with monkeypatch.context() as patch:
        patch.setattr(NatsServer, "mark_ready", publish_and_mark_ready)
        count = publish_kind(bus, kind)
        bus.publish("a.0")
        bus.finish()
    for client in clients:
        messages = client.messages()
        assert len(bus.received_of_class(messages, 2)) == 1
        payloads = [each.payload for each in bus.received_of_class(messages, 1)]
        assert len(payloads) == count + 1
        assert payloads == sorted(payloads, key=int)


# Errors ------------------------------------------------------------------------------------------


def break_session(monkeypatch: pytest.MonkeyPatch, session: NatsSession, method: str) -> None:
    """Make a method of one session raise."""
    original = getattr(NatsSession, method)

    def call_or_fail(called: NatsSession, *arguments: Any) -> Any:
        if called is session:
            raise ZeroDivisionError
        return original(called, *arguments)

    monkeypatch.setattr(NatsSession, method, call_or_fail)


@pytest.mark.parametrize("turn_bytes", [0, 1 << 30], ids=["waiting", "direct"])
@pytest.mark.parametrize("method", ["send", "gather", "write_gathered"])
@pytest.mark.parametrize("queue", [b"", b"group "])
def test_error_of_one_receiver_does_not_affect_the_others(
    kind: str, method: str, turn_bytes: int, queue: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", turn_bytes)
    bus = Bus()
    clients = bus.subscribers(2, b"SUB > 1\r\n")
    (broken,) = bus.subscribers(1, b"SUB > %b1\r\n" % queue)
    clients += bus.subscribers(2, b"SUB > 1\r\n")
    with monkeypatch.context() as patch:
        break_session(patch, broken.session, method)
        count = publish_kind(bus, kind)
        bus.finish()
    errors = [type(error) for error in bus.nats_server.drain_errors()]
    assert errors == [ZeroDivisionError] * ((method == "send") == (kind == "single"))
    assert [len(client.messages()) for client in clients] == [count] * 4
    broken.messages()
    bus.publish_plain(20)
    bus.finish()
    assert [len(client.messages()) for client in (*clients, broken)] == [20] * 5


def test_driver_is_informed_of_an_error_of_the_only_receiver(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 1 << 30)
    informed: list[bool] = []
    harness = NatsBrokerHarness()
    bus = Bus(harness)
    (client,) = bus.subscribers(1, b"SUB > 1\r\n")
    monkeypatch.setattr(harness, "flush", lambda: informed.append(harness.is_flush_requested))
    harness.is_flush_requested = False
    break_session(monkeypatch, client.session, "send" if kind == "single" else "gather")
    publish_kind(bus, kind)
    assert informed == [True]
    assert len(bus.nats_server.drain_errors()) == 1


# Limits ------------------------------------------------------------------------------------------


def test_queue_is_full_above_its_part_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_delivery, "WAITING_DELIVERIES_BYTES_MAX", 6 * 1100)
    bus = Bus()
    delivery = bus.nats_server.delivery
    bus.subscribers(3)

    def is_full_after_publishing(class_id: int, count: int) -> bool:
        for _ in range(count):
            bus.publish("a.0", class_id=class_id)
        (started,) = delivery.pop_started()
        return delivery.is_queue_full(started)

    assert not is_full_after_publishing(1, 6)
    assert is_full_after_publishing(1, 1)
    assert not is_full_after_publishing(2, 3)  # The parts are smaller now.
    assert is_full_after_publishing(2, 1)
    bus.finish()
    assert delivery.waiting_bytes == 0
    assert not is_full_after_publishing(1, 6)


def test_deliveries_above_the_limit_take_no_longer_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_delivery, "WAITING_DELIVERIES_BYTES_MAX", 0)
    bus = Bus()
    clients = bus.subscribers(3)
    for _ in range(20):
        bus.publish("a.0")
    assert [client.messages() for client in clients] == [[]] * 3
    assert bus.take_turn()
    assert sum(len(client.messages()) for client in clients) <= 1


def test_waiting_deliveries_disconnect_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 2_100_000
    monkeypatch.setattr(message_delivery, "WAITING_DELIVERY_BYTES", 10 * limit)
    limits = Limits(frame_bytes=1000, pending_bytes=limit, total_pending_bytes=limit)
    bus = Bus(NatsBrokerHarness(Settings(limits)))
    bus.subscribers(3)
    bus.publish("a.0")
    assert bus.nats_server.delivery.waiting_bytes > limit
    bus.nats_server.tick()
    assert bus.nats_server.drain_disconnecting() == []


def test_stored_messages_are_converted_while_they_are_delivered() -> None:
    received = []
    for can_wait in (True, False):
        bus = Bus(can_wait=can_wait)
        (client,) = bus.subscribers(1, b"SUB > 1\r\n")
        for part in range(3):
            bus.publish(*["a", "b"] * 300, headers=part != 1)
            bus.publish("a", "a")
        messages = client.messages()
        assert can_wait == (len(messages) < 300)
        while bus.nats_server.has_waiting_deliveries:
            bus.nats_server.deliver_waiting()
            bus.harness.flush()
            messages += client.messages()
        received.append([(m.subject, m.headers, m.payload) for m in messages])
    assert received[0] == received[1]
    assert [int(payload) for _, _, payload in received[0]] == list(range(3 * 602))
