"""Clients of the simulated bus that speak the protocol carelessly.

The next action of a client is an event. Publishers keep unconfirmed messages and send them again
after a reconnect. Consumers record messages in `processed` before they ack them. After the last
fault all clients are connected, have published everything, and ack at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import msgspec

from simplebus.core.protocol.envelope_batch import Envelope
from tests.behaviour import wire_peer
from tests.behaviour.wire_peer_v2 import (
    CONNECT,
    DELIVER,
    ENVELOPE,
    ERROR,
    FETCH,
    MESSAGE,
    PURGE,
    SUBSCRIBE,
    ack,
    connect_request,
    json_request,
    nack,
    publish,
    publish_envelopes,
    subscribe,
    unsubscribe,
    working,
)
from tests.simulation import messages
from tests.simulation.history import (
    channel_from_traits,
    delay_from_traits,
    expiry_from_traits,
    message_token,
)
from tests.simulation.network import Endpoint, SimulatedConnection
from tests.simulation.world import World
from tests.support.oracles import parse_frames

Dial = Callable[[Endpoint, str], "SimulatedConnection | None"]
Processed = dict[tuple[int, str], set[bytes]]


@dataclass(frozen=True)
class SubscriptionSpec:
    """Parameters of a subscription."""

    class_id: int
    durable: str = ""
    group: str = ""
    max_in_flight: int = 0
    max_deliveries: int = 0
    start: str = "waiting"
    filters: bool = False
    """True to ask for one channel only."""
    by_key: bool = False
    start_position: dict[str, object] | None = None
    """Start position, instead of `start`."""

    def options(self) -> dict[str, object]:
        """Return the options of a Subscribe request."""
        found: dict[str, object] = {"start": self.start_position or self.start}
        for name in ("durable", "group", "max_in_flight", "max_deliveries", "by_key"):
            if getattr(self, name):
                found[name] = getattr(self, name)
        if self.filters:
            found["channels"] = ["a.*"]
        return found


def named(class_id: int) -> dict[str, object]:
    """Return the declaration of a class in a Connect."""
    return {"id": class_id, "name": f"class {class_id}"}


class SimulatedClient(Endpoint):
    """Client that reconnects after it lost its connection."""

    pause = 0.8
    """Mean seconds between two actions."""

    def __init__(self, world: World, dial: Dial, name: str) -> None:
        self.world = world
        self.dial = dial
        self.name = name
        self.line: SimulatedConnection | None = None
        self.unsent = bytearray()
        world.call_later(world.random.uniform(0, 1), self.connect)
        world.call_later(world.random.uniform(0, 1), self._next_action)

    # Connections ---------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, and retry until the bus answers."""
        if self.line is not None:
            return
        self.line = self.dial(self, self.name)
        if self.line is None:
            self.world.call_later(self.world.random.uniform(0.1, 1.0), self.connect)
            return
        self.unsent.clear()
        self.send_handshake()
        self.flush()

    def send_handshake(self) -> None:
        """Send the first frames of a connection."""
        raise NotImplementedError

    def on_connection_lost(self) -> None:
        """Reset the state of the connection."""

    def send(self, *frames: bytes) -> None:
        if self.line is not None:
            self.unsent += b"".join(frames)
            self.flush()

    def flush(self) -> None:
        line = self.line
        if line is not None and self.unsent and not line.is_gone:
            count = min(len(self.unsent), line.up.room)
            if count:
                line.up.put(bytes(self.unsent[:count]))
                del self.unsent[:count]

    def on_writable(self, line: SimulatedConnection) -> None:
        if line is self.line:
            self.flush()

    def on_bytes(self, line: SimulatedConnection, data: bytes) -> None:
        if line is self.line:
            self.receive_bytes(data)
            self.flush()

    def receive_bytes(self, data: bytes) -> None:
        """Process received bytes."""
        raise NotImplementedError

    def on_closed(self, line: SimulatedConnection) -> None:
        if line is self.line:
            self.line = None
            self.on_connection_lost()
            self.world.call_later(self.world.random.uniform(0.01, 1.0), self.connect)

    # Actions and faults --------------------------------------------------------------------------

    def _next_action(self) -> None:
        world = self.world
        if self.line is not None:
            if world.is_fault_due(0.08):
                self.lose_connection()
            else:
                self.take_action()
        world.call_later(world.random.expovariate(1 / self.pause), self._next_action)

    def take_action(self) -> None:
        """Do the next thing that the client does."""

    def lose_connection(self) -> None:
        """End the connection in one of several ways."""
        line, rng = self.line, self.world.random
        assert line is not None
        match rng.choice(["goes", "both", "half", "deaf", "twice"]):
            case "goes":
                line.close_from(self)
                self.on_closed(line)
            case "both":
                line.break_off(client_after=0.0, server_after=0.001)
            case "half":  # The bus does not notice it for a long time.
                line.break_off(client_after=0.001, server_after=rng.uniform(1, 20))
            case "deaf":  # The client does not notice it.
                line.break_off(client_after=rng.uniform(1, 10), server_after=0.001)
            case "twice":  # The client reconnects while the first connection is open.
                self.line = None
                self.world.call_later(rng.uniform(1, 20), self._close_line, line)
                self.on_connection_lost()
                self.connect()

    def _close_line(self, line: SimulatedConnection) -> None:
        if not (line.is_gone or line.up.ends or line.up.is_closed):
            line.close_from(self)


