"""Parser of single commands that accepts what nats-server accepts.

A line ends with LF. If a byte after the first is CR, the last byte of the line is dropped, so CR LF
works. Errors are raised as early as possible: for an unknown verb before its line ends, for a size
before its payload arrives.

    PUB a.b 5 ␍␊ hello ␍␊
    ↑   ↑        ↑     ↑
    │   │        body  end
    │   arguments_start
    offset

`required_bytes` is the least length that an incomplete command can have, from `offset` on.
"""

from __future__ import annotations

import re

import msgspec

from simplebus.core.errors import Reason
from simplebus.nats.errors import NatsError, unknown_operation
from simplebus.nats.limits import SIZE_DIGITS_MAX, NatsLimits
from simplebus.nats.protocol.events import ClientEvent, Connect, Ping, Pong, Pub, Sub, Unsub

# Common forms of PUB and HPUB.
_PUB = re.compile(
    rb"[Pp][Uu][Bb][ \t]++([^ \t\r\n]++)[ \t]++(?:([^ \t\r\n]++)[ \t]++)?+([0-9]{1,9}+)\r?\n"
)
_HPUB = re.compile(
    rb"[Hh][Pp][Uu][Bb][ \t]++([^ \t\r\n]++)[ \t]++(?:([^ \t\r\n]++)[ \t]++)?"
    rb"([0-9]{1,9}+)[ \t]++([0-9]{1,9}+)\r?\n"
)
_VERB = re.compile(rb"(?i:(PUB|HPUB|SUB|UNSUB|-ERR)[ \t]++|(CONNECT|INFO)[ \t]*+|(PING|PONG|\+OK))")
_FREE_TEXT_GROUP, _NO_ARGUMENTS_GROUP = 2, 3  # Groups of `_VERB` by the arguments of the verb.
_VERBS = (b"PUB ", b"HPUB ", b"SUB ", b"UNSUB ", b"-ERR ", b"CONNECT", b"INFO", b"PING", b"PONG")
_VERB_PREFIXES = frozenset(verb[:n] for verb in (*_VERBS, b"+OK") for n in range(len(verb)))
_SIZE = re.compile(rb"[0-9]{1,%d}" % SIZE_DIGITS_MAX)
_PUB_WORDS = re.compile(rb"[^ \t]+")
_SUB_WORDS = re.compile(rb"[^ \t\r\n]+")
_CR, _LF = b"\r\n"
_QUOTED_BYTES_MAX = 60
_VIOLATION_REASON = "Protocol Violation"


def _shorten(line: bytes | bytearray) -> str:
    more = f"… ({len(line)} bytes)" if len(line) > _QUOTED_BYTES_MAX else ""
    return f"{bytes(line[:_QUOTED_BYTES_MAX])!r}{more}"


def _protocol_violation(sentence: str) -> NatsError:
    """Return an error for which nats-server closes the connection without an `-ERR` line."""
    return NatsError(Reason.BAD_REQUEST, sentence, closed_reason=_VIOLATION_REASON)


