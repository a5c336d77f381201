"""Delivery of publications with many receivers in several turns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.broker.broker import Broker
from simplebus.core.channel import matches, paged_set
from simplebus.core.channel.subscription_index import SubscriptionIndex
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.core.users.users import User, Users
from simplebus.nats import nats_server
from simplebus.nats.limits import (
    DECISION_COST_BYTES,
    DECISION_STEP_COST_BYTES,
    FAN_OUT_READ_BYTES,
    FOUND_SINK_COST_BYTES,
    NEW_SUBJECT_MESSAGES_MAX,
    OUTPUT_PER_READ_BYTES,
    SEARCHED_SUBJECT_COST_BYTES,
    SEARCHED_SUBJECTS_PER_TURN_MAX,
    SUBJECTS_MAX,
    NatsLimits,
)
from simplebus.nats.nats_server import NatsServer
from simplebus.nats.protocol.events import Pub
from simplebus.nats.server import message_delivery, queue_group
from simplebus.nats.server.queue_group import RandomNumbers
from simplebus.nats.server.session import NatsSubscription
from simplebus.nats.settings import NatsSettings
from tests.core.channel.channel_oracle import is_match
from tests.nats.differential import generated_dialogues
from tests.nats.differential.compare import Script
from tests.nats.server.nats_peer import Client, NatsServerHarness, buffer
from tests.nats.test_nats_server import USERS

QUIET = b'CONNECT {"verbose":false,"pedantic":false}\r\n'
MESSAGE = re.compile(rb"MSG (\S+) (\S+) \d+\r\n(\w+)\r\n")


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


def splitting(nats: NatsSettings | None = None, broker: Broker | None = None) -> NatsServerHarness:
    """Return a server that delivers in several turns."""
    return NatsServerHarness(nats, broker=broker, splits_reads=True)


def single() -> bytes:
    return b"PUB a.0 1\r\nx\r\n"


def uniform(count: int = 20) -> bytes:
    return b"PUB a.0 1\r\nx\r\n" * count


def mixed(count: int = 60) -> bytes:
    """Return messages on the subjects a.0 to a.2, whose payloads are their numbers."""
    return b"".join(b"PUB a.%d 2\r\n%02d\r\n" % (n % 3, n) for n in range(count))


@pytest.fixture(params=[single(), uniform(), mixed()], ids=["single", "uniform", "mixed"])
def publication(request: pytest.FixtureRequest) -> bytes:
    data = request.param
    assert isinstance(data, bytes)
    return data


# Equality with delivery at once -------------------------------------------------------------------


@pytest.mark.usefixtures("delivers_singly")
@settings(max_examples=5 * settings().max_examples)
@given(generated_dialogues.scripts(user=True, pedantic=True))
def test_turns_have_the_same_effect_as_delivery_at_once(script: Script) -> None:
    with_users = NatsSettings(users=USERS)
    assert splitting(with_users).play(script) == NatsServerHarness(with_users).play(script)


@pytest.mark.usefixtures("delivers_singly")
@settings(max_examples=5 * settings().max_examples)
@given(generated_dialogues.scripts(queues=True))
def test_queue_groups_receive_the_same_as_with_delivery_at_once(script: Script) -> None:
    with pytest.MonkeyPatch.context() as patch:  # The order of groups differs, and so would draws.
        patch.setattr(RandomNumbers, "draw", lambda numbers, below: 0)
        patch.setattr(
            RandomNumbers, "draw_many", lambda numbers, below, count: np.zeros(count, np.int64)
        )
        assert splitting().play(script) == NatsServerHarness().play(script)


DENIED = {
    "unrestricted": (),
    "some_denied": ("a.1", "b.>"),
    "others_denied": ("a.0", "*.2"),
    "all_denied": (">",),
}
"""Denied subject patterns by user name."""
SUBJECT_NAMES = [f"{first}.{last}" for first in "ab" for last in range(4)]
SUBSCRIPTIONS = st.lists(
    st.tuples(
        st.sampled_from(sorted(DENIED)),
        st.sampled_from(["a.*", "a.>", ">", "a.1", "*.2"]),
        st.sampled_from(["", "", "g", "h"]),
    ),
    max_size=12,
)
"""User, pattern, and queue group of subscriptions. All those of a user belong to one client."""


def with_denied_subjects() -> NatsSettings:
    users = [
        User(name, "p", subject_permissions=SubjectPermissions(subscribe_deny=denied))
        for name, denied in DENIED.items()
    ]
    return NatsSettings(users=Users((*users, User("publisher", "p"))))


def connect_as(harness: NatsServerHarness, user: str) -> Client:
    return harness.client(QUIET[:-3] + b',"user":"%b","pass":"p"}\r\n' % user.encode())


def accepts(user: str, pattern: str, subject: str) -> bool:
    """Return True if a subscription of the user receives messages on the subject."""
    is_denied = any(is_match(denied, subject) for denied in DENIED[user])
    return is_match(pattern, subject) and not is_denied


@pytest.mark.usefixtures("delivers_singly")
@settings(max_examples=3 * settings().max_examples)
@given(
    subscriptions=SUBSCRIPTIONS,
    publications=st.lists(
        st.lists(st.sampled_from(SUBJECT_NAMES), min_size=1, max_size=60), min_size=1, max_size=3
    ),
    splits_reads=st.booleans(),
    is_large_group=st.booleans(),
)
def test_denied_subjects_are_not_delivered(
    subscriptions: list[tuple[str, str, str]],
    publications: list[list[str]],
    splits_reads: bool,
    is_large_group: bool,
) -> None:
    harness = NatsServerHarness(with_denied_subjects(), splits_reads=splits_reads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue_group, "_INDEXED_MEMBERS", 2)
        patch.setattr(queue_group, "_LARGE_GROUP_MEMBERS", 2 if is_large_group else 1024)
        clients = {user: connect_as(harness, user) for user in DENIED}
        for sid, (user, pattern, queue) in enumerate(subscriptions):
            clients[user].send(f"SUB {pattern} {queue} s{sid}\r\n".encode())
        publisher, subjects = connect_as(harness, "publisher"), list[str]()
        for names in publications:
            first = len(subjects)
            subjects += names
            lines = [f"PUB {name} 4\r\n{first + n:04}\r\n" for n, name in enumerate(names)]
            publisher.send("".join(lines).encode())
    received: dict[str, list[int]] = {}
    for client in clients.values():
        for _, sid, number in MESSAGE.findall(bytes(client.received)):
            received.setdefault(subscriptions[int(sid[1:])][2] or sid.decode(), []).append(
                int(number)
            )
    for sid, (user, pattern, queue) in enumerate(subscriptions):
        expected = [n for n, name in enumerate(subjects) if accepts(user, pattern, name)]
        if not queue:
            assert received.get(f"s{sid}", []) == expected
    for group in ("g", "h"):
        members = [(user, pattern) for user, pattern, queue in subscriptions if queue == group]
        expected = [
            n for n, name in enumerate(subjects) if any(accepts(*each, name) for each in members)
        ]
        assert sorted(received.get(group, [])) == expected


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives each subject that is compared with patterns."""
    compared, has_match = list[str](), SubscriptionIndex.has_match

    def record_comparison(index: SubscriptionIndex[int], name: str) -> bool:
        compared.append(name)
        return has_match(index, name)

    monkeypatch.setattr(SubscriptionIndex, "has_match", record_comparison)
    return compared