def _milliseconds(seconds: float) -> int | None:
    return round(seconds * 1000) if 0 < seconds < inf else None


class Version1Client(SimulatedClient):
    """Version 1 client: publishes, subscribes, and acks some messages."""

    def __init__(
        self, world: World, dial: Dial, name: str, *, class_ids: list[int], reads: bool, count: int
    ) -> None:
        self.class_ids = class_ids
        self.reads = reads
        self.count = count
        self.published = 0
        self._partial_frame = b""
        self._unacked: list[tuple[int, int]] = []
        super().__init__(world, dial, name)

    def send_handshake(self) -> None:
        self._partial_frame = b""
        self._unacked.clear()
        self.send(wire_peer.connect(*self.class_ids))
        if self.reads:
            self.send(*(wire_peer.subscribe(class_id) for class_id in self.class_ids))

    def take_action(self) -> None:
        rng = self.world.random
        if self.published < self.count:
            for _ in range(rng.randint(1, 4)):
                data = messages.payload(self.name, self.published)
                self.published += 1
                self.send(wire_peer.publish(rng.choice(self.class_ids), data))
        rng.shuffle(self._unacked)
        message_count = (
            len(self._unacked) if self.world.is_calm else rng.randint(0, len(self._unacked))
        )
        for class_id, number in self._unacked[:message_count]:
            if not self.world.is_fault_due(0.1):
                self.send(wire_peer.ack(class_id, number, number + 1))
        del self._unacked[:message_count]

    def receive_bytes(self, data: bytes) -> None:
        frames, self._partial_frame = parse_frames(self._partial_frame + data)
        for kind, class_id, number, _, _ in frames:
            if kind == MESSAGE:
                self._unacked.append((class_id, number))


