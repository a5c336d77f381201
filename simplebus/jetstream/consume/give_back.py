"""What a door gives back to a consumer that others may have, for whoever comes next (trio).

Rule 1: what is given back comes again first, and in order. A server that has a request of somebody
who is gone would put the first message behind the others: it is asked something before that, and
forgets the request.
Rule 2: what was on its way to nobody is given back as well, where all that the consumer has sent
before came to this door.
Rule 3: a server forgets what was given back when messages in front of it are purged, and sends it
after the ack wait, behind what is newer. So the consumer says what that was, and how many messages
it had sent by then; who finds that it has sent none since gives the same back once more.

Rule 4: what a dead door had comes first as well, where nobody says that he has it: all that the
consumer waits for is given back, but for what is to pause.

    simplebus-left    7 4-5 9-9    7 sent so far; 4, 5 and 9 of the stream were given back
    simplebus-pause   6-8          and 6 to 8, not to be sent before some time has passed
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

BURIED = float("inf")
"""As a pause: its dead letter is on its way."""


@dataclass(frozen=True, slots=True)
class Owed:
    """What a door that goes gives back of a consumer that was its alone."""

    sequences: Integers
    """Messages of the stream, ascending: shape (n,)."""
    waits: Times
    """For how many seconds none of them is to be sent; less than 0 for one that is done with."""
    highest: int
    """The last one that was sent to this door,"""
    sent_to: int
    """or to somebody before."""

    def when_buried(self, is_stored: bool) -> Owed | None:
        """The same when it is known whether the dead letters are stored of what is being buried:
        who comes next has it otherwise. None for nothing."""
        waits = np.where(self.waits == BURIED, -1.0 if is_stored else 0.0, self.waits)
        return replace(self, waits=waits) if (waits >= 0.0).any() else None


_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before it is said again; after that it comes by itself."""


class Awaited:
    """Of one position."""

    def __init__(self, subjects: dict[int, bytes]) -> None:
        """`subjects`: by which the consumer is told of each message of the stream, in order."""
        self._subjects = dict(subjects)
        self._since: float | None = None
        """Since when nothing of it has come that could have."""
        self._tries = 0

    def came(self, sequences: Integers) -> None:
        """These messages of the stream have come."""
        if not self._subjects:
            return
        before = len(self._subjects)
        for sequence in sequences.tolist():
            self._subjects.pop(sequence, None)
        if len(self._subjects) < before:
            self._since = None

    def late(self, now: float, *, is_owed: bool) -> bytes:
        """What is to be said now; `is_owed` says whether the consumer was asked for messages."""
        if not (self._subjects and is_owed):
            self._since = None
            return b""
        if self._since is None:
            self._since = now
        if now - self._since < _PAUSES[self._tries]:
            return b""
        said = [
            encode.encode_pub(subject, jetstream_codec.NAK) for subject in self._subjects.values()
        ]
        self._since, self._tries = now, self._tries + 1
        if self._tries == len(_PAUSES):
            self._subjects.clear()
        return b"".join(said)


LEFT, PAUSE = "simplebus-left", "simplebus-pause"
RETURN_MAX = 16 * 1024
"""Of more messages it is not said that they were given back."""
_BATCH_MAX = 4096
_RUNS_MAX = 256
_NOTE = re.compile(r"([0-9]{1,18})((?: [0-9]{1,18}-[0-9]{1,18})+)")
_RUNS = re.compile(r"[0-9]{1,18}-[0-9]{1,18}(?: [0-9]{1,18}-[0-9]{1,18})*")
_NOTE_CHARACTERS_MAX = 64 * _RUNS_MAX
_NONE: Integers = np.empty(0, np.int64)
_ASIDE = jetstream_codec.nak_payload(30.0)
"""What has a server take a message out of the row of those that are to come again."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """What a position leaves that is nobody's at this door any more."""

    messages: list[tuple[ReceivedMessages, float]]
    """Those that are not acknowledged, and for how many seconds they are not to be sent."""
    known: tuple[int, int] | None = None
    """How many messages the consumer has sent by now and the last one of the stream among them, as
    far as this door knows; None where some went elsewhere."""


def with_note(
    info: dict[str, Any], sequences: Integers, paused: Integers = _NONE
) -> dict[str, Any]:
    """How a consumer is configured that says that these messages were given back, and those with
    pauses: ascending, shape (n,)."""
    config: dict[str, Any] = info["config"]
    metadata = {**(config.get("metadata") or {})}
    for key in (LEFT, PAUSE):
        metadata.pop(key, None)
    if sequences.size:
        metadata[LEFT] = f"{api.delivery_count(info)} {_runs(sequences)}"
    if paused.size:
        metadata[PAUSE] = _runs(paused)
    return {**config, "metadata": metadata}


def _runs(sequences: Integers) -> str:
    sequences = sequences[:RETURN_MAX]
    edges = np.flatnonzero(np.diff(sequences) != 1) + 1
    return " ".join(f"{run[0]}-{run[-1]}" for run in np.split(sequences, edges)[:_RUNS_MAX])


def _sequences(runs: str) -> list[int]:
    found: list[int] = []
    for run in runs.split():
        first, last = map(int, run.split("-"))
        found += range(first, min(last + 1, first + RETURN_MAX - len(found)))
    return found


