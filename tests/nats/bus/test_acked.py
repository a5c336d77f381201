"""Acked delivery to NATS clients: start positions, groups, redelivery and ack commands."""

from __future__ import annotations

from itertools import pairwise

import pytest

from simplebus.core.broker.broker import Settings
from simplebus.core.errors import Reason
from simplebus.core.limits import CONNECTION_SCAN_MESSAGES_MAX, Limits
from simplebus.core.settings import ClassSettings
from simplebus.nats.class_requests import encode_token
from simplebus.nats.limits import (
    ACK_COST_BYTES,
    ENCODED_MESSAGES_MAX,
    NACK_EXTRA_COST_BYTES,
    OUTPUT_PER_READ_BYTES,
    TERMINATE_EXTRA_COST_BYTES,
)
from tests.behaviour.wire_peer import connect as connect1
from tests.behaviour.wire_peer import numbered
from tests.behaviour.wire_peer import publish as publish1
from tests.behaviour.wire_peer import subscribe as subscribe1
from tests.behaviour.wire_peer_v2 import (
    ack,
    channel_envelope,
    connect_version2,
    nack,
    publish,
    publish_envelopes,
    subscribe,
)
from tests.models.key_order_model import encode_with_key
from tests.nats.bus.two_listeners import (
    DEAD_1,
    Client,
    NatsBrokerHarness,
    deliveries,
    fields,
    holding,
    stored,
)

# Subscriptions ------------------------------------------------------------------------------------


def test_verbose_client_gets_ok_only_for_accepted_subscriptions() -> None:
    client = NatsBrokerHarness().client(verbose=True)
    client.sub("$SB.SUB.orders.d.start=never")
    assert [line[:4] for line in client.lines()] == [b"-ERR"]
    client.sub("$SB.SUB.orders.d")
    assert client.lines() == [b"+OK"]


def test_durable_has_one_client_and_outlives_it() -> None:
    harness = holding(b"a", b"b")
    client, next_client = harness.client(b"SUB $SB.SUB.1.d 1\r\n"), harness.client()
    first, second = client.messages()
    client.pub(first.reply, b"+ACK")
    next_client.sub("$SB.SUB.1.d")
    (line,) = next_client.lines()
    assert b"the durable 'd' is held" in line.replace(b"`", b"'")
    client.close()
    next_client.sub("$SB.SUB.1.d", "9")
    (redelivered,) = next_client.messages()
    assert (redelivered.payload, redelivered.sid) == (b"b", "9")
    assert fields(redelivered)[:4] == ["1", "d", "2", fields(second)[3]]


def test_class_limit_applies_to_requested_classes() -> None:
    harness = NatsBrokerHarness(classes=2)
    client = harness.client(b"SUB $SB.SUB.1 1\r\n", b"SUB $SB.SUB.a 2\r\n", b"SUB $SB.SUB.b 3\r\n")
    (line,) = client.lines()
    assert b"of at most 2 classes exist" in line
    assert len(harness.broker.classes) == 2


# Deliveries ---------------------------------------------------------------------------------------


def test_deliveries_carry_ack_subject_metadata() -> None:
    harness = NatsBrokerHarness()
    harness.broker.clock.now = 1763700000.25
    client = harness.client(b"SUB $SB.SUB.shop.till 4\r\n")
    peer = connect_version2(harness, classes=["shop"])
    shop = harness.broker.store.class_id_by_name["shop"]
    peer.send(
        publish_envelopes(
            shop, 0, channel_envelope("orders.eu", b"a"), b"\0b", channel_envelope("x", b"c")
        )
    )
    messages = client.messages()
    assert [(m.subject, m.payload) for m in messages] == [
        ("orders.eu", b"a"),
        ("class.shop", b"b"),
        ("x", b"c"),
    ]
    time = str(int(1763700000.25 * 1e9))
    assert [fields(m) for m in messages] == [
        ["shop", "till", "1", str(n), str(n + 1), time, str(2 - n)] for n in range(3)
    ]


