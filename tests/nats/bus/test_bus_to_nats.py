"""Delivery of messages of binary clients to NATS subscriptions."""

from __future__ import annotations

import zlib

import pytest

from simplebus.core.broker.broker import FullPolicy, Settings
from simplebus.core.limits import Limits
from simplebus.core.protocol.envelope_batch import Envelope, encode
from simplebus.core.settings import ClassSettings
from simplebus.nats.server.session import NatsSession
from tests.behaviour.wire_peer import connect as connect1
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer import publish as publish1
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    channel_envelope,
    connect_version2,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    timed_envelope,
)
from tests.nats.bus.two_listeners import NatsBrokerHarness, stored


def test_version_1_message_is_delivered_on_the_class_subject() -> None:
    harness = NatsBrokerHarness()
    client = harness.client(b"SUB class.* 1\r\n")
    peer = harness.peer(connect1(1), publish1(1, b"lone"))
    peer.send(publish1(1, *numbered(30, size=20), *numbered(3)))
    messages = client.messages()
    assert {m.subject for m in messages} == {"class.1"}
    assert [m.payload for m in messages] == [b"lone", *numbered(30, size=20), *numbered(3)]
    assert {(m.reply, m.headers) for m in messages} == {("", b"")}


def test_class_name_and_channels_are_used_as_subjects() -> None:
    harness = NatsBrokerHarness()
    client = harness.client(b"SUB class.> 1\r\n", b"SUB orders.eu 2\r\n", b"SUB orders.* 3\r\n")
    peer = connect_version2(harness, classes=["shop"])
    shop = harness.broker.store.class_id_by_name["shop"]
    peer.send(publish(shop, 0, b"plain"))
    envelopes = [channel_envelope(f"orders.{region}", b"x") for region in ("eu", "us", "eu")]
    peer.send(publish_envelopes(shop, 1, *envelopes, channel_envelope("else", b"y"), b"\0none"))
    received = [(m.subject, m.sid, m.payload) for m in client.messages()]
    assert received == [
        ("class.shop", "1", b"plain"),
        *[("orders.eu", sid, b"x") for sid in "23"],
        ("orders.us", "3", b"x"),
        *[("orders.eu", sid, b"x") for sid in "23"],
        ("class.shop", "1", b"none"),
    ]


def test_driver_need_not_flush_nats_clients_that_get_nothing() -> None:
    harness = NatsBrokerHarness()
    client = harness.client(b"SUB orders.eu 1\r\n")
    peer = connect_version2(harness, classes=[1])
    harness.flush()
    peer.send(publish(1, 0, b"x"), publish_envelopes(1, 1, channel_envelope("orders.us", b"x")))
    assert not harness.is_flush_requested
    peer.send(publish_envelopes(1, 2, channel_envelope("orders.eu", b"x")))
    assert harness.is_flush_requested
    assert harness.flush() == [client.session]


def test_headers_only_reach_clients_that_accept_headers() -> None:
    harness = NatsBrokerHarness()
    client, plain = harness.client(b"SUB a 1\r\n"), harness.client(b"SUB a 1\r\n", headers=False)
    envelope = Envelope("a", headers=(("Nats-Reply-To", "_INBOX.1"), ("A", "b")))
    peer = connect_version2(harness, publish_envelopes(1, 0, encode(envelope, b"pay")))
    (message,), (plain_message,) = client.messages(), plain.messages()
    assert message == ("a", "1", "_INBOX.1", b"NATS/1.0\r\nA: b\r\n\r\n", b"pay")
    assert plain_message == ("a", "1", "_INBOX.1", b"", b"pay")
    assert peer.receive_error_codes() == []


def test_delivery_error_does_not_affect_the_publisher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = NatsBrokerHarness()
    client = harness.client(b"SUB a 1\r\n")
    with monkeypatch.context() as broken:
        broken.setattr(NatsSession, "write_gathered", lambda *arguments: 1 / 0)
        peer = connect_version2(
            harness, publish_envelopes(1, 0, *[channel_envelope("a", b"%d" % n) for n in range(60)])
        )
    assert peer.receive_error_codes() == []
    assert harness.broker.classes[1].ring.head == 60
    assert [type(fault) for fault in harness.nats_server.drain_errors()] == [ZeroDivisionError]
    peer.send(publish_envelopes(1, 60, *[channel_envelope("a", b"later")] * 60))
    assert [message.payload for message in client.messages()] == [b"later"] * 60
    assert harness.nats_server.drain_errors() == []