def noted(info: dict[str, Any]) -> list[int]:
    """What was given back to a consumer that has sent nothing since."""
    match = _NOTE.fullmatch(_said(info, LEFT))
    if match is None or int(match[1]) != api.delivery_count(info):
        return []
    return _sequences(match[2])


def awaited(info: dict[str, Any]) -> list[int]:
    """All that a consumer may wait for, but for what pauses."""
    pauses = _RUNS.fullmatch(_said(info, PAUSE))
    paused = set(_sequences(pauses[0])) if pauses is not None else ()
    sent = range(api.ack_floor(info), api.last_delivered(info) + 1)[:RETURN_MAX]
    return [sequence for sequence in sent if sequence not in paused]


def _said(info: dict[str, Any], key: str) -> str:
    metadata = info.get("config", {}).get("metadata") or {}
    return str(metadata.get(key, ""))[:_NOTE_CHARACTERS_MAX]


async def give_back(
    link: NatsConnection, stream: str, name: str, leaving: Leaving
) -> dict[str, Any] | None:
    """Give messages back to a consumer, and what it has sent to nobody. Returns how it is to be
    configured from now on; None for as it is. Raises BusConnectionError and JetStreamError."""
    info = await link.api_request(f"CONSUMER.INFO.{stream}.{name}")
    lost = range(0)
    if leaving.known is not None and not info.get("num_waiting"):  # Else they may be another's.
        count, highest = leaving.known
        if api.delivery_count(info) > count:
            first, last_sent = api.ack_floor(info), api.last_delivered(info)
            lost = range(max(first, highest + 1), last_sent + 1)[:RETURN_MAX]
    subjects = [_subject(stream, info, sequence) for sequence in lost]
    _say(link, subjects, _ASIDE)  # They may be in the row already, before what is older.
    given, paused = [np.array(lost, np.int64)], [_NONE]
    last = ("", b"")
    for messages, pause in leaving.messages:
        word = jetstream_codec.nak_payload(pause)
        link.core.write(jetstream_codec.encode_acks_in_order(messages, word))
        last = messages.reply(-1).decode("latin-1"), word
        (paused if pause > 0 else given).append(
            jetstream_codec.parse_deliveries(messages).sequences
        )
    _say(link, subjects, jetstream_codec.NAK)
    if subjects:
        last = subjects[-1].decode(), jetstream_codec.NAK
    if last[0]:  # What was said before is known when this is answered.
        await link.request(*last)
    sequences, late = (np.unique(np.concatenate(each)) for each in (given, paused))
    return with_note(info, sequences, late) if sequences.size or late.size else None


async def pass_on(link: NatsConnection, stream: str, name: str, owed: Owed) -> None:
    """Have a consumer of this name, which is new, go on with what another one has sent: each
    message is acknowledged there, or given back with its pause. Raises BusConnectionError."""
    most = owed.highest - int(owed.sequences[owed.waits >= 0.0][0]) + 1
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
            last = _say_each(link, messages, owed)
        most -= count
        if count < batch:
            break
    if last is not None:  # What was said before is known when this is answered.
        await link.request(*last)


def _say_each(link: NatsConnection, messages: ReceivedMessages, owed: Owed) -> tuple[str, bytes]:
    """Acknowledge or give back each of these. Returns what was said last."""
    sequences = jetstream_codec.parse_deliveries(messages).sequences
    at = np.minimum(owed.sequences.searchsorted(sequences), owed.sequences.size - 1)
    waits = np.where(owed.sequences[at] == sequences, owed.waits[at], -1.0)
    waits[sequences > owed.highest] = 0.0
    word = b""
    for begin, end in pairwise([0, *(np.flatnonzero(np.diff(waits)) + 1), waits.size]):
        word = (
            jetstream_codec.ACK
            if waits[begin] < 0
            else jetstream_codec.nak_payload(float(waits[begin]))
        )
        link.core.write(
            jetstream_codec.encode_acks_in_order(messages.pick(slice(begin, end)), word)
        )
    return messages.reply(-1).decode("latin-1"), word


async def give_again(
    link: NatsConnection, stream: str, info: dict[str, Any], *, is_nobodys: bool = False
) -> dict[int, bytes]:
    """Have what was given back to a consumer come first, whatever was purged since; of one that is
    nobody's, all that it waits for. Returns by which it is told of each of these. Raises
    BusConnectionError."""
    sequences = awaited(info) if is_nobodys else noted(info)
    subjects = {sequence: _subject(stream, info, sequence) for sequence in sequences}
    if subjects:
        _say(link, list(subjects.values()), jetstream_codec.NAK)
        await link.request(subjects[sequences[-1]].decode(), jetstream_codec.NAK)
    return subjects


def _subject(stream: str, info: dict[str, Any], sequence: int) -> bytes:
    """By which a consumer is told of a message of the stream that it has sent, whenever it was."""
    sent = api.delivery_count(info)
    return f"$JS.ACK.{stream}.{info['name']}.1.{sequence}.{sent}.0.0".encode()


def _say(link: NatsConnection, subjects: list[bytes], word: bytes) -> None:
    link.core.write(b"".join([encode.encode_pub(subject, word) for subject in subjects]))
