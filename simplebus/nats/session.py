"""One NATS client: what it said of itself, what it subscribed to, what waits for it.

Rule 1: a session knows its own client only. What its words mean for others is the front's business.
"""

from __future__ import annotations

from collections.abc import Callable

from simplebus.core.limits import RECEIVE_BYTES, TRICKLE_BYTES
from simplebus.nats import writing
from simplebus.nats.connect import Options
from simplebus.nats.events import Mix, Positions, Run, singles
from simplebus.nats.outbox import Outbox
from simplebus.nats.parser import Parser
from simplebus.nats.subscription import Subscription


class NatsSession:
    """Protocol state of one connection, from accept to close."""

    def __init__(
        self,
        client_id: int,
        parser: Parser,
        *,
        peer: str,
        ready: Callable[[NatsSession], None],
        end: Callable[[Subscription], None],
    ) -> None:
        self.client_id = client_id
        self.peer = peer
        """Who it is, for logs."""
        self.parser = parser
        self.outbox = Outbox()
        self.options = Options()
        self.is_connected = False
        """Whether it has said CONNECT."""
        self.is_greeted = False
        """Whether it was sent its first PONG."""
        self.subscriptions: dict[bytes, Subscription] = {}
        """By sid."""
        self.closed = False
        self.must_wait = False
        """Whether reading is to pause."""
        self.in_messages = self.in_bytes = self.out_messages = self.out_bytes = 0
        self.end = end
        """Called with a subscription that has been sent all that it asked for."""
        self._ready = ready
        """Called when something waits to be sent."""
        self._gathered: list[tuple[bytes, Positions | None]] = []
        self._read_bytes = TRICKLE_BYTES

    @property
    def read_bytes(self) -> int:
        """How much to read from this client at once."""
        return min(self._read_bytes, TRICKLE_BYTES) if self.must_wait else self._read_bytes

    @property
    def may_make_room(self) -> bool:
        """Whether its acknowledgements may make room for its own messages."""
        return True

    @property
    def hears_farewell(self) -> bool:
        """Whether it is sent what waits for it before it is closed."""
        return True

    def took(self, count: int) -> None:
        """A read brought so many bytes. Bulk is read in ever larger pieces."""
        if count >= self._read_bytes:
            self._read_bytes = min(2 * self._read_bytes, RECEIVE_BYTES)

    @property
    def takes_headers(self) -> bool:
        """Whether it is sent headers."""
        return self.options.headers

    def send(self, piece: bytes | bytearray | memoryview) -> None:
        """Queue bytes for it."""
        self.outbox.put(piece)
        self._ready(self)

    def gather(self, sid: bytes, rows: Positions | None) -> None:
        """These messages of the batch that is looked at are for it, under this sid."""
        self._gathered.append((sid, rows))
        self._ready(self)

    def write(self, messages: Run | Mix, names: list[bytes]) -> None:
        """Queue what was gathered of a batch. `names` are subjects by their numbers."""
        if not self._gathered:
            return
        gathered, self._gathered = self._gathered, []
        if len(gathered) == 1:
            sid, rows = gathered[0]
            if isinstance(messages, Run):
                self.outbox.put(writing.run(messages, sid, rows, headers=self.takes_headers))
            else:
                self.outbox.put(writing.mix(messages, sid, rows))
            return
        sids: list[list[bytes]] = [[] for _ in range(messages.count)]
        for sid, rows in gathered:
            for row in range(messages.count) if rows is None else rows.tolist():
                sids[row].append(sid)
        pieces = [
            writing.one(message, sid, headers=self.takes_headers)
            for message, those in zip(singles(messages, names), sids, strict=True)
            for sid in those
        ]
        self.outbox.put(b"".join(pieces))