def test_binary_subscriber_answers_a_nats_request() -> None:
    harness = NatsBrokerHarness(Settings(classes={1: ClassSettings(pub_ack=False)}))
    harness.broker.store.class_registry.bind_subject("ask.>", 1)
    client = harness.client(b"SUB _INBOX.me.* 1\r\n")
    worker = connect_version2(harness, subscribe(1, 5), classes=[1, 2])
    client.pub("ask.time", b"?", reply="_INBOX.me.7")
    (request,) = worker.receive_deliveries()
    assert b"Nats-Reply-To" in request.content
    worker.send(publish_envelopes(2, 0, channel_envelope("_INBOX.me.7", b"now")))
    assert client.payloads() == [b"now"]


def test_nats_messages_are_delivered_once() -> None:
    harness = NatsBrokerHarness(class_messages=1)
    harness.broker.store.class_registry.bind_subject("orders.>", 1)
    client = harness.client(b"SUB > 1\r\n")
    for payload in (b"a", b"b", b"c"):
        client.pub("orders.eu", payload)
    assert client.payloads() == [b"a", b"b", b"c"]
    reader = harness.client(b"SUB $SB.SUB.1 1\r\n")
    for _ in range(3):
        (message,) = reader.messages()
        reader.pub(message.reply)
    assert harness.statistics(1).published == 3
    assert [m.payload for m in client.messages() if m.subject == "orders.eu"] == []


def test_binary_messages_are_not_stored_in_other_classes() -> None:
    harness = NatsBrokerHarness()
    harness.broker.store.class_registry.bind_subject("orders.>", 2)
    client = harness.client(b"SUB $SB.SUB.1 1\r\n")
    connect_version2(harness, publish_envelopes(1, 0, channel_envelope("orders.eu", b"x")))
    connect_version2(
        harness, publish_envelopes(1, 0, channel_envelope("$JS.ACK.1._1.1.0.1.1.1", b"+ACK"))
    )
    assert harness.statistics(2).published == 0
    assert len(client.messages()) == 2
    assert harness.statistics(1).acknowledged == 0


def test_blocked_message_is_delivered_when_it_is_stored() -> None:
    harness = NatsBrokerHarness(class_messages=1)
    client = harness.client(b"SUB class.1 1\r\n", b"SUB $SB.SUB.1 2\r\n")
    harness.peer(connect1(1), publish1(1, b"a", b"b"))
    first, acked = client.messages()
    assert (first.payload, acked.payload) == (b"a", b"a")
    client.pub(acked.reply)
    assert client.payloads() == [b"b", b"b"]


def test_blocked_messages_are_delivered_during_another_batch() -> None:
    harness = NatsBrokerHarness(class_messages=20)
    client = harness.client(b"SUB class.1 1\r\n", b"SUB $SB.SUB.1 2\r\n", b"SUB noise 3\r\n")
    harness.peer(connect1(1), publish1(1, *numbered(40, size=9)))
    messages = client.messages()
    acks = [m.reply.encode() for m in messages if m.sid == "2"]
    assert len(acks) == 20
    client.send(b"".join(b"PUB %b 0\r\n\r\n" % reply for reply in acks[1:]))
    noise = [b"PUB noise %d\r\n%b\r\n" % (n % 7, b"x" * (n % 7)) for n in range(2000)]
    client.send(b"".join([*noise[:1500], b"PUB %b 0\r\n\r\n" % acks[0], *noise[1500:]]))
    remaining = client.messages()
    assert [m.payload for m in remaining if m.sid == "1"] == numbered(20, size=9, start=20)
    assert [len(m.payload) for m in remaining if m.sid == "3"] == [n % 7 for n in range(2000)]


def test_messages_of_many_channels_are_delivered_in_order() -> None:
    harness = NatsBrokerHarness()
    client = harness.client(b"SUB a.> 1\r\n", b"SUB *.3 2\r\n", b"SUB a.* q 3\r\n")
    peer = connect_version2(harness)
    contents, expected = [], []
    for number in range(400):
        channel = f"{'ab'[number % 5 == 4]}.{number % 7}"
        headers = (("N", str(number)),) if number % 50 == 0 else ()
        payload = b"%d" % number if number % 9 else b"<\r\n>%d" % number
        contents.append(encode(Envelope(channel, headers=headers), payload))
        sids = ["1", "3"] * channel.startswith("a") + ["2"] * channel.endswith("3")
        expected += [(channel, sid, payload, bool(headers)) for sid in sorted(sids)]
    peer.send(publish_envelopes(1, 0, *contents))
    messages = client.messages()
    received = [(m.subject, m.sid, m.payload, bool(m.headers)) for m in messages]
    assert sorted(received) == sorted(expected)
    for sid in "123":
        of_sid = [entry for entry in received if entry[1] == sid]
        assert of_sid == [entry for entry in expected if entry[1] == sid]


