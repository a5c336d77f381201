"""From a NATS client's bytes to events.

Rule 1: any chunking of the same bytes says the same.
Rule 2: the only error that escapes is NatsError, after the events before the offence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from simplebus.core.errors import Reason
from simplebus.core.limits import HEADROOM_BYTES
from simplebus.core.receive import ReceiveBuffer
from simplebus.nats.errors import NatsError
from simplebus.nats.events import Connect, Event, Ping, Pong, Pub, Sub, Unsub
from simplebus.nats.limits import SIZE_DIGITS_MAX, NatsLimits
from simplebus.nats.table import SubjectTable

_SIZE = re.compile(rb"[0-9]{1,%d}" % SIZE_DIGITS_MAX)


def _parse_error(sentence: str, says: str = "") -> NatsError:
    return NatsError(Reason.UNKNOWN_TYPE, sentence, says=says, closed="Parse Error")


class Parser:
    """Of one client."""

    def __init__(self, limits: NatsLimits, table: SubjectTable) -> None:
        self.headers = False
        """Whether the client may send headers."""
        self._limits = limits
        self._tail = bytearray()

    @property
    def tail_bytes(self) -> int:
        """Bytes of what is not whole yet."""
        return len(self._tail)

    def receive(self, buffer: ReceiveBuffer, count: int) -> Iterator[Event]:
        """Yield what `count` fresh bytes in the buffer complete. Raises NatsError."""
        self._tail += buffer.view[HEADROOM_BYTES : HEADROOM_BYTES + count]
        data, at = bytes(self._tail), 0
        self._tail.clear()
        while True:
            end = data.find(b"\n", at)
            line = data[at:] if end < 0 else data[at:end].removesuffix(b"\r")
            if len(line) > self._limits.max_control_line:
                raise _parse_error("a line is too long", "maximum control line exceeded")
            if end < 0:
                break
            verb, _, rest = line.replace(b"\t", b" ").partition(b" ")
            words = rest.split()
            after = end + 1
            match verb.upper():
                case b"PING":
                    yield Ping()
                case b"PONG":
                    yield Pong()
                case b"CONNECT":
                    yield Connect(rest)
                case b"SUB" if len(words) in (2, 3):
                    yield Sub(words[0], words[1] if len(words) == 3 else b"", words[-1])
                case b"UNSUB" if len(words) in (1, 2):
                    yield Unsub(words[0], int(words[1]) if len(words) == 2 else 0)
                case b"PUB" if len(words) in (2, 3) and _SIZE.fullmatch(words[-1]):
                    size = int(words[-1])
                    if size > self._limits.max_payload:
                        raise NatsError(
                            Reason.FRAME_TOO_LONG, "too long", says="Maximum Payload Violation"
                        )
                    if len(data) < after + size + 2:
                        break
                    body = memoryview(data)[after : after + size]
                    reply = words[1] if len(words) == 3 else b""
                    after += size + 2
                    yield Pub(words[0], reply, words[-1], b"", 0, body)
                case b"HPUB" if len(words) in (3, 4) and self.headers:
                    size = int(words[-1])
                    if len(data) < after + size + 2:
                        break
                    body = memoryview(data)[after : after + size]
                    reply = words[1] if len(words) == 4 else b""
                    after += size + 2
                    yield Pub(words[0], reply, words[-1], words[-2], int(words[-2]), body)
                case b"+OK" | b"INFO":
                    pass
                case _:
                    raise _parse_error(f"a line said {line!r}", "Unknown Protocol Operation")
            at = after
        self._tail += data[at:]
