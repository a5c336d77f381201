"""Dead letters for messages that the target refuses for good.

A message counts as dead-lettered when its dead letter is stored; if there is no space the copier
starts again and loses nothing. A message that is too long for one dead letter, with the reason, is
split into several parts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import numpy as np

from simplebus.bridge.bus_connection import connect, create_client_core
from simplebus.bridge.interfaces import Refusal
from simplebus.bridge.nats_frames import NatsFramer
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.aio.transport import Endpoint
from simplebus.core import dead_letters
from simplebus.core.dead_letters import DeadLetterCause, DeadMessage
from simplebus.core.errors import BusError, Reason, RefusedError
from simplebus.core.limits import DELIMITER_BYTES, HEADER_BYTES
from simplebus.core.protocol import envelope_batch, frames
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.frames import DELIMITER, Integers
from simplebus.core.protocol.inquiry import ClassInfo, ClassInquiry
from simplebus.core.protocol.requests import Auth, NamedClass
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.events import ReceivedMessages

_PART_BYTES_MIN = 16
"""Payloads are not split into smaller parts than this."""


class UnackedDeliveries:
    """Messages that were read and whose position is not committed yet."""

    def __init__(self) -> None:
        self._parts: deque[tuple[ReceivedMessages, Integers]] = deque()
        self.count = 0

    def add(self, messages: ReceivedMessages, sequences: Integers) -> None:
        self._parts.append((messages, sequences))
        self.count += messages.count

    def clear(self) -> None:
        self._parts.clear()
        self.count = 0

    def pop_below(self, sequence: int) -> list[tuple[ReceivedMessages, Integers]]:
        """Remove and return the messages below `sequence`."""
        removed, remaining_parts = [], deque[tuple[ReceivedMessages, Integers]]()
        for messages, sequences in self._parts:
            is_below = sequences < sequence
            if is_below.any():
                removed.append((messages.pick(is_below), sequences[is_below]))
                self.count -= removed[-1][0].count
            if not is_below.all():
                remaining_parts.append((messages.pick(~is_below), sequences[~is_below]))
        self._parts = remaining_parts
        return removed

    def select(self, refusals: Sequence[Refusal]) -> list[tuple[ReceivedMessages, Integers]]:
        """Return the refused messages."""
        refused_sequences, batches = np.array([refusal.sequence for refusal in refusals]), []
        for messages, sequences in self._parts:
            is_match = np.isin(sequences, refused_sequences)
            if is_match.any():
                batches.append((messages.pick(is_match), sequences[is_match]))
        return batches


async def write_dead_letters(
    batches: Sequence[tuple[ReceivedMessages, Integers]],
    refusals: Sequence[Refusal],
    open: OpenDeadLetters,
    framer: NatsFramer,
) -> None:
    """Store a dead letter for each of these NATS messages."""
    if not batches:
        return
    refusals_by_sequence = {refusal.sequence: refusal for refusal in refusals}
    async with open() as letters:
        for messages, sequences in batches:
            deliveries = jetstream_codec.parse_deliveries(messages)
            times = np.where(deliveries.good, deliveries.times / 1e9, 0.0).tolist()
            run = framer.to_run(messages, sequences)
            framer.pop_altered()  # Reported when the messages were read.
            for row, sequence in enumerate(sequences.tolist()):
                frame = bytes(run.slice(row, row + 1).raw)
                letters.add(
                    frame, refusals_by_sequence[sequence], accepted=times[row], now=time.time()
                )


class BridgeDeadLetters:
    """Writer of dead letters over one connection. Call `open` first and `wait_stored` last."""

    def __init__(self, connection: ClientConnection, class_: int | str, copier_name: str) -> None:
        """Create a writer. `class_` is the class of the refused messages."""
        self._connection = connection
        self._core = connection.core
        self._class = class_
        self._class_label = str(class_)
        self._copier_name = copier_name
        self._class_id = -1
        self._first = connection.core.published_position

    async def open(self) -> None:
        self._class_label = await self._find_class_label()
        name = dead_letters.dead_letter_class_name(self._class_label)
        if self._core.find_class_id(name) is None:
            await self._connection.wait_answered(self._core.name_classes(NamedClass(name=name)))
        class_id = self._core.find_class_id(name)
        assert class_id is not None
        self._class_id, self._first = class_id, self._core.published_position

    async def _find_class_label(self) -> str:
        """Return the name that the bus uses in the name of the dead-letter class.

        It is the class name if the class has one and the user may see it, otherwise the class id.
        """
        if isinstance(self._class, str):
            return self._class
        request = self._core.inquire(ClassInquiry(self._class))
        try:
            reply = (await self._connection.wait_answered(request)).reply
        except RefusedError:  # The class does not exist, or the user lacks the permission.
            return str(self._class)
        assert isinstance(reply, ClassInfo)
        return reply.name or str(self._class)

    def add(self, frame: bytes, refusal: Refusal, *, accepted: float, now: float) -> None:
        """Publish the dead letter of a message.

        Args:
            frame: Frame of the message.
            refusal: Reason why the target refused it.
            accepted: Unix time at which the source accepted it; 0 if unknown.
            now: Unix time of the dead letter.

        Raises:
            BusError: The message does not fit into dead letters.
        """
        cause = DeadLetterCause(Reason.TERMINATED, self._class_label, 1, self._copier_name, "", now)
        for parts in _split_to_fit(frame, f"{refusal.code}: {refusal.sentence}"):
            dead = [DeadMessage(refusal.sequence, part, accepted, reason) for part, reason in parts]
            letters = dead_letters.build_dead_letters(
                dead,
                cause,
                class_id=self._class_id,
                frame_bytes_max=self._core.accepted_frame_bytes_max,
            )
            if not letters.lost_count:
                assert letters.frames is not None
                raw = bytearray(DELIMITER) + letters.frames.data.tobytes()
                self._core.publish_buffer.publish_frames(raw, letters.frames.bounds, self._class_id)
                return
        raise BusError(f"message {refusal.sequence} does not fit into a dead letter")

    async def wait_stored(self) -> None:
        """Wait until all dead letters are stored. Raises RefusedError if the bus has no space."""
        last = self._core.published_position - 1
        if last >= self._first:
            refused = await self._connection.wait_confirmed(self._first, last)
            if refused:
                raise refused[0]


def _split_to_fit(frame: bytes, error: str) -> Iterator[list[tuple[bytes, str]]]:
    """Yield ways to split a message into dead letters, each as frames with their reasons.

    The first way is one dead letter; the next ones have more and more parts. If the headers do
    not fit even then, the next ways drop the headers, and finally all metadata.
    """
    original, payload = Envelope(), frame[HEADER_BYTES:-DELIMITER_BYTES]
    if frame[0] == frames.ENVELOPE:
        original, payload = envelope_batch.decode(payload)
    yield [(frame, error)]
    without_headers = original._replace(headers=())
    for envelope, loss in (
        (original, ""),
        (without_headers, "without its headers; "),
        (Envelope(), "payload only; "),
    ):
        count = 1
        while count == 1 or len(payload) // count >= _PART_BYTES_MIN:
            size = max(1, -(-len(payload) // count))
            parts = [
                payload[begin : begin + size] for begin in range(0, max(1, len(payload)), size)
            ]
            yield [
                (_encode_part(envelope, part), f"part {number} of {len(parts)}; {loss}{error}")
                for number, part in enumerate(parts, 1)
            ]
            count *= 2


def _encode_part(envelope: Envelope, payload: bytes) -> bytes:
    return frames.encode(frames.ENVELOPE, content=envelope_batch.encode(envelope, payload))


OpenDeadLetters = Callable[[], AbstractAsyncContextManager[BridgeDeadLetters]]


def dead_letter_opener(
    endpoint: Endpoint, class_: int | str, copier_name: str, *, heartbeat: float, auth: Auth | None
) -> OpenDeadLetters:
    """Return a function that connects to a bus to write dead letters.

    Leaving its block waits until they are stored. `heartbeat` is in seconds. Raises BusError
    without space or permission.
    """

    @asynccontextmanager
    async def open() -> AsyncIterator[BridgeDeadLetters]:
        async with connect(
            endpoint, create_client_core(None, heartbeat=heartbeat, auth=auth)
        ) as connection:
            letters = BridgeDeadLetters(connection, class_, copier_name)
            await letters.open()
            yield letters
            await letters.wait_stored()

    return open
