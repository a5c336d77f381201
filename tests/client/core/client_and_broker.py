"""A client core and a broker joined without a socket.

Rule 1: bytes cross in chunks of the test's choice, and nothing else crosses.
"""

from __future__ import annotations

from simplebus.client.core.client import ClientCore
from simplebus.client.core.inbox import Inbox
from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.statistics import ClassStatistics


class Pair:
    """One client of a broker. Give it another pair's broker to have two clients of one bus."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        broker: Broker | None = None,
        name: str = "tester",
        instance: str = "one",
        chunk: int = 1 << 16,
        frame_bytes_max: int = 1 << 20,
    ) -> None:
        self.broker = broker or Broker(settings)
        self.core = ClientCore(name=name, instance=instance, frame_bytes_max=frame_bytes_max)
        self.chunk = chunk
        """Bytes that cross at a time."""
        self.said = b""
        """Everything that the client has written on this connection."""
        self.now = 0.0
        self._buffer = ReceiveBuffer(max(chunk, 1024))
        self.connect()

    def connect(self) -> None:
        """A fresh connection."""
        self.session = self.broker.open_session()
        self.said = b""
        self.core.connection_made(self.now)

    def lose(self) -> None:
        """The connection breaks: both sides notice, and what was under way is gone."""
        self.broker.close_session(self.session)
        self.core.connection_lost()

    def exchange(self) -> list[Inbox]:
        """Let bytes cross until both sides are quiet. Returns who got something."""
        woken: dict[Inbox, None] = {}
        while self.say() or self.hear(woken):
            pass
        self.broker.check_invariants()
        self.core.check_invariants()
        return list(woken)

    def say(self, most: int | None = None) -> bool:
        """One chunk from the client to the bus, if there is one."""
        outgoing = self.core.send_queue
        data = bytes(outgoing.peek()[: most or self.chunk])
        if not data:
            return False
        outgoing.mark_sent(len(data))
        self.said += data
        self.broker.receive(self.session, self._buffer, self._buffer.fill(data))
        return True

    def hear(self, woken: dict[Inbox, None] | None = None, most: int | None = None) -> bool:
        """One chunk from the bus to the client, if there is one."""
        self.broker.drain_writable()
        outbox, tick = self.session.outbox, self.broker.tick_number
        data = bytes(outbox.peek(tick)[: most or self.chunk])
        if not data:
            return False
        outbox.mark_sent(len(data), tick)
        inboxes = self.core.receive(self._buffer, self._buffer.fill(data), self.now)
        if woken is not None:
            woken.update(dict.fromkeys(inboxes))
        return True

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.broker.tick()
        self.exchange()

    def wait(self, seconds: float) -> None:
        """Time goes by."""
        self.broker.clock.now += seconds
        self.broker.run_due_wakeups()
        self.exchange()

    def statistics(self, class_id: int = 1) -> ClassStatistics:
        return self.broker.classes[class_id].statistics()
