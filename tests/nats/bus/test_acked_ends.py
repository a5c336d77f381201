"""End of acked subscriptions: UNSUB, drain and closed connections."""

from __future__ import annotations

from itertools import pairwise

import pytest

from simplebus.core.errors import Reason
from simplebus.core.limits import DEAD_LETTER_BATCH_MESSAGES, SUBSCRIPTIONS_ENDED_PER_TURN
from simplebus.core.subscription import unacked_messages
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.core.users.users import User, Users
from simplebus.nats.errors import NatsError
from simplebus.nats.limits import OUTPUT_PER_READ_BYTES, UNSUBSCRIBE_COST_BYTES
from simplebus.nats.nats_server import apply_settings_in_parts
from simplebus.nats.settings import NatsSettings
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer import publish as publish1
from tests.behaviour.wire_peer_v2 import connect_version2, subscribe
from tests.nats.bus.two_listeners import (
    DEAD_1,
    Client,
    NatsBrokerHarness,
    deliveries,
    holding,
    stored,
)


def test_unsub_returns_unacked_messages_and_keeps_the_durable() -> None:
    harness = holding(b"a", b"b")
    client = harness.client(b"SUB $SB.SUB.1.d 1\r\n")
    first, _ = client.messages()
    client.pub(first.reply)
    client.send(b"UNSUB 1\r\n")
    assert harness.statistics(1).subscriptions[0].durable == "d"
    client.sub("$SB.SUB.1.d", "2")
    (redelivered,) = client.messages()
    assert (redelivered.sid, *deliveries([redelivered])[0]) == ("2", b"b", 2)


@pytest.mark.parametrize(
    ("subject", "is_ordered"), [(b"1.d", True), (b"1.d g", True), (b"1.d.by_key=true g", False)]
)
def test_unsub_with_max_sends_no_further_messages(subject: bytes, is_ordered: bool) -> None:
    harness = holding(*numbered(5))
    client = harness.client(b"SUB $SB.SUB.%b 1\r\nUNSUB 1 3\r\n" % subject)
    messages = client.messages()
    assert [m.payload for m in messages] == numbered(3)
    assert client.session.subscriptions == {}
    other_client = harness.client(b"SUB $SB.SUB.%b 1\r\n" % subject)
    redelivered = deliveries(other_client.messages())
    if not is_ordered:  # A key-ordered group does not order messages without a key.
        redelivered.sort()
    assert redelivered == [(p, 2 if n < 3 else 1) for n, p in enumerate(numbered(5))]


@pytest.mark.parametrize("options", [b"", b".by_key=true"])
def test_messages_beyond_the_maximum_of_a_member_are_delivered_to_others_once(
    options: bytes,
) -> None:
    harness = holding()
    subscribe = b"SUB $SB.SUB.1.-.max_deliveries=1%b g 1\r\n" % options
    limited = harness.client(subscribe + b"UNSUB 1 4\r\n")
    other = harness.client(subscribe)
    received = []
    for first in range(0, 40, 20):
        harness.peer(publish1(1, *numbered(20, start=first)))
        received += limited.messages() + other.messages()
    assert limited.session.subscriptions == {}
    assert sorted(deliveries(received)) == sorted((payload, 1) for payload in numbered(40))


@pytest.mark.parametrize("subject", [b"1.-", b"1.- g", b"1.-.by_key=true g"])
def test_maximum_of_unsub_can_be_raised(subject: bytes) -> None:
    harness = holding()
    client = harness.client(b"SUB $SB.SUB.%b 1\r\nUNSUB 1 4\r\n" % subject)
    harness.peer(publish1(1, *numbered(3)))
    assert len(client.messages()) == 3
    client.send(b"UNSUB 1 10\r\n")
    harness.peer(publish1(1, *numbered(17, start=3)))
    assert len(client.messages()) == 7
    assert client.session.subscriptions == {}


@pytest.mark.parametrize("options", [b"", b".by_key=true"])
def test_maximum_may_be_set_while_messages_are_sent(options: bytes) -> None:
    harness = holding(*numbered(400))
    subscribe = b"SUB $SB.SUB.1.-.in_flight=1000.max_deliveries=1%b g 1\r\n" % options
    limited = harness.client(subscribe)
    received = limited.messages(1)
    assert len(received) < 300
    limited.send(b"UNSUB 1 390\r\n")
    other = harness.client(subscribe)
    harness.wait_for_all_due(0)
    received += limited.messages() + other.messages()
    assert sorted(deliveries(received)) == sorted((payload, 1) for payload in numbered(400))


