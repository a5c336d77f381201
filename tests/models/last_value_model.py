"""Writer and late readers of a class that retains last values, and a model of the values."""

from __future__ import annotations

from simplebus.core.protocol import envelope_batch
from simplebus.core.protocol.envelope_batch import Envelope
from tests.behaviour.wire_peer import BrokerHarness
from tests.behaviour.wire_peer_v2 import (
    Version2Peer,
    ack,
    connect_version2,
    publish,
    publish_envelopes,
    subscribe,
    unsubscribe,
)

KEEPS = {"name": "state", "id": 1, "last_values": True}
CHANNELS = ["", "a", "b", "c.d", "c.e"]


class LastValueWriter:
    """Publishes to class 1 and records its last values."""

    def __init__(self, bus: BrokerHarness, **fields: object) -> None:
        self.bus = bus
        self.peer = connect_version2(bus, classes=[KEEPS], **fields)
        self.number = 0
        self.values: dict[str, tuple[bytes, float]] = {}
        """Payload and expiry time by channel."""

    def publish_value(self, channel: str, payload: bytes, expires_ms: int | None = None) -> None:
        if channel or expires_ms is not None:
            envelope = Envelope(channel, expires_ms=expires_ms)
            data = publish_envelopes(1, self.number, envelope_batch.encode(envelope, payload))
        else:
            data = publish(1, self.number, payload)
        self.number += 1
        self.peer.send(data)
        self.values.pop(channel, None)
        if payload:
            now = self.bus.broker.clock.now
            expires_at = float("inf") if expires_ms is None else now + expires_ms / 1000
            self.values[channel] = (payload, expires_at)

    def live_values(self) -> set[bytes]:
        now = self.bus.broker.clock.now
        return {payload for payload, expires_at in self.values.values() if expires_at > now}


def payload(content: bytes, kind: int) -> bytes:
    return content if kind == ord("1") else envelope_batch.decode(content)[1]


def payloads(peer: Version2Peer) -> list[bytes]:
    return [payload(delivery.content, delivery.kind) for delivery in peer.receive_deliveries()]


def open_late_reader(bus: BrokerHarness, number: int = 9, **options: object) -> Version2Peer:
    return connect_version2(bus, subscribe(1, number, start="last_values", **options))


def drain_class(bus: BrokerHarness) -> None:
    """Read and acknowledge all messages of class 1 with a new subscriber, and disconnect it."""
    reader = connect_version2(bus, subscribe(1, 3))
    ids = reader.receive_message_ids()
    if ids:
        reader.send(ack(3, ids[0], ids[-1] + 1))
    reader.send(unsubscribe(3))


def read_last_values(bus: BrokerHarness, **options: object) -> list[bytes]:
    """Return what a new subscriber receives from `last_values`; it acknowledges all and
    disconnects.
    """
    reader = open_late_reader(bus, **options)
    deliveries = reader.receive_deliveries()
    if deliveries:
        reader.send(ack(9, deliveries[0].message_id, deliveries[-1].message_id + 1))
    reader.send(unsubscribe(9))
    reader.disconnect()
    return [payload(delivery.content, delivery.kind) for delivery in deliveries]