class LineParser:
    """Parser of one command; `parse_command` leaves its results in attributes."""

    __slots__ = ("_limits", "accepts_headers", "event", "required_bytes", "shortened_tail")

    def __init__(self, limits: NatsLimits) -> None:
        self._limits = limits
        self.accepts_headers = False
        """True if HPUB is accepted."""
        self.event: ClientEvent | None = None
        """Event of the last command; None for a command without effect."""
        self.required_bytes = 0
        """Least length of the incomplete command, in bytes from its start; 0 if unknown."""
        self.shortened_tail = b""
        """Equivalent shorter form of an incomplete command to keep; empty for none."""

    def pop_event(self) -> ClientEvent | None:
        """Return and drop the event, which may hold much memory."""
        event, self.event = self.event, None
        return event

    def parse_command(self, raw: bytearray, start: int, last: int, searched: int = 0) -> int:
        """Parse the command in raw[start:last], which is not empty.

        Args:
            raw: Buffer.
            start: Offset of the command.
            last: End of the received bytes.
            searched: Number of bytes from `start` on that are known to contain no LF behind the
                verb.

        Returns:
            Offset of the end of the command; -1 if it is incomplete.

        Raises:
            NatsError: The command is invalid.
        """
        self.required_bytes, self.shortened_tail = 0, b""
        if not searched:
            if raw[start] not in b"Hh":
                match = _PUB.match(raw, start, last)
                if match is not None:
                    body = match.end()
                    if body - start <= self._limits.max_control_line:
                        subject, reply, size = match.groups(b"")
                        message = Pub(subject, reply, size, b"", 0, _NO_BODY)
                        return self._parse_body(raw, start, body, last, message)
            elif self.accepts_headers:
                match = _HPUB.match(raw, start, last)
                if match is not None and match.end() - start <= self._limits.max_control_line:
                    subject, reply, header_size, size = match.groups(b"")
                    header_bytes = int(header_size)
                    if header_bytes <= int(size):
                        message = Pub(subject, reply, size, header_size, header_bytes, _NO_BODY)
                        return self._parse_body(raw, start, match.end(), last, message)
        return self._parse_any_command(raw, start, last, searched)

    def _parse_any_command(self, raw: bytearray, offset: int, last: int, searched: int) -> int:
        verb = _VERB.match(raw, offset, last)
        if verb is None:
            if bytes(raw[offset : min(last, offset + 8)]).upper() not in _VERB_PREFIXES:
                raise unknown_operation(
                    f"received {_shorten(raw[offset:last])}, expected a NATS protocol verb"
                )
            return -1
        arguments_start = verb.end()
        if verb.lastindex == _NO_ARGUMENTS_GROUP:
            end = raw.find(b"\n", arguments_start, last) + 1
            name = verb[_NO_ARGUMENTS_GROUP].upper()
            self.event = Ping() if name == b"PING" else Pong() if name == b"PONG" else None
            self.shortened_tail = verb[_NO_ARGUMENTS_GROUP]
            return end or -1
        if arguments_start == last:
            name = verb[verb.lastindex or 0]
            self.shortened_tail = name if verb.lastindex == _FREE_TEXT_GROUP else name + b" "
            return -1
        line_feed = raw.find(b"\n", max(arguments_start + 1, offset + searched), last)
        line_bytes_max = self._limits.max_control_line
        if line_feed < 0:
            line_bytes = last - arguments_start
            if line_bytes > line_bytes_max:
                has_cr = raw.find(b"\r", arguments_start + 1, last) > 0
                if line_bytes - has_cr > line_bytes_max:
                    raise self._line_too_long(raw[offset:last], line_bytes)
            return -1
        line = bytes(raw[arguments_start:line_feed])
        if line.find(b"\r", 1) > 0:
            line = line[:-1]
        if len(line) > line_bytes_max:
            raise self._line_too_long(line, len(line))
        return self._parse_arguments(
            verb[verb.lastindex or 0].upper(), line, raw, offset, line_feed + 1, last
        )

    def _parse_arguments(
        self, verb: bytes, line: bytes, raw: bytearray, offset: int, line_end: int, last: int
    ) -> int:
        """Parse the arguments of a verb. `line_end` is the offset after the LF of the line."""
        match verb:
            case b"PUB" | b"HPUB":
                message = self._parse_pub(line) if verb == b"PUB" else self._parse_hpub(line)
                return self._parse_body(raw, offset, line_end, last, message)
            case b"SUB":
                fields = _SUB_WORDS.findall(line)
                if len(fields) not in (2, 3):
                    raise _protocol_violation(
                        f"received SUB {_shorten(line)}, expected: subject [queue] sid"
                    )
                self.event = Sub(fields[0], fields[1] if len(fields) == 3 else b"", fields[-1])
            case b"UNSUB":
                fields = _SUB_WORDS.findall(line)
                if len(fields) not in (1, 2):
                    raise _protocol_violation(
                        f"received UNSUB {_shorten(line)}, expected: sid [max]"
                    )
                is_size = len(fields) == 2 and _SIZE.fullmatch(fields[1])
                self.event = Unsub(fields[0], int(fields[1]) if is_size else 0)
            case b"CONNECT":
                self.event = Connect(line)
            case b"INFO":
                self.event = None
                _check_info(line)
            case _:
                raise NatsError(
                    Reason.BAD_REQUEST,
                    f"the client reported an error: {_shorten(line)}",
                    closed_reason="Parse Error",
                )
        return line_end

    def _parse_pub(self, line: bytes) -> Pub:
        fields = _PUB_WORDS.findall(line)
        if len(fields) not in (2, 3):
            raise _protocol_violation(
                f"received PUB {_shorten(line)}, expected: subject [reply] size"
            )
        if not _SIZE.fullmatch(fields[-1]):
            raise _protocol_violation(
                f"received PUB {_shorten(line)}, expected a size of 1 to 9 digits at its end"
            )
        return Pub(fields[0], fields[1] if len(fields) == 3 else b"", fields[-1], b"", 0, _NO_BODY)

    def _parse_hpub(self, line: bytes) -> Pub:
        if not self.accepts_headers:
            raise _protocol_violation(
                "received HPUB from a client that did not announce headers in CONNECT"
            )
        fields = _PUB_WORDS.findall(line)
        if len(fields) not in (3, 4):
            raise _protocol_violation(
                f"received HPUB {_shorten(line)}, expected: subject [reply] header-size size"
            )
        if not (_SIZE.fullmatch(fields[-2]) and _SIZE.fullmatch(fields[-1])):
            raise _protocol_violation(
                f"received HPUB {_shorten(line)}, expected two sizes of 1 to 9 digits at its end"
            )
        header_bytes = int(fields[-2])
        if header_bytes > int(fields[-1]):
            raise _protocol_violation(
                f"received HPUB {_shorten(line)}, expected a header size up to the total size"
            )
        reply = fields[1] if len(fields) == 4 else b""
        return Pub(fields[0], reply, fields[-1], fields[-2], header_bytes, _NO_BODY)

    def _parse_body(self, raw: bytearray, offset: int, body: int, last: int, message: Pub) -> int:
        """Parse the body of a message, which begins at raw[body]."""
        size = int(message.size)
        if size > self._limits.max_payload:
            raise NatsError(
                Reason.FRAME_TOO_LONG,
                f"a message on {_shorten(message.subject)} is {size} bytes long; "
                f"at most {self._limits.max_payload} are accepted",
                error_text="Maximum Payload Violation",
                closed_reason="Maximum Message Payload Exceeded",
            )
        end = body + size
        if end + 1 < last:
            if raw[end] == _CR and raw[end + 1] == _LF:
                message.body = memoryview(raw)[body:end]
                self.event = message
                return end + 2
        elif end == last - 1:
            if raw[end] == _CR:
                self.required_bytes = end + 2 - offset
                return -1
        else:
            self.required_bytes = end + 1 - offset
            return -1
        raise unknown_operation(
            f"a message on {_shorten(message.subject)} has a size of {size} bytes; "
            f"received {bytes(raw[end : min(end + 2, last)])!r} after them, expected CR LF"
        )

    def _line_too_long(self, line: bytes | bytearray, size: int) -> NatsError:
        return NatsError(
            Reason.FRAME_TOO_LONG,
            f"a line has {size} bytes after its verb: {_shorten(line)}; "
            f"at most {self._limits.max_control_line} are accepted",
            error_text="maximum control line exceeded",
            closed_reason="Maximum Control Line Exceeded",
        )


_NO_BODY = memoryview(b"")


def _check_info(line: bytes) -> None:
    """Raise NatsError unless the line is a JSON object or null. A client's INFO has no effect."""
    try:
        value = msgspec.json.decode(line.decode("utf-8", "replace"))
    except (msgspec.DecodeError, RecursionError):
        value = False
    if not (value is None or isinstance(value, dict)):
        raise _protocol_violation(f"received INFO {_shorten(line)}, expected a JSON object")
