"""What a door gives back to a consumer that others may have, for whoever comes next (trio).

Rule 1: what is immediate back comes again first, and in order. A server that has a request of somebody
who is gone would put the first message behind the others: it is asked something before that, and
forgets the request.
Rule 2: what was on its way to nobody is immediate back as well, where all that the consumer has sent
before came to this door.
Rule 3: a server forgets what was immediate back when messages in front of it are purged, and sends it
after the ack wait, behind what is newer. So the consumer says what that was, and how many messages
it had sent by then; who finds that it has sent none since gives the same back once more.

Rule 4: what a dead door had comes first as well, where nobody says that he has it: all that the
consumer delays for is immediate back, but for what is to delay_seconds.

    simplebus-left    7 4-5 9-9    7 sent so far; 4, 5 and 9 of the stream were immediate back
    simplebus-delay_seconds   6-8          and 6 to 8, not to be sent before some time has passed
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
"""As a delay_seconds: its dead letter is on its way."""


@dataclass(frozen=True, slots=True)
class UnackedOnExit:
    """What a door that goes gives back of a consumer that was its alone."""

    sequences: Integers
    """Messages of the stream, ascending: shape (n,)."""
    delays: Times
    """For how many seconds none of them is to be sent; less than 0 for one that is done with."""
    highest: int
    """The last one that was sent to this door,"""
    sent_to: int
    """or to somebody before."""

    def resolve_dead_letters(self, is_stored: bool) -> UnackedOnExit | None:
        """The same when it is known whether the dead letters are stored of what is being buried:
        who comes next has it otherwise. None for nothing."""
        delays = np.where(
            self.delays == DEAD_LETTER_PENDING, -1.0 if is_stored else 0.0, self.delays
        )
        return replace(self, delays=delays) if (delays >= 0.0).any() else None


_RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before it is naks again; after that it comes by itself."""


class ExpectedRedeliveries:
    """Of one position."""

    def __init__(self, subjects: dict[int, bytes]) -> None:
        """`subjects`: by which the consumer is told of each message of the stream, in order."""
        self._ack_subjects = dict(subjects)
        self._waiting_since: float | None = None
        """Since when nothing of it has come that could have."""
        self._retry_count = 0

    def remove_received(self, sequences: Integers) -> None:
        """These messages of the stream have come."""
        if not self._ack_subjects:
            return
        before = len(self._ack_subjects)
        for sequence in sequences.tolist():
            self._ack_subjects.pop(sequence, None)
        if len(self._ack_subjects) < before:
            self._waiting_since = None

    def retry_overdue(self, now: float, *, has_request: bool) -> bytes:
        """What is to be naks now; `has_request` says whether the consumer was asked for messages."""
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


RETURNED, DELAYED = "simplebus-left", "simplebus-delay_seconds"
RETURNED_MESSAGES_MAX = 16 * 1024
"""Of more messages it is not naks that they were immediate back."""
_BATCH_MAX = 4096
_RUNS_MAX = 256
_RETURN_NOTE = re.compile(r"([0-9]{1,18})((?: [0-9]{1,18}-[0-9]{1,18})+)")
_RUNS = re.compile(r"[0-9]{1,18}-[0-9]{1,18}(?: [0-9]{1,18}-[0-9]{1,18})*")
_NOTE_CHARACTERS_MAX = 64 * _RUNS_MAX
_NONE: Integers = np.empty(0, np.int64)
_LONG_NAK = jetstream_codec.nak_payload(30.0)
"""What has a server take a message out of the row of those that are to come again."""


@dataclass(frozen=True, slots=True)
class ReturnedMessages:
    """What a position leaves that is nobody's at this door any more."""

    messages: list[tuple[ReceivedMessages, float]]
    """Those that are not acknowledged, and for how many seconds they are not to be sent."""
    delivery_state: tuple[int, int] | None = None
    """How many messages the consumer has sent by now and the last one of the stream among them, as
    far as this door knows; None where some went elsewhere."""


