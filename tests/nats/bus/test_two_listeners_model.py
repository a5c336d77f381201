"""Model test of publishers and subscribers of every kind on one small class.

No message is lost or reordered, and acked messages are not redelivered.
"""

from __future__ import annotations

from collections import defaultdict

from hypothesis import example, given, settings
from hypothesis import strategies as st

from simplebus.core.protocol.envelope_batch import decode
from tests.behaviour.wire_peer import connect as connect1
from tests.behaviour.wire_peer import publish as publish1
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    channel_envelope,
    connect_version2,
    publish_envelopes,
    subscribe,
)
from tests.nats.bus.two_listeners import Client, Msg, NatsBrokerHarness

STEPS = st.one_of(
    st.tuples(st.sampled_from(["nats", "run", "one", "two"]), st.integers(1, 6)),
    st.tuples(st.sampled_from(["ack", "nak", "binary"]), st.integers(1, 6)),
    st.tuples(st.sampled_from(["tick", "again", "listen"]), st.just(1)),
)


def by_publisher(payloads: list[bytes]) -> dict[bytes, list[int]]:
    """Return the payloads of each publisher in order of arrival."""
    found: dict[bytes, list[int]] = defaultdict(list)
    for payload in payloads:
        who, number = payload.split(b"-")
        found[who].append(int(number))
    return dict(found)


class World:
    """One class with its publishers and subscribers."""

    def __init__(self) -> None:
        self.harness = NatsBrokerHarness(class_messages=8)
        self.harness.skips_checks = True  # Each step is checked at its end.
        self.harness.broker.store.class_registry.bind_subject("orders.>", 1)
        self.said: dict[bytes, int] = defaultdict(int)
        """Number of messages published by each publisher."""
        self.one = self.harness.peer(connect1(1))
        self.two = connect_version2(self.harness)
        self.publisher = self.harness.client()
        self.listener = self.harness.client(b"SUB orders.> 1\r\n", b"SUB class.1 2\r\n")
        self.binary: Version2Peer = connect_version2(
            self.harness, subscribe(1, 5, durable="binary")
        )
        self.acked: Client = self.harness.client(b"SUB $SB.SUB.1.nats.in_flight=4 1\r\n")
        self.listened: list[bytes] = []
        self.first: list[bytes] = []
        """First deliveries to the acked client."""
        self.done: set[bytes] = set()
        """Payloads that the client has acked."""
        self.held: dict[bytes, Msg] = {}
        self.binary_got: list[bytes] = []

    def payloads(self, who: str, count: int) -> list[bytes]:
        name = who.encode()
        first, self.said[name] = self.said[name], self.said[name] + count
        return [b"%b-%d" % (name, number) for number in range(first, first + count)]

    def step(self, what: str, count: int) -> None:
        match what:
            case "nats" | "run":
                said = self.payloads("nats", count * (10 if what == "run" else 1))
                lines = [b"PUB orders.x %d\r\n%b\r\n" % (len(p), p) for p in said]
                self.publisher.send(b"".join(lines))
            case "one":
                self.one.send(publish1(1, *self.payloads("one", count)))
            case "two":
                first = self.said[b"two"]
                said = self.payloads("two", count)
                contents = [channel_envelope("orders.y", p) for p in said]
                self.two.send(publish_envelopes(1, first, *contents))
            case "ack":
                for payload in list(self.held)[:count]:
                    self.acked.pub(self.held.pop(payload).reply, b"+ACK")
                    self.done.add(payload)
            case "nak":
                for payload in list(self.held)[:count]:
                    self.acked.pub(self.held.pop(payload).reply, b"-NAK")
            case "binary":
                self.hear_binary(count)
            case "tick":
                self.harness.tick()
            case "again":
                self.acked.close()
                self.held.clear()
                self.acked = self.harness.client(b"SUB $SB.SUB.1.nats.in_flight=4 1\r\n")
            case "listen":
                self.listened += self.listener.payloads()
        self.receive()
        self.harness.broker.check_invariants()

    def receive(self) -> None:
        for message in self.acked.messages():
            assert message.payload not in self.done, "acknowledged, and came again"
            if message.payload not in self.first:
                self.first.append(message.payload)
            self.held[message.payload] = message
        assert len(self.held) <= 4

    def hear_binary(self, most: int) -> None:
        for got in self.binary.receive_deliveries():
            payload = decode(got.content)[1] if got.kind == ord("5") else got.content
            if got.attempt == 1:
                self.binary_got.append(payload)
            self.binary.send(ack(5, got.message_id, got.message_id + 1))

    def finish(self) -> None:
        """Deliver and ack everything."""
        for _ in range(1000):
            self.step("ack", 100)
            self.hear_binary(100)
            if self.done == set(self.first) and sum(self.said.values()) == len(self.done):
                break
            self.harness.tick()  # What came twice to who has gone has a pause.
        self.listened += self.listener.payloads()
        self.two.receive_all()


@settings(max_examples=40, deadline=None)
@given(st.lists(STEPS, max_size=25))
@example([("run", 3), ("one", 3), ("again", 1), ("two", 2), ("nak", 4), ("tick", 1), ("ack", 2)])
def test_all_subscribers_receive_all_messages_in_order(
    steps: list[tuple[str, int]],
) -> None:
    world = World()
    for what, count in steps:
        world.step(what, count)
    world.finish()
    expected = {who: list(range(count)) for who, count in world.said.items() if count}
    assert by_publisher(world.first) == expected
    assert by_publisher(world.listened) == expected
    assert by_publisher(world.binary_got) == expected
    assert world.binary_got == world.first, "accepted in one order, delivered in another"
    world.harness.broker.end_turn()
    assert world.harness.statistics(1).ring.message_count == 0
    assert not world.publisher.session.is_reading_paused
    assert world.harness.broker.refusal_counts == {}
