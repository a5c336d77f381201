"""A client core and a broker, connected without a socket."""

from __future__ import annotations

from simplebus.client.core.client import ClientCore
from simplebus.client.core.inbox import Inbox
from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.statistics import ClassStatistics


class ClientAndBroker:
    """A client core and a broker. Pass `broker` to connect several clients to one."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        broker: Broker | None = None,
        name: str = "tester",
        instance: str = "one",
        chunk_bytes: int = 1 << 16,
        frame_bytes_max: int = 1 << 20,
    ) -> None:
        self.broker = broker or Broker(settings)
        self.core = ClientCore(name=name, instance=instance, frame_bytes_max=frame_bytes_max)
        self.chunk_bytes = chunk_bytes
        """Maximum number of bytes per transfer."""
        self.sent_data = b""
        """Bytes that the client has sent on this connection."""
        self.now = 0.0
        self._buffer = ReceiveBuffer(max(chunk_bytes, 1024))
        self.connect()

    def connect(self) -> None:
        """Open a new connection."""
        self.session = self.broker.open_session()
        self.sent_data = b""
        self.core.connection_made(self.now)

    def disconnect(self) -> None:
        """Break the connection. Bytes in transit are lost."""
        self.broker.close_session(self.session)
        self.core.connection_lost()

    def exchange(self) -> list[Inbox]:
        """Transfer bytes until both sides are idle. Return the inboxes that received messages."""
        inboxes_to_wake: dict[Inbox, None] = {}
        while self.send_chunk() or self.receive_chunk(inboxes_to_wake):
            pass
        self.broker.check_invariants()
        self.core.check_invariants()
        return list(inboxes_to_wake)

    def send_chunk(self, max_bytes: int | None = None) -> bool:
        """Transfer one chunk to the broker. Return False if the client has nothing to send."""
        send_queue = self.core.send_queue
        data = bytes(send_queue.peek()[: max_bytes or self.chunk_bytes])
        if not data:
            return False
        send_queue.mark_sent(len(data))
        self.sent_data += data
        self.broker.receive(self.session, self._buffer, self._buffer.fill(data))
        return True

    def receive_chunk(
        self, inboxes_to_wake: dict[Inbox, None] | None = None, max_bytes: int | None = None
    ) -> bool:
        """Transfer one chunk to the client. Return False if the broker has nothing to send."""
        self.broker.end_turn()
        outbox, tick_number = self.session.outbox, self.broker.tick_number
        data = bytes(outbox.peek(tick_number)[: max_bytes or self.chunk_bytes])
        if not data:
            return False
        outbox.mark_sent(len(data), tick_number)
        inboxes = self.core.receive(self._buffer, self._buffer.fill(data), self.now)
        if inboxes_to_wake is not None:
            inboxes_to_wake.update(dict.fromkeys(inboxes))
        return True

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.broker.tick()
        self.exchange()

    def advance_time(self, seconds: float) -> None:
        """Advance the broker's clock."""
        self.broker.clock.now += seconds
        self.broker.run_due_wakeups()
        self.exchange()

    def statistics(self, class_id: int = 1) -> ClassStatistics:
        return self.broker.classes[class_id].statistics()
