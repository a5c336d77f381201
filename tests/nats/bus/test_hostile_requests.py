"""Arbitrary class commands of NATS clients only cause replies, errors and their own disconnection.

The broker's invariants hold and memory stays bounded.
"""

from __future__ import annotations

from random import Random

import pytest

from simplebus.nats.errors import NatsError
from tests.behaviour.wire_peer import connect as connect1
from tests.behaviour.wire_peer import publish as publish1
from tests.behaviour.wire_peer_v2 import (
    ack,
    channel_envelope,
    connect_version2,
    publish_envelopes,
    subscribe,
)
from tests.nats.bus.two_listeners import Client, NatsBrokerHarness

TOKENS = [
    "$SB",
    "SUB",
    "$JS",
    "ACK",
    "1",
    "7",
    "orders",
    "-",
    "d",
    "e",
    "*",
    ">",
    "#",
    "start=new",
    "start=earliest",
    "in_flight=2",
    "in_flight=0",
    "ack_seconds=1",
    "max_deliveries=1",
    "filter",
    "x",
    "%2E",
    "%zz",
    "_INBOX",
    "class",
    "dead",
    "café",
    "0",
    "_1",
    "_2",
    "99999999999999999999",
]
SUBJECTS = ["orders.a", "orders.b", "x", "orders.*", "class.1", ">", "orders.caf\xe9", "a..b"]
PAYLOADS = b"|+ACK|-NAK|+WPI|+TERM|-NAK {|<\r\n>|<|xxxxxxxxxxxxxxxxxxxx".split(b"|")
BLOCKS = [b"NATS/1.0\r\nA: b\r\n\r\n", b"junk", b"NATS/1.0 503\r\n\r\n"]


def subject(random: Random) -> bytes:
    kind = random.random()
    if kind < 0.5:
        start, max_tokens = ("$SB.SUB", 5) if kind < 0.35 else ("$JS.ACK", 8)
        tokens = [start, *random.choices(TOKENS, k=random.randint(0, max_tokens))]
    elif kind < 0.65:
        options = [random.choice("17"), random.choice(["d", "_1", "_2", "g"]), "1"]
        tokens = ["$JS.ACK", *options, str(random.randint(0, 60)), "1", "1", "1"]
    else:
        tokens = [random.choice(SUBJECTS)]
    return ".".join(tokens).encode("latin-1")


def line(random: Random) -> bytes:
    kind, options, sid = random.random(), subject(random), random.randint(1, 6)
    if kind < 0.3:
        return b"SUB %b%b %d\r\n" % (options, random.choice([b"", b" g", b" \xff"]), sid)
    if kind < 0.4:
        return b"UNSUB %d%b\r\n" % (sid, random.choice([b"", b" 2"]))
    payload, reply = random.choice(PAYLOADS), random.choice([b"", b" r.1"])
    if kind < 0.5:
        block = random.choice(BLOCKS)
        sizes = len(block), len(block) + len(payload)
        return b"HPUB %b%b %d %d\r\n%b%b\r\n" % (options, reply, *sizes, block, payload)
    command = b"PUB %b%b %d\r\n%b\r\n" % (options, reply, len(payload), payload)
    return command * random.choice([1, 1, 1, 3, 30])


@pytest.mark.parametrize("seed", range(4))
def test_arbitrary_class_commands_do_not_affect_other_clients(seed: int) -> None:
    random = Random(seed)
    capacity = random.choice([2, 10, 1000])
    harness = NatsBrokerHarness(class_messages=capacity, classes=50, durables=10, subscriptions=5)
    harness.skips_checks = True
    for bound in ("orders.>", "*.a"):
        harness.broker.store.class_registry.bind_subject(bound, 1)
    harness.broker.store.class_registry.bind_subject(">", 7)
    nats_peer, reader = (
        harness.peer(connect1(1)),
        connect_version2(harness, subscribe(1, 5, durable="binary")),
    )
    clients: list[Client] = [harness.client() for _ in range(3)]
    number = 0
    for _ in range(120):
        index = random.randrange(3)
        client = clients[index]
        try:
            match random.randrange(12):
                case 0:
                    harness.tick()
                case 1:
                    harness.wait(3 * random.random())
                case 2:
                    nats_peer.send(
                        publish1(1, *[b"p" * random.randint(0, 9)] * random.randint(1, 30))
                    )
                case 3:
                    channel = random.choice(["orders.a", "$JS.ACK.1", "x"])
                    reader.send(
                        publish_envelopes(1, number, *[channel_envelope(channel, b"q")] * 3)
                    )
                    number += 3
                case 4:
                    for delivery in reader.receive_deliveries():
                        reader.send(ack(5, delivery.message_id, delivery.message_id + 1))
                case 5:
                    client.close()
                case 6 | 7:
                    for message in client.receive()[0]:
                        if message.reply.startswith("$JS.ACK"):
                            client.pub(message.reply, random.choice([b"+ACK", b"-NAK", b"+TERM"]))
                case _:
                    client.send(b"".join(line(random) for _ in range(random.randint(1, 20))))
        except NatsError:
            client.close()
        if harness.nats_server.drain_disconnecting() or client.session.is_closed:
            client.close()
            clients[index] = harness.client()
        harness.broker.check_invariants()
    for client in clients:
        client.close()
    harness.broker.check_invariants()
    assert harness.nats_server.bus_adapter is not None
    assert harness.nats_server.bus_adapter.nats_sessions == {}
    tap = harness.nats_server.bus_adapter._bus_to_nats  # type: ignore[union-attr]
    assert all(verdicts.size < 64 for _, verdicts in tap._channel_flags.values())