def test_redelivery_reports_pending_messages() -> None:
    harness = holding(*numbered(5))
    client = harness.client(b"SUB $SB.SUB.1.-.in_flight=3 1\r\n")
    messages = client.messages()
    assert [fields(message)[6] for message in messages] == ["4", "3", "2"]
    for message in messages:
        client.pub(message.reply, b"-NAK 0s")
        (redelivered,) = client.messages()
        assert fields(redelivered)[2] == "2"
        assert fields(redelivered)[3] == fields(message)[3]
        assert fields(redelivered)[6] == "2"


def test_names_with_special_characters_are_percent_encoded() -> None:
    harness = holding()
    name = encode_token("a.b *>%")
    assert name == "a%2Eb%20%2A%3E%25"
    client = harness.client(f"SUB $SB.SUB.{name}.{name} 1\r\n".encode())
    class_id = harness.broker.store.class_id_by_name["a.b *>%"]
    harness.peer(connect1(class_id), publish1(class_id, b"x"))
    (message,) = client.messages()
    assert fields(message)[:2] == [name, name]
    client.pub(message.reply)
    assert harness.statistics(class_id).ring.message_count == 0


def test_long_names_are_shortened_in_ack_subjects() -> None:
    harness, name = holding(), "\U0001f40c" * 200
    client = harness.client(f"SUB $SB.SUB.{name}.{name} 1\r\n".encode())
    class_id = harness.broker.store.class_id_by_name[name]
    harness.peer(connect1(class_id), publish1(class_id, b"x"))
    (message,) = client.messages()
    assert fields(message)[:2] == [str(class_id), "_1"]
    client.pub(message.reply)
    assert harness.statistics(class_id).ring.message_count == 0


def test_client_without_headers_gets_payload_only() -> None:
    harness = NatsBrokerHarness()
    harness.broker.store.class_registry.bind_subject("a", 1)
    client = harness.client(b"SUB $SB.SUB.1 1\r\n", headers=False)
    harness.client().pub("a", b"pay", headers=b"NATS/1.0\r\nA: b\r\n\r\n")
    (message,) = client.messages()
    assert (message.headers, message.payload) == (b"", b"pay")


def test_filter_selects_channels() -> None:
    harness = NatsBrokerHarness()
    client = harness.client(b"SUB $SB.SUB.1.-.filter.orders.* 1\r\n")
    connect_version2(
        harness,
        publish_envelopes(
            1, 0, *[channel_envelope(c, b"x") for c in ("orders.a", "b", "orders.c")]
        ),
    )
    assert [m.subject for m in client.messages()] == ["orders.a", "orders.c"]


def test_start_option_selects_the_first_message() -> None:
    harness = holding(b"a", b"b", b"c")
    starts = ("new", "earliest", "last", "last_values", "1", "waiting")
    clients = {start: harness.client() for start in starts}
    for start, client in clients.items():
        client.sub(f"$SB.SUB.1.-.start={start}")
    harness.peer(publish1(1, b"d"))
    payloads_by_start = {start: b"".join(client.payloads()) for start, client in clients.items()}
    assert payloads_by_start == {
        "new": b"d",
        "earliest": b"abcd",
        "last": b"cd",
        "last_values": b"cd",
        "1": b"bcd",
        "waiting": b"abcd",
    }


def test_unread_messages_stay_in_the_class() -> None:
    harness = holding(*numbered(5000, size=100))
    harness.skips_checks = True
    client = harness.client(b"SUB $SB.SUB.1.-.in_flight=5000 1\r\n")
    pending_before = client.session.outbox.pending_bytes
    assert pending_before == 0
    assert not client.session.outbox.is_idle
    assert client.payloads() == numbered(5000, size=100)


def test_few_messages_are_encoded_at_once() -> None:
    count = 3 * ENCODED_MESSAGES_MAX + 1
    harness = holding(*numbered(count))
    harness.skips_checks = True
    source = harness.client(
        f"SUB $SB.SUB.1.-.in_flight={count} 1\r\n".encode()
    ).session.outbox.source
    assert source is not None
    encoded_counts = []
    while not source.is_idle:
        encoded_counts.append(source.encode_next(harness.broker.tick_number).count(b"MSG class.1 "))
        assert source.scanned_count > CONNECTION_SCAN_MESSAGES_MAX or source.is_idle
    assert sum(encoded_counts) == count
    assert max(encoded_counts) <= ENCODED_MESSAGES_MAX


