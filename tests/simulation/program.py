"""A program that uses the SDK's own core, in place of its driver.

Rule 1: the core decides; this brings bytes and is the consumer, who takes what it is given, is
late, fails, forgets, and comes back.
"""

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
from tests.simulation.clients import (
    Client,
    Dial,
    Processed,
    Wish,
)
from tests.simulation.history import token_of
from tests.simulation.world import World

_BUFFER = ReceiveBuffer(1 << 13)


class Program(Client):
    """One, with one subscription."""

    def __init__(
        self,
        world: World,
        dial: Dial,
        name: str,
        *,
        class_ids: list[int],
        wish: Wish,
        count: int,
        processed: Processed,
    ) -> None:
        self.core = ClientCore(name=name, instance="one")
        self.class_ids = class_ids
        self.wish = wish
        self.count = count
        self.made = 0
        self.processed = processed.setdefault((wish.class_id, wish.durable), set())
        self.core.name_classes(*class_ids)
        self.by_hand = world.random.random() < 0.5
        self.inbox = self._subscribe()
        self._held: list[Message[object]] = []
        super().__init__(world, dial, name)

    def _subscribe(self) -> Inbox:
        options = SubscribeRequest(**self.wish.options())  # type: ignore[arg-type]
        return self.core.subscribe(self.wish.class_id, options, auto_ack=not self.by_hand)

    def greet(self) -> None:
        self.core.connection_made(self.world.now)

    def lost(self) -> None:
        self.core.connection_lost()
        if self.by_hand:
            self._held.clear()

    def flush(self) -> None:
        line, outgoing = self.line, self.core.send_queue
        while line is not None and not line.is_gone and line.up.room:
            data = bytes(outgoing.peek()[: line.up.room])
            if not data:
                return
            outgoing.mark_sent(len(data))
            line.up.put(data)

    def consume(self, data: bytes) -> None:
        try:
            self.core.receive(_BUFFER, _BUFFER.fill(data), self.world.now)
        except RemoteProtocolError:
            line = self.line
            assert line is not None
            line.shut(self)
            self.hang_up(line)

    def act(self) -> None:
        chance = self.world.random
        if self.made < self.count and self.core.has_credit:
            for _ in range(chance.randint(1, 6)):
                what = chance.choice(["", "c"])
                about = Envelope(channel="a.b") if what else None
                data = messages.payload(self.name, self.made, what)
                self.core.publish(data, chance.choice(self.class_ids), about)
                self.made += 1
        if self.inbox.error is not None or self.inbox.subscribe_request.error is not None:
            self.inbox = self._subscribe()
        elif self.by_hand:
            self._judge()
        else:
            self._consume()
        self.core.check_invariants()
        self.flush()

    def _consume(self) -> None:
        """Take some as a loop does: what was taken is processed when it comes back."""
        chance = self.world.random
        most = 1 << 20 if self.world.calm else chance.randint(0, 9)
        try:
            taken = consume(self.inbox, most)
        except RefusedError:
            return
        if len(taken) == most and self.world.chance(0.05):  # It fails with the last one.
            self.processed.update(token_of(message.payload) for message in taken[:-1])
            self.inbox.nack_last()
            return
        self.processed.update(token_of(message.payload) for message in taken)
        self.inbox.settle(include_last=True)

    def _judge(self) -> None:
        chance = self.world.random
        try:
            self._held += consume(self.inbox)
        except RefusedError:
            return
        chance.shuffle(self._held)
        many = len(self._held) if self.world.calm else chance.randint(0, len(self._held))
        for message in self._held[:many]:
            way = chance.random()
            if way < 0.7 or self.world.calm:
                self.processed.add(token_of(message.payload))
                message.ack()
            elif way < 0.8:
                message.nack(chance.choice([None, 0.0, 0.5]))
            elif way < 0.9:
                message.working()
        del self._held[:many]

    @property
    def is_done(self) -> bool:
        """Whether all that it has to say is said and confirmed."""
        return (
            self.made >= self.count and self.core.confirmed_position == self.core.published_position
        )