@pytest.mark.parametrize("delivers_singly", [False, True])
@pytest.mark.parametrize("queue", [b"", b" g"])
@pytest.mark.parametrize(
    "users", [("some_denied",), ("some_denied", "others_denied", "all_denied")]
)
def test_a_turn_decides_about_few_subjects(
    delivers_singly: bool,
    queue: bytes,
    users: tuple[str, ...],
    compared: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    max_cost_bytes = 0 if delivers_singly else DECISION_STEP_COST_BYTES
    monkeypatch.setattr(message_delivery, "BATCH_COST_PER_CLIENT_MAX", max_cost_bytes)
    harness = splitting(with_denied_subjects())
    for user in users:
        connect_as(harness, user).send(b"SUB >%b 1\r\nSUB >%b 2\r\n" % (queue, queue))
    publisher, counts_by_round = connect_as(harness, "publisher"), []
    for _ in range(2):
        compared.clear()
        publisher.start(b"".join(b"PUB b.%d 1\r\nx\r\n" % number for number in range(300)))
        counts = [len(compared)]
        while publisher.take_turn():
            counts.append(len(compared))
        assert max(np.diff([0, *counts])) <= DECISION_STEP_COST_BYTES // DECISION_COST_BYTES
        counts_by_round.append(counts[-1])
    assert counts_by_round[0] >= 300
    # Of several users in a group, only some decide about each message.
    assert counts_by_round[1] == 0 or (queue and len(users) > 1)


@pytest.mark.parametrize(
    "publication", [single(), uniform(), mixed()], ids=["single", "uniform", "mixed"]
)
@pytest.mark.parametrize("are_all_denied", [False, True])
def test_a_turn_decides_for_few_users_of_a_queue_group(
    publication: bytes, are_all_denied: bool, compared: list[str]
) -> None:
    denied = [SubjectPermissions(subscribe_deny=(f"b.{n}", "a.*")) for n in range(300)]
    users = [User(f"u{n}", "p", subject_permissions=each) for n, each in enumerate(denied)]
    harness = splitting(NatsSettings(users=Users((*users, User("publisher", "p")))))
    for user in users:
        connect_as(harness, user.name).send(b"SUB > g 1\r\n")
    if not are_all_denied:
        connect_as(harness, "publisher").send(b"SUB > g 1\r\n")
    publisher = connect_as(harness, "publisher")
    compared.clear()
    publisher.start(publication)
    counts = [len(compared)]
    while publisher.take_turn():
        counts.append(len(compared))
    assert len(counts) > 2
    assert max(np.diff([0, *counts])) <= 2 * DECISION_STEP_COST_BYTES // DECISION_COST_BYTES
    received = b"".join(client.lines() for client in harness.clients)
    expected = 0 if are_all_denied else publication.count(b"PUB")
    assert received.count(b"MSG") == expected


def test_users_that_join_between_turns_do_not_cause_a_loss() -> None:
    denied = SubjectPermissions(subscribe_deny=("a.*",))
    users = [User(f"u{n}", "p", subject_permissions=denied) for n in range(300)]
    harness = splitting(NatsSettings(users=Users((*users, User("publisher", "p")))))
    for user in users[:200]:
        connect_as(harness, user.name).send(b"SUB > g 1\r\n")
    receiver = connect_as(harness, "publisher")
    receiver.send(b"SUB > g 1\r\n")
    publisher = connect_as(harness, "publisher")
    publisher.start(single())
    late_users = iter(users[200:])
    is_processing = True
    while is_processing:
        for user, _ in zip(late_users, range(20), strict=False):
            connect_as(harness, user.name).send(b"SUB > g 1\r\n")
        is_processing = publisher.take_turn()
    assert receiver.lines().count(b"MSG") == 1


@pytest.mark.parametrize("publication", [uniform(), mixed()], ids=["uniform", "mixed"])
def test_members_may_join_and_leave_between_the_turns_of_a_batch(
    publication: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_delivery, "BATCH_COST_PER_CLIENT_MAX", 0)
    harness = splitting()
    members = [harness.client(QUIET + b"SUB a.* g 1\r\nSUB a.* 2\r\n") for _ in range(40)]
    publisher = harness.client(QUIET)
    publisher.start(publication)
    is_processing = True
    while is_processing:
        harness.client(QUIET + b"SUB a.* g 1\r\n")
        is_processing = publisher.take_turn()
    received = [sid for client in members for _, sid, _ in MESSAGE.findall(bytes(client.received))]
    assert received.count(b"2") == 40 * publication.count(b"PUB")


# Changes between two turns -----------------------------------------------------------------------

_PATTERNS = (b"a.0", b"a.1", b"a.*", b"a.>", b">")
_MESSAGE = re.compile(rb"MSG a\.(\d) (\w+) 4\r\n(\w)(\d+)\r\n|PONG\r\n")


class Publisher:
    """Client whose messages have its name and a number as payload."""

    def __init__(self, harness: NatsServerHarness, name: str) -> None:
        self.client = harness.client(QUIET)
        self.name = name
        self.sent: list[tuple[int, int]] = []
        """Number in the subject and in the payload of each message."""

    def publish(self, subject_numbers: list[int]) -> None:
        """Publish messages on these subjects in one read, after all earlier turns."""
        self.client.finish()
        data = b""
        for subject_number in subject_numbers:
            number = len(self.sent)
            self.sent.append((subject_number, number))
            data += b"PUB a.%d 4\r\n%s%03d\r\n" % (subject_number, self.name.encode(), number)
        self.client.start(data)


class Subscriber:
    """Client with some subscriptions, and what it received."""

    def __init__(self, harness: NatsServerHarness, patterns: list[bytes]) -> None:
        self.patterns = {b"s%d" % n: pattern for n, pattern in enumerate(patterns)}
        subscribes = (b"SUB %s %s\r\n" % (p, sid) for sid, p in self.patterns.items())
        self.client = harness.client(QUIET + b"".join(subscribes))
        self.ended: dict[bytes, int] = {}
        """Length of the output when a subscription ended."""

    def unsubscribe(self, sid: bytes) -> None:
        self.client.send(b"UNSUB %s\r\nPING\r\n" % sid)
        self.ended.setdefault(sid, len(self.client.received))

    def received(self, publisher: str) -> list[tuple[bytes, int, int]]:
        """Return sid, subject number and payload number of a publisher's messages."""
        output, end = bytes(self.client.received), 0
        found = []
        for match in _MESSAGE.finditer(output):
            assert match.start() == end
            end = match.end()
            if match[2] is not None:
                assert match.start() < self.ended.get(match[2], len(output))
            if match[3] == publisher.encode():
                found.append((match[2], int(match[1]), int(match[4])))
        assert end == len(output)
        return found

    def expected(self, publisher: Publisher) -> list[tuple[bytes, int, int]]:
        """Return what the client must have received if nothing changed meanwhile."""
        return [
            (sid, subject_number, number)
            for subject_number, number in publisher.sent
            for sid, pattern in self.patterns.items()
            if pattern in (b"a.%d" % subject_number, b"a.*", b"a.>", b">")
        ]


_ACTIONS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 1), st.lists(st.integers(0, 2), max_size=3)),
    st.tuples(st.just("uniform"), st.integers(0, 1), st.integers(0, 2)),
    st.tuples(st.just("mixed"), st.integers(0, 1), st.integers(1, 3)),
    st.tuples(st.just("turn"), st.integers(0, 1), st.integers(1, 4)),
    st.tuples(st.just("turn"), st.integers(0, 1), st.integers(1, 4)),
    st.tuples(st.just("unsubscribe"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.just("close"), st.integers(0, 2), st.none()),
    st.tuples(st.just("disconnect"), st.integers(0, 1), st.none()),
)