def test_in_flight_option_limits_unacked_messages() -> None:
    harness = holding(*numbered(30))
    client = harness.client(b"SUB $SB.SUB.1.-.in_flight=10 1\r\n")
    messages = client.messages()
    assert [m.payload for m in messages] == numbered(10)
    assert client.session.outbox.is_idle
    for message in messages[:3]:
        client.pub(message.reply, b"+ACK")
    assert client.payloads() == numbered(3, start=10)


def test_two_subscriptions_of_one_client_each_receive_all_messages() -> None:
    harness = holding()
    client = harness.client(b"SUB $SB.SUB.1 1\r\n", b"SUB $SB.SUB.1.d 2\r\n", b"SUB class.1 3\r\n")
    harness.peer(publish1(1, b"a"))
    messages = client.messages()
    assert sorted(m.sid for m in messages) == ["1", "2", "3"]
    for message in messages:
        if message.reply:
            client.pub(message.reply)
    assert harness.statistics(1).ring.message_count == 0


def test_group_members_share_messages_and_only_the_holder_can_ack() -> None:
    harness = holding(*numbered(4))
    first_member = harness.client(b"SUB $SB.SUB.1.- workers 1\r\n")
    first = first_member.messages()
    second_member = harness.client(b"SUB $SB.SUB.1.- workers 1\r\n")
    harness.peer(publish1(1, *numbered(4, start=4)))
    shares = first_member.messages(), second_member.messages()
    assert sorted(m.payload for m in (*first, *shares[0], *shares[1])) == numbered(8)
    assert shares[1]
    second_member.pub(first[0].reply, b"+ACK")
    assert harness.broker.refusal_counts == {Reason.ACK_UNSUBSCRIBED: 1}
    assert harness.statistics(1).acknowledged == 0
    first_member.pub(first[0].reply, b"+ACK")
    assert harness.statistics(1).acknowledged == 1
    first_member.close()
    redelivered = deliveries(second_member.messages())
    assert [attempt for _, attempt in redelivered] == [2] * len(redelivered)
    assert len(redelivered) == 7 - len(shares[1])


def test_key_ordered_group_delivers_one_message_per_key() -> None:
    harness = holding()
    subject = b"SUB $SB.SUB.1.till.by_key=true workers 1\r\n"
    members = [harness.client(subject) for _ in range(2)]
    connect_version2(
        harness,
        publish_envelopes(
            1, 0, *(encode_with_key(key, b"%d" % n) for n, key in enumerate([b"a"] * 3))
        ),
    )
    for number in range(2):
        ((receiver, message),) = [(m, delivery) for m in members for delivery in m.messages()]
        assert message.payload == b"%d" % number
        receiver.pub(message.reply, b"-NAK 0s")
        ((receiver, message),) = [(m, delivery) for m in members for delivery in m.messages()]
        assert (message.payload, fields(message)[2]) == (b"%d" % number, "2")
        receiver.pub(message.reply, b"+ACK")
    for member in members:
        member.messages()
        member.close()
    new_member = harness.client(b"SUB $SB.SUB.1.till workers 1\r\n")
    assert b"without by_key" in b"".join(new_member.lines())