def test_unsub_max_counts_redeliveries_and_can_be_changed() -> None:
    harness = holding(*numbered(2))
    client = harness.client(b"SUB $SB.SUB.1.d.in_flight=1 1\r\nUNSUB 1 2\r\n")
    (first,) = client.messages()
    client.send(b"UNSUB 1 4\r\n")
    client.pub(first.reply, b"-NAK 0s")
    (first,) = client.messages()
    assert deliveries([first]) == [(b"0.", 2)]
    client.pub(first.reply)
    (second,) = client.messages()
    client.pub(second.reply)
    harness.peer(publish1(1, *numbered(3, start=2)))
    assert deliveries(client.messages()) == [(b"2.", 1)]
    assert client.session.subscriptions == {}
    other_client = harness.client(b"SUB $SB.SUB.1.d 1\r\n")
    assert deliveries(other_client.messages()) == [(b"2.", 2), (b"3.", 1), (b"4.", 1)]


def test_closed_client_leaves_no_subscriptions_or_sessions() -> None:
    harness = holding(*numbered(5))
    client = harness.client(b"SUB $SB.SUB.1 1\r\n", b"SUB $SB.SUB.1.- g 2\r\n")
    client.messages()
    client.close()
    assert harness.statistics(1).subscriptions == ()
    assert harness.nats_server.bus_adapter is not None
    assert harness.nats_server.bus_adapter.nats_sessions == {}
    assert {s.peer for s in harness.broker.sessions.values()} == {"session 0"}


def test_members_of_a_closed_client_do_not_redeliver_to_each_other() -> None:
    harness = holding(*numbered(6))
    client = harness.client(b"SUB $SB.SUB.1.d g 1\r\nSUB $SB.SUB.1.d g 2\r\n")
    assert len(client.messages()) == 6
    client.close()
    other_client = harness.client(b"SUB $SB.SUB.1.d g 1\r\n")
    assert deliveries(other_client.messages()) == [(payload, 2) for payload in numbered(6)]


def test_unacked_messages_of_a_closed_client_go_to_the_next_subscriber() -> None:
    harness = holding(*numbered(5))
    client = harness.client(b"SUB $SB.SUB.1 1\r\n")
    client.pub(client.messages()[1].reply)
    client.close()
    assert connect_version2(harness, subscribe(1, 5)).receive_message_ids() == [0, 2, 3, 4]


def test_repeated_connect_ends_acked_subscriptions() -> None:
    harness = holding(b"a")
    client = harness.client(b"SUB $SB.SUB.1.d 1\r\n")
    client.messages()
    client.send(b'CONNECT {"verbose":false}\r\n')
    assert client.session.subscriptions == {}
    client.sub("$SB.SUB.1.d")
    assert deliveries(client.messages()) == [(b"a", 2)]


def open_members(harness: NatsBrokerHarness, count: int) -> Client:
    """Return a client with as many members of a queue group, which have a message each."""
    harness.skips_checks = True
    client = harness.client(b"SUB subject a\r\n")
    for number in range(count):
        client.sub("$SB.SUB.1.-.in_flight=1", f"{number}", "g")
    assert len(client.messages()) == count
    return client


