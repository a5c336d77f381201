"""Parser of single lines of a NATS server.

Verbs are case-insensitive, words are separated by blanks, lines and payloads end with CR LF. Errors
are raised as early as possible: for an unknown verb before its line ends, for a size before its
payload.
"""

from __future__ import annotations

import re

import msgspec

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.nats.client.events import (
    ServerError,
    ServerEvent,
    ServerInfo,
    ServerPing,
    ServerPong,
)

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
_VERB_PREFIXES = frozenset(verb[:n] for verb in _VERBS for n in range(len(verb)))
_QUOTED_BYTES_MAX = 60
_CR, _LF = b"\r\n"

MessageRow = tuple[int, int, int, int, int, int, int, int]
"""A message in the columns of `ReceivedMessages`."""


def _shorten(line: bytes) -> str:
    more = f"… ({len(line)} bytes)" if len(line) > _QUOTED_BYTES_MAX else ""
    return f"{line[:_QUOTED_BYTES_MAX]!r}{more}"


class ClientLineParser:
    """Parser of one line; `read` leaves its results in attributes."""

    __slots__ = ("_max_message_bytes", "event", "required_bytes", "row")

    def __init__(self, max_message: int) -> None:
        self._max_message_bytes = max_message
        self.event: ServerEvent | None = None
        """Event of the parsed line; None if the line is a message, +OK or incomplete."""
        self.row: MessageRow | None = None
        """The message, if the parsed line is one."""
        self.required_bytes = 0
        """Length of the incomplete message, from the start of its line; 0 if unknown."""

    def read(self, raw: bytes, offset: int, last: int) -> int:
        """Parse the line that starts at `offset`; the received bytes end at `last`.

        Returns the offset after the line and its payload, or -1 if they are incomplete.

        Raises:
            RemoteProtocolError: The line is invalid.
        """
        self.event = self.row = None
        self.required_bytes = 0
        match = _MESSAGE.match(raw, offset, last)
        if match is not None:
            return self._parse_message(raw, offset, last, match, 0, int(match[4]))
        match = _WITH_HEADERS.match(raw, offset, last)
        if match is not None:
            return self._parse_message(raw, offset, last, match, int(match[4]), int(match[5]))
        return self._parse_other_line(raw, offset, last)

    def _parse_message(
        self, raw: bytes, offset: int, last: int, match: re.Match[bytes], headers: int, size: int
    ) -> int:
        if headers > size:
            raise _invalid_line(match[0], "the header size is larger than the total size")
        if size > self._max_message_bytes:
            raise RemoteProtocolError(
                Reason.FRAME_TOO_LONG,
                f"the server sent {_shorten(match[0])}: a message of {size} bytes; at most "
                f"{self._max_message_bytes} are accepted",
            )
        body = match.end()
        end = body + size
        if end + 2 > last:
            self.required_bytes = end + 2 - offset
            return -1
        if raw[end] != _CR or raw[end + 1] != _LF:
            raise _invalid_line(
                match[0], f"{raw[end : end + 2]!r} follows its {size} bytes, expected CR LF"
            )
        reply, reply_end = match.span(3)
        if reply < 0:
            reply = reply_end = body
        subject, subject_end = match.span(1)
        self.row = (
            int(match[2]), subject, subject_end, reply, reply_end, body, body + headers, end
        )  # fmt: skip
        return end + 2

    def _parse_other_line(self, raw: bytes, offset: int, last: int) -> int:
        """Parse a line that is not a message."""
        feed = raw.find(b"\r\n", offset, last)
        if feed < 0:
            verb = re.split(rb"[ \t\r]", raw[offset : min(last, offset + 8)], maxsplit=1)[0].upper()
            if verb not in _VERB_PREFIXES and verb not in _VERBS:
                raise _invalid_line(raw[offset:last], "expected a verb of the NATS protocol")
            if last - offset > LINE_BYTES_MAX:
                raise RemoteProtocolError(
                    Reason.FRAME_TOO_LONG,
                    f"the server sent a line that is longer than {LINE_BYTES_MAX} bytes: "
                    f"{_shorten(raw[offset:last])}",
                )
            return -1
        line = raw[offset:feed]
        fields = line.split(None, 1)
        match fields[0].upper() if fields and line[:1] not in b" \t" else b"":
            case b"PING":
                self.event = ServerPing()
            case b"PONG":
                self.event = ServerPong()
            case b"+OK":
                pass
            case b"-ERR":
                self.event = ServerError(_strip_quotes(fields[1] if len(fields) > 1 else b""))
            case b"INFO":
                self.event = _parse_info(fields[1] if len(fields) > 1 else b"")
            case b"MSG" | b"HMSG":
                raise _invalid_line(line, "expected: MSG subject sid [reply] size")
            case _:
                raise _invalid_line(line, "expected a verb of the NATS protocol")
        return feed + 2


def _invalid_line(line: bytes, problem: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        Reason.UNKNOWN_TYPE, f"the server sent {_shorten(line.rstrip())}: {problem}"
    )


def _strip_quotes(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip().strip("'")


def _parse_info(text: bytes) -> ServerInfo:
    try:
        return msgspec.json.decode(text, type=ServerInfo)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _invalid_line(b"INFO " + text, f"expected a JSON object ({error})") from None