def test_two_members_of_one_client_share_messages() -> None:
    harness = holding(*numbered(4))
    client = harness.client(b"SUB $SB.SUB.1.- g 1\r\n", b"SUB $SB.SUB.1.- g 2\r\n")
    harness.peer(publish1(1, *numbered(20, start=4)))
    messages = client.messages()
    assert sorted(m.payload for m in messages) == sorted(numbered(24))
    assert {(m.sid, fields(m)[1]) for m in messages} == {("1", "g"), ("2", "g_2")}
    for message in messages:
        client.pub(message.reply)
    assert harness.statistics(1).ring.message_count == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [(("1.-", ""), ("1._1", "")), (("1._2", ""), ("1.-", "")), (("1.d", ""), ("1.-", "d"))],
)
def test_ack_names_of_a_client_are_unique(first: tuple[str, str], second: tuple[str, str]) -> None:
    harness = holding(b"a")
    client = harness.client()
    for sid, (subject, queue) in (("8", first), ("9", second)):
        client.sub(f"$SB.SUB.{subject}.start=earliest", sid, queue)
    eight, nine = sorted(client.messages(), key=lambda message: message.sid)
    assert fields(eight)[1] != fields(nine)[1]
    client.pub(eight.reply, b"-NAK 0s")
    assert [m.sid for m in client.messages()] == ["8"]
    client.pub(nine.reply, b"-NAK 0s")
    assert [m.sid for m in client.messages()] == ["9"]
    client.send(b"UNSUB 8\r\nUNSUB 9\r\n")


# Acks ---------------------------------------------------------------------------------------------


def test_unacked_message_is_redelivered_with_backoff() -> None:
    harness = holding(b"a", b"b")
    client = harness.client(b"SUB $SB.SUB.1 1\r\n")
    first, second = client.messages()
    client.pub(first.reply)
    harness.tick(5)
    assert client.messages() == []
    harness.tick(1)
    assert deliveries(client.messages()) == [(b"b", 2)]
    harness.tick(11)
    assert client.messages() == []
    harness.tick(1)
    (redelivered,) = client.messages()
    assert deliveries([redelivered]) == [(b"b", 3)]
    assert fields(redelivered)[3] == fields(second)[3]
    client.pub(second.reply, b"+ACK")  # Late, but still accepted.
    harness.tick(100)
    assert client.messages() == []
    assert harness.statistics(1).ring.message_count == 0


def test_ack_seconds_option_sets_the_ack_timeout() -> None:
    harness = holding(b"a")
    client = harness.client(b"SUB $SB.SUB.1.-.ack_seconds=2 1\r\n")
    client.messages()
    harness.tick(2)
    assert deliveries(client.messages()) == [(b"a", 2)]


@pytest.mark.parametrize("queue", ["", "g"])
def test_redelivery_reports_pending_and_repeated_ack_is_accepted(
    queue: str,
) -> None:
    harness = holding(b"a", b"b", b"c")
    client = harness.client(b"SUB in 2\r\n")
    client.sub("$SB.SUB.1.-.in_flight=2", queue=queue)
    first, second = client.messages()
    assert [fields(m)[-1] for m in (first, second)] == ["2", "1"]
    client.pub(first.reply, b"-NAK 0s")
    (first,) = client.messages()
    assert (deliveries([first]), fields(first)[-1]) == ([(b"a", 2)], "1")
    for _ in range(2):
        client.pub(first.reply, b"+ACK", reply="in")
    assert [m.subject for m in client.messages() if m.sid == "2"] == ["in"] * 2
    assert harness.statistics(1).acknowledged == 1
    assert harness.broker.refusal_counts == {}


def test_nack_redelivers_at_once_or_after_its_delay() -> None:
    harness = holding(b"a")
    client = harness.client(b"SUB $SB.SUB.1 1\r\n")
    (message,) = client.messages()
    client.pub(message.reply, b"-NAK 0s")
    (message,) = client.messages()
    assert deliveries([message]) == [(b"a", 2)]
    client.pub(message.reply, b'-NAK {"delay": 5000000000}')
    harness.wait(4.9)
    assert client.messages() == []
    harness.wait(0.1)
    assert deliveries(client.messages()) == [(b"a", 3)]


def test_working_restarts_the_ack_timeout() -> None:
    harness = holding(b"a")
    client = harness.client(b"SUB $SB.SUB.1 1\r\n")
    (message,) = client.messages()
    for _ in range(5):
        harness.tick(4)
        client.pub(message.reply, b"+WPI")
    assert client.messages() == []
    client.pub(message.reply)
    assert harness.statistics(1).ring.message_count == 0


