"""Client that uses the SDK's client core, with a simulated driver and a careless consumer."""

from __future__ import annotations

from simplebus.client.core.client import ClientCore
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.messages import Message
from simplebus.core.errors import RefusedError, RemoteProtocolError
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.protocol.requests import SubscribeRequest
from tests.client.core.consumers import consume
from tests.simulation import messages
from tests.simulation.clients import Dial, Processed, SimulatedClient, SubscriptionSpec
from tests.simulation.history import message_token
from tests.simulation.world import World

_BUFFER = ReceiveBuffer(1 << 13)


class SdkClient(SimulatedClient):
    """SDK client with one subscription."""

    def __init__(
        self,
        world: World,
        dial: Dial,
        name: str,
        *,
        class_ids: list[int],
        spec: SubscriptionSpec,
        count: int,
        processed: Processed,
    ) -> None:
        self.core = ClientCore(name=name, instance="one")
        self.class_ids = class_ids
        self.spec = spec
        self.count = count
        self.created_count = 0
        self.processed = processed.setdefault((spec.class_id, spec.durable), set())
        self.core.name_classes(*class_ids)
        self.has_manual_acks = world.random.random() < 0.5
        self.inbox = self._subscribe()
        self._unacked: list[Message[object]] = []
        super().__init__(world, dial, name)

    def _subscribe(self) -> Inbox:
        options = SubscribeRequest(**self.spec.options())  # type: ignore[arg-type]
        return self.core.subscribe(self.spec.class_id, options, auto_ack=not self.has_manual_acks)

    def send_handshake(self) -> None:
        self.core.connection_made(self.world.now)

    def on_connection_lost(self) -> None:
        self.core.connection_lost()
        if self.has_manual_acks:
            self._unacked.clear()

    def flush(self) -> None:
        line, outgoing = self.line, self.core.send_queue
        while line is not None and not line.is_gone and line.up.room:
            data = bytes(outgoing.peek()[: line.up.room])
            if not data:
                return
            outgoing.mark_sent(len(data))
            line.up.put(data)

    def receive_bytes(self, data: bytes) -> None:
        try:
            self.core.receive(_BUFFER, _BUFFER.fill(data), self.world.now)
        except RemoteProtocolError:
            line = self.line
            assert line is not None
            line.close_from(self)
            self.on_closed(line)

    def take_action(self) -> None:
        rng = self.world.random
        if self.created_count < self.count and self.core.has_credit:
            for _ in range(rng.randint(1, 6)):
                traits = rng.choice(["", "c"])
                envelope = Envelope(channel="a.b") if traits else None
                data = messages.payload(self.name, self.created_count, traits)
                self.core.publish(data, rng.choice(self.class_ids), envelope)
                self.created_count += 1
        if self.inbox.error is not None or self.inbox.subscribe_request.error is not None:
            self.inbox = self._subscribe()
        elif self.has_manual_acks:
            self._settle_randomly()
        else:
            self._consume()
        self.core.check_invariants()
        self.flush()

    def _consume(self) -> None:
        """Read messages as a loop does: the next call acknowledges the messages of this call."""
        rng = self.world.random
        max_count = 1 << 20 if self.world.is_calm else rng.randint(0, 9)
        try:
            batch = consume(self.inbox, max_count)
        except RefusedError:
            return
        if len(batch) == max_count and self.world.is_fault_due(0.05):  # The loop body raises.
            self.processed.update(message_token(message.payload) for message in batch[:-1])
            self.inbox.nack_last()
            return
        self.processed.update(message_token(message.payload) for message in batch)
        self.inbox.settle(include_last=True)

    def _settle_randomly(self) -> None:
        rng = self.world.random
        try:
            self._unacked += consume(self.inbox)
        except RefusedError:
            return
        rng.shuffle(self._unacked)
        count = len(self._unacked) if self.world.is_calm else rng.randint(0, len(self._unacked))
        for message in self._unacked[:count]:
            outcome = rng.random()
            if outcome < 0.7 or self.world.is_calm:
                self.processed.add(message_token(message.payload))
                message.ack()
            elif outcome < 0.8:
                message.nack(rng.choice([None, 0.0, 0.5]))
            elif outcome < 0.9:
                message.working()
        del self._unacked[:count]

    @property
    def is_done(self) -> bool:
        """True if all messages are published and confirmed."""
        return (
            self.created_count >= self.count
            and self.core.confirmed_position == self.core.published_position
        )