@pytest.mark.usefixtures("delivers_singly")
@settings(max_examples=5 * settings().max_examples)
@given(
    st.lists(st.lists(st.sampled_from(_PATTERNS), min_size=1, max_size=3), min_size=4, max_size=8),
    st.lists(_ACTIONS, max_size=20),
)
def test_messages_keep_their_order_while_clients_change_between_turns(
    patterns: list[list[bytes]], actions: list[tuple[str, int, Any]]
) -> None:
    harness = splitting()
    subscribers = [Subscriber(harness, each) for each in patterns]
    publishers = [Publisher(harness, name) for name in "pq"]
    changed: set[Subscriber] = set()
    for kind, index, argument in actions:
        if kind in ("unsubscribe", "close"):
            subscriber = subscribers[index]
            changed.add(subscriber)
            if kind == "close":
                subscriber.client.close()
            elif not subscriber.client.closed:
                subscriber.unsubscribe(b"s%d" % argument)
            continue
        publisher = publishers[index]
        if kind == "turn":
            for _ in range(argument):
                publisher.client.take_turn()
        elif publisher.client.closed:
            continue
        elif kind == "publish":
            publisher.publish(argument)
        elif kind == "uniform":
            publisher.publish([argument] * 20)
        elif kind == "mixed":
            publisher.publish([n // argument % 3 for n in range(60)])
        else:
            while publisher.client.session.unprocessed:
                publisher.client.take_turn()
            publisher.client.close()
            harness.settle()
    for publisher in publishers:
        publisher.client.finish()
    for publisher in publishers:
        for subscriber in subscribers:
            expected, received = subscriber.expected(publisher), subscriber.received(publisher.name)
            if subscriber not in changed:
                assert sorted(received) == sorted(expected)
            assert set(received) <= set(expected)
            assert len(set(received)) == len(received)
            numbers = [number for _, _, number in received]
            assert numbers == sorted(numbers)


@pytest.mark.usefixtures("delivers_singly")
def test_subscriber_that_leaves_between_two_turns_gets_nothing_more(publication: bytes) -> None:
    harness = splitting()
    first, second, third = (harness.client(QUIET + b"SUB a.* 1\r\n") for _ in range(3))
    publisher = harness.client(QUIET)
    publisher.start(publication)
    while not first.lines():
        assert publisher.take_turn()
    assert publisher.session.is_request_pending
    second.send(b"UNSUB 1\r\nPING\r\n")
    third.close()
    publisher.finish()
    assert second.lines() == b"PONG\r\n"
    assert third.lines() == b""


@pytest.mark.usefixtures("delivers_singly")
def test_subscriber_with_a_maximum_gets_no_more_messages_than_that() -> None:
    harness = splitting()
    harness.client(QUIET + b"SUB a.* 1\r\n")
    limited = harness.client(QUIET + b"SUB a.* 1\r\nUNSUB 1 5\r\n")
    publishers = [harness.client(QUIET) for _ in range(2)]
    for publisher in publishers:
        publisher.start(uniform())
        assert publisher.session.is_request_pending
    while publishers[0].take_turn() | publishers[1].take_turn():
        pass
    assert limited.lines() == b"MSG a.0 1 1\r\nx\r\n" * 5


def test_client_that_subscribes_between_two_turns_gets_only_later_messages(
    publication: bytes,
) -> None:
    harness = splitting()
    for _ in range(2):
        harness.client(QUIET + b"SUB a.* 1\r\n")
    publisher = harness.client(QUIET)
    publisher.start(publication)
    late = harness.client(QUIET + b"SUB a.* 1\r\n")
    publisher.finish()
    assert late.lines() == b""
    publisher.send(single())
    assert late.lines() == b"MSG a.0 1 1\r\nx\r\n"


def test_publication_of_a_closed_client_is_delivered(publication: bytes) -> None:
    harness = splitting()
    subscribers = [harness.client(QUIET + b"SUB a.* 1\r\n") for _ in range(3)]
    publisher = harness.client(QUIET)
    publisher.start(publication)
    publisher.close()
    harness.settle()
    first, *others = (subscriber.lines() for subscriber in subscribers)
    assert others == [first, first]
    assert first.count(b"MSG") == publication.count(b"PUB")


@pytest.mark.usefixtures("delivers_singly")
def test_subjects_of_a_batch_stay_known_while_others_use_up_the_table() -> None:
    users = Users(
        (
            User("u", "p", subject_permissions=SubjectPermissions(subscribe_deny=("a.1",))),
            User("other", "p"),
        )
    )
    harness = splitting(NatsSettings(users=users))
    connect = b'CONNECT {"verbose":false,"pedantic":false,"user":"%s","pass":"p"}\r\n'
    subscribers = [harness.client(connect % b"u" + b"SUB a.* 1\r\n") for _ in range(3)]
    publisher, other = (harness.client(connect % b"other") for _ in range(2))
    publisher.start(mixed())
    generation = harness.nats_server.routes.table.generation
    for first in range(0, SUBJECTS_MAX + 1, 10_000):
        other.send(b"".join(b"PUB b.%d 0\r\n\r\n" % n for n in range(first, first + 10_000)))
    assert harness.nats_server.routes.table.generation != generation
    publisher.finish()
    first_lines, *other_lines = (subscriber.lines() for subscriber in subscribers)
    assert first_lines.count(b"MSG") == 40
    assert other_lines == [first_lines, first_lines]


@pytest.mark.usefixtures("delivers_singly")
def test_messages_for_several_subscriptions_of_a_group_member_stay_in_order() -> None:
    harness = splitting()
    subscribes = b"SUB a.* 1\r\nSUB a.> group 2\r\nSUB a.* other 3\r\n"
    member = harness.client(QUIET + subscribes)
    harness.client(QUIET + b"SUB a.* 1\r\n")
    harness.client(QUIET).send(mixed())
    received = re.findall(rb"MSG a.\d (\d) 2\r\n(\d\d)", member.lines())
    assert len(received) == 3 * 60
    assert [number for _, number in received] == sorted(number for _, number in received)


def test_error_of_one_receiver_does_not_affect_the_next_publication(
    publication: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = splitting()
    subscribers = [harness.client(QUIET + b"SUB a.* 1\r\n") for _ in range(3)]
    publishers = [harness.client(QUIET) for _ in range(2)]
    with monkeypatch.context() as broken:
        for method in ("deliver", "deliver_batch"):
            broken.setattr(NatsSubscription, method, lambda *arguments: 1 / 0)
        publishers[0].start(publication)
        with pytest.raises(ZeroDivisionError):
            publishers[0].finish()
    assert not publishers[0].session.is_request_pending
    publishers[1].send(single())
    assert [subscriber.lines() for subscriber in subscribers] == [b"MSG a.0 1 1\r\nx\r\n"] * 3


# Classes -----------------------------------------------------------------------------------------


def broker_with_bindings(count: int) -> Broker:
    """Return a broker with classes that store the messages on a.*, besides other subjects."""
    broker = Broker()
    for class_id in range(1, count + 1):
        broker.store.class_registry.bind_subject("a.*", class_id)
        broker.store.class_registry.bind_subject(f"other.{class_id}", class_id)
    return broker


def stored_counts(broker: Broker) -> list[int]:
    return [cls.ring.head for _, cls in sorted(broker.classes.items())]


@pytest.mark.parametrize("is_verbose", [False, True])
def test_every_class_stores_the_messages(publication: bytes, is_verbose: bool) -> None:
    broker = broker_with_bindings(3)
    harness = splitting(broker=broker)
    subscriber = harness.client(QUIET + b"SUB a.* 1\r\n")
    publisher = harness.client(QUIET.replace(b"false", b"true", is_verbose))
    publisher.start(publication)
    assert publisher.session.is_request_pending
    table = harness.nats_server.routes.table
    table.reserve(SUBJECTS_MAX)  # Other clients use up the subject numbers.
    publisher.finish()
    count = publication.count(b"PUB")
    assert stored_counts(broker) == [count] * 3
    assert subscriber.lines().count(b"MSG") == count


def test_class_without_bindings_stores_nothing_more() -> None:
    broker = broker_with_bindings(3)
    harness = splitting(broker=broker)
    publisher = harness.client(QUIET)
    publisher.start(single())
    while stored_counts(broker)[0] == 0:
        assert publisher.take_turn()
    for subject in ("a.*", "other.3"):
        broker.store.subject_bindings.unbind(3, subject)
    publisher.finish()
    assert stored_counts(broker) == [1, 1, 0]


# Turns -------------------------------------------------------------------------------------------


def receivers_per_turn(publisher: Client, subscribers: list[Client], data: bytes) -> list[int]:
    """Publish and return how many subscribers received something in each turn."""
    counts = []
    publisher.start(data)
    is_processing = True
    while is_processing:
        counts.append(sum(bool(subscriber.lines()) for subscriber in subscribers))
        is_processing = publisher.take_turn()
    return counts


def test_a_turn_reaches_few_receivers(publication: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 100 * 1024)
    harness = splitting()
    subscribers = [harness.client(QUIET + b"SUB a.* 1\r\n") for _ in range(100)]
    publisher = harness.client(QUIET)
    counts = receivers_per_turn(publisher, subscribers, publication)
    assert sum(counts) == 100
    assert len(counts) >= 5
    assert max(counts) <= 20


def test_known_subjects_are_searched_in_turns_after_routes_have_changed() -> None:
    harness = splitting()
    publisher = harness.client(QUIET)
    message_count = 4 * SEARCHED_SUBJECTS_PER_TURN_MAX + 1
    messages = b"".join(b"PUB a.%d 1\r\nx\r\n" % number for number in range(message_count))
    publisher.start(messages)
    publisher.finish()
    subscriber = harness.client(QUIET + b"SUB a.> 1\r\n")
    publisher.start(messages)
    received = [subscriber.lines()]
    while publisher.take_turn():
        received.append(subscriber.lines())
    assert max(lines.count(b"MSG ") for lines in received) == SEARCHED_SUBJECTS_PER_TURN_MAX
    assert b"".join(received) == b"".join(
        b"MSG a.%d 1 1\r\nx\r\n" % number for number in range(message_count)
    )


def test_new_subjects_of_one_read_are_searched_in_turns() -> None:
    harness = splitting()
    subscriber, publisher = harness.client(QUIET + b"SUB a.> 1\r\n"), harness.client(QUIET)
    message_count = 4 * NEW_SUBJECT_MESSAGES_MAX
    publisher.start(b"".join(b"PUB a.%d 0\r\n\r\n" % number for number in range(message_count)))
    received_counts = [subscriber.lines().count(b"MSG ")]
    while publisher.take_turn():
        received_counts.append(subscriber.lines().count(b"MSG "))
    assert sum(received_counts) == message_count
    subjects_max = OUTPUT_PER_READ_BYTES // SEARCHED_SUBJECT_COST_BYTES + NEW_SUBJECT_MESSAGES_MAX
    assert max(received_counts) <= subjects_max


@pytest.mark.parametrize("options", [{}, {"splits_reads": True}], ids=["at once", "in turns"])
def test_clients_share_the_body_of_a_long_message(options: dict[str, bool]) -> None:
    harness, body = NatsServerHarness(**options), bytes(range(256)) * 80
    headed = b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n'
    clients = [harness.client(each + b"SUB a 1\r\n") for each in (QUIET, QUIET, headed)]
    publisher = harness.client(headed)
    header = b"NATS/1.0\r\nA: 1\r\n\r\n"
    arguments = len(header), len(header) + len(body)
    publisher.start(b"HPUB a %d %d\r\n%b%b\r\n" % (*arguments, header, body))
    publisher.finish()
    plain = b"MSG a 1 %d\r\n%b\r\n" % (len(body), body)
    assert [each.lines() for each in clients[:2]] == [plain] * 2
    assert clients[2].lines() == b"HMSG a 1 %d %d\r\n%b%b\r\n" % (*arguments, header, body)


def test_memory_of_a_shared_body_is_that_of_one_copy() -> None:
    server = NatsServer(NatsSettings())
    sessions = [server.open_session("a client") for _ in range(3)]
    for session in sessions:
        server.receive(session, buffer(), buffer().fill(QUIET + b"SUB a 1\r\n"))
    data = b"PUB a 20000\r\n%b\r\n" % bytes(20_000)
    server.receive(sessions[0], buffer(), buffer().fill(data))
    sizes = dict(pair for session in sessions for pair in session.outbox.iter_buffers())
    assert 20_000 < sum(sizes.values()) < 2 * 20_000
    assert all(session.outbox.pending_bytes > 20_000 for session in sessions)


def deliveries_per_turn(harness: NatsServerHarness, data: bytes) -> list[int]:
    """Publish and return how many messages were delivered in each turn."""
    publisher = harness.client(QUIET)
    counts, total_count = [], 0
    publisher.start(data)
    is_processing = True
    while is_processing:
        before = total_count
        total_count = sum(each.out_messages for each in harness.nats_server.sessions.values())
        counts.append(total_count - before)
        is_processing = publisher.take_turn()
    return counts


@pytest.mark.parametrize("data", [uniform(), mixed()], ids=["uniform", "mixed"])
def test_a_turn_delivers_few_messages_to_the_subscriptions_of_one_client(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_delivery, "BATCH_COST_PER_CLIENT_MAX", 100 * 1024)
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 100 * 1024)
    harness = splitting()
    harness.client(QUIET + b"".join(b"SUB a.* %d\r\n" % n for n in range(100)))
    counts = deliveries_per_turn(harness, data)
    assert sum(counts) == 100 * data.count(b"PUB")
    assert max(counts) <= 20


@pytest.mark.parametrize("data", [uniform(), mixed()], ids=["uniform", "mixed"])
@pytest.mark.parametrize("has_one_group", [False, True])
def test_a_turn_delivers_few_messages_to_queue_groups(
    data: bytes, has_one_group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_delivery, "BATCH_COST_PER_CLIENT_MAX", 100 * 1024)
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 100 * 1024)
    harness = splitting()
    for number in range(100):
        name = b"g" if has_one_group else b"g%d" % number
        harness.client(QUIET + b"SUB a.* %b 1\r\n" % name)
    counts = deliveries_per_turn(harness, data)
    assert sum(counts) == data.count(b"PUB") * (1 if has_one_group else 100)
    assert max(counts) <= 20


def test_search_for_many_receivers_takes_a_turn(
    publication: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 100 * FOUND_SINK_COST_BYTES)
    harness = splitting()
    subscribers = [harness.client(QUIET + b"SUB a.* 1\r\n") for _ in range(200)]
    counts = receivers_per_turn(harness.client(QUIET), subscribers, publication)
    assert counts[0] == 0
    assert sum(counts) == 200


def test_a_turn_searches_for_the_receivers_of_few_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_server, "SEARCHED_SINKS_PER_TURN_MAX", 10)
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 100 * 1024)
    names = [b"a.%d" % number for number in range(60)]
    harness, expected = splitting(), NatsServerHarness()
    for each in (harness, expected):
        each.client(QUIET + b"".join(b"SUB %b %b\r\n" % (name, name) for name in (b"a.*", *names)))
        each.client(QUIET + b"SUB a.* 1\r\n")
    data = b"".join(b"PUB %b 2\r\n%02d\r\n" % (name, n) for n, name in enumerate(names))
    expected.client(QUIET + data)
    publisher, searched = harness.client(QUIET), [harness.nats_server.routes.statistics().searches]
    publisher.start(data)
    searched.append(harness.nats_server.routes.statistics().searches)
    while publisher.take_turn():
        searched.append(harness.nats_server.routes.statistics().searches)
    assert searched[-1] - searched[0] == len(names)
    assert np.diff(searched).max() <= 10
    for received, complete in zip(harness.clients[:2], expected.clients[:2], strict=True):
        assert sorted(received.lines().split(b"MSG")) == sorted(complete.lines().split(b"MSG"))