def test_acked_subscriptions_of_a_closed_client_end_in_turns() -> None:
    count = 3 * SUBSCRIPTIONS_ENDED_PER_TURN
    harness = holding(*numbered(2 * count))
    session_ids = list(harness.broker.sessions)
    client = open_members(harness, count)
    left = [len(client.session.subscriptions)]
    while harness.nats_server.end_some_acked_subscriptions(client.session):
        left.append(len(client.session.subscriptions))
        harness.flush()
        assert client.messages() == []
    assert left == [count + 1, 2 * count // 3 + 1, count // 3 + 1]
    client.close()
    assert list(harness.broker.sessions) == session_ids
    other_client = harness.client(b"SUB $SB.SUB.1.- g 1\r\n")
    assert deliveries(other_client.messages()) == [
        (payload, 2 if number < count else 1) for number, payload in enumerate(numbered(2 * count))
    ]


def test_repeated_connect_ends_acked_subscriptions_in_turns() -> None:
    count = 3 * SUBSCRIPTIONS_ENDED_PER_TURN
    harness = holding(*numbered(count))
    client = open_members(harness, count)
    client.session.allow_split_reads()
    client.send(b'CONNECT {"headers":true}\r\nSUB $SB.SUB.1.- g 1\r\n')
    turn_count = 1
    while client.session.is_request_pending or client.session.unprocessed:
        client.continue_read()
        turn_count += 1
    assert turn_count > count * UNSUBSCRIBE_COST_BYTES // OUTPUT_PER_READ_BYTES
    assert list(client.session.subscriptions) == [b"1"]
    assert deliveries(client.messages()) == [(payload, 2) for payload in numbered(count)]


def finish_reading(client: Client) -> None:
    """Let the server process everything that the client has sent."""
    while client.session.is_request_pending or client.session.unprocessed:
        client.continue_read()


def test_repeated_connect_is_refused_if_a_reload_removes_its_user() -> None:
    first, before = User("a", token=hash_token("a")), User("b", token=hash_token("b"))
    after = User("b", token=hash_token("b"), subject_permissions=SubjectPermissions(("x",)))
    users = Users((first, before))
    harness = NatsBrokerHarness(nats=NatsSettings(users=users))
    harness.broker.user_directory.replace_users(users)
    client = harness.client(auth_token="a")
    for number in range(60):
        client.sub(f"$SB.SUB.{number + 1}", str(number))
    client.session.allow_split_reads()
    client.send(b'CONNECT {"auth_token":"b"}\r\n')
    assert client.session.is_request_pending
    reloaded = NatsSettings(users=Users((first, after)))
    for _ in apply_settings_in_parts(harness.nats_server, reloaded):
        pass
    assert harness.nats_server.drain_disconnecting() == []
    with pytest.raises(NatsError, match="removed or changed by a reload"):
        finish_reading(client)
    assert client.session.user is first
    grants = harness.nats_server.authenticator.subject_grants(after)
    assert grants is not None
    assert not grants.publish_cache.get(b"y")


@pytest.mark.parametrize("command", [b"UNSUB 1\r\n", b'CONNECT {"headers":true}\r\n'])
def test_dead_letters_are_appended_in_turns_before_the_subscription_ends(command: bytes) -> None:
    count = 3 * DEAD_LETTER_BATCH_MESSAGES
    harness = holding(*numbered(count))
    harness.skips_checks = True
    harness.broker.store.limit_turns(100)
    client = harness.client(b"SUB $SB.SUB.1 1\r\n")
    assert len(client.messages()) == count
    (local_session,) = (each for each in harness.broker.sessions.values() if each.is_local)
    (subscription,) = local_session.subscriptions.values()
    subscription.terminate(0, count, attempt=0, error="")
    client.session.allow_split_reads()
    client.send(command)
    counts = [0, len(stored(harness, DEAD_1))]
    while client.session.is_request_pending or client.session.unprocessed:
        client.continue_read()
        counts.append(len(stored(harness, DEAD_1)))
    # The cost of two batches is that of a turn.
    turn_max = 2 * DEAD_LETTER_BATCH_MESSAGES
    assert max(after - before for before, after in pairwise(counts)) <= turn_max
    assert [payload for _, payload in stored(harness, DEAD_1)] == numbered(count)
    assert client.session.subscriptions == {}


def finishing(subject: bytes, count: int) -> tuple[NatsBrokerHarness, Client]:
    """Return a server and a client that has received the maximum of UNSUB, while `count` dead
    letters of its subscription are to be appended.
    """
    harness = holding(*numbered(count))
    harness.skips_checks = True
    harness.broker.store.limit_turns(100)
    commands = b"SUB $SB.SUB.%b 1\r\nUNSUB 1 %d\r\n" % (subject, count + 1)
    client = harness.client(commands)
    client.session.allow_split_reads()
    assert len(client.messages()) == count
    (local_session,) = (each for each in harness.broker.sessions.values() if each.is_local)
    (subscription,) = local_session.subscriptions.values()
    subscription.terminate(0, count, attempt=0, error="")
    harness.peer(publish1(1, b"last", b"for another subscription"))
    assert [message.payload for message in client.messages()] == [b"last"]
    assert list(client.session.subscriptions) == [b"1"]
    assert DEAD_1 not in harness.broker.classes
    return harness, client


@pytest.mark.parametrize("queue", [b"", b" g"])
def test_dead_letters_are_appended_in_turns_after_the_last_message(queue: bytes) -> None:
    count = 3 * DEAD_LETTER_BATCH_MESSAGES
    harness, client = finishing(b"1.-.in_flight=1000" + queue, count)
    counts = [0]
    while harness.nats_server.has_removals:
        harness.nats_server.remove_some()
        harness.flush()
        counts.append(len(stored(harness, DEAD_1)))
    assert max(after - before for before, after in pairwise(counts)) <= DEAD_LETTER_BATCH_MESSAGES
    assert [payload for _, payload in stored(harness, DEAD_1)] == numbered(count)
    assert client.session.subscriptions == {}
    assert client.messages() == []


@pytest.mark.parametrize("subject", [b"1.d", b"1.d g"])
def test_maximum_of_a_finished_subscription_cannot_be_raised(subject: bytes) -> None:
    harness, client = finishing(subject, DEAD_LETTER_BATCH_MESSAGES)
    client.send(b"UNSUB 1 10000\r\n")
    harness.peer(publish1(1, b"another message"))
    assert client.messages() == []
    while harness.nats_server.has_removals:
        harness.nats_server.remove_some()
    assert client.session.subscriptions == {}
    assert client.messages() == []


@pytest.mark.parametrize("subject", [b"1.d", b"1.d g", b"1.- g"])
def test_sub_waits_for_the_end_of_a_finished_subscription(subject: bytes) -> None:
    count = 3 * DEAD_LETTER_BATCH_MESSAGES
    harness, client = finishing(subject, count)
    client.send(b"SUB $SB.SUB.%b 1\r\n" % subject)
    assert client.session.is_request_pending
    finish_reading(client)
    assert [payload for _, payload in stored(harness, DEAD_1)] == numbered(count)
    assert not harness.nats_server.has_removals
    redelivered = deliveries(client.messages())
    assert redelivered == [(b"last", 2), (b"for another subscription", 1)]


@pytest.mark.parametrize("is_told_before", [False, True])
@pytest.mark.parametrize("command", [b"UNSUB 1\r\n", b"UNSUB 1 5\r\n", b"CONNECT {}\r\n"])
def test_client_is_told_that_the_broker_has_ended_its_subscription(
    command: bytes, is_told_before: bool
) -> None:
    harness = holding()
    options = {"group": "g", "slow": "disconnect", "max_pending": 10, "max_in_flight": 5}
    connect_version2(harness, subscribe(1, 5, **options))
    client = harness.client(b"SUB $SB.SUB.1.-.in_flight=5 g 1\r\n")
    harness.peer(publish1(1, *numbered(100)))
    lines = client.receive()[1] if is_told_before else []
    client.pub("$JS.ACK.1.g.1.1.1.0.0", b"+ACK")
    client.send(command)
    lines += client.receive()[1]
    is_ended_by_client = command != b"UNSUB 1 5\r\n" and not is_told_before
    error_count = b"".join(lines).count(b'Subscription to "$SB.SUB.1.-.in_flight=5" (')
    assert error_count == (0 if is_ended_by_client else 1)
    assert client.session.subscriptions == {}
    client.send(b"SUB $SB.SUB.1.-.start=earliest h 1\r\n")
    assert client.payloads() == numbered(100)


def test_client_that_blocks_publishers_is_reported() -> None:
    harness = NatsBrokerHarness(class_messages=2)
    client = harness.client(b"SUB $SB.SUB.1 1\r\n")
    idle = harness.client()
    harness.peer(publish1(1, b"a", b"b", b"c"))
    assert harness.nats_server.bus_adapter is not None
    assert harness.nats_server.bus_adapter.is_blocking_publishers(client.session)
    assert not harness.nats_server.bus_adapter.is_blocking_publishers(idle.session)


def test_stalled_client_that_blocks_publishers_is_disconnected() -> None:
    harness = NatsBrokerHarness(class_messages=2, stall_seconds=3)
    client = harness.client(b"SUB $SB.SUB.1.-.in_flight=1 1\r\n")
    harness.peer(publish1(1, b"a", b"b", b"c"))
    ((local_session, error),) = harness.tick(4)
    assert error.reason is Reason.STALLED
    assert harness.nats_server.bus_adapter is not None
    assert harness.nats_server.bus_adapter.nats_sessions[local_session.session_id] is client.session


@pytest.mark.parametrize("queue", ["", "g"])
def test_drained_client_can_ack_after_unsub(queue: str) -> None:
    harness = holding(b"a", b"b", b"c")
    client = harness.client()
    client.sub("$SB.SUB.1.d", queue=queue)
    first, second, third_message = client.messages()
    client.send(b"UNSUB 1\r\n", b"SUB _INBOX.me 2\r\n")
    client.pub(first.reply)
    client.pub(third_message.reply, b"+ACK", reply="_INBOX.me")
    assert [m.subject for m in client.messages()] == ["_INBOX.me"]
    assert harness.statistics(1).acknowledged == 2
    other_client = harness.client()
    other_client.sub("$SB.SUB.1.d", queue=queue)
    client.pub(second.reply)  # The other client holds the message now.
    assert deliveries(other_client.messages()) == [(b"b", 2)]
    assert harness.broker.refusal_counts == {Reason.ACK_UNSUBSCRIBED: 1}


def test_ack_after_unsub_is_refused_if_too_many_spans_must_be_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unacked_messages, "RELEASED_SEARCH_SPANS_MAX", 0)
    harness = holding(b"a", b"b", b"c")
    client = harness.client()
    client.sub("$SB.SUB.1.d", queue="g")
    _, message, settled = client.messages()
    client.pub(settled.reply)
    client.send(b"UNSUB 1\r\n", b"SUB _INBOX.me 2\r\n")
    for payload in (b"+TERM", b"+ACK"):
        client.pub(message.reply, payload, reply="_INBOX.me")
        assert [m.headers[:12] for m in client.messages()] == [b"NATS/1.0 503"]
    assert harness.broker.refusal_counts == {Reason.ACK_UNSUBSCRIBED: 2}
    client.pub(settled.reply, b"+ACK", reply="_INBOX.me")
    assert [m.headers for m in client.messages()] == [b""]
    other_client = harness.client()
    other_client.sub("$SB.SUB.1.d", queue="g")
    assert deliveries(other_client.messages()) == [(b"a", 2), (b"b", 2)]