class Version2Client(SimulatedClient):
    """Version 2 client that encodes its frames itself."""

    def __init__(
        self,
        world: World,
        dial: Dial,
        name: str,
        *,
        class_ids: list[int],
        specs: list[SubscriptionSpec],
        count: int,
        is_named: bool,
        processed: Processed,
        purges: bool,
    ) -> None:
        self.class_ids = class_ids
        self.specs = specs
        self.count = count
        self.is_named = is_named
        self.processed = processed
        self.purges = purges
        self.created_count = 0
        self.first = 0
        """The number of the oldest unconfirmed message."""
        self.waiting: deque[tuple[int, int, bytes]] = deque()
        """Unconfirmed messages: class, frame type, content."""
        self.bus = ""
        self.is_open = False
        self._partial_frame = b""
        self._delivery = (0, 0, 0)
        self._unacked: list[tuple[int, int, int, bytes]] = []
        """Class, subscription, message id, content."""
        super().__init__(world, dial, name)

    def send_handshake(self) -> None:
        identity: dict[str, object] = {}
        if self.is_named:
            identity = {"name": self.name, "instance": "one"}
            if self.bus:
                identity |= {"unconfirmed": self.first, "bus": self.bus}
        self.send(connect_request(*map(named, self.class_ids), **identity))

    def on_connection_lost(self) -> None:
        self.is_open = False
        self._partial_frame = b""
        self._unacked.clear()

    def take_action(self) -> None:
        if not self.is_open:
            return
        rng = self.world.random
        if self.created_count < self.count:
            for _ in range(rng.randint(1, 6)):
                self._publish()
        if self.specs and self.world.is_fault_due(0.08):
            number = rng.randint(1, len(self.specs))
            self.send(unsubscribe(number, 1000 + number))
            self._unacked = [message for message in self._unacked if message[1] != number]
        elif self.world.is_fault_due(0.08):
            self._fetch_or_purge()
        elif self.specs and self.world.is_fault_due(0.08):
            self._subscribe(rng.randrange(len(self.specs)))
        if self.world.is_calm:
            self._ack(len(self._unacked))
        else:
            self._settle_randomly()

    def _publish(self) -> None:
        rng = self.world.random
        class_id, number = rng.choice(self.class_ids), self.created_count
        self.created_count += 1
        traits = rng.choice(["", "", "c", "c", "ct", "cty", "t", "ty", "ck", "cl", "b"])
        if traits == "b":  # An invalid envelope.
            message = (class_id, ENVELOPE, b"\xff" + messages.payload(self.name, number))
        elif traits:
            bits = traits.encode()
            envelope = Envelope(
                channel=channel_from_traits(bits).decode(),
                key=messages.key_from_traits(bits),
                expires_ms=_milliseconds(expiry_from_traits(bits)),
                not_before_ms=_milliseconds(delay_from_traits(bits)),
            )
            data = messages.payload(self.name, number, traits, size=rng.choice([0, 0, 300]))
            message = (class_id, ENVELOPE, messages.encode_envelope(data, envelope))
        else:
            message = (class_id, MESSAGE, messages.payload(self.name, number))
        self.waiting.append(message)
        self._send(self.first + len(self.waiting) - 1, *message)

    def _fetch_or_purge(self) -> None:
        """Fetch or purge random messages."""
        rng = self.world.random
        class_id, first = rng.choice(self.class_ids), rng.randrange(40)
        if rng.random() < 0.5:
            self.send(json_request(FETCH, class_id, 5, first=first, count=rng.randint(1, 20)))
        elif self.purges:
            last = first + rng.randint(1, 4)
            self.send(json_request(PURGE, class_id, 6, first=first, last=last))

    def _send(self, number: int, class_id: int, kind: int, content: bytes) -> None:
        encode = publish if kind == MESSAGE else publish_envelopes
        self.send(encode(class_id, number, content))

    def _subscribe(self, index: int) -> None:
        spec = self.specs[index]
        self.send(subscribe(spec.class_id, index + 1, index + 1, **spec.options()))

    def _settle_randomly(self) -> None:
        """Ack, nack, extend or forget some of the received messages."""
        rng, unacked = self.world.random, self._unacked
        decision = rng.choice(
            ["some", "all", "shuffled", "nack", "nack", "working", "none", "drop"]
        )
        message_count = rng.randint(0, min(len(unacked), 8))
        match decision:
            case "all":
                self._ack(len(unacked))
            case "some":
                self._ack(message_count)
            case "shuffled":
                rng.shuffle(unacked)
                self._ack(message_count)
            case "nack":
                for _, number, message_id, _ in unacked[:message_count]:
                    delay = rng.choice([None, 0, 50, 2000])
                    self.send(nack(number, message_id, message_id + 1, delay))
                del unacked[:message_count]
            case "working":
                for _, number, message_id, _ in unacked[:message_count]:
                    self.send(working(number, message_id, message_id + 1))
            case "drop":
                del unacked[:message_count]

    def _ack(self, message_count: int) -> None:
        """Process `message_count` messages and ack them, as ranges where they are consecutive."""
        ranges: list[list[int]] = []
        for class_id, number, message_id, content in self._unacked[:message_count]:
            durable = self.specs[number - 1].durable
            self.processed.setdefault((class_id, durable), set()).add(message_token(content))
            if ranges and ranges[-1][0] == number and ranges[-1][2] == message_id:
                ranges[-1][2] += 1
            else:
                ranges.append([number, message_id, message_id + 1])
        del self._unacked[:message_count]
        for number, first, last in ranges:
            self.send(ack(number, first, last))

    def receive_bytes(self, data: bytes) -> None:
        frames, self._partial_frame = parse_frames(self._partial_frame + data)
        for kind, key, number, last, content in frames:
            if kind == DELIVER:
                self._delivery = (key, number, last)
            elif kind in (MESSAGE, ENVELOPE) and self._delivery[2]:  # Otherwise it was fetched.
                self._unacked.append((key, self._delivery[2], number, content))
            elif kind == ord("6"):
                self._confirmed(number)
            elif kind == CONNECT:
                self._on_connected(msgspec.json.decode(content))
            elif kind == ERROR:
                self._failed(last, number, msgspec.json.decode(content)["code"])
            elif kind == ord("U"):
                self.world.call_later(
                    self.world.random.uniform(0.01, 2.0), self._resubscribe, key - 1
                )

    def _resubscribe(self, index: int) -> None:
        if self.is_open:
            self._subscribe(index)

    def _confirmed(self, next_number: int) -> None:
        while self.first < next_number:
            self.first += 1
            self.waiting.popleft()

    def _on_connected(self, reply: dict[str, object]) -> None:
        next_number = reply["next"]
        assert isinstance(next_number, int)
        knows_us = self.bus in ("", reply["bus"]) and self.is_named
        if knows_us and self.first <= next_number <= self.first + len(self.waiting):
            self._confirmed(next_number)
        self.first = next_number
        self.bus = str(reply["bus"])
        self.is_open = True
        for index in range(len(self.specs)):
            self._subscribe(index)
        for index, message in enumerate(self.waiting):
            self._send(self.first + index, *message)

    def _failed(self, envelope: int, number: int, code: str) -> None:
        if envelope == SUBSCRIBE and code in ("durable_in_use", "too_many_subscriptions"):
            self.world.call_later(1.0, self._resubscribe, number - 1)

    @property
    def is_done(self) -> bool:
        """True if all messages are published and confirmed."""
        return self.created_count >= self.count and not self.waiting
