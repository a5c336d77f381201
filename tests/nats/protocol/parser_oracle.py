"""Parser of NATS clients' bytes that handles one byte at a time, as nats-server does.

Independent of the parser under test. Results are plain tuples; a violation is the last one.

    ("PUB", subject, reply, size, body)         ("HPUB", subject, reply, header size, size, body)
    ("SUB", subject, queue, sid)                ("UNSUB", sid, max)
    ("CONNECT", options)  ("PING",)  ("PONG",)  ("CLOSE", error text, closed reason)
"""

from __future__ import annotations

import json

VERBS = {b"PUB", b"HPUB", b"SUB", b"UNSUB", b"-ERR", b"CONNECT", b"INFO", b"PING", b"PONG", b"+OK"}
BLANKS = b" \t"


class ClosedError(Exception):
    """The connection is closed; nothing more is parsed."""

    def __init__(self, error_text: str, closed: str = "Protocol Violation") -> None:
        super().__init__(error_text)
        self.error_text = error_text
        self.closed = closed


class Oracle:
    def __init__(self, *, max_payload: int, max_control_line: int, headers: bool) -> None:
        self.max_payload = max_payload
        self.max_control_line = max_control_line
        self.headers = headers
        self.found: list[tuple[object, ...]] = []
        self.state = "verb"
        self.verb = b""
        self.line = bytearray()
        self.message: tuple[bytes, ...] = ()
        self.bytes_left = 0
        self.body = bytearray()

    def feed(self, data: bytes) -> None:
        for byte in data:
            if self.state == "closed":
                return
            try:
                getattr(self, f"on_{self.state}")(byte)
            except ClosedError as violation:
                self.found.append(("CLOSE", violation.error_text, violation.closed))
                self.state = "closed"

    def on_verb(self, byte: int) -> None:
        if self.verb in (b"PUB", b"HPUB", b"SUB", b"UNSUB", b"-ERR"):
            if byte not in BLANKS:
                raise ClosedError("Unknown Protocol Operation")
            self.state = "blanks"
            return
        self.verb += bytes([byte]).upper()
        if not any(verb.startswith(self.verb) for verb in VERBS):
            raise ClosedError("Unknown Protocol Operation")
        if self.verb in (b"CONNECT", b"INFO"):
            self.state = "blanks"
        elif self.verb in (b"PING", b"PONG", b"+OK"):
            self.state = "nothing"

    def on_nothing(self, byte: int) -> None:
        """Ignore everything up to the LF."""
        if byte == 0x0A:
            if self.verb != b"+OK":
                self.found.append((self.verb.decode(),))
            self.begin()

    def on_blanks(self, byte: int) -> None:
        if byte not in BLANKS:
            self.line = bytearray([byte])
            self.state = "line"

    def on_line(self, byte: int) -> None:
        if byte == 0x0A:
            line = bytes(self.line)
            if b"\r" in line[1:]:
                line = line[:-1]
            if len(line) > self.max_control_line:
                raise ClosedError("maximum control line exceeded", "Maximum Control Line Exceeded")
            getattr(self, "do_" + self.verb.decode().strip("-").lower())(line)
        else:
            self.line.append(byte)
            # A CR at the end does not count.
            if len(self.line) - (b"\r" in self.line[1:]) > self.max_control_line:
                raise ClosedError("maximum control line exceeded", "Maximum Control Line Exceeded")

    def on_body(self, byte: int) -> None:
        self.body.append(byte)
        self.bytes_left -= 1
        if self.bytes_left == 0:
            self.state = "cr"

    def on_cr(self, byte: int) -> None:
        if byte != 0x0D:
            raise ClosedError("Unknown Protocol Operation")
        self.state = "lf"

    def on_lf(self, byte: int) -> None:
        if byte != 0x0A:
            raise ClosedError("Unknown Protocol Operation")
        self.found.append((self.verb.decode(), *self.message, bytes(self.body)))
        self.begin()

    def begin(self) -> None:
        self.state, self.verb = "verb", b""

    def do_pub(self, line: bytes) -> None:
        arguments = split(line, BLANKS)
        if len(arguments) not in (2, 3) or size(arguments[-1]) < 0:
            raise ClosedError("")
        reply = arguments[1] if len(arguments) == 3 else b""
        self.message = (arguments[0], reply, arguments[-1])
        self.expect(size(arguments[-1]))

    def do_hpub(self, line: bytes) -> None:
        arguments = split(line, BLANKS)
        if not self.headers or len(arguments) not in (3, 4):
            raise ClosedError("")
        if not 0 <= size(arguments[-2]) <= size(arguments[-1]):
            raise ClosedError("")
        reply = arguments[1] if len(arguments) == 4 else b""
        self.message = (arguments[0], reply, arguments[-2], arguments[-1])
        self.expect(size(arguments[-1]))

    def expect(self, count: int) -> None:
        if count > self.max_payload:
            raise ClosedError("Maximum Payload Violation", "Maximum Message Payload Exceeded")
        self.bytes_left, self.body = count, bytearray()
        self.state = "body" if count else "cr"

    def do_sub(self, line: bytes) -> None:
        arguments = split(line, b" \t\r\n")
        if len(arguments) not in (2, 3):
            raise ClosedError("")
        self.found.append(
            ("SUB", arguments[0], arguments[1] if len(arguments) == 3 else b"", arguments[-1])
        )
        self.begin()

    def do_unsub(self, line: bytes) -> None:
        arguments = split(line, b" \t\r\n")
        if len(arguments) not in (1, 2):
            raise ClosedError("")
        self.found.append(
            ("UNSUB", arguments[0], max(0, size(arguments[1])) if len(arguments) == 2 else 0)
        )
        self.begin()

    def do_connect(self, line: bytes) -> None:
        self.found.append(("CONNECT", line))
        self.begin()

    def do_info(self, line: bytes) -> None:
        try:
            content = json.loads(line.decode("utf-8", "replace"))
        except ValueError:
            content = 0
        if content is not None and not isinstance(content, dict):
            raise ClosedError("")
        self.begin()

    def do_err(self, line: bytes) -> None:
        raise ClosedError("", "Parse Error")


def split(line: bytes, separators: bytes) -> list[bytes]:
    arguments, argument = [], b""
    for byte in line:
        if byte in separators:
            arguments += [argument] if argument else []
            argument = b""
        else:
            argument += bytes([byte])
    return arguments + ([argument] if argument else [])


def size(argument: bytes) -> int:
    """Return the size; -1 if it is invalid."""
    return (
        int(argument)
        if len(argument) <= 9 and argument and all(c in b"0123456789" for c in argument)
        else -1
    )
