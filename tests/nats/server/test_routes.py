"""Routes of subjects, singly and in batches, and queue groups."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Generator, Iterable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from simplebus.core.channel import matches
from simplebus.core.channel.subscription_index import SubscriptionIndex
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.core.users.users import User, Users
from simplebus.nats.limits import MERGED_GROUP_COST
from simplebus.nats.server import routes as routes_module
from simplebus.nats.server.queue_group import MergedQueueGroup, QueueGroup, RandomNumbers
from simplebus.nats.server.routes import SubjectRoutes, SubjectSink
from simplebus.nats.server.session import NatsSession, NatsSubscription
from simplebus.nats.settings import NatsSettings
from simplebus.nats.subjects import index_key
from tests.core.channel.channel_oracle import is_match
from tests.nats.protocol.numbered_subjects import numbered
from tests.nats.server.nats_peer import Client, NatsServerHarness

QUIET = b'CONNECT {"verbose":false,"pedantic":false}\r\n'
DEAF = b'CONNECT {"verbose":false,"pedantic":false,"echo":false}\r\n'


def mixed(count: int, names: list[bytes]) -> bytes:
    """Return a mixed batch with numbered payloads on these subjects in turn."""
    return b"".join(
        b"PUB %s 3\r\n%03d\r\n" % (names[index % len(names)], index) for index in range(count)
    )


def numbers(client: Client) -> list[int]:
    """Return the payload numbers of the received messages."""
    lines = client.lines().split(b"\r\n")
    return [int(line) for line in lines[1::2]]


def identify(sink: SubjectSink) -> object:
    """Return the sink, or the members of merged queue groups, which are merged for each search."""
    return list(sink.current_members()) if isinstance(sink, MergedQueueGroup) else sink


SUBJECTS = st.lists(st.sampled_from(["a", "b", "*", "#"]), min_size=1, max_size=3).map(
    lambda tokens: ".".join(tokens).encode()
)
NAMES = st.lists(st.sampled_from(["a", "b", "#"]), min_size=1, max_size=3).map(
    lambda tokens: ".".join(tokens).encode()
)


@given(
    st.lists(st.tuples(SUBJECTS, st.sampled_from([b"", b"g"])), max_size=6),
    st.lists(NAMES, min_size=1, max_size=20),
    st.sampled_from([0, 1, 100]),
    st.sampled_from([0, 4, 100]),
)
def test_batch_routes_equal_single_routes(
    subscribed: list[tuple[bytes, bytes]],
    names: list[bytes],
    tuple_max: int,
    cached_sinks_max: int,
) -> None:
    routes = SubjectRoutes(np.random.default_rng(0))
    session = NatsServerHarness().client(QUIET).session
    for index, (subject, queue) in enumerate(subscribed):
        routes.subscribe(NatsSubscription(session, subject, queue, b"%d" % index))
    numbers = numbered(routes.table, names)
    found: dict[int, list[object]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matches, "MATCHES_IN_TUPLE_MAX", tuple_max)
        patch.setattr(routes_module, "CACHED_SINKS_MAX", cached_sinks_max)
        routes.match_each(numbers)
        for sinks, rows in routes.split_by_sinks(numbers):
            for row in range(len(names)) if rows is None else rows.tolist():
                assert row not in found
                found[row] = list(map(identify, sinks))
    expected = [list(map(identify, routes.match(name))) for name in names]
    assert [found[row] for row in range(len(names))] == expected


ACK_WORDS = st.sampled_from(["$JS", "ACK", "*", "a", "API", "b"])
ACK_PATTERNS = st.tuples(st.lists(ACK_WORDS, max_size=4), st.sampled_from([">", "*", "a"])).map(
    lambda parts: ".".join([*parts[0], parts[1]]).encode()
)
ACK_SUBJECTS = st.lists(st.sampled_from(["a", "b", "*", "#", ">", ""]), max_size=5).map(
    lambda tokens: ".".join(["$JS", "ACK", *tokens]).encode()
)


@given(
    st.lists(ACK_PATTERNS, max_size=6),
    st.lists(ACK_SUBJECTS, min_size=1, max_size=6),
    st.integers(0, 6),
)
@example([b"$JS.ACK.*.b"], [b"$JS.ACK.a.b", b"$JS.ACK.a.a"], 0)
@example([b"$JS.ACK.a"], [b"$JS.ACK.a", b"$JS.ACK.b"], 1)
def test_ack_subjects_are_matched_like_others(
    patterns: list[bytes], names: list[bytes], removed_count: int
) -> None:
    routes, oracle = (
        SubjectRoutes(np.random.default_rng(0)),
        SubscriptionIndex[SubjectSink](check=lambda pattern: pattern),
    )
    session = NatsServerHarness().client(QUIET).session
    subscriptions = [
        NatsSubscription(session, pattern, b"", b"%d" % number)
        for number, pattern in enumerate([b"$JS.ACK.>", *patterns])
    ]
    for subscription in subscriptions:
        routes.subscribe(subscription)
        oracle.insert(index_key(subscription.subject), subscription)
    for subscription in [None, *subscriptions[:removed_count]]:
        if subscription is not None:
            routes.unsubscribe(subscription)
            oracle.remove(index_key(subscription.subject), subscription)
        for name in names:
            assert routes.match(name) == oracle.match(index_key(name))


def test_cached_results_are_dropped_after_a_change() -> None:
    routes = SubjectRoutes(np.random.default_rng(0))
    session = NatsServerHarness().client(QUIET).session
    numbers = numbered(routes.table, [b"a.b"])
    assert [sinks for sinks, _ in routes.split_by_sinks(numbers)] == [()]
    subscription = NatsSubscription(session, b"a.*", b"", b"1")
    routes.subscribe(subscription)
    assert [sinks for sinks, _ in routes.split_by_sinks(numbers)] == [(subscription,)]
    routes.unsubscribe(subscription)
    assert [sinks for sinks, _ in routes.split_by_sinks(numbers)] == [()]
    assert len(routes) == 0


def test_cached_results_do_not_keep_ended_subscriptions() -> None:
    routes = SubjectRoutes(np.random.default_rng(0))
    session = NatsServerHarness().client(QUIET).session
    subscription = NatsSubscription(session, b"a", b"", b"1")
    routes.subscribe(subscription)
    routes.match_each(numbered(routes.table, [b"a"]))
    assert routes.statistics().results == 1
    routes.unsubscribe(subscription)
    assert routes.statistics().results == 0


def test_cached_results_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "CACHED_SINKS_MAX", 40)
    routes = SubjectRoutes(np.random.default_rng(0))
    session = NatsServerHarness().client(QUIET).session
    names = [b"a.%d" % number for number in range(100)]
    for index, subject in enumerate([*names, *[b"a.*"] * 9]):
        routes.subscribe(NatsSubscription(session, subject, b"", b"%d" % index))
    for number in numbered(routes.table, names).tolist():
        [sinks] = routes.match_each(np.array([number], np.int32))
        assert len(sinks) == 10
        assert routes.statistics().results <= 5


def test_groups_with_one_name_are_merged() -> None:
    routes = SubjectRoutes(np.random.default_rng(0))
    session = NatsServerHarness().client(QUIET).session
    subscriptions = [
        NatsSubscription(session, subject, queue, sid)
        for subject, queue, sid in [
            (b"a.b", b"g", b"1"),
            (b"a.*", b"g", b"2"),
            (b"a.*", b"h", b"3"),
            (b"a.b", b"", b"4"),
        ]
    ]
    for subscription in subscriptions:
        routes.subscribe(subscription)
    by_type = {type(sink): sink for sink in routes.match(b"a.b")}
    assert len(by_type) == len(routes.match(b"a.b")) == 3
    plain = by_type[NatsSubscription]
    joined, merged = by_type[QueueGroup], by_type[MergedQueueGroup]
    assert plain is subscriptions[3]
    assert isinstance(joined, QueueGroup)
    assert isinstance(merged, MergedQueueGroup)
    assert set(merged.current_members()) == set(subscriptions[:2])
    assert routes.match(b"a.b") == routes.match(b"a.b")
    assert len(routes.match(b"a.c")) == 2
    for subscription in subscriptions:
        routes.unsubscribe(subscription)
    assert routes.match(b"a.b") == ()


def test_merged_groups_follow_member_changes() -> None:
    harness = NatsServerHarness()
    first, second, publisher = harness.client(QUIET), harness.client(QUIET), harness.client(QUIET)
    first.send(b"SUB a.* g 1\r\n")
    second.send(b"SUB *.b g 1\r\n")
    batch = b"PUB a.b 1\r\n0\r\n" * 60
    received = []
    for data in (b"", b"UNSUB 1\r\n", b"SUB *.b g 1\r\nSUB a.* g 2\r\n"):
        second.send(data)
        publisher.send(batch)
        received.append((len(numbers(first)), len(numbers(second))))
    assert [sum(counts) for counts in received] == [60, 60, 60]
    assert received[0][1] > 0
    assert received[1][1] == 0
    assert received[2][1] > 30  # Two of three memberships are its own.


def test_merged_groups_keep_remaining_members() -> None:
    harness = NatsServerHarness()
    subscribe_both = b"SUB a.* g 1\r\nSUB *.b g 2\r\n"
    staying, leaving, publisher = (
        harness.client(QUIET + subscribe_both),
        harness.client(QUIET),
        harness.client(QUIET),
    )
    for data, shares in (
        (b"", 1),
        (subscribe_both, 2),
        (b"UNSUB 1\r\nUNSUB 2\r\n", 1),
        (subscribe_both, 2),
    ):
        leaving.send(data)
        publisher.send(b"PUB a.b 1\r\n0\r\n" * 60)
        publisher.send(b"PUB a.b 1\r\n0\r\n" * 60, 16)
        counts = [len(numbers(client)) for client in (staying, leaving)]
        assert sum(counts) == 120
        assert sum(count > 20 for count in counts) == shares


@pytest.mark.parametrize("subjects", [(b"a", b"a"), (b"a", b"*")], ids=["one", "joined"])
@pytest.mark.parametrize("count", [12, 60])
def test_members_can_end_within_a_batch(subjects: tuple[bytes, bytes], count: int) -> None:
    harness = NatsServerHarness()
    member, publisher = harness.client(QUIET), harness.client(QUIET)
    for index in range(8):
        sid = b"%d" % index
        member.send(b"SUB %b g %b\r\nUNSUB %b 1\r\n" % (subjects[index % 2], sid, sid))
    publisher.send(b"PUB a 1\r\n0\r\n" * count)
    assert not publisher.closed
    assert len(numbers(member)) == 8


def test_merged_group_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "CACHED_SINKS_MAX", 64 * MERGED_GROUP_COST)
    routes = SubjectRoutes(np.random.default_rng(0))
    session = NatsServerHarness().client(QUIET).session
    tokens = 10
    for index in range(tokens):
        subject = b".".join(b"a" if index == word else b"*" for word in range(tokens))
        routes.subscribe(NatsSubscription(session, subject, b"g", b"%d" % index))
    names = [
        b".".join(b"a" if number >> word & 1 else b"b" for word in range(tokens))
        for number in range(1 << tokens)
    ]
    for number, subject_number in enumerate(numbered(routes.table, names).tolist()):
        [sinks] = routes.match_each(np.array([subject_number], np.int32))
        assert sum(len(sink.current_members()) for sink in sinks) == number.bit_count()  # type: ignore[attr-defined]
    cached_count = sum(
        isinstance(referrer, MergedQueueGroup) for referrer in gc.get_referrers(MergedQueueGroup)
    )
    assert 0 < cached_count <= 64


ROUTE_NAMES = st.sampled_from([b"a", b"b", b"a.a", b"a.b", b"b.a", b"a.b.a"])
SUBSCRIBED = st.lists(
    st.tuples(SUBJECTS, st.sampled_from([b"", b"g", b"h", b"i"])), min_size=1, max_size=12
)


def receivers_of(sinks: Iterable[SubjectSink]) -> Counter[tuple[NatsSubscription, ...]]:
    """Return the possible receivers of a message, one tuple for each copy of it."""
    return Counter(
        (sink,) if isinstance(sink, NatsSubscription) else tuple(sorted_members(sink))
        for sink in sinks
    )


def sorted_members(group: SubjectSink) -> list[NatsSubscription]:
    assert isinstance(group, QueueGroup | MergedQueueGroup)
    return sorted(group.current_members(), key=lambda member: member.sid)


@given(SUBSCRIBED, ROUTE_NAMES, st.integers(1, 4), st.sampled_from([0, 1, 2, 100]))
def test_sinks_merged_in_steps_equal_sinks_merged_at_once(
    subscribed: list[tuple[bytes, bytes]], name: bytes, page_size: int, tuple_max: int
) -> None:
    routes = SubjectRoutes(np.random.default_rng(0))
    session = NatsServerHarness().client(QUIET).session
    expected: dict[object, list[NatsSubscription]] = {}
    for index, (subject, queue) in enumerate(subscribed):
        subscription = NatsSubscription(session, subject, queue, b"%02d" % index)
        routes.subscribe(subscription)
        if is_match(index_key(subject), index_key(name)):
            expected.setdefault(queue or subscription, []).append(subscription)
    expected_receivers = Counter(map(tuple, expected.values()))
    assert receivers_of(routes.match(name)) == expected_receivers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matches, "MATCHES_IN_TUPLE_MAX", tuple_max)
        patch.setattr(matches, "PAGE_SIZE", page_size)
        routes.subscribe(NatsSubscription(session, b"other.>", b"", b"99"))  # Clears the cache.
        found, merger = routes.match(name), routes.create_merger()
    for page in matches.pages_of(found):
        merger.add(page)
    assert receivers_of(merger.drain()) == expected_receivers
    if isinstance(found, tuple):
        assert receivers_of(found) == expected_receivers


def test_merger_removes_repeated_sinks() -> None:
    routes = SubjectRoutes(np.random.default_rng(0))
    sink = Listed()
    merger = routes.create_merger()
    merger.add((sink,))
    merger.add((sink, sink))
    assert list(merger.drain()) == [sink]


def test_search_counts_groups_before_they_are_merged() -> None:
    routes = SubjectRoutes(np.random.default_rng(0))
    session = NatsServerHarness().client(QUIET).session
    for index, subject in enumerate([b"*.a", b"*.*", b"*.>"]):
        routes.subscribe(NatsSubscription(session, subject, b"g", b"%d" % index))
    numbers = numbered(routes.table, [b"%d.a" % number for number in range(20)])
    [sinks] = routes.match_each(numbers[:1])
    assert len(sinks) == 1
    assert routes.search(numbers[1:]) == (0, 19)  # All subjects have the same result.
    assert routes.search(numbers[1:]) == (0, 0)
    routes.subscribe(NatsSubscription(session, b"1.a", b"g", b"9"))
    sink_count, subject_count = routes.search(numbers[1:2])
    assert sink_count > 4 * MERGED_GROUP_COST
    assert subject_count == 1


def test_each_message_goes_to_one_current_member() -> None:
    group = QueueGroup(RandomNumbers(np.random.default_rng(1)), b"a", b"g")
    session = NatsServerHarness().client(QUIET).session
    members = [NatsSubscription(session, b"a", b"g", b"%d" % index) for index in range(40)]
    for member in members:
        group.add(member)
    for member in members[::2]:
        group.remove(member)
    assert set(group.members) == set(members[1::2])
    for member in members[1::2]:
        group.remove(member)
    assert group.members == []


def test_members_are_chosen_evenly() -> None:
    harness = NatsServerHarness(seed=3)
    members = [harness.client(QUIET + b"SUB a g 1\r\nSUB a.* g 2\r\n") for _ in range(4)]
    publisher = harness.client(QUIET)
    publisher.send(mixed(400, [b"a", b"a.b"]))  # As one batch,
    publisher.send(mixed(400, [b"a", b"a.b"]), 17)  # and one by one.
    counts = [len(numbers(member)) for member in members]
    assert sum(counts) == 800
    # 200 are expected for each; 60 off is more than five standard deviations.
    assert all(140 < count < 260 for count in counts), counts


@pytest.mark.parametrize("chunks", [0, 17])
@pytest.mark.parametrize("names", [[b"a"], [b"a", b"b"]])
def test_members_receive_messages_in_publication_order(chunks: int, names: list[bytes]) -> None:
    harness = NatsServerHarness(seed=5)
    members = [harness.client(QUIET + b"SUB a g 1\r\nSUB b g 2\r\nSUB > h 3\r\n") for _ in range(3)]
    recorder = harness.client(DEAF + b"SUB > g 1\r\nSUB > h 2\r\nUNSUB 2 5\r\nSUB > i 3\r\n")
    recorder.send(mixed(120, names), chunks)
    received = [numbers(member) for member in members]
    assert all(first == sorted(first) for first in received)
    counted = Counter(number for first in received for number in first)
    assert counted == dict.fromkeys(range(120), 2)
    assert recorder.lines() == b""


def test_rest_of_a_batch_goes_to_other_members() -> None:
    harness = NatsServerHarness()
    ends = harness.client(QUIET + b"SUB a g 1\r\nUNSUB 1 3\r\nSUB a g 2\r\nUNSUB 2 4\r\n")
    staying = harness.client(QUIET + b"SUB a g 1\r\n")
    harness.client(QUIET + mixed(90, [b"a"]))
    assert len(numbers(ends)) == 7
    assert len(numbers(staying)) == 83
    assert ends.session.subscriptions == {}


@pytest.mark.parametrize("connect", [QUIET, b'CONNECT {"verbose":false,"pedantic":true}\r\n'])
@pytest.mark.parametrize("names", [[b"a"], [b"a", b"b", b"c"]])
def test_ending_member_receives_the_first_messages_of_a_batch(
    names: list[bytes], connect: bytes
) -> None:
    harness = NatsServerHarness()
    ends = harness.client(QUIET + b"SUB * 1\r\nUNSUB 1 5\r\n")
    harness.client(connect + mixed(90, names))
    assert numbers(ends) == [0, 1, 2, 3, 4]


def test_rejected_messages_go_to_other_members() -> None:
    denied = User("some", "p", subject_permissions=SubjectPermissions(subscribe_deny=("no.>",)))
    auth = Users((denied, User("all", "p")))
    harness = NatsServerHarness(NatsSettings(users=auth), seed=2)
    rejecting, accepting, publisher = (
        harness.client(QUIET[:-3] + b',"user":"%b","pass":"p"}\r\n' % name)
        for name in (b"some", b"all", b"all")
    )
    rejecting.send(b"SUB > g 1\r\nUNSUB 1 5\r\n")
    accepting.send(b"SUB > g 1\r\n")
    publisher.send(mixed(90, [b"no.a", b"ok.a", b"no.b"]))
    received = numbers(rejecting), numbers(accepting)
    assert sorted(received[0] + received[1]) == list(range(90))
    assert len(received[0]) == 5
    assert {number % 3 for number in received[0]} == {1}


@pytest.mark.parametrize("chunks", [0, 16])
def test_accepting_members_depend_on_subject_and_publisher(chunks: int) -> None:
    users = (
        User("a", "p", subject_permissions=SubjectPermissions(subscribe_deny=("no.a",))),
        User("b", "p", subject_permissions=SubjectPermissions(subscribe_deny=("no.b",))),
    )
    harness = NatsServerHarness(NatsSettings(users=Users(users)))
    first, merged, third_client = (
        harness.client(DEAF[:-3] + b',"user":"%b","pass":"p"}\r\nSUB no.> g 1\r\n' % name)
        for name in (b"a", b"b", b"a")
    )
    third_client.send(mixed(80, [b"no.a", b"no.b"]), chunks)  # By subject,
    assert numbers(first) == list(range(1, 80, 2))
    assert numbers(merged) == list(range(0, 80, 2))
    third_client.send(b"UNSUB 1\r\n")
    for publisher, receiver in ((first, merged), (merged, first)):  # by publisher,
        publisher.send(mixed(80, [b"no.c"]), chunks)
        assert numbers(receiver) == list(range(80))
    first.send(b"UNSUB 1\r\n")
    third_client.send(b"SUB no.> g 1\r\n")
    merged.send(mixed(80, [b"no.c"]), chunks)  # and by connected members.
    assert numbers(third_client) == list(range(80))
    assert numbers(first) == numbers(merged) == []


def test_group_without_accepting_members_accepts_nothing() -> None:
    harness = NatsServerHarness()
    connect = b'CONNECT {"verbose":false,"echo":false,"headers":true,"no_responders":true}\r\n'
    requester = harness.client(
        connect + b"SUB y g 1\r\nSUB y g 2\r\nSUB in 3\r\nPUB y in 0\r\n\r\n"
    )
    assert requester.lines().startswith(b"HMSG in 3 33 33\r\nNATS/1.0 503\r\n")


@pytest.mark.parametrize("count", [1, 40])
def test_repeated_connect_ends_members_of_queue_groups(count: int) -> None:
    users = (
        User("a", "p", subject_permissions=SubjectPermissions(subscribe_deny=("no.>",))),
        User("b", "p", subject_permissions=SubjectPermissions(subscribe_deny=("x.>",))),
    )
    harness = NatsServerHarness(NatsSettings(users=Users(users)))
    connect = QUIET[:-3] + b',"user":"%b","pass":"p"}\r\n'
    member, publisher = harness.client(connect % b"a"), harness.client(connect % b"b")
    member.send(b"".join(b"SUB > g %d\r\n" % sid for sid in range(200)))
    member.send(connect % b"b" + b"SUB > g new\r\n")
    publisher.send(b"PUB no.a 1\r\nx\r\n" * count)
    assert member.lines().count(b"MSG no.a new 1\r\n") == count


@pytest.mark.parametrize("count", [1, 40])
def test_members_that_ended_since_the_last_message_are_passed_over(count: int) -> None:
    users = (
        User("a", "p", subject_permissions=SubjectPermissions(subscribe_deny=("no.a",))),
        User("b", "p"),
    )
    harness = NatsServerHarness(NatsSettings(users=Users(users)))
    connect = QUIET[:-3] + b',"user":"%b","pass":"p"}\r\n'
    denied, ending, lasting, publisher = (
        harness.client(connect % user) for user in (b"a", b"b", b"b", b"b")
    )
    denied.send(b"".join(b"SUB no.* g %d\r\n" % sid for sid in range(40)))
    ending.send(b"".join(b"SUB no.* g %d\r\n" % sid for sid in range(20)))
    ending.send(b"".join(b"SUB other.%d %d\r\n" % (sid, 100 + sid) for sid in range(200)))
    lasting.send(b"SUB no.* g 1\r\n")
    for _ in range(40):
        publisher.send(b"PUB no.a 1\r\nx\r\n")
    assert numbers_received(ending) + numbers_received(lasting) == 40
    ending.send(connect % b"b")  # Its many subscriptions are left in the group for some turns.
    for _ in range(20):
        publisher.send(b"PUB no.a 1\r\nx\r\n" * count)
        assert numbers_received(lasting) == count


def numbers_received(client: Client) -> int:
    """Return how many messages the client has received since the last call."""
    return client.lines().count(b"MSG ")


class Listed:
    """Sink that records its messages."""

    is_ordered = True
    delivery_filters = ()

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def deliver(self, message: object, origin: object) -> bool:
        raise AssertionError("expected a batch")

    def deliver_in_steps(self, message: object, origin: object) -> Generator[None, None, bool]:
        raise AssertionError("expected a batch")

    def further_cost_bytes(self, count: int) -> int:
        return 0

    def receiving_sessions(self) -> list[NatsSession]:
        return []

    def deliver_batch(self, messages: object, rows: object, origin: object) -> None:
        self.batches.append(list(range(64)) if rows is None else rows.tolist())  # type: ignore[attr-defined]


def test_ordered_sink_receives_a_batch_in_order() -> None:
    harness = NatsServerHarness()
    sink = Listed()
    harness.nats_server.routes.add(b">", sink)
    harness.client(QUIET + b"SUB a 1\r\n")
    harness.client(QUIET + mixed(64, [b"a", b"b", b"c"]))
    assert sink.batches == [list(range(64))]
