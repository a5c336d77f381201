"""PubAcks, deduplication by message id, and PONGs that wait for the journal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from simplebus.core.broker.broker import FullPolicy, Settings
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason
from simplebus.core.limits import DUPLICATE_WINDOW_SECONDS, Limits
from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import ClassSettings
from simplebus.core.users.subject_permissions import SubjectPermissions
from simplebus.core.users.users import User, Users
from simplebus.nats.limits import WAITING_PUB_ACKS_MAX
from simplebus.nats.settings import NatsSettings
from tests.behaviour.wire_peer_v2 import connect_version2
from tests.behaviour.wire_peer_v2 import publish as publish_v2
from tests.nats.bus.two_listeners import Client, NatsBrokerHarness, stored

PING = b"PING\r\n"
USERS = "one", "all"


def bound(
    settings: Settings | None = None, commit_log: CommitLog | None = None, **limits: float
) -> NatsBrokerHarness:
    """Return a harness whose class 7 is named `orders` and bound to `orders.>`."""
    harness = NatsBrokerHarness(settings, commit_log=commit_log, **limits)
    harness.broker.store.class_registry.create_classes([(7, "orders")])
    harness.broker.store.class_registry.bind_subject("orders.>", 7)
    if commit_log is not None:
        harness.write_journal()
    return harness


def publisher(harness: NatsBrokerHarness, **options: bool) -> Client:
    return harness.client(b"SUB _INBOX.> 1\r\n", **options)


def block(**headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode()


def pub_acks(client: Client) -> list[Any]:
    """Return the contents of the received PubAcks."""
    return [json.loads(message.payload) for message in client.messages()]


def publish(client: Client, payload: bytes = b"x", **headers: str) -> Any:
    """Publish a message and return the content of its PubAck."""
    client.pub(
        "orders.a", payload, reply="_INBOX.a.1", headers=block(**headers) if headers else b""
    )
    (ack,) = pub_acks(client)
    return ack


# Stored -------------------------------------------------------------------------------------------


def test_message_with_reply_subject_gets_a_pub_ack() -> None:
    harness = bound()
    client = publisher(harness)
    client.pub("orders.a", b"x", reply="_INBOX.a.1")
    client.pub("orders.a", b"y", reply="_INBOX.a.2")
    first, second = client.messages()
    assert (first.subject, first.payload) == ("_INBOX.a.1", b'{"stream":"orders","seq":0}')
    assert (second.subject, second.payload) == ("_INBOX.a.2", b'{"stream":"orders","seq":1}')
    assert [payload for _, payload in stored(harness, 7)] == [b"x", b"y"]


def test_class_without_a_name_is_named_by_its_id() -> None:
    harness = NatsBrokerHarness()
    harness.broker.store.class_registry.bind_subject("orders.>", 7)
    assert publish(publisher(harness)) == {"stream": "7", "seq": 0}


def test_batch_of_equal_messages_gets_one_pub_ack_each() -> None:
    harness = bound()
    client = publisher(harness, no_responders=False)
    client.send(b"PUB orders.a _INBOX.1 1\r\nx\r\n" * 40)
    assert [ack["seq"] for ack in pub_acks(client)] == list(range(40))
    assert len(stored(harness, 7)) == 40


def test_pub_ack_waits_for_the_journal() -> None:
    harness = bound(commit_log=CommitLog(Durability.DISK))
    client, other_client = publisher(harness), publisher(harness)
    client.pub("orders.a", b"x", reply="_INBOX.a.1")
    other_client.pub("orders.a", b"y", reply="_INBOX.b.1")
    assert client.messages() == other_client.messages() == []
    harness.write_journal()
    assert [ack["seq"] for ack in pub_acks(client)] == [0, 1]  # Both have the same inbox pattern.
    assert [ack["seq"] for ack in pub_acks(other_client)] == [0, 1]
    client.pub("orders.a", b"z", reply="_INBOX.a.2")
    assert client.messages() == []
    client.close()
    harness.write_journal()
    assert pub_acks(other_client) == []


def test_pub_ack_does_not_wait_if_confirms_do_not() -> None:
    harness = bound(commit_log=CommitLog(Durability.MEMORY))
    assert publish(publisher(harness)) == {"stream": "orders", "seq": 0}


def test_pub_ack_reaches_only_the_client_that_may_not_publish_on_the_reply_subject() -> None:
    permissions = SubjectPermissions(publish_allow=("orders.>",))
    users = User("one", "p", subject_permissions=permissions), User("all", "p")
    harness = NatsBrokerHarness(nats=NatsSettings(users=Users(users)))
    harness.broker.store.class_registry.bind_subject("orders.>", 7)
    client, other_client = (
        harness.client(b"SUB other 1\r\n", user=u, **{"pass": "p"}) for u in USERS
    )
    client.pub("orders.a", b"x", reply="other")
    assert pub_acks(client) == [{"stream": "7", "seq": 0}]
    assert other_client.messages() == []
    other_client.pub("orders.a", b"x", reply="other")
    assert len(client.messages()) == len(other_client.messages()) == 1


def test_class_without_pub_acks_leaves_replies_to_programs() -> None:
    harness = bound(Settings(classes={"orders": ClassSettings(pub_ack=False)}))
    client = publisher(harness)
    client.pub("orders.a", b"x", reply="_INBOX.a.1")
    client.send(b"PUB orders.a _INBOX.1 1\r\nx\r\n" * 40)
    assert client.messages() == []
    assert len(stored(harness, 7)) == 41


# Duplicates ---------------------------------------------------------------------------------------


def test_message_with_a_known_id_is_a_duplicate() -> None:
    harness = bound()
    client, listener = publisher(harness), harness.client(b"SUB orders.> 1\r\n")
    assert publish(client, b"x", Nats_Msg_Id="1") == {"stream": "orders", "seq": 0}
    assert publish(client, b"y", Nats_Msg_Id="2") == {"stream": "orders", "seq": 1}
    expected = {"stream": "orders", "seq": 0, "duplicate": True}
    assert publish(client, b"z", Nats_Msg_Id="1") == expected
    assert [payload for _, payload in stored(harness, 7)] == [b"x", b"y"]
    assert listener.payloads() == [b"x", b"y", b"z"]  # As nats-server does.
    assert harness.broker.refusal_counts == {Reason.DUPLICATE: 1}
    harness.wait(DUPLICATE_WINDOW_SECONDS + 1)
    assert publish(client, b"z", Nats_Msg_Id="1") == {"stream": "orders", "seq": 2}


def test_pub_ack_of_a_duplicate_waits_for_its_original() -> None:
    harness = bound(commit_log=CommitLog(Durability.DISK))
    client = publisher(harness)
    for _ in range(2):
        client.pub("orders.a", b"x", reply="_INBOX.a", headers=block(Nats_Msg_Id="1"))
    assert client.messages() == []
    harness.write_journal()
    assert ["duplicate" in ack for ack in pub_acks(client)] == [False, True]
    assert "duplicate" in publish(client, Nats_Msg_Id="1")


def test_ids_count_without_a_reply_subject() -> None:
    harness = bound()
    client = harness.client()
    for _ in range(2):
        client.pub("orders.a", b"x", headers=block(Nats_Msg_Id="1"))
    header = block(Nats_Msg_Id="0")
    line = b"HPUB orders.a %d %d\r\n" % (len(header), len(header) + 1)
    client.send(line + header + b"x\r\n" + (line + block(Nats_Msg_Id="2") + b"x\r\n") * 40)
    assert len(stored(harness, 7)) == 3


def test_message_with_id_that_waits_for_space_is_stored_later() -> None:
    harness = bound(class_messages=1)
    client = harness.client()
    consumer = harness.client(b"SUB $SB.SUB.orders 1\r\n")
    for number in range(2):
        client.pub("orders.a", b"%d" % number, headers=block(Nats_Msg_Id=str(number)))
    (first,) = consumer.messages()
    consumer.pub(first.reply)
    (second,) = consumer.messages()
    assert second.payload == b"1"


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FullPolicy.BLOCK, FullPolicy.DROP_NEWEST])
def test_full_class_refuses_with_an_error(policy: FullPolicy) -> None:
    harness = bound(Settings(full_policy=policy, limits=Limits(class_messages=1)))
    client = publisher(harness)
    publish(client)
    error = {"code": 503, "err_code": 10077, "description": "class orders is full"}
    refused = publish(client, Nats_Msg_Id="1")
    assert refused == {"error": error, "stream": "orders", "seq": 0}
    assert not client.session.is_reading_paused
    consumer = harness.client(b"SUB $SB.SUB.orders 1\r\n")
    (message,) = consumer.messages()
    consumer.pub(message.reply)
    assert publish(client, Nats_Msg_Id="1") == {"stream": "orders", "seq": 1}


def test_full_class_drops_its_oldest_message_if_that_is_its_policy() -> None:
    settings = Settings(full_policy=FullPolicy.DROP_OLDEST, limits=Limits(class_messages=2))
    harness = bound(settings)
    client = publisher(harness)
    assert [publish(client)["seq"] for _ in range(4)] == [0, 1, 2, 3]


def test_message_behind_waiting_messages_is_refused() -> None:
    harness = bound(Settings(limits=Limits(class_messages=1)))
    client = publisher(harness)
    client.send(b"PUB orders.a 1\r\nx\r\n" * 2)
    assert publish(client)["error"]["err_code"] == 10077


def test_failing_journal_refuses_with_an_error() -> None:
    harness = bound(commit_log=CommitLog(Durability.DISK))
    client = publisher(harness)
    harness.broker.journal_failed(Reason.DISK_FULL, "the disk is full")
    error = {"code": 503, "err_code": 10077, "description": "the disk is full"}
    assert publish(client)["error"] == error
    assert stored(harness, 7) == []


def test_message_that_is_too_long_is_refused_with_an_error() -> None:
    harness = bound(frame_bytes=1000)
    error = publish(publisher(harness), b"x" * 1000)["error"]
    assert (error["code"], error["err_code"]) == (400, 10054)
    assert "at most 1000 are accepted" in error["description"]


def test_subject_that_is_no_channel_is_refused_with_an_error() -> None:
    client = publisher(bound())
    client.send(b"PUB orders.\xff _INBOX.1 1\r\nx\r\n")
    (error,) = (ack["error"] for ack in pub_acks(client))
    assert (error["code"], error["err_code"]) == (400, 10003)
    assert "not UTF-8" in error["description"]


def test_expected_stream_must_match() -> None:
    client = publisher(bound())
    assert publish(client, Nats_Expected_Stream="orders") == {"stream": "orders", "seq": 0}
    error = publish(client, Nats_Expected_Stream="others")["error"]
    assert (error["code"], error["err_code"]) == (400, 10060)
    assert error["description"].startswith("expected stream does not match: got 'others'")


@pytest.mark.parametrize(
    "name",
    ["Nats_Expected_Last_Sequence", "Nats_Expected_Last_Msg_Id", "Nats_Rollup", "Nats_TTL"],
)
def test_unsupported_demand_is_refused_with_an_error(name: str) -> None:
    harness = bound()
    error = publish(publisher(harness), **{name: "1"})["error"]
    assert (error["code"], error["err_code"]) == (400, 10003)
    assert error["description"].startswith(f"header {name.replace('_', '-')} is not supported")
    assert stored(harness, 7) == []


def test_client_that_does_not_wait_for_pub_acks_is_refused() -> None:
    harness = bound(commit_log=CommitLog(Durability.DISK))
    harness.skips_checks = True
    client = publisher(harness)
    client.send(b"PUB orders.a _INBOX.1 0\r\n\r\n" * (WAITING_PUB_ACKS_MAX + 2))
    assert [ack["error"]["code"] for ack in pub_acks(client)] == [429, 429]
    harness.write_journal()
    assert len(pub_acks(client)) == WAITING_PUB_ACKS_MAX
    client.send(b"PUB orders.a _INBOX.1 0\r\n\r\n")
    harness.write_journal()
    assert "seq" in pub_acks(client)[0]


# PONG ---------------------------------------------------------------------------------------------


def test_pong_waits_for_what_the_client_has_published() -> None:
    harness = bound(commit_log=CommitLog(Durability.DISK))
    client, other_client = harness.client(), harness.client()
    client.pub("orders.a", b"x")
    client.send(PING, PING)
    other_client.send(PING)
    assert client.lines() == []
    assert other_client.lines() == [b"PONG"]
    harness.write_journal()
    assert client.lines() == [b"PONG"] * 2
    client.send(PING)
    assert client.lines() == [b"PONG"]


def test_pongs_keep_their_order_while_more_is_published() -> None:
    harness = bound(commit_log=CommitLog(Durability.DISK))
    commit_log = harness.broker.commit_log
    assert commit_log is not None
    client = harness.client()
    client.pub("orders.a", b"x")
    client.send(PING)
    first = commit_log.pop_write_batch()
    assert first is not None
    client.pub("orders.a", b"y")
    client.send(PING)
    harness.broker.mark_durable(first.number)
    assert client.lines() == [b"PONG"]
    harness.write_journal()
    assert client.lines() == [b"PONG"]


def test_first_pong_after_connect_does_not_wait() -> None:
    """Client libraries expect no INFO before it."""
    harness = bound(commit_log=CommitLog(Durability.DISK))
    client = Client(harness, harness.nats_server.open_session("a client"))
    client.send(b'CONNECT {"verbose":false,"protocol":1}\r\nPUB orders.a 1\r\nx\r\nPING\r\n')
    _, pong, info = client.lines()
    assert pong == b"PONG"
    assert info.startswith(b"INFO ")


def test_version_2_client_sees_the_id_as_a_header() -> None:
    harness = bound()
    connect_version2(harness)
    publish(publisher(harness), Nats_Msg_Id="1")
    ((envelope, _),) = stored(harness, 7)
    assert envelope.headers == (("Nats-Reply-To", "_INBOX.a.1"), ("Nats-Msg-Id", "1"))


# Replies to acks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [b"", b"+ACK", b"+TERM"])
def test_reply_to_an_ack_waits_for_the_journal(command: bytes) -> None:
    harness = bound(commit_log=CommitLog(Durability.DISK))
    client = harness.client(b"SUB _INBOX.> 1\r\nSUB $SB.SUB.orders.d 2\r\n")
    harness.write_journal()
    connect_version2(harness, publish_v2(7, 0, b"a"))
    harness.write_journal()
    (message,) = client.messages()
    client.pub(message.reply, command, reply="_INBOX.a.1")
    assert client.messages() == []
    harness.write_journal()
    (reply,) = client.messages()
    assert (reply.subject, reply.payload) == ("_INBOX.a.1", b"")


def test_reply_to_an_ack_without_journal_comes_at_once() -> None:
    harness = bound()
    client = harness.client(b"SUB _INBOX.> 1\r\nSUB $SB.SUB.orders.d 2\r\n")
    connect_version2(harness, publish_v2(7, 0, b"a"))
    (message,) = client.messages()
    client.pub(message.reply, b"+ACK", reply="_INBOX.a.1")
    (reply,) = client.messages()
    assert (reply.subject, reply.payload) == ("_INBOX.a.1", b"")


def test_replies_to_acks_that_wait_are_limited() -> None:
    harness = bound(commit_log=CommitLog(Durability.DISK))
    harness.skips_checks = True
    client = harness.client(b"SUB _INBOX.> 1\r\nSUB $SB.SUB.orders.d 2\r\n")
    harness.write_journal()
    connect_version2(harness, publish_v2(7, 0, b"a"))
    harness.write_journal()
    (message,) = client.messages()
    for _ in range(WAITING_PUB_ACKS_MAX + 1):
        client.pub(message.reply, b"+ACK", reply="_INBOX.a.1")
    harness.write_journal()
    assert len(client.messages()) == WAITING_PUB_ACKS_MAX
    harness.broker.check_invariants()
