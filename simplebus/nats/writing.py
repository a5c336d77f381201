"""The lines in which messages are sent to a subscription: MSG and HMSG (NATS protocol).

Rule 1: what is written never shares memory with the receive buffer.
Rule 2: a batch is written as its messages would be, one by one; per message nothing is done in the
interpreter where they are many.
"""

from __future__ import annotations

import numpy as np

from simplebus.core.frames import unaligned
from simplebus.nats.events import Mix, Positions, Pub, Run
from simplebus.nats.limits import MIX_MESSAGES_LEAST

_CR_LF = b"\r\n"
_VERB = b"MSG "
_VERB_WORD = np.uint32(int.from_bytes(_VERB, "little"))
# Bytes of which one may not occur in a batch, and then marks places in it: first those that no text
# has.
_MARKERS = [bytes([n]) for n in (0xFF, 0xFE, 0xC0, 0xC1, *range(0xF5, 0xFE), *range(0xF5))]


def one(message: Pub, sid: bytes, *, headers: bool) -> bytes:
    """A message for a subscription with this sid, whose client takes `headers`, or does not."""
    line, skipped = _line(message, sid, headers=headers)
    return b"".join([line, message.body[skipped:], _CR_LF])


def _line(message: Pub, sid: bytes, *, headers: bool) -> tuple[bytes, int]:
    """What stands in front of a message, and how much of its body is left out."""
    words, skipped = [message.subject, sid], 0
    if message.reply:
        words.append(message.reply)
    verb = _VERB
    if message.header_bytes and headers:
        verb = b"HMSG "
        words += [message.header_size, message.size]
    elif message.header_bytes:
        skipped = message.header_bytes
        words.append(b"%d" % (len(message.body) - skipped))
    else:
        words.append(message.size)
    return verb + b" ".join(words) + _CR_LF, skipped


def run(messages: Run, sid: bytes, rows: Positions | None, *, headers: bool) -> memoryview:
    """The same for those of the messages that are in these rows; None for all."""
    line, skipped = _line(messages.head, sid, headers=headers)
    bodies = messages.rows[:, messages.body_at + skipped :]
    if rows is not None:
        bodies = bodies[rows]
    written = np.empty((len(bodies), len(line) + bodies.shape[1]), np.uint8)
    written[:, : len(line)] = np.frombuffer(line, np.uint8)
    written[:, len(line) :] = bodies
    return written.reshape(-1).data


def mix(messages: Mix, sid: bytes, rows: Positions | None) -> bytes | bytearray:
    """The same, also for a client without headers: there are none."""
    if rows is not None and len(rows) < MIX_MESSAGES_LEAST:
        return _few(messages, sid, rows)
    text, begins, words = _taken(messages, rows)
    data = np.frombuffer(text, np.uint8)
    unaligned(data, _VERB_WORD.dtype)[begins] = _VERB_WORD
    for marker in _MARKERS:
        if text.find(marker) < 0:
            data[words] = marker[0]
            return text.replace(marker, b" " + sid + b" ")
    view, ends = memoryview(text), words.tolist()
    pieces = [view[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    return (b" " + sid).join(pieces)


def _few(messages: Mix, sid: bytes, rows: Positions) -> bytes:
    """One by one."""
    data, word, size = messages.data.data, b" " + sid, len(_VERB)
    bounds, lines = messages.bounds, messages.subject_ends
    pieces: list[bytes | memoryview] = []
    for begin, line, end in zip(
        bounds[rows].tolist(), lines[rows].tolist(), bounds[rows + 1].tolist(), strict=True
    ):
        pieces += (_VERB, data[begin + size : line], word, data[line:end])
    return b"".join(pieces)


def _taken(messages: Mix, rows: Positions | None) -> tuple[bytearray, Positions, Positions]:
    """A copy of these messages; where in it each begins, and where its subject ends."""
    bounds, words = messages.bounds, messages.subject_ends
    if rows is None:
        return bytearray(messages.data.data), bounds[:-1], words
    begins, ends = bounds[rows], bounds[rows + 1]
    lengths = ends - begins
    moved = np.cumsum(lengths)
    moved -= lengths
    # Messages that lie one behind the other are copied together.
    gaps = np.flatnonzero(rows[1:] != rows[:-1] + 1)
    first = [int(begins[0]), *begins[gaps + 1].tolist()]
    last = [*ends[gaps].tolist(), int(ends[-1])]
    data = messages.data.data
    text = bytearray().join([data[begin:end] for begin, end in zip(first, last, strict=True)])
    return text, moved, words[rows] - begins + moved