@pytest.mark.parametrize("queue", ["", "g"])
def test_terminated_message_becomes_a_dead_letter(queue: str) -> None:
    harness = holding(b"a", b"b")
    client = harness.client()
    client.sub("$SB.SUB.1.d", queue=queue)
    first, second = client.messages()
    client.pub(first.reply, b"+TERM it is broken")
    client.pub(second.reply, b"+ACK")
    harness.tick(100)
    assert client.messages() == []
    ((envelope, payload),) = stored(harness, DEAD_1)
    assert payload == b"a"
    assert ("dead-reason", "terminated") in envelope.headers
    assert ("dead-subscription", "d") in envelope.headers
    assert harness.statistics(1).dropped == {Reason.TERMINATED: 1}
    letters = harness.client(b"SUB $SB.SUB.dead%2E1 1\r\n")
    assert letters.payloads() == [b"a"]


@pytest.mark.parametrize("queue", ["", "g"])
def test_terminate_reason_is_stored_in_the_dead_letter(queue: str) -> None:
    harness = holding(b"a", b"b")
    client = harness.client()
    client.sub("$SB.SUB.1.d", queue=queue)
    first, second = client.messages()
    client.pub(first.reply, b"+TERM no such customer: \xc3\x85gren")
    client.pub(second.reply, b"+TERM")
    (a, _), (b, _) = stored(harness, DEAD_1)
    assert ("dead-error", "no such customer: \u00c5gren") in a.headers
    assert "dead-error" not in dict(b.headers)


@pytest.mark.parametrize("queue", ["", "g"])
@pytest.mark.parametrize("command", [b"-NAK", b'-NAK {"delay": 9000000000}', b"+TERM", b"+WPI"])
def test_command_for_an_earlier_attempt_is_ignored(command: bytes, queue: str) -> None:
    harness = holding(b"a")
    client = harness.client(b"SUB _INBOX.me.* 2\r\n")
    client.sub("$SB.SUB.1.d", "1", queue)
    (first_delivery,) = client.messages()
    harness.tick(6)
    (present,) = client.messages()
    assert (fields(first_delivery)[2], fields(present)[2]) == ("1", "2")
    harness.tick(1)
    client.pub(first_delivery.reply, command, reply="_INBOX.me.1")
    (answer,) = client.messages()
    assert (answer.subject, b" 503" in answer.headers) == ("_INBOX.me.1", True)
    assert harness.statistics(1).dropped == {}
    harness.tick(11)
    (second_delivery,) = client.messages()
    assert fields(second_delivery)[2] == "3"
    # The message stays acknowledged.
    client.pub(first_delivery.reply, b"+ACK", reply="_INBOX.me.2")
    assert [m.subject for m in client.messages()] == ["_INBOX.me.2"]
    assert harness.statistics(1).ring.message_count == 0


@pytest.mark.parametrize("queue", ["", "g"])
def test_nack_uses_the_backoff_of_the_class(queue: str) -> None:
    class_settings = ClassSettings(backoff_seconds=(2.0, 3.0))
    harness = NatsBrokerHarness(Settings(classes={1: class_settings}))
    harness.peer(connect1(1), publish1(1, b"a"))
    client = harness.client()
    client.sub("$SB.SUB.1.d", queue=queue)
    found = []
    for tick in range(9):
        for message in client.messages():
            found.append((tick, fields(message)[2]))
            client.pub(message.reply, b"-NAK")
        harness.tick(1)
        harness.wait(1)
    assert found == [(0, "1"), (2, "2"), (5, "3"), (8, "4")]


@pytest.mark.parametrize("queue", ["", "g"])
def test_nack_without_delay_uses_the_backoff(queue: str) -> None:
    harness = holding(b"a")
    client = harness.client()
    client.sub("$SB.SUB.1.d.max_deliveries=3", queue=queue)
    found = []
    for tick in range(50):
        for message in client.messages():
            found.append((tick, fields(message)[2]))
            client.pub(message.reply, b"-NAK")
        harness.tick(1)
    assert found == [(0, "1"), (6, "2"), (18, "3")]
    assert [payload for _, payload in stored(harness, DEAD_1)] == [b"a"]