def test_long_subscription_ids_count_as_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_delivery, "BATCH_COST_PER_CLIENT_MAX", 100 * 1024)
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", 100 * 1024)
    harness = splitting()
    harness.client(QUIET + b"SUB a.* %b\r\n" % (b"s" * 4000))
    counts = deliveries_per_turn(harness, uniform(100))
    assert sum(counts) == 100
    assert max(counts) <= 20


@pytest.mark.parametrize("command", [QUIET, b"PING\r\n", b"PONG\r\n"])
def test_a_turn_handles_few_commands(command: bytes) -> None:
    client = splitting().client(QUIET)
    client.start(command * 4)
    turns = 1
    while client.take_turn():
        turns += 1
    assert turns == 4


def test_a_turn_handles_few_requests_without_responders() -> None:
    harness = splitting()
    options = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n'
    client = harness.client(options + b"SUB reply 1\r\n")
    client.start(b"PUB b reply 0\r\n\r\n" * 20)
    counts = [client.lines().count(b" 503\r\n")]
    while client.take_turn():
        counts.append(client.lines().count(b" 503\r\n"))
    assert sum(counts) == 20
    assert max(counts) == 1


def test_batch_of_single_messages_is_delivered_in_turns() -> None:
    harness = splitting()
    subscribers = [harness.client(QUIET + b"SUB a.* 1\r\n") for _ in range(3)]
    publisher = harness.client(b'CONNECT {"verbose":true,"pedantic":false}\r\n')
    publisher.lines()
    counts = receivers_per_turn(publisher, subscribers, mixed() + b"PING\r\n")
    assert max(counts) == 1
    assert sum(counts) == 3 * 60
    assert publisher.lines() == b"+OK\r\n" * 60 + b"PONG\r\n"


