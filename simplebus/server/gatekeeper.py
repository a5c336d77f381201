"""What peers say of who they are, checked before the bus is told: slow passwords, by a thread.

Rule 1: the event loop never works out a slow hash, and no more than one is worked out at a time.
Rule 2: how many checks an address may ask for is bounded, and how many may wait: guessing at speed
costs who guesses, and nobody else. A password that was right before is known at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

import trio

from simplebus.core import frames
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import DELIMITER_BYTES, GREETING_BYTES_MAX, HEADER_BYTES
from simplebus.core.requests import Auth, ConnectRequest, decode
from simplebus.core.users import Users
from simplebus.server.buckets import Buckets

log = logging.getLogger("simplebus.server")

_WAITING_MAX = 64
"""Checks that may wait for the thread."""
_ATTEMPTS_AT_ONCE, _ATTEMPTS_PER_SECOND = 5, 0.5
"""Slow checks of one address."""
_NICE = 10


class Gatekeeper:
    """Of one bus, for all its doors."""

    def __init__(self, users: Users) -> None:
        self.users = users
        self.checks = 0
        """Slow passwords that were looked at."""
        self._turn = trio.Lock()
        self._waiting = 0
        self._attempts = Buckets(_ATTEMPTS_AT_ONCE, _ATTEMPTS_PER_SECOND)

    async def hear(self, auth: Auth | None, address: str) -> None:
        """A peer from this address says who it is: work out what the bus is to know before it
        judges. Raises RemoteProtocolError (too_many_attempts)."""
        slow = self.users.slow_check(auth)
        if slow is None:
            return
        if not self._attempts.take(address, trio.current_time()):
            raise RemoteProtocolError(
                Reason.TOO_MANY_ATTEMPTS,
                "too many passwords were tried from this address; wait a little",
            )
        if self._waiting >= _WAITING_MAX:
            raise RemoteProtocolError(
                Reason.TOO_MANY_ATTEMPTS, f"{self._waiting} others wait to be let in; try again"
            )
        self._waiting += 1
        try:
            async with self._turn:
                is_right = await _worked_out(*slow)
        finally:
            self._waiting -= 1
            self.checks += 1
        if is_right:
            self.users.passwords.learn(*slow)


async def _worked_out(kept: str, said: str) -> bool:
    """The same as `is_password`, in a thread of its own, which everything else goes before."""
    token, done, found = trio.lowlevel.current_trio_token(), trio.Event(), [False]

    def work() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            found[0] = is_password(kept, said)
        except Exception:
            log.exception("a password could not be checked")
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(done.set)

    threading.Thread(target=work, name="simplebus password", daemon=True).start()
    with trio.CancelScope(shield=True):  # The next check is to begin behind this one.
        await done.wait()
    return found[0]


def is_password(kept: str, said: str) -> bool:
    """Whether a password is the one that is kept as this slow hash. Takes long."""
    from argon2 import PasswordHasher
    from argon2.exceptions import Argon2Error, InvalidHashError

    try:
        return PasswordHasher().verify(kept, said.encode("utf-8", "surrogatepass"))
    except (Argon2Error, InvalidHashError):
        return False


def introduction(heard: bytearray) -> tuple[bool, Auth | None]:
    """Whether a binary peer's first frame but Heartbeats is whole, and what it says of who the peer
    is. What is wrong with it is for the bus to say.

    Raises RemoteProtocolError (frame_too_long).
    """
    first = 0
    while (end := heard.find(frames.DELIMITER, first + HEADER_BYTES)) >= 0:
        if heard[first] != frames.HEARTBEAT:
            return True, _auth(heard, first, end)
        first = end + DELIMITER_BYTES
    if len(heard) > GREETING_BYTES_MAX:
        raise RemoteProtocolError(
            Reason.FRAME_TOO_LONG,
            f"{len(heard)} bytes came before the peer said who it is, {GREETING_BYTES_MAX} are "
            "allowed",
        )
    return False, None


def _auth(heard: bytearray, first: int, end: int) -> Auth | None:
    content = bytes(heard[first + HEADER_BYTES : end])
    if heard[first] != frames.CONNECT or not content.lstrip().startswith(b"{"):
        return None
    try:
        return decode(ConnectRequest, content).auth
    except RemoteProtocolError:
        return None
