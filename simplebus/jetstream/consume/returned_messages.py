"""Return of unacknowledged messages to a consumer, for the next subscription.

Returned messages are redelivered first and in order. Messages that were delivered to a request of a
disconnected server are returned as well. NATS servers discard the returns when earlier messages are
purged, and redeliver the messages only after the ack wait. Therefore the consumer's metadata list
the returned messages and the number of deliveries so far; a server that finds the same number of
deliveries returns the same messages again. The messages of a failed server are returned if no
server holds the consumer.

    simplebus-left    7 4-5 9-9    7 deliveries so far; sequences 4, 5 and 9 were returned
    simplebus-pause   6-8          sequences 6 to 8 were returned with a delay
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from simplebus.core.protocol.frames import Integers
from simplebus.core.ring.columns import Times
from simplebus.jetstream import api
from simplebus.nats.client import encode, jetstream_codec
from simplebus.nats.client.events import ReceivedMessages
from simplebus.net.nats_connection import NatsConnection

DEAD_LETTER_PENDING = float("inf")
"""Delay of a message whose dead letter is not stored yet."""


@dataclass(frozen=True, slots=True)
class UnackedOnExit:
    """Unacknowledged messages of a closed consumer with ack policy `all`."""

    sequences: Integers
    """Stream sequences, ascending: shape (n,)."""
    delays: Times
    """Seconds before redelivery, shape (n,); negative for an acknowledged message."""
    highest: int
    """Last sequence that this server received."""
    sent_to: int
    """Last sequence that this server or a predecessor received."""

    def resolve_dead_letters(self, is_stored: bool) -> UnackedOnExit | None:
        """Acknowledge messages with stored dead letters, or return them if `is_stored` is False.

        Returns:
            The remaining messages; None if no messages remain.
        """
        delays = np.where(
            self.delays == DEAD_LETTER_PENDING, -1.0 if is_stored else 0.0, self.delays
        )
        return replace(self, delays=delays) if (delays >= 0.0).any() else None


_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each repeated nak. After the last one the ack wait applies."""


class ExpectedRedeliveries:
    """Returned messages that should be redelivered to this position first.

    Times are in seconds of a monotonic clock.
    """

    def __init__(self, subjects: dict[int, bytes]) -> None:
        """Expect messages: ack subjects by stream sequence, in order."""
        self._ack_subjects = dict(subjects)
        self._waiting_since: float | None = None
        """Time since which a redelivery was possible and none arrived."""
        self._retry_count = 0

    def remove_received(self, sequences: Integers) -> None:
        """Remove sequences that have arrived."""
        if not self._ack_subjects:
            return
        before = len(self._ack_subjects)
        for sequence in sequences.tolist():
            self._ack_subjects.pop(sequence, None)
        if len(self._ack_subjects) < before:
            self._waiting_since = None

    def retry_overdue(self, now: float, *, has_request: bool) -> bytes:
        """Return naks that repeat the return of overdue messages; empty if none is due.

        `has_request` is True if the consumer was asked for messages.
        """
        if not (self._ack_subjects and has_request):
            self._waiting_since = None
            return b""
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < _RETRY_SECONDS[self._retry_count]:
            return b""
        naks = [
            encode.encode_pub(subject, jetstream_codec.NAK)
            for subject in self._ack_subjects.values()
        ]
        self._waiting_since, self._retry_count = now, self._retry_count + 1
        if self._retry_count == len(_RETRY_SECONDS):
            self._ack_subjects.clear()
        return b"".join(naks)


RETURNED, DELAYED = "simplebus-left", "simplebus-pause"
RETURNED_MESSAGES_MAX = 16 * 1024
"""Upper limit of the messages that are listed in the metadata."""
_BATCH_MAX = 4096
_RUNS_MAX = 256
_RETURN_NOTE = re.compile(r"([0-9]{1,18})((?: [0-9]{1,18}-[0-9]{1,18})+)")
_RUNS = re.compile(r"[0-9]{1,18}-[0-9]{1,18}(?: [0-9]{1,18}-[0-9]{1,18})*")
_NOTE_CHARACTERS_MAX = 64 * _RUNS_MAX
_NONE: Integers = np.empty(0, np.int64)
_LONG_NAK = jetstream_codec.nak_payload(30.0)
"""Nak that removes a message from the server's redelivery queue for now."""