def test_max_deliveries_option_limits_deliveries() -> None:
    harness = holding(b"a")
    client = harness.client(b"SUB $SB.SUB.1.-.max_deliveries=2 1\r\n")
    for _ in range(2):
        (message,) = client.messages()
        client.pub(message.reply, b"-NAK 0s")
    assert client.messages() == []
    assert [payload for _, payload in stored(harness, DEAD_1)] == [b"a"]


@pytest.mark.parametrize("command", [b"", b"+ACK", b"-NAK", b"+WPI", b"+TERM", b"+NXT"])
def test_ack_with_reply_subject_is_confirmed(command: bytes) -> None:
    harness = holding(b"a")
    client = harness.client(b"SUB $SB.SUB.1 1\r\n", b"SUB _INBOX.me.* 2\r\n")
    (message,) = client.messages()
    client.pub(message.reply, command, reply="_INBOX.me.1")
    answers = [m for m in client.messages() if m.sid == "2"]
    assert answers == [("_INBOX.me.1", "2", "", b"", b"")]
    if command in (b"", b"+ACK"):
        client.pub(message.reply, command, reply="_INBOX.me.2")  # The name is unchanged.
        assert [m.subject for m in client.messages()] == ["_INBOX.me.2"]


@pytest.mark.parametrize("queue", ["", "g"])
def test_repeated_ack_is_confirmed(queue: str) -> None:
    harness = holding(b"a")
    client = harness.client(b"SUB _INBOX.me.* 2\r\n")
    client.sub("$SB.SUB.1.d", "1", queue)
    (message,) = client.messages()
    for reply in ("_INBOX.me.1", "_INBOX.me.2"):
        client.pub(message.reply, b"+ACK", reply=reply)
        assert client.messages() == [(reply, "2", "", b"", b"")]
    assert harness.broker.refusal_counts == {}
    assert harness.statistics(1).acknowledged == 1


def test_ack_for_an_undelivered_message_is_refused() -> None:
    harness = holding(b"a", b"b")
    client = harness.client(b"SUB $SB.SUB.1.d.in_flight=1 1\r\n", b"SUB _INBOX.me.* 2\r\n")
    other_client = harness.client(b"SUB $SB.SUB.2 1\r\n", b"SUB _INBOX.me.* 2\r\n")
    (message,) = client.messages()
    unsent_tokens = message.reply.split(".")
    unsent_tokens[5] = "1"
    distant_tokens = [*unsent_tokens[:5], str(2**31), *unsent_tokens[6:]]
    for sender, subject in (
        (other_client, message.reply),
        (client, ".".join(unsent_tokens)),
        (client, ".".join(distant_tokens)),
        (client, message.reply.replace(".d.", ".e.")),
        (harness.client(), message.reply),
    ):
        sender.pub(subject, b"+ACK", reply="_INBOX.me.1")
        answers = [m for m in (*client.messages(), *other_client.messages()) if m.sid == "2"]
        assert all(m.headers.startswith(b"NATS/1.0 503") for m in answers)
        assert len(answers) == (sender in (client, other_client))
    assert harness.broker.refusal_counts == {Reason.ACK_UNSUBSCRIBED: 5}
    assert harness.statistics(1).acknowledged == 0


@pytest.mark.parametrize(
    ("subject", "payload"),
    [
        ("$JS.ACK.1._1.1.0.1.1.1", b"what?"),
        ("$JS.ACK.1._1.1.x.1.1.1", b"+ACK"),
        ("$JS.ACK.1._1.1.-1.1.1.1", b"+ACK"),
        ("$JS.ACK.1", b"+ACK"),
        ("$JS.ACK." + "1." * 30 + "1", b"+ACK"),
        ("$JS.ACK.1._1.1." + "9" * 400 + ".1.1.1", b"+ACK"),
    ],
)
def test_invalid_acks_are_counted(subject: str, payload: bytes) -> None:
    harness = holding(b"a")
    client = harness.client(b"SUB $SB.SUB.1 1\r\n")
    client.messages()
    client.pub(subject, payload)
    assert harness.broker.refusal_counts == {Reason.BAD_ACK: 1}
    assert harness.statistics(1).acknowledged == 0
    assert client.lines() == []


