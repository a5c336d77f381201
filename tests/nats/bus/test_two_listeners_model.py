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
        publisher, number = payload.split(b"-")
        found[publisher].append(int(number))
    return dict(found)


class TwoListenersModel:
    """One class with its publishers and subscribers."""

    def __init__(self) -> None:
        self.harness = NatsBrokerHarness(class_messages=8)
        self.harness.skips_checks = True  # Each step is checked at its end.
        self.harness.broker.store.class_registry.bind_subject("orders.>", 1)
        self.published_counts: dict[bytes, int] = defaultdict(int)
        """Number of messages published by each publisher."""
        self.version1 = self.harness.peer(connect1(1))
        self.version2 = connect_version2(self.harness)
        self.publisher = self.harness.client()
        self.listener = self.harness.client(b"SUB orders.> 1\r\n", b"SUB class.1 2\r\n")
        self.binary: Version2Peer = connect_version2(
            self.harness, subscribe(1, 5, durable="binary")
        )
        self.acked: Client = self.harness.client(b"SUB $SB.SUB.1.nats.in_flight=4 1\r\n")
        self.listened: list[bytes] = []
        self.first: list[bytes] = []
        """First deliveries to the acked client."""
        self.acked_payloads: set[bytes] = set()
        """Payloads that the client has acked."""
        self.unacked: dict[bytes, Msg] = {}
        self.binary_got: list[bytes] = []

    def payloads(self, publisher: str, count: int) -> list[bytes]:
        name = publisher.encode()
        first, self.published_counts[name] = (
            self.published_counts[name],
            self.published_counts[name] + count,
        )
        return [b"%b-%d" % (name, number) for number in range(first, first + count)]

    def step(self, action: str, count: int) -> None:
        match action:
            case "nats" | "run":
                payloads = self.payloads("nats", count * (10 if action == "run" else 1))
                lines = [b"PUB orders.x %d\r\n%b\r\n" % (len(p), p) for p in payloads]
                self.publisher.send(b"".join(lines))
            case "one":
                self.version1.send(publish1(1, *self.payloads("one", count)))
            case "two":
                first = self.published_counts[b"two"]
                payloads = self.payloads("two", count)
                contents = [channel_envelope("orders.y", p) for p in payloads]
                self.version2.send(publish_envelopes(1, first, *contents))
            case "ack":
                for payload in list(self.unacked)[:count]:
                    self.acked.pub(self.unacked.pop(payload).reply, b"+ACK")
                    self.acked_payloads.add(payload)
            case "nak":
                for payload in list(self.unacked)[:count]:
                    self.acked.pub(self.unacked.pop(payload).reply, b"-NAK")
            case "binary":
                self.hear_binary(count)
            case "tick":
                self.harness.tick()
            case "again":
                self.acked.close()
                self.unacked.clear()
                self.acked = self.harness.client(b"SUB $SB.SUB.1.nats.in_flight=4 1\r\n")
            case "listen":
                self.listened += self.listener.payloads()
        self.receive()
        self.harness.broker.check_invariants()

    def receive(self) -> None:
        for message in self.acked.messages():
            assert message.payload not in self.acked_payloads, "redelivered after its ack"
            if message.payload not in self.first:
                self.first.append(message.payload)
            self.unacked[message.payload] = message
        assert len(self.unacked) <= 4

    def hear_binary(self, max_count: int) -> None:
        for delivery in self.binary.receive_deliveries():
            payload = decode(delivery.content)[1] if delivery.kind == ord("5") else delivery.content
            if delivery.attempt == 1:
                self.binary_got.append(payload)
            self.binary.send(ack(5, delivery.message_id, delivery.message_id + 1))

    def finish(self) -> None:
        """Deliver and ack everything."""
        for _ in range(1000):
            self.step("ack", 100)
            self.hear_binary(100)
            if self.acked_payloads == set(self.first) and sum(
                self.published_counts.values()
            ) == len(self.acked_payloads):
                break
            # A message that a closed client received twice waits for its backoff.
            self.harness.tick()
        self.listened += self.listener.payloads()
        self.version2.receive_all()


@settings(max_examples=40, deadline=None)
@given(st.lists(STEPS, max_size=25))
@example([("run", 3), ("one", 3), ("again", 1), ("two", 2), ("nak", 4), ("tick", 1), ("ack", 2)])
def test_all_subscribers_receive_all_messages_in_order(
    steps: list[tuple[str, int]],
) -> None:
    model = TwoListenersModel()
    for action, count in steps:
        model.step(action, count)
    model.finish()
    expected = {
        publisher: list(range(count))
        for publisher, count in model.published_counts.items()
        if count
    }
    assert by_publisher(model.first) == expected
    assert by_publisher(model.listened) == expected
    assert by_publisher(model.binary_got) == expected
    assert model.binary_got == model.first, "delivered in another order than accepted"
    model.harness.broker.end_turn()
    assert model.harness.statistics(1).ring.message_count == 0
    assert not model.publisher.session.is_reading_paused
    assert model.harness.broker.refusal_counts == {}