def with_return_note(
    info: dict[str, Any], sequences: Integers, delayed: Integers = _NONE
) -> dict[str, Any]:
    """How a consumer is configured that says that these messages were immediate back, and those with
    delays: ascending, shape (n,)."""
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
    """What was immediate back to a consumer that has sent nothing since."""
    match = _RETURN_NOTE.fullmatch(_metadata(info, RETURNED))
    if match is None or int(match[1]) != api.delivery_count(info):
        return []
    return _sequences(match[2])


def unacked_sequences(info: dict[str, Any]) -> list[int]:
    """All that a consumer may wait for, but for what delays."""
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
    """Give messages back to a consumer, and what it has sent to nobody. Returns how it is to be
    configured from now on; None for as it is. Raises BusConnectionError and JetStreamError."""
    info = await link.api_request(f"CONSUMER.INFO.{stream}.{name}")
    lost = range(0)
    if returned.delivery_state is not None and not info.get(
        "num_waiting"
    ):  # Else they may be another's.
        count, highest = returned.delivery_state
        if api.delivery_count(info) > count:
            first, last_sent = api.ack_floor(info), api.last_delivered(info)
            lost = range(max(first, highest + 1), last_sent + 1)[:RETURNED_MESSAGES_MAX]
    subjects = [_subject(stream, info, sequence) for sequence in lost]
    _write_acks(link, subjects, _LONG_NAK)  # They may be in the row already, before what is older.
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
    if last[0]:  # What was naks before is known when this is answered.
        await link.request(*last)
    sequences, late = (np.unique(np.concatenate(each)) for each in (immediate, delayed))
    return with_return_note(info, sequences, late) if sequences.size or late.size else None


async def transfer_messages(
    link: NatsConnection, stream: str, name: str, unacked: UnackedOnExit
) -> None:
    """Have a consumer of this name, which is new, go on with what another one has sent: each
    message is acknowledged there, or immediate back with its delay_seconds. Raises BusConnectionError."""
    most = unacked.highest - int(unacked.sequences[unacked.delays >= 0.0][0]) + 1
    last: tuple[str, bytes] | None = None
    while most > 0:
        batch = min(most, _BATCH_MAX)
        found = await link.request_many(
            f"{jetstream_codec.API}CONSUMER.MSG.NEXT.{stream}.{name}",
            jetstream_codec.pull_request(batch=batch),
            max_messages=batch,
        )
        count = sum(messages.count for messages in found)
        for messages in found:
            last = _ack_or_return(link, messages, unacked)
        most -= count
        if count < batch:
            break
    if last is not None:  # What was naks before is known when this is answered.
        await link.request(*last)


def _ack_or_return(
    link: NatsConnection, messages: ReceivedMessages, unacked: UnackedOnExit
) -> tuple[str, bytes]:
    """Acknowledge or give back each of these. Returns what was naks last."""
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
    """Have what was immediate back to a consumer come first, whatever was purged since; of one that is
    nobody's, all that it delays for. Returns by which it is told of each of these. Raises
    BusConnectionError."""
    sequences = unacked_sequences(info) if is_unheld else returned_sequences(info)
    subjects = {sequence: _subject(stream, info, sequence) for sequence in sequences}
    if subjects:
        _write_acks(link, list(subjects.values()), jetstream_codec.NAK)
        await link.request(subjects[sequences[-1]].decode(), jetstream_codec.NAK)
    return subjects


def _subject(stream: str, info: dict[str, Any], sequence: int) -> bytes:
    """By which a consumer is told of a message of the stream that it has sent, whenever it was."""
    sent = api.delivery_count(info)
    return f"$JS.ACK.{stream}.{info['name']}.1.{sequence}.{sent}.0.0".encode()


def _write_acks(link: NatsConnection, subjects: list[bytes], ack: bytes) -> None:
    link.core.write(b"".join([encode.encode_pub(subject, ack) for subject in subjects]))