def test_many_acks_in_one_read() -> None:
    harness = holding(*numbered(200))
    harness.skips_checks = True
    client = harness.client(b"SUB $SB.SUB.1 1\r\n")
    messages = client.messages()
    odd, even = messages[1::2], messages[::2]
    client.send(b"".join(b"PUB %b 0\r\n\r\n" % m.reply.encode() for m in odd))
    assert harness.statistics(1).acknowledged == 100
    client.send(
        b"".join(b"PUB %b 4\r\n+ACK\r\nPUB other 0\r\n\r\n" % m.reply.encode() for m in even)
    )
    assert harness.statistics(1).ring.message_count == 0
    assert harness.broker.refusal_counts == {}


@pytest.mark.parametrize(
    ("payload", "queue", "extra_cost_bytes"),
    [
        (b"", "", 0),
        (b"", "g", NACK_EXTRA_COST_BYTES),
        (b"-NAK 60s", "", NACK_EXTRA_COST_BYTES),
        (b"+WPI", "g", NACK_EXTRA_COST_BYTES),
        (b"+TERM", "", TERMINATE_EXTRA_COST_BYTES),
    ],
)
def test_acks_of_one_read_are_processed_in_turns(
    payload: bytes, queue: str, extra_cost_bytes: int
) -> None:
    harness = holding(*numbered(1000))
    harness.skips_checks = True
    client = harness.client()
    client.sub("$SB.SUB.1", queue=queue)
    replies = [message.reply.encode() for message in client.messages()]
    client.session.allow_split_reads()
    client.send(b"".join(b"PUB %b %d\r\n%b\r\n" % (r, len(payload), payload) for r in replies))
    counts = [client.session.ack_count]
    while client.session.is_request_pending or client.session.unprocessed:
        client.continue_read()
        counts.append(client.session.ack_count)
    assert counts[-1] == 1000
    turn_max = OUTPUT_PER_READ_BYTES // (ACK_COST_BYTES + extra_cost_bytes) + 1
    assert counts[0] <= turn_max
    assert max(after - before for before, after in pairwise(counts)) <= turn_max
    assert harness.broker.refusal_counts == {}


def test_messages_between_acks_do_not_count_as_acks() -> None:
    harness = holding(*numbered(30))
    harness.skips_checks = True
    client = harness.client(b"SUB $SB.SUB.1 1\r\n")
    acks = [b"PUB %b 4\r\n+ACK\r\n" % message.reply.encode() for message in client.messages()]
    client.send(b"PUB noise 4\r\n+ACK\r\n".join(acks))
    assert harness.statistics(1).acknowledged == 30
    assert harness.broker.refusal_counts == {}


# All protocols ------------------------------------------------------------------------------------


def test_messages_of_every_publisher_reach_every_subscriber() -> None:
    harness = NatsBrokerHarness()
    harness.broker.store.class_registry.bind_subject("orders.>", 1)
    acked, plain = harness.client(b"SUB $SB.SUB.1 1\r\n"), harness.client(b"SUB > 1\r\n")
    version1, version2 = (
        harness.peer(connect1(1), subscribe1(1)),
        connect_version2(harness, subscribe(1, 5)),
    )
    harness.client().pub("orders.a", b"nats")
    version1.send(publish1(1, b"one"))
    version2.send(publish(1, 0, b"two"))
    expected = [b"nats", b"one", b"two"]
    assert acked.payloads() == expected
    assert plain.payloads() == expected
    assert [message.payload for message in version1.receive_messages()] == expected
    assert [delivery.message_id for delivery in version2.receive_deliveries()] == [0, 1, 2]
    version2.send(ack(5, 0, 2), nack(5, 2, 3, 0))
    assert [
        (delivery.attempt, delivery.message_id) for delivery in version2.receive_deliveries()
    ] == [(2, 2)]


def test_subscription_limits_of_a_client() -> None:
    harness = NatsBrokerHarness(Settings(limits=Limits(subscriptions=2)))
    client: Client = harness.client()
    for sid in "123":
        client.sub("$SB.SUB.1", sid)
    (line,) = client.lines()
    assert b"a session may have at most 2 subscriptions" in line