@dataclass(frozen=True, slots=True)
class ReturnedMessages:
    """Unacknowledged messages of a closed durable, group or resumed consumer."""

    messages: list[tuple[ReceivedMessages, float]]
    """Messages, and the seconds before they may be redelivered."""
    delivery_state: tuple[int, int] | None = None
    """Number of deliveries and last delivered sequence of the consumer; None if other servers
    received messages, too.
    """


def with_return_note(
    info: dict[str, Any], sequences: Integers, delayed: Integers = _NONE
) -> dict[str, Any]:
    """Return the configuration with metadata about returned and delayed messages.

    The sequences are ascending, shape (n,).
    """
    config: dict[str, Any] = info["config"]
    metadata = {**(config.get("metadata") or {})}
    for key in (RETURNED, DELAYED):
        metadata.pop(key, None)
    if sequences.size:
        metadata[RETURNED] = f"{api.delivery_count(info)} {_runs(sequences)}"
    if delayed.size:
        metadata[DELAYED] = _runs(delayed)
    return {**config, "metadata": metadata}


def _runs(sequences: Integers) -> str:
    sequences = sequences[:RETURNED_MESSAGES_MAX]
    edges = np.flatnonzero(np.diff(sequences) != 1) + 1
    return " ".join(f"{run[0]}-{run[-1]}" for run in np.split(sequences, edges)[:_RUNS_MAX])


def _sequences(runs: str) -> list[int]:
    found: list[int] = []
    for run in runs.split():
        first, last = map(int, run.split("-"))
        found += range(first, min(last + 1, first + RETURNED_MESSAGES_MAX - len(found)))
    return found


def returned_sequences(info: dict[str, Any]) -> list[int]:
    """Return the sequences that were returned to a consumer that has delivered nothing since."""
    match = _RETURN_NOTE.fullmatch(_metadata(info, RETURNED))
    if match is None or int(match[1]) != api.delivery_count(info):
        return []
    return _sequences(match[2])


def unacked_sequences(info: dict[str, Any]) -> list[int]:
    """Return all delivered sequences from the ack floor on, except delayed ones."""
    delays = _RUNS.fullmatch(_metadata(info, DELAYED))
    delayed = set(_sequences(delays[0])) if delays is not None else ()
    sent = range(api.ack_floor(info), api.last_delivered(info) + 1)[:RETURNED_MESSAGES_MAX]
    return [sequence for sequence in sent if sequence not in delayed]


def _metadata(info: dict[str, Any], key: str) -> str:
    metadata = info.get("config", {}).get("metadata") or {}
    return str(metadata.get(key, ""))[:_NOTE_CHARACTERS_MAX]


async def return_messages(
    link: NatsConnection, stream: str, name: str, returned: ReturnedMessages
) -> dict[str, Any] | None:
    """Return messages to a consumer, and messages that it delivered to a departed server.

    Returns:
        The new configuration of the consumer; None if it does not change.

    Raises:
        BusConnectionError, JetStreamError: A request failed.
    """
    info = await link.api_request(f"CONSUMER.INFO.{stream}.{name}")
    lost = range(0)
    # With pending requests, the other deliveries may belong to other servers.
    if returned.delivery_state is not None and not info.get("num_waiting"):
        count, highest = returned.delivery_state
        if api.delivery_count(info) > count:
            first, last_sent = api.ack_floor(info), api.last_delivered(info)
            lost = range(max(first, highest + 1), last_sent + 1)[:RETURNED_MESSAGES_MAX]
    subjects = [_subject(stream, info, sequence) for sequence in lost]
    # They may be queued for redelivery before older messages; move them out of the queue first.
    _write_acks(link, subjects, _LONG_NAK)
    immediate, delayed = [np.array(lost, np.int64)], [_NONE]
    last = ("", b"")
    for messages, delay_seconds in returned.messages:
        ack = jetstream_codec.nak_payload(delay_seconds)
        link.core.write(jetstream_codec.encode_acks_in_order(messages, ack))
        last = messages.reply(-1).decode("latin-1"), ack
        (delayed if delay_seconds > 0 else immediate).append(
            jetstream_codec.parse_deliveries(messages).sequences
        )
    _write_acks(link, subjects, jetstream_codec.NAK)
    if subjects:
        last = subjects[-1].decode(), jetstream_codec.NAK
    if last[0]:  # The answer follows the processing of all earlier acks.
        await link.request(*last)
    sequences, late = (np.unique(np.concatenate(parts)) for parts in (immediate, delayed))
    return with_return_note(info, sequences, late) if sequences.size or late.size else None


