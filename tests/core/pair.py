"""A client core and a broker joined without a socket.

Rule 1: bytes cross in chunks of the test's choice, and nothing else crosses.
Rule 2: a consumer here does what a driver's loop does: it settles before it asks for more.
"""

from __future__ import annotations

from simplebus.core.broker import Broker, Settings
from simplebus.core.client import ClientCore
from simplebus.core.inbox import Inbox
from simplebus.core.messages import Batch, Message
from simplebus.core.receive import ReceiveBuffer
from simplebus.core.statistics import ClassStatistics


class Pair:
    """One client of a broker. Give it another pair's broker to have two clients of one bus."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        broker: Broker | None = None,
        chunk: int = 1 << 16,
        frame_bytes_max: int = 1 << 20,
    ) -> None:
        self.broker = broker or Broker(settings)
        self.session = self.broker.open()
        self.core = ClientCore(frame_bytes_max=frame_bytes_max)
        self.chunk = chunk
        """Bytes that cross at a time."""
        self.said = b""
        """Everything that the client has written."""
        self._buffer = ReceiveBuffer(max(chunk, 1))

    def exchange(self) -> list[Inbox]:
        """Let bytes cross until both sides are quiet. Returns who got something."""
        woken: dict[Inbox, None] = {}
        while self.say() or self.hear(woken):
            pass
        self.broker.check()
        return list(woken)

    def say(self) -> bool:
        """One chunk from the client to the bus, if there is one."""
        outgoing = self.core.outgoing
        data = bytes(outgoing.peek()[: self.chunk])
        if not data:
            return False
        outgoing.sent(len(data))
        self.said += data
        self.broker.receive(self.session, self._buffer, self._buffer.fill(data))
        return True

    def hear(self, woken: dict[Inbox, None] | None = None) -> bool:
        """One chunk from the bus to the client, if there is one."""
        outbox, tick = self.session.outbox, self.broker.tick_number
        data = bytes(outbox.peek(tick)[: self.chunk])
        if not data:
            return False
        outbox.sent(len(data), tick)
        inboxes = self.core.receive(self._buffer, self._buffer.fill(data))
        if woken is not None:
            woken.update(dict.fromkeys(inboxes))
        return True

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.broker.tick()
        self.exchange()

    def statistics(self, class_id: int = 1) -> ClassStatistics:
        return self.broker.classes[class_id].statistics()


def take(inbox: Inbox, most: int = 1 << 30) -> list[Message]:
    """Consume up to so many messages as a loop does. The last one is not settled."""
    taken: list[Message] = []
    while len(taken) < most:
        message = next(inbox.ready, None)
        if message is not None:
            taken.append(message)
        else:
            inbox.settle(current=True)
            if not inbox.prepare(64):
                break
        inbox.check()
    return taken


def take_batches(inbox: Inbox) -> list[Batch]:
    """Consume everything in batches. All of it is settled."""
    batches = []
    inbox.settle(current=True)
    while (batch := inbox.take_batch()) is not None:
        batches.append(batch)
        inbox.settle(current=True)
        inbox.check()
    return batches


def payloads(inbox: Inbox, most: int = 1 << 30) -> list[bytes]:
    return [message.payload for message in take(inbox, most)]