def test_reads_that_are_not_split_deliver_at_once(publication: bytes) -> None:
    harness = NatsServerHarness()
    subscribers = [harness.client(QUIET + b"SUB a.* 1\r\n") for _ in range(3)]
    publisher = harness.client(QUIET)
    assert receivers_per_turn(publisher, subscribers, publication) == [3]


def test_cost_of_many_receivers_does_not_shorten_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_delivery, "GROUPING_COST_BYTES", OUTPUT_PER_READ_BYTES)
    harness = splitting()
    for _ in range(3):
        harness.client(QUIET + b"SUB a.* 1\r\n")
    publisher = harness.client(QUIET)
    message = b"PUB a.0 3\r\nxyz\r\n"
    for _ in range(8):
        publisher.send(message * (publisher.session.next_read_bytes // len(message)))
    assert publisher.session.next_read_bytes == FAN_OUT_READ_BYTES


def test_commands_behind_a_publication_wait_for_its_last_turn(publication: bytes) -> None:
    harness = splitting()
    subscribers = [harness.client(QUIET + b"SUB a.* 1\r\n") for _ in range(3)]
    publisher = harness.client(QUIET)
    publisher.start(publication + b"PING\r\n")
    while publisher.session.is_request_pending:
        assert publisher.lines() == b""
        publisher.take_turn()
    assert all(subscriber.lines() for subscriber in subscribers)
    publisher.take_turn()
    assert publisher.lines() == b"PONG\r\n"


@pytest.mark.parametrize("is_accepted", [False, True])
def test_no_responders_are_known_after_the_last_turn(is_accepted: bool) -> None:
    harness = splitting()
    for index in range(3):
        pattern = b"a.0" if is_accepted and index == 2 else b"b"
        harness.client(QUIET + b"SUB %s 1\r\n" % pattern)
    connect = b'CONNECT {"verbose":false,"headers":true,"no_responders":true,"echo":false}\r\n'
    requester = harness.client(connect + b"SUB in 1\r\nSUB a.0 2\r\nSUB a.* 3\r\n")
    requester.send(b"PUB a.0 in 1\r\nx\r\n")
    assert requester.lines().startswith(b"HMSG in 1 ") is not is_accepted


def use_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return more than two sinks of a subject in pages of two."""
    monkeypatch.setattr(matches, "MATCHES_IN_TUPLE_MAX", 2)
    monkeypatch.setattr(matches, "PAGE_SIZE", 2)
    monkeypatch.setattr(paged_set, "PAGE_SIZE", 2)


@pytest.mark.parametrize("splits_reads", [False, True])
def test_requester_is_found_among_many_sinks(
    splits_reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_pages(monkeypatch)
    harness = NatsServerHarness(splits_reads=splits_reads)
    others = [harness.client(QUIET + b"SUB in 1\r\n") for _ in range(8)]
    connect = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'
    requester = harness.client(connect + b"SUB in.> 1\r\nSUB *.* 2\r\nSUB in 3\r\n")
    requester.start(b"PUB b in 1\r\nx\r\n")
    turns = 1
    while requester.take_turn():
        turns += 1
    assert turns > 4 if splits_reads else turns == 1
    assert requester.lines().startswith(b"HMSG in 3 ")
    assert all(other.lines() == b"" for other in others)


# Queue groups that are merged in several turns ---------------------------------------------------

GROUP_PATTERNS = st.sampled_from([b"a.0", b"a.*", b"*.0", b"*.*", b"a.>", b"a.1"])
GROUP_MEMBERS = st.lists(
    st.tuples(GROUP_PATTERNS, st.sampled_from([b"", b"g", b"h"])), min_size=3, max_size=10
)


@given(
    GROUP_MEMBERS,
    st.lists(st.tuples(GROUP_PATTERNS, st.sampled_from([b"g", b"h"]), st.booleans()), max_size=20),
    st.sampled_from([single(), uniform(), mixed()]),
    st.sampled_from([1, 2, 100]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_one_member_receives_a_message_while_subscriptions_change(
    subscribed: list[tuple[bytes, bytes]],
    changes: list[tuple[bytes, bytes, bool]],
    publication: bytes,
    tuple_max: int,
    is_single: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matches, "MATCHES_IN_TUPLE_MAX", tuple_max)
        if is_single:
            patch.setattr(message_delivery, "BATCH_COST_PER_CLIENT_MAX", 0)
        harness = splitting()
        staying = harness.client(QUIET)
        for sid, (pattern, queue) in enumerate(subscribed):
            staying.send(b"SUB %b %b %b%d\r\n" % (pattern, queue, queue or b"plain", sid))
        changing, publisher = harness.client(QUIET), harness.client(QUIET)
        for pattern, queue, _ in changes:
            changing.send(b"SUB %b %b %b\r\n" % (pattern, queue, queue))
        publisher.start(publication)
        received = [staying.lines()]
        waiting_changes = list(changes)
        while publisher.take_turn():
            received.append(staying.lines())
            if waiting_changes:
                pattern, queue, joins = waiting_changes.pop()
                changing.send(b"UNSUB %b\r\n" % queue)
                if joins:
                    changing.send(b"SUB %b %b %b\r\n" % (pattern, queue, queue))
        received.append(staying.lines())
        deliveries = Counter(MESSAGE.findall(b"".join([*received, changing.lines()])))
    messages = Counter(re.findall(rb"PUB (\S+) \d+\r\n(\w+)\r\n", publication))
    for (subject, payload), count in messages.items():
        matching = [
            (b"%b%d" % (queue or b"plain", sid), queue)
            for sid, (pattern, queue) in enumerate(subscribed)
            if is_match(pattern.decode(), subject.decode())
        ]
        for sid, queue in matching:
            if not queue:
                assert deliveries[subject, sid, payload] == count
        for queue in {queue for _, queue in matching if queue}:
            sids = [queue, *[sid for sid, other in matching if other == queue]]
            assert sum(deliveries[subject, sid, payload] for sid in sids) == count


def test_next_message_waits_for_a_publication_that_ends_its_turn_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_delivery, "OUTPUT_PER_READ_BYTES", OUTPUT_PER_READ_BYTES)
    monkeypatch.setattr(matches, "MATCHES_IN_TUPLE_MAX", 1)
    monkeypatch.setattr(message_delivery, "SINGLE_DELIVERY_COST_BYTES", OUTPUT_PER_READ_BYTES // 2)
    harness = splitting()
    subscribers = [harness.client(QUIET + b"SUB a.* 1\r\n") for _ in range(3)]
    publisher = harness.client(QUIET)
    publisher.start(b"".join(b"PUB a.%d 1\r\n%d\r\n" % (n, n) for n in range(5)))
    while publisher.take_turn():
        pass
    for subscriber in subscribers:
        assert [number for _, _, number in MESSAGE.findall(subscriber.lines())] == [
            b"%d" % n for n in range(5)
        ]


def test_client_is_not_disconnected_while_its_publication_waits() -> None:
    harness = splitting()
    for _ in range(3):
        harness.client(QUIET + b"SUB a.* 1\r\n")
    publisher = harness.client(QUIET + b"PING\r\n")
    publisher.start(single())
    for seconds in range(0, 1000, 100):
        harness.nats_server.now = float(seconds)
        harness.nats_server.tick()
    assert publisher.session.is_request_pending
    assert not publisher.session.is_disconnecting


# Slow receivers and memory -----------------------------------------------------------------------


def test_publisher_stalls_for_slow_receivers_of_all_turns() -> None:
    server = NatsServer(NatsSettings(NatsLimits(max_pending=256 * 1024, max_payload=64 * 1024)))
    sessions = [server.open_session("receiver") for _ in range(3)]
    for session in sessions:
        server.receive(session, buffer(), buffer().fill(QUIET + b"SUB a 1\r\n"))
    publisher = server.open_session("publisher")
    server.receive(publisher, buffer(), buffer().fill(QUIET))
    publisher.allow_split_reads()
    data = b"PUB a 1000\r\n%b\r\n" % bytes(1000) * 70
    server.receive(publisher, buffer(), buffer().fill(data))
    server.drain_ready()
    turns = 1
    while publisher.unprocessed or publisher.is_request_pending:
        assert publisher.stall is None
        if publisher.is_request_pending:
            server.continue_request(publisher)
        else:
            server.receive(publisher, buffer(), publisher.refill(buffer()))
        server.drain_ready()
        turns += 1
    assert turns >= 3
    assert publisher.stall is not None
    assert set(publisher.stall.sessions) == set(sessions)
    assert not publisher.stall.has_fast_receivers


def test_memory_of_a_pending_publication_is_counted(publication: bytes) -> None:
    harness = splitting()
    for _ in range(3):
        harness.client(QUIET + b"SUB a.* 1\r\n")
    publisher = harness.client(QUIET)
    publisher.start(publication)
    assert 0 < publisher.session.kept_bytes <= len(publication)
    publisher.finish()
    assert publisher.session.kept_bytes == 0


def test_reply_for_one_client_reaches_its_subscriptions_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_small_pages(monkeypatch)
    monkeypatch.setattr(message_delivery, "SEARCHED_SINKS_PER_TURN_MAX", 2)
    harness = splitting()
    subscriptions = b"".join(b"SUB r %d\r\n" % sid for sid in range(5))
    receiver, other = harness.client(QUIET + subscriptions), harness.client(QUIET + subscriptions)
    server = harness.nats_server
    server.allow_waiting_deliveries()
    reply = Pub(b"r", b"", b"1", b"", 0, memoryview(b"x"))
    server.begin_turn()
    server.deliver_reply(reply, receiver=receiver.session)
    turn_count = 1
    while server.has_waiting_deliveries:
        server.begin_turn()
        server.deliver_waiting()
        turn_count += 1
    assert turn_count == 5
    receiver.drain()
    other.drain()
    sids = [sid for _, sid, _ in MESSAGE.findall(receiver.lines())]
    assert sorted(sids) == [b"%d" % sid for sid in range(5)]
    assert not other.lines()


@pytest.mark.parametrize("large_group_members", [1024, 16])
@pytest.mark.parametrize("publication", [single(), uniform(), mixed()])
@pytest.mark.parametrize("own_subject", [b"a.*", b"a.>"])
def test_members_of_a_client_that_rejects_its_own_messages_are_passed_over(
    monkeypatch: pytest.MonkeyPatch,
    large_group_members: int,
    publication: bytes,
    own_subject: bytes,
) -> None:
    monkeypatch.setattr(queue_group, "_LARGE_GROUP_MEMBERS", large_group_members)
    harness = splitting()
    publisher = harness.client(b'CONNECT {"verbose":false,"echo":false}\r\n')
    publisher.start(b"".join(b"SUB %b g %d\r\n" % (own_subject, sid) for sid in range(40)))
    receiver = harness.client(QUIET + b"SUB a.* g 1\r\n")
    count = publication.count(b"PUB")
    for left_count in (40, 20, 0):
        receiver.lines()
        publisher.start(publication)
        while publisher.take_turn():
            pass
        assert len(MESSAGE.findall(receiver.lines())) == count
        assert not MESSAGE.findall(publisher.lines())
        publisher.start(b"".join(b"UNSUB %d\r\n" % sid for sid in range(left_count)))
    receiver.start(b"UNSUB 1\r\n")
    publisher.start(publication)
    while publisher.take_turn():
        pass
    assert not MESSAGE.findall(receiver.lines())
