"""Source for subjects of a NATS server without JetStream.

Core NATS stores nothing: messages that are published while the copier is away are lost, and
messages beyond the buffer limit count as missed. Dead letters are stored at the target bus.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence

import numpy as np

from simplebus.bridge import dead_letters
from simplebus.bridge.checkpoint import MessageFingerprint
from simplebus.bridge.dead_letters import UnackedDeliveries, write_dead_letters
from simplebus.bridge.interfaces import Refusal, SourceBatch
from simplebus.bridge.nats_connection import BridgeNatsConnection
from simplebus.bridge.nats_frames import NatsFramer
from simplebus.bridge.reserved_headers import is_reserved_subject
from simplebus.core.errors import BusConnectionError
from simplebus.nats.client.events import ReceivedMessages

BUFFERED_BYTES_MAX = 64 * 1024 * 1024
"""Bytes that wait to be read. Messages beyond this limit are missed."""
_READ_MESSAGES_MAX = 65_536
"""A read ends when it has this many messages."""
_ID_CHARACTERS = 16
_RESERVED_FIRST_BYTES = np.frombuffer(b"$_", np.uint8)
"""First bytes of subjects that may be reserved."""


class CoreNatsSource:
    """Messages that are published on some subjects from now on."""

    def __init__(
        self,
        connection: BridgeNatsConnection,
        subjects: Sequence[str],
        *,
        open_dead_letters: dead_letters.OpenDeadLetters,
        group: str = "",
    ) -> None:
        """Subscribe to `subjects`, or to all; `group` is a queue group."""
        self._connection = connection
        self._open_dead_letters = open_dead_letters
        self.identity = nats_identity(connection)
        self.storage_id = f"nats {secrets.token_hex(8)}"
        self.head = 0
        self._framer = NatsFramer()
        self._buffered: deque[ReceivedMessages] = deque()
        self._buffered_bytes = 0
        self._next = 0
        self._missed = 0
        self._unacked = UnackedDeliveries()
        connection.on_messages = self._on_messages
        self._wildcard_sids: list[int] = []
        """Subscriptions whose first segment is a wildcard."""
        for subject in subjects or (">",):
            sid = connection.core.subscribe(subject, group)
            if subject.split(".", 1)[0] in ("*", ">", "#"):
                self._wildcard_sids.append(sid)
        connection.nats.flush()

    async def open(self) -> int:
        """Wait until the subscriptions are active. Returns the first sequence."""
        await self._connection.round_trip()  # The server has processed the subscriptions.
        self._connection.check_permissions()
        return 0

    def _on_messages(self, messages: ReceivedMessages) -> None:
        messages = self._without_reserved(messages)
        size = int((messages.ends - messages.bodies).sum())
        if self._buffered_bytes + size > BUFFERED_BYTES_MAX:
            self._missed += messages.count
            return
        if messages.count:
            self._buffered.append(messages)
            self._buffered_bytes += size

    def _without_reserved(self, messages: ReceivedMessages) -> ReceivedMessages:
        """Remove messages on reserved subjects that only a wildcard matched.

        These are replies to other clients, and the round trips of the bridge itself.
        """
        is_reserved = np.isin(messages.data[messages.subjects], _RESERVED_FIRST_BYTES)
        if not is_reserved.any():
            return messages
        is_reserved &= np.isin(messages.sids, self._wildcard_sids)
        for row in np.flatnonzero(is_reserved).tolist():
            is_reserved[row] = is_reserved_subject(messages.subject(row).decode("utf-8", "replace"))
        return messages.pick(~is_reserved)

    async def read(self, sequence: int) -> SourceBatch:
        self._connection.check_permissions()
        missed, self._missed = self._missed, 0
        runs = []
        first = self._next
        while self._buffered and self._next - first < _READ_MESSAGES_MAX:
            messages = self._buffered.popleft()
            self._buffered_bytes -= int((messages.ends - messages.bodies).sum())
            sequences = np.arange(self._next, self._next + messages.count)
            runs.append(self._framer.to_run(messages, sequences))
            self._unacked.add(messages, sequences)
            self._next += messages.count
        head = self._next + sum(messages.count for messages in self._buffered)
        batch = SourceBatch(runs, sequence, self._next, head, missed)
        batch.altered_count, batch.alteration = self._framer.pop_altered()
        return batch

    async def read_fingerprint(self, sequence: int) -> MessageFingerprint | None:
        return None  # Core NATS stores nothing.

    async def measure_backlog(self, sequence: int) -> tuple[int, float]:
        return self._next - sequence + sum(messages.count for messages in self._buffered), 0.0

    async def wait_for_message(self, sequence: int) -> int:
        await self.commit_position(sequence, now=False)
        while not self._buffered:
            await self._connection.wait_event()
            self._connection.check_permissions()
        return sequence

    async def commit_position(self, sequence: int, *, now: bool) -> None:
        """Drop the messages below the position. There is nothing to commit at the server."""
        self._unacked.pop_below(sequence)

    async def dead_letter(self, refusals: Sequence[Refusal]) -> int:
        batches = self._unacked.select(refusals)
        await write_dead_letters(batches, refusals, self._open_dead_letters, self._framer)
        return len(refusals) - sum(messages.count for messages, _ in batches)

    def count_lost_on_close(self, sequence: int) -> int:
        buffered_count = sum(messages.count for messages in self._buffered)
        return self._next - sequence + buffered_count + self._missed


def require_jetstream(connection: BridgeNatsConnection) -> None:
    """Raise BusConnectionError if the server has no JetStream."""
    info = connection.core.info
    if info is None or not info.jetstream:
        raise BusConnectionError("the NATS server has no JetStream, but the bridge names a stream")


def nats_identity(connection: BridgeNatsConnection, stream: str = "") -> str:
    """Return the identity of a server, or of its stream, in a bridge path.

    Every server of a cluster has its own.
    """
    info = connection.core.info
    server = f"nats.{info.server_id[:_ID_CHARACTERS]}" if info and info.server_id else "nats"
    return f"{server}.{stream}" if stream else server
