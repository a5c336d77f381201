"""NatsServer: timers, limits, and batches compared with single messages."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from simplebus.core.broker.broker import Broker
from simplebus.core.errors import Reason
from simplebus.core.limits import RECEIVE_BYTES
from simplebus.core.users.subject_permissions import ResponsePermission, SubjectPermissions
from simplebus.core.users.users import User, Users
from simplebus.nats.limits import (
    CHECKED_CLIENTS_PER_TURN,
    FIRST_PING_SECONDS,
    IMMEDIATE_REMOVALS_MAX,
    OUTPUT_PER_READ_BYTES,
    REMOVALS_PER_TURN_MAX,
    SUBSCRIBE_COST_BYTES,
    NatsLimits,
)
from simplebus.nats.nats_server import apply_settings_in_parts
from simplebus.nats.protocol.events import MixedBatch, UniformBatch
from simplebus.nats.protocol.parser import NatsParser
from simplebus.nats.protocol.subject_table import SubjectTable
from simplebus.nats.settings import NatsSettings
from tests.nats.differential import generated_dialogues
from tests.nats.differential.compare import Script
from tests.nats.server.nats_peer import Client, NatsServerHarness, buffer

QUIET = b'CONNECT {"verbose":false,"pedantic":false}\r\n'
AUTH = Users((User("u", "p"),))


def tick_at(harness: NatsServerHarness, seconds: float) -> None:
    """Set the time and tick."""
    harness.nats_server.now = seconds
    harness.nats_server.tick()
    harness.settle()


def waiting(limits: NatsLimits | None = None, auth: Users | None = None) -> NatsServerHarness:
    return NatsServerHarness(NatsSettings(limits=limits or NatsLimits(), users=auth or None))


# Liveness and INFO --------------------------------------------------------------------------------


def test_first_ping_is_early_and_after_the_first_pong() -> None:
    harness = waiting()
    greeted, unconnected = harness.client(QUIET + b"PING\r\n"), harness.client()
    assert greeted.lines() == b"PONG\r\n"
    tick_at(harness, FIRST_PING_SECONDS)
    assert greeted.lines() == b"PING\r\n"
    assert unconnected.lines() == b""
    tick_at(harness, 120.0)
    assert unconnected.lines() == b"PING\r\n"


def test_each_part_of_a_tick_examines_few_clients() -> None:
    harness = waiting()
    clients = [harness.client(QUIET + b"PING\r\n") for _ in range(2 * CHECKED_CLIENTS_PER_TURN + 1)]
    for client in clients:
        client.lines()
    harness.nats_server.now = FIRST_PING_SECONDS
    counts = []
    for _ in harness.nats_server.tick_in_parts():
        counts.append(sum(client.session.unanswered_ping_count for client in clients))
    assert counts[-1] == 2 * CHECKED_CLIENTS_PER_TURN
    assert max(upper - lower for lower, upper in pairwise(counts)) <= CHECKED_CLIENTS_PER_TURN
    harness.settle()
    assert all(client.lines() == b"PING\r\n" for client in clients)


def test_each_part_of_a_tick_looks_for_few_slow_consumers() -> None:
    harness = waiting()
    clients = [harness.client(QUIET) for _ in range(2 * CHECKED_CLIENTS_PER_TURN + 1)]
    monitor = harness.nats_server.slow_consumer_monitor
    for client in clients:
        client.session.send(b"unread")
    monitor.track({client.session: None for client in clients})
    assert not any(monitor.find_slow_consumers())
    monitor.now += harness.nats_server.settings.limits.write_seconds + 1
    counts = [len(group) for group in monitor.find_slow_consumers()]
    assert counts == [CHECKED_CLIENTS_PER_TURN, CHECKED_CLIENTS_PER_TURN, 1]


def test_client_that_answers_no_ping_is_disconnected() -> None:
    harness = waiting()
    client = harness.client(QUIET + b"PING\r\n")
    received = []
    for seconds in range(0, 600, 10):
        tick_at(harness, seconds)
        received.append((seconds, client.lines()))
    pings = [(seconds, line) for seconds, line in received[1:] if line]
    assert pings == [
        (10, b"PING\r\n"),  # The first one.
        (130, b"PING\r\n"),
        (250, b"-ERR 'Stale Connection'\r\n"),
    ]
    assert client.error is not None
    assert client.error.reason is Reason.HEARTBEAT_TIMEOUT
    assert client.error.closed_reason == "Stale Connection"
    assert harness.nats_server.sessions == {}


def test_client_that_the_server_does_not_read_stays_connected() -> None:
    harness = waiting()
    client = harness.client(QUIET + b"PING\r\n")
    for seconds in range(0, 1800, 10):
        client.session.excuse_silence()
        tick_at(harness, seconds)
    assert not client.closed


def test_client_that_sends_anything_stays_connected() -> None:
    harness = waiting()
    responder, talks = harness.client(QUIET + b"PING\r\n"), harness.client(QUIET + b"PING\r\n")
    tick_at(harness, 10)
    pings = [0, 0]
    for seconds in range(60, 1800, 60):
        tick_at(harness, seconds)
        if b"PING" in responder.lines():
            pings[0] += 1
            responder.send(b"PONG\r\n")
        pings[1] += talks.lines().count(b"PING")
        talks.send(b"PUB a 0\r\n\r\n")
    assert not responder.closed
    assert not talks.closed
    assert pings[0] > 10
    assert pings[1] == 1


def test_missing_connect_times_out() -> None:
    harness = waiting(auth=AUTH)
    late_client = harness.client()
    early_client = harness.client(b'CONNECT {"verbose":false,"user":"u","pass":"p"}\r\n')
    partial_client = harness.client(b"CONNE")
    tick_at(harness, 1.9)
    assert not late_client.closed
    tick_at(harness, 2.0)
    for client in (late_client, partial_client):
        assert client.lines() == b"-ERR 'Authentication Timeout'\r\n"
        assert client.error is not None
        assert client.error.reason is Reason.HELLO_TIMEOUT
    assert not early_client.closed


def test_connect_is_optional_without_authentication() -> None:
    harness = waiting()
    client = harness.client()
    guests = NatsServerHarness(NatsSettings(users=Users((User("u", "p"),), anonymous="u")))
    local_session = guests.client()
    tick_at(harness, 60)
    tick_at(guests, 60)
    assert not client.closed
    assert not local_session.closed


def test_liveness_checks_of_closed_clients_are_removed() -> None:
    harness = waiting()
    for _ in range(100):
        harness.client(QUIET).close()
    tick_at(harness, 1000)
    assert harness.nats_server._liveness_checks == []


def test_lame_duck_info_goes_to_protocol_1_clients() -> None:
    harness = waiting()
    protocol_0 = harness.client(b'CONNECT {"verbose":false}\r\n')
    connect = b'CONNECT {"verbose":false,"protocol":1}\r\n'
    protocol_1, ungreeted = harness.client(connect + b"PING\r\n"), harness.client(connect)
    for _ in harness.nats_server.send_lame_duck_in_parts():
        pass
    harness.settle()
    assert protocol_0.lines() == b""
    assert b'"ldm":true' in protocol_1.lines()
    assert ungreeted.lines() == b""  # Any line counts as its PONG.


def test_each_part_of_a_lame_duck_notice_is_sent_to_few_clients() -> None:
    harness = waiting()
    connect = b'CONNECT {"verbose":false,"protocol":1}\r\nPING\r\n'
    clients = [harness.client(connect) for _ in range(2 * CHECKED_CLIENTS_PER_TURN + 1)]
    harness.nats_server.drain_ready()
    parts = harness.nats_server.send_lame_duck_in_parts()
    counts = [len(harness.nats_server.drain_ready()) for _ in parts]
    assert counts == [CHECKED_CLIENTS_PER_TURN, CHECKED_CLIENTS_PER_TURN, 1]
    outboxes = [client.session.outbox for client in clients]
    assert all(b'"ldm":true' in bytes(outbox.peek(0)) for outbox in outboxes)


def test_each_part_of_a_tick_removes_few_subscriptions() -> None:
    harness = waiting()
    subscribe = b"".join(b"SUB a.%d %d\r\n" % (n, n) for n in range(IMMEDIATE_REMOVALS_MAX))
    clients = [harness.client(QUIET + subscribe) for _ in range(5)]
    monitor, routes = harness.nats_server.slow_consumer_monitor, harness.nats_server.routes
    for client in clients:
        client.session.send(b"unread")
    monitor.track({client.session: None for client in clients})
    harness.nats_server.tick()
    harness.nats_server.now += harness.nats_server.settings.limits.write_seconds + 1
    counts = [routes.subscription_count]
    for _ in harness.nats_server.tick_in_parts():
        counts.append(routes.subscription_count)
    assert counts[-1] == 0
    assert max(upper - lower for lower, upper in pairwise(counts[::-1])) == IMMEDIATE_REMOVALS_MAX


def test_info_contains_client_and_listener_address() -> None:
    harness = waiting(auth=AUTH)
    info = harness.client().session.info
    assert (info.client_id, info.client_ip, info.host, info.port) == (1, "127.0.0.1", "h", 1)
    assert info.auth_required
    assert info.max_payload == 1024 * 1024
    assert info.line().startswith(b'INFO {"server_id":"ours"')
    assert harness.client().session.info.client_id == 2


def test_restricted_user_needs_permission_for_classes() -> None:
    auth = Users(
        users=(
            User("some", "p", subject_permissions=SubjectPermissions(subscribe_deny=("secret.>",))),
            User(
                "named", "p", subject_permissions=SubjectPermissions(subscribe_allow=("$SB.SUB.*",))
            ),
        )
    )
    harness = NatsServerHarness(NatsSettings(users=auth), broker=Broker())
    restricted, named_only = (
        harness.client(b'CONNECT {"verbose":false,"user":"%s","pass":"p"}\r\n' % name)
        for name in (b"some", b"named")
    )
    for client in (restricted, named_only):
        client.send(b"SUB $SB.SUB.orders g 1\r\n")
    assert restricted.lines() == (
        b'-ERR \'Permissions Violation for Subscription to "$SB.SUB.orders" '
        b"(no permission to subscribe to class `orders`)'\r\n"
    )
    assert named_only.lines() == b""


# Limits -------------------------------------------------------------------------------------------


def test_slow_consumer_is_disconnected_without_error_line() -> None:
    harness = waiting(NatsLimits(max_payload=1000, max_pending=2000))
    nats_server, slow = harness.nats_server, harness.client(QUIET + b"SUB a 1\r\n")
    other_client = harness.client(QUIET + b"SUB a 1\r\n")
    publisher = nats_server.open_session("test")
    pings = QUIET + (b"PUB a 900\r\n" + b"x" * 900 + b"\r\n") * 2
    nats_server.receive(publisher, buffer(), buffer().fill(pings))
    other_client.drain()
    nats_server.receive(publisher, buffer(), buffer().fill(pings[len(QUIET) :]))
    cut = nats_server.drain_disconnecting()
    assert [session for session, _ in cut] == [slow.session]
    assert cut[0][1].line == b""
    assert cut[0][1].closed_reason == "Slow Consumer (Pending Bytes)"
    assert slow.session.outbox.pending_bytes == 0
    assert slow.session.subscriptions == {}
    assert not other_client.session.is_disconnecting


def test_subscriptions_of_closed_clients_are_removed() -> None:
    harness = waiting()
    routes = harness.nats_server.routes
    lower = len(routes)
    client = harness.client(
        QUIET + b"".join(b"SUB a.%d.* %d\r\nSUB b g%d x%d\r\n" % ((n,) * 4) for n in range(500))
    )
    assert len(routes) == lower + 1000
    assert len(client.session.subscriptions) == 1000
    client.close()
    while routes.has_abandoned:
        tick_at(harness, 0.0)
    assert len(routes) == lower
    assert routes._groups == {}


def test_subject_with_2000_tokens_is_accepted() -> None:
    harness = waiting()
    subject_bytes = b"a." * 2000 + b"a"
    client = harness.client(QUIET + b"SUB %s 1\r\nSUB a.> 2\r\n" % subject_bytes)
    client.send(b"PUB %s 1\r\nx\r\n" % subject_bytes)
    client.send(b"PUB %s 1\r\nx\r\n" % subject_bytes[2:])
    assert client.lines().count(b"MSG") == 3


def test_wildcard_subject_with_too_many_tokens_is_refused() -> None:
    client = waiting().client(QUIET)
    client.send(b"SUB %s 1\r\nSUB %s 2\r\n" % (b"*." * 127 + b">", b"a." * 128 + b">"))
    subject = (b"a." * 128 + b">").decode()
    pings = f"-ERR 'Permissions Violation for Subscription to \"{subject}\", too many tokens'\r\n"
    assert client.lines() == pings.encode()


def test_many_subscriptions_are_removed_over_several_ticks() -> None:
    harness = waiting()
    lower = len(harness.nats_server.routes)
    count = max(IMMEDIATE_REMOVALS_MAX, REMOVALS_PER_TURN_MAX // 2)
    pings = QUIET + b"".join(
        b"SUB a.%d %d\r\nSUB b.%d g x%d\r\nSUB b g y%d\r\n" % (n, n, n, n, n) for n in range(count)
    )
    leaves = harness.client(pings)
    second_client = harness.client(pings)
    requester = harness.client(
        b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB in 1\r\n'
    )
    leaves.close()
    second_client.send(QUIET)
    for subject in (b"a.5", b"b.5", b"b"):
        requester.send(b"PUB %s in 0\r\n\r\n" % subject)
        assert b"503" in requester.lines()
    second_client.send(b"SUB a.5 5\r\nSUB b.5 g x5\r\n")
    tick_count = 0
    while len(harness.nats_server.routes) > lower + 3:
        tick_at(harness, 0.0)
        tick_count += 1
    assert 1 < tick_count < 2 + 6 * count / REMOVALS_PER_TURN_MAX
    requester.send(b"PUB a.5 1\r\nx\r\nPUB b.5 1\r\ny\r\n")
    assert second_client.lines() == b"MSG a.5 5 1\r\nx\r\nMSG b.5 x5 1\r\ny\r\n"
    second_client.close()
    assert len(harness.nats_server.routes) == lower + 1


def test_clients_learn_changed_addresses_of_servers() -> None:
    harness = waiting()
    client = harness.client(b'CONNECT {"verbose":false,"protocol":1}\r\nPING\r\n')
    old_client = harness.client(QUIET + b"PING\r\n")
    for each in (client, old_client):
        each.lines()
    settings = replace(harness.nats_server.settings, connect_urls=("other:4222",))
    for _ in apply_settings_in_parts(harness.nats_server, settings):
        pass
    for _ in apply_settings_in_parts(harness.nats_server, settings):
        pass
    for each in (client, old_client):
        each.drain()
    assert client.lines().count(b'"connect_urls":["other:4222"]') == 1
    assert old_client.lines() == b""


def test_repeated_connect_ends_subscriptions() -> None:
    harness = waiting()
    connect = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'
    count = IMMEDIATE_REMOVALS_MAX + 1
    client = harness.client(connect + b"".join(b"SUB in.%d %d\r\n" % (n, n) for n in range(count)))
    client.send(b"PUB x in.5 0\r\n\r\n")
    assert client.lines().startswith(b"HMSG in.5 5 33 33\r\n")
    client.send(connect + b"PUB x in.5 0\r\n\r\n")
    assert client.lines() == b""
    client.send(b"SUB in.5 new\r\nPUB x in.5 0\r\n\r\n")
    assert client.lines().startswith(b"HMSG in.5 new 33 33\r\n")


@pytest.mark.parametrize("subject", [b"a.%d.*", b"a.%d"])
def test_subscriptions_of_one_read_are_created_in_several_turns(subject: bytes) -> None:
    client = waiting().client(QUIET)
    session = client.session
    session.allow_split_reads()
    count = 1000
    client.start(
        b"".join(b"SUB " + subject % n + b" %d\r\n" % n for n in range(count)) + b"PING\r\n"
    )
    created = [len(session.subscriptions)]
    while session.unprocessed:
        server = client.harness.nats_server
        server.receive(session, buffer(), session.refill(buffer()))
        created.append(len(session.subscriptions) - sum(created))
    assert max(created) <= OUTPUT_PER_READ_BYTES // SUBSCRIBE_COST_BYTES + 1
    assert sum(created) == count
    client.drain()
    assert client.lines() == b"PONG\r\n"


@pytest.mark.parametrize("line", [b"SUB a.%d %d\r\n", b"PUB a.%d in.%d 1\r\nx\r\n"])
def test_expensive_commands_reduce_the_read_size(line: bytes) -> None:
    client = waiting().client(QUIET)
    number = 0
    for _ in range(20):
        pings = b""
        while len(pings) + 40 < client.session.next_read_bytes:
            number += 1
            pings += line % (number, number)
        client.send(pings)
    assert client.session.next_read_bytes <= 256 * 1024


@pytest.mark.parametrize(("subscriptions", "max_size"), [(1, RECEIVE_BYTES), (4000, 512 * 1024)])
def test_many_subscriptions_reduce_the_read_size(subscriptions: int, max_size: int) -> None:
    harness = waiting()
    harness.client(QUIET + b"".join(b"SUB a.%d %d\r\n" % (n, n) for n in range(subscriptions)))
    client = harness.client(QUIET)
    pings = b"".join(b"PUB a.%d 1\r\nx\r\n" % n for n in range(4000)) * 100
    pings = pings[: 3 * max_size // 2]
    while pings:
        at_once = client.session.next_read_bytes
        client.send(pings[:at_once])
        pings = pings[at_once:]
    assert not client.closed
    assert max_size // 128 <= at_once <= max_size


# Batches -----------------------------------------------------------------------------------------


def kinds(data: bytes) -> list[type]:
    """Return the event types that the parser makes of these bytes."""
    parser = NatsParser(NatsLimits(), SubjectTable())
    return [type(event) for event in parser.receive(buffer(), buffer().fill(data))]


def test_generated_dialogues_contain_batches() -> None:
    assert UniformBatch in kinds(b"PUB a 1\r\nx\r\n" * 40)
    assert MixedBatch in kinds(b"".join(b"PUB a.%d 1\r\nx\r\n" % (n % 3) for n in range(60)))


USERS = Users(
    users=(
        User("all", "p"),
        User("publisher", "p", subject_permissions=SubjectPermissions(publish_deny=("a.>", "x"))),
        User(
            "subscriber", "p", subject_permissions=SubjectPermissions(subscribe_deny=("a", "*.b"))
        ),
        User("denied", "p", subject_permissions=SubjectPermissions(publish_allow=("foo.>", "in"))),
        User(
            "answerer",
            "p",
            subject_permissions=SubjectPermissions(responses=ResponsePermission(max_responses=3)),
        ),
        User(
            "answers",
            "p",
            subject_permissions=SubjectPermissions(
                publish_allow=("foo.x",), responses=ResponsePermission()
            ),
        ),
    )
)


@settings(max_examples=2 * settings().max_examples)
@given(generated_dialogues.scripts(user=True, pedantic=True))
def test_batches_have_the_same_effect_as_single_messages(script: Script) -> None:
    whole_script = NatsServerHarness(NatsSettings(users=USERS)).play(script)
    assert NatsServerHarness(NatsSettings(users=USERS)).play(script, 97) == whole_script


def test_responder_may_answer_requests_of_a_batch() -> None:
    harness = NatsServerHarness(NatsSettings(users=USERS))
    connect_as = b'CONNECT {"verbose":false,"pedantic":false,"user":"%b","pass":"p"}\r\n'
    answerer = harness.client(connect_as % b"answerer" + b"SUB ask 1\r\n")
    harness.client(connect_as % b"all" + b"PUB ask reply 1\r\nx\r\n" * 40)
    assert answerer.lines().count(b"MSG ask 1 reply 1\r\n") == 40
    answerer.send(b"PUB reply 0\r\n\r\n" * 4)
    assert answerer.lines().count(b"Permissions Violation for Publish") == 1


@pytest.mark.parametrize("count", [1, 40])
def test_responder_may_answer_single_requests(count: int) -> None:
    harness = NatsServerHarness(NatsSettings(users=USERS))
    requester, responder = (
        harness.client(b'CONNECT {"verbose":false,"user":"%b","pass":"p"}\r\n' % name)
        for name in (b"all", b"answerer")
    )
    responder.send(b"SUB foo.x 1\r\n")
    requester.send(b"SUB in 2\r\n" + b"PUB foo.x in 1\r\nx\r\n" * count)
    assert responder.lines() == b"MSG foo.x 1 in 1\r\nx\r\n" * count
    responder.send(b"PUB in 1\r\ny\r\n" * 3)
    assert responder.lines() == b""
    assert requester.lines() == b"MSG in 2 1\r\ny\r\n" * 3


@pytest.mark.parametrize("count", [1, 40])
def test_no_responders_reply_for_each_request(count: int) -> None:
    connect = b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n'
    client = NatsServerHarness().client(connect + b"SUB in 1\r\n")
    client.send(b"PUB x in 0\r\n\r\n" * count)
    pings = b"HMSG in 1 33 33\r\nNATS/1.0 503\r\nNats-Subject: x\r\n\r\n\r\n"
    assert client.lines() == pings * count


@pytest.mark.parametrize("count", [1, 40])
def test_pedantic_client_gets_an_error_for_each_invalid_subject(count: int) -> None:
    client = NatsServerHarness().client(b'CONNECT {"verbose":false,"pedantic":true}\r\n')
    client.send(b"PUB a.* 0\r\n\r\n" * count)
    assert client.lines() == b"-ERR 'Invalid Publish Subject'\r\n" * count


@pytest.mark.parametrize("count", [1, 40])
def test_reserved_reply_subject_is_refused_each_time(count: int) -> None:
    harness = NatsServerHarness()
    listens, client = harness.client(QUIET + b"SUB x 1\r\n"), harness.client(QUIET)
    client.send(b"PUB x _R_.a 0\r\n\r\n" * count)
    pings = b"-ERR 'Permissions Violation for Publish with Reply of \"_R_.a\"'\r\n"
    assert client.lines() == pings * count
    assert listens.lines() == b""
    assert harness.nats_server.denied_count == count


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("queue", [b"", b"g "])
def test_unsub_with_reached_max_ends_at_once(count: int, queue: bytes) -> None:
    client = NatsServerHarness().client(
        QUIET + b"SUB a %b1\r\n" % queue + b"PUB a 0\r\n\r\n" * count
    )
    assert client.lines().count(b"MSG") == count
    client.send(b"UNSUB 1 %d\r\nPUB a 0\r\n\r\n" % count)
    assert client.lines() == b""
    assert client.session.subscriptions == {}


@pytest.mark.parametrize("count", [1, 40])
def test_batch_headers_only_reach_clients_that_accept_headers(count: int) -> None:
    harness = NatsServerHarness()
    connects = [
        harness.client(b'CONNECT {"verbose":false,"headers":%b}\r\nSUB a 1\r\n' % flag)
        for flag in (b"true", b"false", b"true")
    ]
    connects[0].send(b"HPUB a 12 13\r\nNATS/1.0\r\n\r\nx\r\n" * count)
    headed = b"HMSG a 1 12 13\r\nNATS/1.0\r\n\r\nx\r\n" * count
    assert [client.lines() for client in connects] == [
        headed,
        b"MSG a 1 1\r\nx\r\n" * count,
        headed,
    ]


@pytest.mark.parametrize("options", [b"{}", b'{"verbose":false}', b'{"pedantic":false}'])
def test_verbose_client_gets_ok_for_each_message_of_a_batch(options: bytes) -> None:
    pings = b"CONNECT " + options + b"\r\nSUB a.> 1\r\n"
    pings += b"".join(b"PUB a.%s 1\r\nx\r\n" % (b"b", b"*", b"c")[n % 3] for n in range(90))
    pings += b"PUB a.b 1\r\nx\r\n" * 40 + b"PUB a..b 1\r\nx\r\n" * 40
    whole_script, in_pieces = NatsServerHarness().client(), NatsServerHarness().client()
    whole_script.send(pings)
    in_pieces.send(pings, 9)
    assert whole_script.lines() == in_pieces.lines() != b""


def test_counts_single_and_batched_messages() -> None:
    pings = QUIET + b"PUB a 3\r\nabc\r\n" * 40
    pings += b"".join(b"PUB a.%d 3\r\nabc\r\n" % (n % 3) for n in range(60))
    for chunks in (0, 5):
        client: Client = NatsServerHarness().client()
        client.send(pings, chunks)
        assert (client.session.in_messages, client.session.in_bytes) == (100, 300)


def test_statistics_include_closed_clients() -> None:
    harness = waiting(NatsLimits(max_payload=1000, max_pending=1000))
    client = harness.client(QUIET + b"SUB a 1\r\nSUB b 2\r\nPUB a 3\r\nabc\r\n")
    first = harness.nats_server.statistics()
    assert (first.clients, first.accepted, first.subscriptions) == (1, 1, 2)
    assert (first.in_messages, first.in_bytes, first.out_messages) == (1, 3, 1)
    client.close()
    statistics_ = harness.nats_server.statistics()
    assert (statistics_.clients, statistics_.accepted, statistics_.subscriptions) == (0, 1, 0)
    assert (statistics_.in_messages, statistics_.in_bytes, statistics_.out_messages) == (1, 3, 1)
    assert (statistics_.denied, statistics_.slow_consumers, statistics_.pending_bytes) == (0, 0, 0)


def test_statistics_count_clients_in_steps_and_each_once() -> None:
    harness = waiting()
    clients = [Client(harness) for _ in range(600)]
    for client in clients[:3]:
        client.send(QUIET + b"PUB a 1\r\nx\r\n")
    steps = harness.nats_server.statistics_in_steps()
    next(steps)
    clients[0].close()
    clients[-1].close()
    next(steps)
    with pytest.raises(StopIteration) as finished:
        next(steps)
    assert finished.value.value.in_messages == 3
    assert harness.nats_server.statistics().in_messages == 3


def test_statistics_do_not_keep_counted_clients_that_have_left() -> None:
    harness = waiting()
    clients = [Client(harness) for _ in range(600)]
    sessions = [weakref.ref(client.session) for client in clients]
    steps = harness.nats_server.statistics_in_steps()
    next(steps)
    for client in clients:
        client.close()
    clients.clear()
    del client
    next(steps)
    assert sum(reference() is not None for reference in sessions) < 400
    with pytest.raises(StopIteration):
        next(steps)
    assert not any(reference() for reference in sessions)