# Delayed and expired messages ---------------------------------------------------------------------


def times(harness: NatsBrokerHarness) -> Version2Peer:
    """Return a peer that has published one due message, two delayed ones and two expired ones."""
    peer = connect_version2(harness)
    peer.send(
        publish_envelopes(
            1,
            0,
            timed_envelope(b"now", expires_ms=5000),
            timed_envelope(b"later", not_before_ms=2000),
            timed_envelope(b"both", not_before_ms=3000, expires_ms=3000),
            timed_envelope(b"last", not_before_ms=4000, expires_ms=5000),
            timed_envelope(b"late", expires_ms=0),
        )
    )
    return peer


def test_delayed_message_is_delivered_when_due_and_expired_never() -> None:
    harness = NatsBrokerHarness()
    client = harness.client(b"SUB class.1 1\r\n")
    times(harness)
    assert client.payloads() == [b"now"]
    assert harness.broker.next_wakeup == 2.0
    harness.wait(1.5)
    assert client.payloads() == []
    harness.wait(0.5)
    assert client.payloads() == [b"later"]
    harness.wait(2)
    assert client.payloads() == [b"last"]
    assert harness.broker.next_wakeup == float("inf")


def test_released_delayed_message_is_not_delivered() -> None:
    limits = Limits(class_messages=2)
    harness = NatsBrokerHarness(Settings(limits=limits, full_policy=FullPolicy.DROP_OLDEST))
    client = harness.client(b"SUB class.1 1\r\n")
    peer = connect_version2(
        harness, publish_envelopes(1, 0, timed_envelope(b"later", not_before_ms=1000))
    )
    peer.send(publish(1, 1, b"a", b"b"))
    assert client.payloads() == [b"a", b"b"]
    harness.wait(2)
    assert client.payloads() == []


@pytest.mark.parametrize("count", [1100, 5000])
def test_delayed_entries_are_bounded_by_stored_messages(count: int) -> None:
    limits = Limits(class_messages=1100)
    harness = NatsBrokerHarness(Settings(limits=limits, full_policy=FullPolicy.DROP_OLDEST))
    harness.skips_checks = True
    client = harness.client(b"SUB class.1 1\r\n")
    peer = connect_version2(harness)
    for start in range(0, count, 50):
        envelopes = [
            timed_envelope(b"%d" % n, not_before_ms=1000 + n % 2) for n in range(start, start + 50)
        ]
        peer.send(publish_envelopes(1, start, *envelopes))
    tap = harness.nats_server.bus_adapter._bus_to_nats  # type: ignore[union-attr]
    assert len(tap._delayed) <= 3 * 1100
    harness.wait_for_all_due(2)
    assert sorted(map(int, client.payloads())) == list(range(count - 1100, count))


def test_many_delayed_messages_are_all_delivered() -> None:
    harness = NatsBrokerHarness()
    client = harness.client(b"SUB class.1 1\r\n")
    peer = connect_version2(harness)
    envelopes = [
        timed_envelope(b"%d" % n, not_before_ms=1000 + 1000 * (n % 2)) for n in range(1100)
    ]
    peer.send(publish_envelopes(1, 0, *envelopes))
    harness.wait_for_all_due(1)
    assert client.payloads() == [b"%d" % n for n in range(0, 1100, 2)]
    harness.wait_for_all_due(1)
    assert client.payloads() == [b"%d" % n for n in range(1, 1100, 2)]


# Dead letters ------------------------------------------------------------------------------------


def test_dead_letters_are_delivered_on_their_class_subject() -> None:
    harness = NatsBrokerHarness()
    client = harness.client(b"SUB orders.> 1\r\n", b"SUB class.> 2\r\n")
    peer = connect_version2(harness, subscribe(1, 5, max_deliveries=1))
    peer.send(publish_envelopes(1, 0, channel_envelope("orders.eu", b"x")))
    assert [m.sid for m in client.messages()] == ["1"]
    assert len(peer.receive_deliveries()) == 1
    peer.send(nack(5, 0, 1, 0))
    assert peer.receive_deliveries() == []
    (message,) = client.messages()
    assert (message.subject, message.sid, message.payload) == ("class.dead.1", "2", b"x")
    assert b"dead-reason: max_deliveries\r\n" in message.headers
    ((envelope, _),) = stored(harness, 0x8000 + zlib.crc32(b"dead.1") % 0x8000)
    assert envelope.channel == "orders.eu"


