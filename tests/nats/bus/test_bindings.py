"""Storing of messages on bound subjects in classes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplebus.core.broker.broker import FullPolicy, Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import Limits
from simplebus.core.protocol.envelope_batch import Envelope, decode
from simplebus.core.settings import ClassSettings
from simplebus.nats.limits import (
    ACK_COST_BYTES,
    BATCHED_STORE_COST_BYTES,
    BLOCKED_READ_INTERVAL_SECONDS,
    SINGLE_STORE_COST_BYTES,
)
from tests.behaviour.wire_peer_v2 import ack, connect_version2, subscribe
from tests.nats.bus.two_listeners import NatsBrokerHarness, stored


def bound(
    *pairs: tuple[str, int], settings: Settings | None = None, **limits: float
) -> NatsBrokerHarness:
    harness = NatsBrokerHarness(settings, **limits)
    for subject, class_id in pairs or [("orders.>", 7)]:
        harness.broker.store.class_registry.bind_subject(subject, class_id)
    return harness


def pubs(*messages: tuple[str, bytes]) -> bytes:
    return b"".join(b"PUB %b %d\r\n%b\r\n" % (s.encode(), len(p), p) for s, p in messages)


def test_bound_subject_is_stored_and_delivered_to_subscribers() -> None:
    harness = bound()
    listener, binary = (
        harness.client(b"SUB orders.* 9\r\n"),
        connect_version2(harness, subscribe(7, 3)),
    )
    publisher = harness.client()
    publisher.pub("orders.eu", b"hello", reply="_INBOX.a.1")
    assert publisher.messages() == []  # The client has not subscribed to its reply subject.
    (message,) = listener.messages()
    assert message == ("orders.eu", "9", "_INBOX.a.1", b"", b"hello")
    (delivery,) = binary.receive_deliveries()
    expected = Envelope("orders.eu", headers=(("Nats-Reply-To", "_INBOX.a.1"),))
    assert decode(delivery.content) == (expected, b"hello")
    binary.send(ack(3, 0, 1))
    assert harness.statistics(7).ring.message_count == 0
    assert publisher.lines() == []


def test_unbound_subject_is_not_stored() -> None:
    harness = bound()
    client = harness.client(b"SUB > 1\r\n")
    used_before = harness.broker.budget.used_bytes
    client.send(pubs(*[("order.eu", b"x" * 100)] * 100, *[("other", b"y")] * 20))
    client.pub("orders", b"z")
    assert len(client.messages()) == 121
    assert harness.broker.budget.used_bytes == used_before
    assert len(harness.broker.sessions) == 0
    assert harness.statistics(7).published == 0


def test_overlapping_bindings_store_a_message_once_per_class() -> None:
    harness = bound(("orders.>", 7), ("*.eu", 7), ("orders.eu", 7), ("orders.*", 8), ("x", 9))
    client = harness.client()
    client.pub("orders.eu", b"a")
    client.send(pubs(*[("orders.eu", b"b")] * 20))
    client.send(pubs(*[("orders.eu", b"c"), ("orders.us", b"dd"), ("x", b"e")] * 5))
    assert [len(stored(harness, class_id)) for class_id in (7, 8, 9)] == [31, 31, 5]
    harness.broker.store.subject_bindings.unbind(7, "orders.>")
    client.pub("orders.us", b"a")
    client.pub("orders.eu", b"a")
    assert [len(stored(harness, class_id)) for class_id in (7, 8, 9)] == [32, 33, 5]
    for subject in ("*.eu", "orders.eu"):
        harness.broker.store.subject_bindings.unbind(7, subject)
    client.pub("orders.eu", b"a")
    assert [len(stored(harness, class_id)) for class_id in (7, 8, 9)] == [32, 34, 5]


@pytest.mark.parametrize("subject", [">", "*.a"])
def test_reserved_subjects_are_not_stored_by_wildcard_bindings(subject: str) -> None:
    harness = bound((subject, 7))
    client = harness.client(b"SUB > 1\r\n")
    names = ("orders.a", "$KV.a", "_INBOX.a", "some.a", "$.a")
    for name in names:
        client.pub(name, b"one")
        client.send(pubs(*[(name, b"run")] * 30))
    client.send(pubs(*[(name, b"mix") for name in names] * 20))
    client.send(pubs(*[(name, b"mix") for name in ("$KV.a", "_INBOX.a")] * 20))
    client.send(pubs(*[(name, b"mix") for name in ("else", *names)] * 20))
    assert len(client.messages()) == 5 * 31 + 100 + 40 + 120
    stored_messages = [
        envelope.channel for envelope, _ in stored(harness, 7) if envelope.channel != "else"
    ]
    mixes = ["orders.a", "some.a"] * 40
    assert stored_messages == ["orders.a"] * 31 + ["some.a"] * 31 + mixes


def test_batches_are_stored_in_publication_order() -> None:
    harness = bound()
    client = harness.client()
    run = [("orders.a", b"%03d" % n) for n in range(100)]
    similar = [("orders.a", b"<\r\n%02d" % n) for n in range(50)]
    mix = [(f"orders.{n % 7}", b"x" * (n % 5)) for n in range(100)]
    strange = [("orders.b", b"<\r\n>"), ("orders.b", b"<"), ("orders.b", b"\r\n")] * 4
    published = run + similar + mix + strange
    client.send(pubs(*published))
    found = [(envelope.channel, payload) for envelope, payload in stored(harness, 7)]
    assert found == published
    assert client.lines() == []


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["orders.a", "orders.b<", "else", "orders.c"]),
            st.sampled_from([b"", b"<", b"\r\n", b"<\r\n", b"plain", b"\r\n>", b"<\r\n>x"]),
            st.integers(1, 12),
        ),
        max_size=30,
    )
)
def test_stored_messages_equal_published_messages(batches: list[tuple[str, bytes, int]]) -> None:
    harness = bound()
    published = [(subject, payload) for subject, payload, times in batches for _ in range(times)]
    harness.client().send(pubs(*published) or b"PING\r\n")
    stored_messages = [pair for pair in published if pair[0].startswith("orders.")]
    assert [(e.channel, p) for e, p in stored(harness, 7)] == stored_messages


def test_subject_that_is_no_channel_is_refused_with_an_error() -> None:
    harness = bound((">", 7))
    client = harness.client()
    client.send(b"PUB caf\xe9 1\r\nx\r\n")
    client.send(pubs(("a.*", b"x")))
    assert harness.broker.refusal_counts == {Reason.BAD_CHANNEL: 2}
    first, second = client.lines()
    assert first.startswith(b'-ERR \'Permissions Violation for Publish to "caf\\xe9" (')
    assert b"wildcard" in second
    assert second.count(b"'") == 2
    client.send(b"PUB caf\xe9 1\r\nx\r\n" * 30 + b"PUB fine 1\r\nx\r\n" * 30)
    assert harness.broker.refusal_counts == {Reason.BAD_CHANNEL: 32}
    assert [e.channel for e, _ in stored(harness, 7)] == ["fine"] * 30


def test_message_too_long_for_a_frame_is_refused_alone() -> None:
    harness = bound(frame_bytes=1000)
    client = harness.client()
    client.send(pubs(("orders.a", b"x" * 1000), ("orders.a", b"y"), ("orders.a", b"z" * 990)))
    client.send(pubs(*[("orders.a", b"x" * 1000)] * 20))
    assert harness.broker.refusal_counts == {Reason.FRAME_TOO_LONG: 22}
    assert [payload for _, payload in stored(harness, 7)] == [b"y"]
    assert len(client.lines()) >= 2


def test_inbox_and_system_subjects_are_not_stored() -> None:
    harness = bound((">", 7))
    client = harness.client()
    client.pub("_INBOX.a.b", b"x")
    client.pub("$JS.ACK.a.b.1.1.1.1.1", b"+ACK")
    client.send(pubs(*[("_INBOX.q", b"x")] * 20))
    client.send(pubs(*[("_INBOX.q", b"x"), ("$SRV.PING", b""), ("a", b"yy")] * 5))
    assert [e.channel for e, _ in stored(harness, 7)] == ["a"] * 5
    client.send(pubs(*[("_INBOX.q", b"x"), ("a", b"yy")] * 40))  # Stored as a batch.
    assert [e.channel for e, _ in stored(harness, 7)] == ["a"] * 45


# Headers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        (b"NATS/1.0\r\nA: b\r\nA: c:d\r\n\r\n", (("A", "b"), ("A", "c:d"))),
        (b"NATS/1.0 503 No One\r\nB: \r\n\r\n", (("Nats-Status", "503 No One"), ("B", ""))),
        (b"NATS/1.0 100\r\n\r\n", (("Nats-Status", "100"),)),
        (b"NATS/1.0\r\nName: caf\xc3\xa9\r\n\r\n", (("Name", "café"),)),
    ],
)
def test_headers_survive_storing_and_delivery(
    block: bytes, headers: tuple[tuple[str, str], ...]
) -> None:
    harness = bound()
    client = harness.client(b"SUB $SB.SUB.7 1\r\n")
    client.pub("orders.a", b"pay", headers=block)
    assert stored(harness, 7) == [(Envelope("orders.a", headers=headers), b"pay")]
    (message,) = client.messages()
    assert (message.headers, message.payload) == (block, b"pay")


@pytest.mark.parametrize(
    ("block", "delivered"),
    [
        (b"NATS/1.0\r\n\r\n", ""),
        (b"NATS/1.0\r\nNats-Reply-To: somewhere\r\n\r\n", ""),
        (b"NATS/1.0\r\nNats-Header-Block: x\r\n\r\n", ""),
        (b"garbage", "garbage"),
        (b"NATS/1.0\r\nA b\r\n\r\n", "NATS/1.0%0D%0AA b%0D%0A%0D%0A"),
        (b"NATS/1.0\r\nA: b\r\n", "NATS/1.0%0D%0AA: b%0D%0A"),
        (b"NATS/1.0\r\nA: \xff\r\n\r\n", "NATS/1.0%0D%0AA: \xff%0D%0A%0D%0A"),
        (b"NATS/1.0\r\n: x\r\n\r\n", "NATS/1.0%0D%0A: x%0D%0A%0D%0A"),
        (b"NATS/1.0\r\nA: <\r\n>\r\n\r\n", "NATS/1.0%0D%0AA: <%0D%0A>%0D%0A%0D%0A"),
        (b"NATS/1.0\r\nA: b\rc\r\n\r\n", "NATS/1.0%0D%0AA: b%0Dc%0D%0A%0D%0A"),
        (b"NATS/1.0 5x3\r\n\r\n", "NATS/1.0 5x3%0D%0A%0D%0A"),
        (b"NATS/2.0\r\nA: b\r\n\r\n", "NATS/2.0%0D%0AA: b%0D%0A%0D%0A"),
    ],
)
def test_irregular_header_block_is_stored_whole(block: bytes, delivered: str) -> None:
    harness = bound()
    client = harness.client(b"SUB $SB.SUB.7 1\r\n")
    client.pub("orders.a", b"pay", headers=block)
    client.pub("orders.a", b"pay", reply="r.1", headers=block)
    ((envelope, _), (second_envelope, _)) = stored(harness, 7)
    assert envelope.headers == (("Nats-Header-Block", block.decode("latin-1")),)
    assert second_envelope.headers == (("Nats-Reply-To", "r.1"), *envelope.headers)
    first, _ = client.messages()
    header = f"NATS/1.0\r\nNats-Header-Block: {delivered}\r\n\r\n".encode()
    assert (first.headers, first.payload) == (header if delivered else block, b"pay")


def test_headers_too_long_for_an_envelope_are_refused() -> None:
    harness = bound()
    client = harness.client()
    client.pub("orders.a", b"x", headers=b"NATS/1.0\r\nA: %b\r\n\r\n" % (b"v" * 70_000))
    assert harness.broker.refusal_counts == {Reason.BAD_ENVELOPE: 1}
    (line,) = client.lines()
    assert b"headers have at most 65535 bytes" in line


def test_batches_with_headers_are_stored() -> None:
    harness = bound()
    client = harness.client()
    first_form = b"HPUB orders.a 18 19\r\nNATS/1.0\r\nA: b\r\n\r\n%d\r\n"
    client.send(b"".join(first_form % (n % 10) for n in range(40)))
    second_form = first_form.replace(b"A: b", b"A: c")
    client.send(b"".join((first_form, second_form)[n % 2] % (n % 10) for n in range(40)))
    stored_messages = stored(harness, 7)
    assert [payload for _, payload in stored_messages] == [b"%d" % (n % 10) for n in range(40)] * 2
    assert [e.headers[0][1] for e, _ in stored_messages] == ["b"] * 40 + ["b", "c"] * 20


# Full classes -------------------------------------------------------------------------------------


def test_publisher_to_a_full_class_waits_while_its_other_commands_are_handled() -> None:
    harness = bound(class_messages=2)
    client = harness.client(b"SUB $SB.SUB.7 1\r\n", b"SUB orders.> 2\r\n")
    publisher = harness.client()
    assert not publisher.session.is_reading_paused
    publisher.send(pubs(*[("orders.a", b"%d" % n) for n in range(5)]) + b"PING\r\n")
    assert publisher.session.is_reading_paused
    assert publisher.lines() == [b"PONG"]
    messages = client.messages()
    assert [m.payload for m in messages if m.sid == "2"] == [b"0", b"1", b"2", b"3", b"4"]
    acked = [m for m in messages if m.sid == "1"]
    received: list[bytes] = []
    while acked:
        received += [m.payload for m in acked]
        for message in acked:
            client.pub(message.reply, b"+ACK")
        acked = client.messages()
    assert received == [b"0", b"1", b"2", b"3", b"4"]
    assert harness.resumed == [publisher.session.local_session]
    assert not publisher.session.is_reading_paused


def test_waiting_publisher_is_read_at_intervals_and_stays_connected() -> None:
    harness = bound(class_messages=2, frame_bytes=4096, pending_bytes=3 << 20)
    nats_server = harness.nats_server
    publisher = harness.client(pubs(*[("orders.a", b"x")] * 5))
    assert publisher.session.is_reading_paused
    for _ in range(10):
        assert not nats_server.can_read_while_blocked(publisher.session)
        nats_server.now += BLOCKED_READ_INTERVAL_SECONDS
        assert nats_server.can_read_while_blocked(publisher.session)
        publisher.send(b"PING\r\n")
        assert publisher.lines() == [b"PONG"]
    while publisher.session.local_session.parked_bytes < 1 << 20:  # type: ignore[union-attr]
        publisher.send(pubs(*[("orders.a", bytes(4000))] * 100))
    nats_server.now += 1000 * nats_server.settings.limits.ping_seconds
    nats_server.tick()
    assert not nats_server.can_read_while_blocked(publisher.session)
    assert nats_server.drain_disconnecting() == []
    assert not publisher.session.is_disconnecting


def test_connection_that_publishes_and_acks_makes_progress() -> None:
    harness = bound(class_messages=1)
    client = harness.client(b"SUB $SB.SUB.7 1\r\n")
    client.send(pubs(*[("orders.a", b"%d" % n) for n in range(20)]))
    received: list[bytes] = []
    while messages := client.messages():
        received += [m.payload for m in messages]
        client.send(b"".join(b"PUB %b 0\r\n\r\n" % m.reply.encode() for m in messages))
    assert received == [b"%d" % n for n in range(20)]
    assert not client.session.is_reading_paused


def test_blocked_messages_of_a_closed_client_are_stored() -> None:
    harness = bound(class_messages=1)
    client = harness.client(pubs(*[("orders.a", b"%d" % n) for n in range(3)]))
    client.close()
    reader = connect_version2(harness, subscribe(7, 1))
    received = []
    for n in range(3):
        received += [decode(delivery.content)[1] for delivery in reader.receive_deliveries()]
        reader.send(ack(1, n, n + 1))
    assert received == [b"0", b"1", b"2"]


@pytest.mark.parametrize("policy", [FullPolicy.DROP_NEWEST, FullPolicy.DROP_OLDEST])
def test_dropping_class_counts_drops_and_does_not_pause_publishers(policy: FullPolicy) -> None:
    harness = bound(settings=Settings(limits=Limits(class_messages=2), full_policy=policy))
    client = harness.client()
    client.send(pubs(*[("orders.a", b"%d" % n) for n in range(5)]))
    assert not client.session.is_reading_paused
    stored_messages = [b"0", b"1"] if policy is FullPolicy.DROP_NEWEST else [b"3", b"4"]
    assert [payload for _, payload in stored(harness, 7)] == stored_messages
    assert harness.statistics(7).dropped == {Reason(policy.value): 3}


def test_publisher_above_the_pending_limit_is_disconnected() -> None:
    harness = bound(class_messages=1, frame_bytes=1000, pending_bytes=2_100_000)
    client = harness.client()
    for _ in range(30):
        if not client.session.is_disconnecting:
            client.send(pubs(*[("orders.a", b"x" * 900)] * 100))
    ((session, error),) = harness.nats_server.drain_disconnecting()
    assert session is client.session
    assert error.reason is Reason.PENDING_LIMIT


# Replies ------------------------------------------------------------------------------------------


def test_stored_request_gets_no_no_responders_reply() -> None:
    harness = bound(settings=Settings(classes={7: ClassSettings(pub_ack=False)}))
    client = harness.client(b"SUB _INBOX.> 1\r\n")
    client.pub("orders.a", b"?", reply="_INBOX.1")
    assert client.messages() == []
    client.pub("other", b"?", reply="_INBOX.2")
    (no_responders,) = client.messages()
    assert no_responders.headers.startswith(b"NATS/1.0 503")


@pytest.mark.parametrize(
    ("line", "weight"),
    [
        (b"PUB $JS.ACK.1.2.3.%06d.5.6.7 0\r\n\r\n", ACK_COST_BYTES),
        (b"PUB orders.%06d 5\r\n<\r\n>x\r\n", SINGLE_STORE_COST_BYTES),
        (b"PUB orders.%06d.* 0\r\n\r\n", SINGLE_STORE_COST_BYTES),
        (b"PUB orders.%06d 5\r\nhello\r\n", BATCHED_STORE_COST_BYTES),
    ],
)
def test_expensive_commands_count_against_the_read_size(line: bytes, weight: int) -> None:
    harness = bound()
    harness.client().send(b"".join(line % number for number in range(300)))
    assert harness.nats_server.delivery.cost_bytes >= 300 * weight
    harness.client().send(b"PUB orders.a 5\r\nhello\r\n" * 300)
    assert harness.nats_server.delivery.cost_bytes < 300 * BATCHED_STORE_COST_BYTES