@pytest.mark.parametrize("queue", ["", "g"])
def test_drained_client_can_terminate_after_unsub(queue: str) -> None:
    harness = holding(b"a", b"b", b"c")
    client = harness.client()
    client.sub("$SB.SUB.1.d", queue=queue)
    first, second, third_message = client.messages()
    client.pub(first.reply, b"-NAK 0s")
    assert deliveries(client.messages()) == [(b"a", 2)]
    client.send(b"UNSUB 1\r\n", b"SUB _INBOX.me 2\r\n")
    client.pub(first.reply, b"+TERM", reply="_INBOX.me")
    client.pub(second.reply, b"-NAK 0s", reply="_INBOX.me")
    assert [m.subject for m in client.messages()] == ["_INBOX.me"] * 2
    # Too late: the message was returned.
    client.pub(third_message.reply, b"+WPI", reply="_INBOX.me")
    assert [m.headers[:12] for m in client.messages()] == [b"NATS/1.0 503"]
    client.pub(first.reply, b"+TERM")
    ((letter, payload),) = stored(harness, DEAD_1)
    assert (payload, dict(letter.headers)["dead-attempts"]) == (b"a", "2")
    assert harness.statistics(1).dropped == {Reason.TERMINATED: 1}
    other_client = harness.client()
    other_client.sub("$SB.SUB.1.d", queue=queue)
    assert deliveries(other_client.messages()) == [(b"b", 2), (b"c", 2)]
    assert harness.broker.refusal_counts == {Reason.ACK_UNSUBSCRIBED: 1}


def test_ack_for_an_ended_position_is_refused() -> None:
    harness = holding(b"a", b"b")
    client = harness.client(b"SUB $SB.SUB.1.d.in_flight=1 1\r\n")
    (message,) = client.messages()
    client.send(b"UNSUB 1\r\n")
    # That message was never sent to this client.
    client.pub(message.reply.replace(".1.0.1.", ".1.1.1."))
    (position,) = harness.broker.classes[1].positions
    harness.broker.subscription_manager.end_position(position)
    client.pub(message.reply)
    assert harness.broker.refusal_counts == {Reason.ACK_UNSUBSCRIBED: 2}
    assert harness.statistics(1).ring.message_count == 2


def test_released_durables_are_bounded() -> None:
    harness = holding(b"a")
    client = harness.client()
    for number in range(100):
        client.sub(f"$SB.SUB.1.d{number}.start=earliest", str(number))
        client.send(b"UNSUB %d\r\n" % number)
    client.messages()
    assert harness.nats_server.bus_adapter is not None
    deliveries = harness.nats_server.bus_adapter._deliveries[client.session]
    assert len(deliveries._released_positions) == 64
