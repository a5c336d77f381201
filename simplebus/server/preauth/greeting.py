"""What is heard of peers that have not said who they are.

Rule 1: nobody is asked to wait for others here, and nothing is looked at twice: it costs what it
weighs, however it comes.
Rule 2: what all of them have sent is bounded. Beyond that, who has sent its share and more is not
heard any further; who has sent less makes place of the one that has sent most.

    Heartbeats, a few │ the first frame, as far as it is there
    let go of           kept, and looked through up to here
"""

from __future__ import annotations

from collections.abc import Callable

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import (
    DELIMITER_BYTES,
    EARLY_HEARTBEATS_MAX,
    GREETING_BYTES_MAX,
    GREETINGS_BYTES_MAX,
    HEADER_BYTES,
)
from simplebus.core.protocol import frames
from simplebus.core.protocol.requests import Auth, ConnectRequest, decode


class Heard:
    """Of one peer. `cut` ends its connection for a reason."""

    def __init__(self, cut: Callable[[RemoteProtocolError], object]) -> None:
        self.data = bytearray()
        self.cut = cut
        self.searched = 0
        """No end of a frame, or of a line, begins before this."""
        self.heartbeats = 0
        """How many were let go of."""


class Greetings:
    """Of all doors of one bus. Invariant: what is heard of all <= limit."""

    def __init__(self, limit: int = GREETINGS_BYTES_MAX) -> None:
        self._limit = limit
        self._all: dict[Heard, int] = {}
        """With how much of it is counted."""
        self.held_bytes = 0

    def open(self, cut: Callable[[RemoteProtocolError], object]) -> Heard:
        """One more has come. `close` when it has said who it is, or is gone."""
        heard = Heard(cut)
        self._all[heard] = 0
        return heard

    def count(self, heard: Heard) -> None:
        """So much is kept of it now. Raises RemoteProtocolError (pending_limit)."""
        if heard not in self._all:  # It has made place for others.
            raise _too_much(len(heard.data))
        self._note(heard)
        if self.held_bytes <= self._limit:
            return
        share = self._limit // len(self._all)
        if len(heard.data) >= share:
            raise _too_much(len(heard.data))
        while self.held_bytes > self._limit:
            most = max(self._all, key=self._all.__getitem__)
            size = self._all[most]
            self.close(most)
            most.cut(_too_much(size))

    def _note(self, heard: Heard) -> None:
        size = len(heard.data)
        self.held_bytes += size - self._all[heard]
        self._all[heard] = size

    def close(self, heard: Heard) -> None:
        """Nothing is kept of it any more."""
        self.held_bytes -= self._all.pop(heard, 0)


def _too_much(size: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        Reason.PENDING_LIMIT,
        f"peers that have not said who they are have sent too much, and this one {size} bytes",
    )


def introduction(heard: Heard) -> tuple[bool, Auth | None]:
    """Whether a binary peer's first frame but Heartbeats is whole, and what it says of who the peer
    is. What is wrong with it is for the bus to say.

    Raises RemoteProtocolError (frame_too_long, unauthorized).
    """
    data = heard.data
    while (end := data.find(frames.DELIMITER, max(HEADER_BYTES, heard.searched))) >= 0:
        if data[0] != frames.HEARTBEAT:
            return True, _auth(data, end)
        heard.heartbeats += 1
        if heard.heartbeats > EARLY_HEARTBEATS_MAX:
            raise RemoteProtocolError(
                Reason.UNAUTHORIZED,
                f"{heard.heartbeats} Heartbeats came before the peer said who it is, "
                f"{EARLY_HEARTBEATS_MAX} are allowed",
            )
        del data[: end + DELIMITER_BYTES]
        heard.searched = 0
    heard.searched = len(data) - DELIMITER_BYTES + 1
    if len(data) > GREETING_BYTES_MAX:
        raise RemoteProtocolError(
            Reason.FRAME_TOO_LONG,
            f"{len(data)} bytes came before the peer said who it is, {GREETING_BYTES_MAX} are "
            "allowed",
        )
    return False, None


def _auth(data: bytearray, end: int) -> Auth | None:
    content = bytes(data[HEADER_BYTES:end])
    if data[0] != frames.CONNECT or not content.lstrip().startswith(b"{"):
        return None
    try:
        return decode(ConnectRequest, content).auth
    except RemoteProtocolError:
        return None