async def transfer_messages(
    link: NatsConnection, stream: str, name: str, unacked: UnackedOnExit
) -> None:
    """Transfer acknowledgements to a new consumer: each message is acknowledged or returned there.

    Raises:
        BusConnectionError: A request failed.
    """
    remaining_count = unacked.highest - int(unacked.sequences[unacked.delays >= 0.0][0]) + 1
    last: tuple[str, bytes] | None = None
    while remaining_count > 0:
        batch = min(remaining_count, _BATCH_MAX)
        found = await link.request_many(
            f"{jetstream_codec.API}CONSUMER.MSG.NEXT.{stream}.{name}",
            jetstream_codec.pull_request(batch=batch),
            max_messages=batch,
        )
        count = sum(messages.count for messages in found)
        for messages in found:
            last = _ack_or_return(link, messages, unacked)
        remaining_count -= count
        if count < batch:
            break
    if last is not None:  # The answer follows the processing of all earlier acks.
        await link.request(*last)


def _ack_or_return(
    link: NatsConnection, messages: ReceivedMessages, unacked: UnackedOnExit
) -> tuple[str, bytes]:
    """Acknowledge or return each message. Returns the last ack subject and payload."""
    sequences = jetstream_codec.parse_deliveries(messages).sequences
    at = np.minimum(unacked.sequences.searchsorted(sequences), unacked.sequences.size - 1)
    delays = np.where(unacked.sequences[at] == sequences, unacked.delays[at], -1.0)
    delays[sequences > unacked.highest] = 0.0
    ack = b""
    for begin, end in pairwise([0, *(np.flatnonzero(np.diff(delays)) + 1), delays.size]):
        ack = (
            jetstream_codec.ACK
            if delays[begin] < 0
            else jetstream_codec.nak_payload(float(delays[begin]))
        )
        link.core.write(jetstream_codec.encode_acks_in_order(messages.pick(slice(begin, end)), ack))
    return messages.reply(-1).decode("latin-1"), ack


async def return_again(
    link: NatsConnection, stream: str, info: dict[str, Any], *, is_unheld: bool = False
) -> dict[int, bytes]:
    """Repeat the return of messages, so that they are redelivered first after a purge.

    For a consumer that no server holds, all delivered messages are returned.

    Returns:
        Ack subjects of these messages by sequence.

    Raises:
        BusConnectionError: The request failed.
    """
    sequences = unacked_sequences(info) if is_unheld else returned_sequences(info)
    subjects = {sequence: _subject(stream, info, sequence) for sequence in sequences}
    if subjects:
        _write_acks(link, list(subjects.values()), jetstream_codec.NAK)
        await link.request(subjects[sequences[-1]].decode(), jetstream_codec.NAK)
    return subjects


def _subject(stream: str, info: dict[str, Any], sequence: int) -> bytes:
    """Return the ack subject of a delivered message."""
    sent = api.delivery_count(info)
    return f"$JS.ACK.{stream}.{info['name']}.1.{sequence}.{sent}.0.0".encode()


def _write_acks(link: NatsConnection, subjects: list[bytes], ack: bytes) -> None:
    link.core.write(b"".join([encode.encode_pub(subject, ack) for subject in subjects]))
