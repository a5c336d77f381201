"""The lines in which messages are sent to a subscription: MSG and HMSG (NATS protocol).

Rule 1: what is written never shares memory with the receive buffer.
"""

from __future__ import annotations

from simplebus.nats.events import Mix, Positions, Pub, Run


def one(message: Pub, sid: bytes, *, headers: bool) -> bytes:
    """A message for a subscription with this sid, whose client takes `headers`, or does not."""
    body = message.body
    words = [message.subject, sid]
    if message.reply:
        words.append(message.reply)
    if message.header_size and headers:
        verb = b"HMSG "
        words += [message.header_size, message.size]
    elif message.header_size:
        verb, body = b"MSG ", body[message.header_bytes :]
        words.append(b"%d" % len(body))
    else:
        verb = b"MSG "
        words.append(message.size)
    return b"".join([verb, b" ".join(words), b"\r\n", body, b"\r\n"])


def run(messages: Run, sid: bytes, rows: Positions | None, *, headers: bool) -> bytes:
    """The same for those of the messages that are in these rows; None for all."""
    raise NotImplementedError


def mix(messages: Mix, sid: bytes, rows: Positions | None) -> bytes:
    """The same."""
    raise NotImplementedError