# Cost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"PING\r\n", b"SUB elsewhere.> 1\r\n", b"SUB class.2 1\r\n"])
def test_messages_without_matching_subscription_are_not_copied(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = NatsBrokerHarness()
    client = harness.client(data)
    client.drain()
    peer = connect_version2(harness)
    tap = harness.nats_server.bus_adapter._bus_to_nats  # type: ignore[union-attr]
    monkeypatch.setattr(tap, "_send_ranges", lambda *args, **kwargs: pytest.fail("it was copied"))
    peer.send(publish(1, 0, *numbered(30)))
    peer.send(publish_envelopes(1, 30, *[channel_envelope(f"a.{n}", b"x") for n in range(30)]))
    peer.send(publish_envelopes(1, 60, timed_envelope(b"x", not_before_ms=5)))
    assert client.messages() == []
    harness.wait(1)
    assert client.messages() == []


def test_store_is_not_observed_without_subscriptions() -> None:
    harness = NatsBrokerHarness()
    harness.broker.store.class_registry.bind_subject("orders.>", 1)
    client = harness.client(b"SUB $SB.SUB.1 2\r\n")
    assert harness.broker.store.on_stored is None
    client.send(b"SUB > 1\r\n", b"SUB a q 3\r\n")
    other_client = harness.client(b"SUB > 1\r\n")
    assert harness.broker.store.on_stored is not None
    client.send(b"UNSUB 1\r\n", b"UNSUB 3\r\n")
    assert harness.broker.store.on_stored is not None
    other_client.close()
    assert harness.broker.store.on_stored is None
    harness.peer(connect1(1), publish1(1, b"x"))
    assert [message.sid for message in client.messages()] == ["2"]


def test_subscription_at_due_time_receives_a_delayed_message() -> None:
    harness = NatsBrokerHarness()
    first_client = harness.client(b"SUB class.1 1\r\n")
    peer = connect_version2(harness)
    peer.send(
        publish_envelopes(
            1, 0, *[timed_envelope(b"%d" % n, not_before_ms=1000) for n in range(5000)]
        )
    )
    first_client.close()
    peer.send(publish_envelopes(1, 5000, timed_envelope(b"last", not_before_ms=1000)))
    second_client = harness.client(b"SUB class.1 1\r\n")
    harness.wait(1)
    assert second_client.payloads() == [b"%d" % n for n in range(4096)]
    harness.wait(0)
    assert second_client.payloads() == [*[b"%d" % n for n in range(4096, 5000)], b"last"]
    assert harness.broker.next_wakeup == float("inf")


def test_channel_flags_are_bounded_by_channels() -> None:
    harness = NatsBrokerHarness()
    client = harness.client(b"SUB other 1\r\n")
    peer = connect_version2(harness)
    tap = harness.nats_server.bus_adapter._bus_to_nats  # type: ignore[union-attr]
    for number in range(100):
        client.send(b"UNSUB 2\r\nSUB another.%d 2\r\n" % number)
        peer.send(publish_envelopes(1, number, channel_envelope("a", b"x")))
    ((_, verdicts),) = tap._channel_flags.values()
    assert verdicts.size == 2
    peer.send(publish_envelopes(1, 100, *[channel_envelope(f"a.{n}", b"x") for n in range(100)]))
    ((_, verdicts),) = tap._channel_flags.values()
    assert verdicts.size <= 256


def test_channel_flags_are_dropped_with_their_channels() -> None:
    harness = NatsBrokerHarness()
    client = harness.client(b"SUB wanted.> 1\r\n")
    peer = connect_version2(harness, subscribe(1, 5))
    for round_ in range(3):
        envelopes = [
            channel_envelope(f"{region}.{round_}.{n}", b"x")
            for region in ("no", "wanted")
            for n in (1, 2)
        ]
        peer.send(
            publish_envelopes(1, 8 * round_, *envelopes),
            publish_envelopes(1, 8 * round_ + 4, *reversed(envelopes)),
        )
        received = [message.subject for message in client.messages()]
        assert received == [f"wanted.{round_}.{n}" for n in (1, 2, 2, 1)]
        peer.send(ack(5, 8 * round_, 8 * round_ + len(peer.receive_message_ids())))
        harness.broker.classes[1].channels.forget_unused(100)
    client.send(b"SUB no.> 2\r\n", b"UNSUB 1\r\n")
    peer.send(
        publish_envelopes(
            1, 24, channel_envelope("no.2.1", b"x"), channel_envelope("wanted.2.1", b"x")
        )
    )
    assert [message.subject for message in client.messages()] == ["no.2.1"]
