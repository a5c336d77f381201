"""Talking to a broker without a socket: what peers say and hear, as bytes.

Rule 1: what is said is built, and what is heard is read, by oracles.py alone, so that a wrong
        encoder cannot hide behind a wrong decoder.
Rule 2: after everything that happens the broker's own invariants are checked.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from simplebus.core.broker.broker import Broker, Settings
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import PLAIN_FRAMES_MAX, Limits
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.session.session import Session
from simplebus.core.statistics import ClassStatistics
from tests.support.oracles import (
    AckOracle,
    build_frame,
    parse_frame,
    split_frames,
)
from tests.support.strategies import (
    ACK,
    CONNECT,
    HEARTBEAT,
    MESSAGE,
    SUBSCRIBE,
)

LARGE_BATCH_COUNT = 4 * PLAIN_FRAMES_MAX
"""Frames in a batch that takes the arrays' paths for certain."""


def connect(*class_ids: int) -> bytes:
    return build_frame(CONNECT, content=str(list(class_ids)).encode())


def subscribe(class_id: int) -> bytes:
    return build_frame(SUBSCRIBE, class_id=class_id)


def publish(class_id: int, *payloads: bytes) -> bytes:
    return b"".join(build_frame(MESSAGE, class_id=class_id, content=p) for p in payloads)


def ack(class_id: int, first: int, last: int) -> bytes:
    return build_frame(ACK, class_id=class_id, content=b"%d-%d" % (first, last))


def heartbeat() -> bytes:
    return build_frame(HEARTBEAT)


def numbered(count: int, *, size: int = 0, start: int = 0) -> list[bytes]:
    """That many payloads, no two alike, of at least `size` bytes."""
    return [(b"%d." % number).ljust(size, b"x") for number in range(start, start + count)]


def build_batch(*whole: bytes) -> FrameBatch:
    """These frames as a batch, as `split` would make it."""
    data = b"".join(whole)
    lengths = [len(frame) for frame in whole]
    stride = lengths[0] if len(set(lengths)) == 1 else 0
    bounds = np.cumsum([0, *lengths], dtype=np.int64)
    return FrameBatch(np.frombuffer(data, np.uint8), bounds, stride)


def window_state(window: AckWindow | AckOracle) -> tuple[int, list[tuple[int, int]]]:
    """Where a window stands: its floor, and what is not acknowledged."""
    return window.floor, window.unacked_ranges(window.floor, window.cursor)


class Version1Message(NamedTuple):
    """One message as a subscriber sees it."""

    class_id: int
    message_id: int
    timer_index: int
    payload: bytes


class BrokerHarness:
    """A broker, the buffer that all its peers share, and the beat."""

    def __init__(self, settings: Settings | None = None, **limits: float) -> None:
        assert settings is None or not limits
        self.broker = Broker(settings or Settings(limits=Limits(**limits)))  # type: ignore[arg-type]
        self.buffer = ReceiveBuffer()
        self.skips_checks = False
        """Whether the broker's own checks are left out."""

    def check_invariants(self) -> None:
        if not self.skips_checks:
            self.broker.check_invariants()

    def peer(self, *said: bytes) -> WirePeer:
        """A peer connects and says this."""
        peer = WirePeer(self, self.broker.open_session())
        peer.send(*said)
        return peer

    def tick(self, times: int = 1) -> list[tuple[Session, RemoteProtocolError]]:
        """Beat; returns who is to be cut off, over all the beats."""
        overdue = []
        for _ in range(times):
            overdue += self.broker.tick()
            self.check_invariants()
        return overdue

    def statistics(self, class_id: int) -> ClassStatistics:
        return self.broker.classes[class_id].statistics()


class WirePeer:
    """One connection."""

    def __init__(self, bus: BrokerHarness, session: Session) -> None:
        self.bus = bus
        self.session = session
        self.partial = b""
        """Heard, but not a whole frame yet."""

    def send(self, *said: bytes) -> None:
        """Send these bytes, each argument as one read of the server or more."""
        broker, buffer = self.bus.broker, self.bus.buffer
        for data in said:
            for at in range(0, len(data), len(buffer.writable)):
                count = buffer.fill(data[at : at + len(buffer.writable)])
                broker.receive(self.session, buffer, count)
                self.bus.check_invariants()

    def send_refused(self, *said: bytes) -> Reason:
        """Send these bytes, the last of which must end the session; returns why."""
        with pytest.raises(RemoteProtocolError) as caught:
            self.send(*said)
        self.disconnect()
        return caught.value.reason

    def disconnect(self) -> None:
        self.bus.broker.close_session(self.session)
        self.bus.check_invariants()

    def read_bytes(self, most: int) -> bytes:
        """The next bytes, up to `most` of them, as a socket that takes no more would."""
        outbox, tick = self.session.outbox, self.bus.broker.tick_number
        taken = bytearray()
        while len(taken) < most and (piece := outbox.peek(tick)):
            count = min(len(piece), most - len(taken))
            taken += piece[:count]
            outbox.mark_sent(count, tick)
            self.bus.check_invariants()
        return bytes(taken)

    def receive_frames(self) -> list[bytes]:
        """Everything there is to hear, as whole frames."""
        frames, self.partial = split_frames(self.partial + self.read_bytes(1 << 40))
        return frames

    def receive_messages(self) -> list[Version1Message]:
        """Every message there is to hear. Replies to Connects are passed over."""
        parsed = [parse_frame(frame) for frame in self.receive_frames()]
        assert self.partial == b"", "the last frame is not whole"
        assert {fields[0] for fields in parsed} <= {MESSAGE, CONNECT}
        return [Version1Message(*fields[1:]) for fields in parsed if fields[0] == MESSAGE]

    def receive_payloads(self) -> list[bytes]:
        return [message.payload for message in self.receive_messages()]

    def receive_ids(self, class_id: int) -> list[int]:
        """The ids of every message of this class that there is to hear, and of no other class."""
        heard = self.receive_messages()
        assert {message.class_id for message in heard} <= {class_id}
        return [message.message_id for message in heard]
