"""Which other doors there are, asked of themselves (trio).

Rule 1: a door that nobody answers for is gone, which the server says. One that is connected and
says nothing, stopped for example, is taken to be there, and is not asked again for a while: to take
what is its own would have two have it, and nobody is to wait for it.
Rule 2: where somebody else hears what doors ask each other, who looks at all that passes by, for
one, the server does not say that a door is gone: so who is silent there is.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

import trio

from simplebus.core.errors import BusConnectionError, BusError
from simplebus.jetstream.names import JetStreamNames
from simplebus.nats.client import jetstream_codec
from simplebus.nats.client.jetstream_codec import JetStreamError
from simplebus.net.nats_connection import NatsConnection

SILENCE_ACCEPTED_SECONDS = 30.0
"""For how long."""
_NO_RESPONDERS_SECONDS = 1.0
"""Within it a server says that nobody is there, when it has what was asked."""
_RETRIES_MAX, _RETRY_SECONDS, _WAIT_SECONDS_MAX = 25, 0.002, 0.05
LEFT, WAIT = b"left", b"wait"
_WORDS = frozenset({b"", LEFT, WAIT})


class Others:
    """As one door sees them."""

    def __init__(self, link: NatsConnection, names: JetStreamNames) -> None:
        self._link = link
        self._names = names
        self._silent_until: dict[str, float] = {}
        """Those that have said nothing."""

    async def alive(
        self, doors: Collection[str], class_id: int | None = None
    ) -> tuple[set[str], set[str]]:
        """Which of these are there, and which consumers of a class, if one is asked for, they are
        about to leave. Raises BusConnectionError, and JetStreamError where one is at it."""
        alive, going, lost = set[str](), set[str](), list[BusError]()

        async def ask(door: str) -> None:
            try:
                said = await self._said(door, b"" if class_id is None else b"%d" % class_id)
            except (BusConnectionError, JetStreamError) as error:
                lost.append(error)
                return
            if said is not None:
                alive.add(door)
                word, *names = said.split(b" ")
                if word == LEFT:
                    going.update(name.decode("latin-1") for name in names)

        async with trio.open_nursery() as nursery:
            for door in doors:
                nursery.start_soon(ask, door)
        if lost:
            raise lost[0]
        return alive, going

    async def is_alive(self, door: str) -> bool:
        """Whether this one is. Raises BusConnectionError."""
        return await self._said(door) is not None

    async def _said(self, door: str, asked: bytes = b"") -> bytes | None:
        """What this one says; None if it is not there. Raises BusConnectionError."""
        now = trio.current_time()
        if now < self._silent_until.get(door, 0.0):
            return b""
        try:
            for waits in range(_RETRIES_MAX):
                said = await self._answer(self._names.server_subject(door), asked)
                if said != WAIT:
                    return said
                await trio.sleep(min(_RETRY_SECONDS * 2**waits, _WAIT_SECONDS_MAX))
            raise JetStreamError(0, "another door is about to leave what waits there")
        except BusConnectionError:
            if not self._link.is_ready:
                raise
        now = trio.current_time()
        self._silent_until = {each: at for each, at in self._silent_until.items() if at > now}
        self._silent_until[door] = now + SILENCE_ACCEPTED_SECONDS
        return b""

    async def is_held(self, class_id: int, name: str) -> bool:
        """Whether a door feeds somebody from the consumer of this name: it says so. A server may
        take one for alive that has just died. Raises BusConnectionError."""
        try:
            return await self._answer(self._names.consumer_holder_subject(class_id, name)) is not None
        except BusConnectionError:
            if self._link.is_ready:  # It was asked, and is silent.
                return False
            raise

    async def _answer(self, subject: str, asked: bytes = b"") -> bytes | None:
        """What a door says there; None for nobody."""
        try:
            headers, said = await self._link.request(subject, asked)
        except BusConnectionError:
            if self._link.is_ready and await self._is_overheard(subject):
                return None
            raise
        if jetstream_codec.parse_status(headers)[0] == jetstream_codec.NO_RESPONDERS:
            return None
        # A stream that somebody else made would say that it has it.
        return said if said.split(b" ")[0] in _WORDS else None

    async def _is_overheard(self, subject: str) -> bool:
        """Whether somebody hears, and does not answer, what is said to a subject beside this one
        that is nobody's. Raises BusConnectionError."""
        try:
            nobodys = f"{subject.rpartition('.')[0]}.{secrets.token_hex(8)}"
            await self._link.request(nobodys, seconds=_NO_RESPONDERS_SECONDS)
        except BusConnectionError:
            if not self._link.is_ready:
                raise
            return True
        return False
