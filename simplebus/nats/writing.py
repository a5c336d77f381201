"""The lines in which messages are sent to a subscription: MSG and HMSG (NATS protocol).

Rule 1: what is written never shares memory with the receive buffer.
Rule 2: a batch is written as its messages would be, one by one; per message nothing is done in the
interpreter where they are many.
"""

from __future__ import annotations

import numpy as np

from simplebus.nats.events import Mix, Positions, Pub, Run

_CR_LF = b"\r\n"
_VERB = b"MSG "


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


def mix(messages: Mix, sid: bytes, rows: Positions | None) -> bytes:
    """The same, also for a client without headers: there are none."""
    begins, ends, lines = messages.bounds[:-1], messages.bounds[1:], messages.subject_ends
    if rows is not None:
        begins, ends, lines = begins[rows], ends[rows], lines[rows]
    data, word = messages.data.data, b" " + sid
    pieces = [
        piece
        for begin, line, end in zip(begins.tolist(), lines.tolist(), ends.tolist(), strict=True)
        for piece in (_VERB, data[begin + len(_VERB) : line], word, data[line:end])
    ]
    return b"".join(pieces)
