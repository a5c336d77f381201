"""Peers that talk to a broker in bytes, without a socket.

Frames are encoded and parsed by oracles.py only, so that an encoder bug cannot hide behind a
decoder bug. The broker's invariants are checked after every step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from simplebus.core.broker.broker import Broker, FullPolicy, Settings
from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import PLAIN_FRAMES_MAX, Limits
from simplebus.core.protocol.frames import FrameBatch
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.session.session import Session
from simplebus.core.statistics import ClassStatistics
from tests.support.oracles import AckOracle, build_frame, parse_frame, split_frames
from tests.support.strategies import ACK, CONNECT, HEARTBEAT, MESSAGE, SUBSCRIBE

LARGE_BATCH_COUNT = 4 * PLAIN_FRAMES_MAX
"""Frames in a batch that certainly takes the array path."""


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
    """Return `count` distinct payloads of at least `size` bytes."""
    return [(b"%d." % number).ljust(size, b"x") for number in range(start, start + count)]


def build_batch(*whole: bytes) -> FrameBatch:
    """Return these frames as a batch, as `split` creates it."""
    data = b"".join(whole)
    lengths = [len(frame) for frame in whole]
    stride = lengths[0] if len(set(lengths)) == 1 else 0
    bounds = np.cumsum([0, *lengths], dtype=np.int64)
    return FrameBatch(np.frombuffer(data, np.uint8), bounds, stride)


def window_state(window: AckWindow | AckOracle) -> tuple[int, list[tuple[int, int]]]:
    """Return a window's floor and its unacknowledged ranges."""
    return window.floor, window.unacked_ranges(window.floor, window.cursor)


class Version1Message(NamedTuple):
    """Message as a version 1 subscriber receives it."""

    class_id: int
    message_id: int
    timer_index: int
    payload: bytes


class BrokerHarness:
    """Broker, the receive buffer that its peers share, and the tick."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        commit_log: CommitLog | None = None,
        **limits: float,
    ) -> None:
        assert settings is None or not limits
        chosen = settings or Settings(limits=Limits(**limits))  # type: ignore[arg-type]
        self.broker = Broker(chosen, commit_log=commit_log)
        self.buffer = ReceiveBuffer()
        self.skips_checks = False
        """True to skip the broker's invariant checks."""

    def check_invariants(self) -> None:
        if not self.skips_checks:
            self.broker.check_invariants()

    def peer(self, *chunks: bytes) -> WirePeer:
        """Connect a peer and send these bytes."""
        peer = WirePeer(self, self.broker.open_session())
        peer.send(*chunks)
        return peer

    def tick(self, times: int = 1) -> list[tuple[Session, RemoteProtocolError]]:
        """Run ticks. Returns the sessions that must be closed, with their errors."""
        overdue = []
        for _ in range(times):
            overdue += self.broker.tick()
            self.check_invariants()
        return overdue

    def statistics(self, class_id: int) -> ClassStatistics:
        return self.broker.classes[class_id].statistics()


def advance_tick(bus: BrokerHarness) -> None:
    """Run one tick of one second."""
    bus.broker.clock.now += 1
    bus.tick()
    bus.broker.run_due_wakeups()


def create_small_bus(policy: FullPolicy, **limits: int) -> BrokerHarness:
    """Return a bus whose classes hold 10 messages, unless `limits` say otherwise."""
    return BrokerHarness(
        Settings(limits=Limits(**{"class_messages": 10, **limits}), full_policy=policy)
    )


class WirePeer:
    """Connection of one client."""

    def __init__(self, bus: BrokerHarness, session: Session) -> None:
        self.bus = bus
        self.session = session
        self.partial = b""
        """Received bytes of an incomplete frame."""

    def send(self, *chunks: bytes) -> None:
        """Send bytes. Each argument arrives in its own read, or in several."""
        broker, buffer = self.bus.broker, self.bus.buffer
        for data in chunks:
            for at in range(0, len(data), len(buffer.writable)):
                count = buffer.fill(data[at : at + len(buffer.writable)])
                broker.receive(self.session, buffer, count)
                self.bus.check_invariants()

    def send_refused(self, *chunks: bytes) -> Reason:
        """Send bytes that must close the session. Returns the reason."""
        with pytest.raises(RemoteProtocolError) as caught:
            self.send(*chunks)
        self.disconnect()
        return caught.value.reason

    def disconnect(self) -> None:
        self.bus.broker.close_session(self.session)
        self.bus.check_invariants()

    def read_bytes(self, most: int) -> bytes:
        """Return up to `most` of the next bytes, like a socket with limited space."""
        outbox, tick = self.session.outbox, self.bus.broker.tick_number
        data = bytearray()
        while len(data) < most and (piece := outbox.peek(tick)):
            count = min(len(piece), most - len(data))
            data += piece[:count]
            outbox.mark_sent(count, tick)
            self.bus.check_invariants()
        self.bus.broker.apply_position_changes()  # Every driver flushes after sending.
        return bytes(data)

    def receive_frames(self) -> list[bytes]:
        """Return all waiting bytes as complete frames."""
        frames, self.partial = split_frames(self.partial + self.read_bytes(1 << 40))
        return frames

    def receive_messages(self) -> list[Version1Message]:
        """Return all waiting messages. Replies to Connects are skipped."""
        parsed = [parse_frame(frame) for frame in self.receive_frames()]
        assert self.partial == b"", "the last frame is not whole"
        assert {fields[0] for fields in parsed} <= {MESSAGE, CONNECT}
        return [Version1Message(*fields[1:]) for fields in parsed if fields[0] == MESSAGE]

    def receive_payloads(self) -> list[bytes]:
        return [message.payload for message in self.receive_messages()]

    def receive_ids(self, class_id: int) -> list[int]:
        """Return the ids of all waiting messages, which must be of this class."""
        messages = self.receive_messages()
        assert {message.class_id for message in messages} <= {class_id}
        return [message.message_id for message in messages]


def run_turn(peer: WirePeer) -> bool:
    """Process the next part of the received bytes. Returns False if all are processed."""
    broker, session = peer.bus.broker, peer.session
    if session.is_request_pending:
        broker.continue_request(session)
    elif session.unprocessed:
        broker.receive(session, peer.bus.buffer, session.refill(peer.bus.buffer))
    else:
        return False
    peer.bus.check_invariants()
    return True


def run_all_turns(peer: WirePeer) -> None:
    while run_turn(peer):
        pass


def disconnect(peer: WirePeer) -> None:
    """Close the connection as a server does."""
    while peer.session.is_request_pending:
        peer.bus.broker.continue_request(peer.session)
    while peer.bus.broker.end_some_subscriptions(peer.session):
        pass
    peer.disconnect()
