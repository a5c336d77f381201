"""One line of a server at a time (NATS protocol): the plain way.

Rule 1: verbs are known in any case, the words of a message's line are parted by blanks, and a line
ends with CR LF; the payload is counted, and ends with CR LF as well.
Rule 2: what is wrong raises RemoteProtocolError, as soon as its bytes are there: an unknown verb
before its line ends, a size before its payload comes.
"""

from __future__ import annotations

import re

import msgspec

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.nats.client.events import Complaint, Event, Info, Ping, Pong

LINE_BYTES_MAX = 64 * 1024
"""Longest line accepted: INFO names every server of a cluster."""

_MESSAGE = re.compile(
    rb"(?i:MSG) ++([^ \n]++) ++([0-9]{1,18}) ++(?:([^ \n]++) ++)?([0-9]{1,9})\r\n"
)
_WITH_HEADERS = re.compile(
    rb"(?i:HMSG) ++([^ \n]++) ++([0-9]{1,18}) ++(?:([^ \n]++) ++)?"
    rb"([0-9]{1,9}) ++([0-9]{1,9})\r\n"
)
_VERBS = (b"MSG", b"HMSG", b"PING", b"PONG", b"+OK", b"-ERR", b"INFO")
_BEGINNINGS = frozenset(verb[:n] for verb in _VERBS for n in range(len(verb)))
_SHOWN_BYTES = 60
_CR, _LF = b"\r\n"

Row = tuple[int, int, int, int, int, int, int, int]
"""A message as the columns of `Messages` have it."""


def _shown(line: bytes) -> str:
    more = f"… ({len(line)} bytes)" if len(line) > _SHOWN_BYTES else ""
    return f"{line[:_SHOWN_BYTES]!r}{more}"


class Reader:
    """What `read` found, beside what it returns."""

    __slots__ = ("_most", "event", "need", "row")

    def __init__(self, max_message: int) -> None:
        self._most = max_message
        self.event: Event | None = None
        """What the line said, if it was no message and said anything."""
        self.row: Row | None = None
        """The message that it was."""
        self.need = 0
        """With fewer bytes than this, from its first one, a message cannot be read; 0 where that is
        not known."""

    def read(self, raw: bytes, at: int, last: int) -> int:
        """Where what begins at raw[at], before `last`, ends; -1 if it is not whole. Raises
        RemoteProtocolError."""
        self.event = self.row = None
        self.need = 0
        match = _MESSAGE.match(raw, at, last)
        if match is not None:
            return self._message(raw, at, last, match, 0, int(match[4]))
        match = _WITH_HEADERS.match(raw, at, last)
        if match is not None:
            return self._message(raw, at, last, match, int(match[4]), int(match[5]))
        return self._line(raw, at, last)

    def _message(
        self, raw: bytes, at: int, last: int, match: re.Match[bytes], headers: int, size: int
    ) -> int:
        if headers > size:
            raise _bad(match[0], "its headers are longer than all of it")
        if size > self._most:
            raise RemoteProtocolError(
                Reason.FRAME_TOO_LONG,
                f"the server sent {_shown(match[0])}: a message of {size} bytes; at most "
                f"{self._most} are accepted",
            )
        body = match.end()
        end = body + size
        if end + 2 > last:
            self.need = end + 2 - at
            return -1
        if raw[end] != _CR or raw[end + 1] != _LF:
            came = raw[end : end + 2]
            raise _bad(match[0], f"behind its {size} bytes came {came!r}, expected CR LF")
        reply, reply_end = match.span(3)
        if reply < 0:
            reply = reply_end = body
        subject, subject_end = match.span(1)
        self.row = (
            int(match[2]), subject, subject_end, reply, reply_end, body, body + headers, end
        )  # fmt: skip
        return end + 2

    def _line(self, raw: bytes, at: int, last: int) -> int:
        """Another line than that of a message."""
        feed = raw.find(b"\r\n", at, last)
        if feed < 0:
            verb = re.split(rb"[ \t\r]", raw[at : min(last, at + 8)], maxsplit=1)[0].upper()
            if verb not in _BEGINNINGS and verb not in _VERBS:
                raise _bad(raw[at:last], "expected a verb of the NATS protocol")
            if last - at > LINE_BYTES_MAX:
                raise RemoteProtocolError(
                    Reason.FRAME_TOO_LONG,
                    f"the server sent a line that is longer than {LINE_BYTES_MAX} bytes: "
                    f"{_shown(raw[at:last])}",
                )
            return -1
        line = raw[at:feed]
        words = line.split(None, 1)
        match words[0].upper() if words and line[:1] not in b" \t" else b"":
            case b"PING":
                self.event = Ping()
            case b"PONG":
                self.event = Pong()
            case b"+OK":
                pass
            case b"-ERR":
                self.event = Complaint(_unquoted(words[1] if len(words) > 1 else b""))
            case b"INFO":
                self.event = _info(words[1] if len(words) > 1 else b"")
            case b"MSG" | b"HMSG":
                raise _bad(line, "expected: MSG subject sid [reply] size")
            case _:
                raise _bad(line, "expected a verb of the NATS protocol")
        return feed + 2


def _bad(line: bytes, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        Reason.UNKNOWN_TYPE, f"the server sent {_shown(line.rstrip())}: {why}"
    )


def _unquoted(words: bytes) -> str:
    return words.decode("utf-8", "replace").strip().strip("'")


def _info(text: bytes) -> Info:
    try:
        return msgspec.json.decode(text, type=Info)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _bad(b"INFO " + text, f"expected a JSON object ({error})") from None
