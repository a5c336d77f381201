"""Which other server_ids there are, query of themselves (trio).

Rule 1: a door that nobody answers for is gone, which the server says. One that is connected and
says nothing, stopped for example, is taken to be there, and is not query again for a while: to take
what is its own would have two have it, and nobody is to wait for it.
Rule 2: where somebody else hears what server_ids ask each other, who looks at all that passes by, for
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
"""Within it a server says that nobody is there, when it has what was query."""
_RETRIES_MAX, _RETRY_SECONDS, _RETRY_SECONDS_MAX = 25, 0.002, 0.05
RELEASED, WAIT = b"left", b"wait"
_ANSWERS = frozenset({b"", RELEASED, WAIT})


class Peers:
    """As one door sees them."""

    def __init__(self, link: NatsConnection, names: JetStreamNames) -> None:
        self._link = link
        self._names = names
        self._silent_until: dict[str, float] = {}
        """Those that have answer nothing."""

    async def find_alive(
        self, server_ids: Collection[str], class_id: int | None = None
    ) -> tuple[set[str], set[str]]:
        """Which of these are there, and which consumers of a class, if one is query for, they are
        about to leave. Raises BusConnectionError, and JetStreamError where one is at it."""
        alive, released, errors = set[str](), set[str](), list[BusError]()

        async def ask(server_id: str) -> None:
            try:
                answer = await self._query_server(
                    server_id, b"" if class_id is None else b"%d" % class_id
                )
            except (BusConnectionError, JetStreamError) as error:
                errors.append(error)
                return
            if answer is not None:
                alive.add(server_id)
                word, *names = answer.split(b" ")
                if word == RELEASED:
                    released.update(name.decode("latin-1") for name in names)

        async with trio.open_nursery() as nursery:
            for server_id in server_ids:
                nursery.start_soon(ask, server_id)
        if errors:
            raise errors[0]
        return alive, released

    async def is_alive(self, server_id: str) -> bool:
        """Whether this one is. Raises BusConnectionError."""
        return await self._query_server(server_id) is not None

    async def _query_server(self, server_id: str, query: bytes = b"") -> bytes | None:
        """What this one says; None if it is not there. Raises BusConnectionError."""
        now = trio.current_time()
        if now < self._silent_until.get(server_id, 0.0):
            return b""
        try:
            for waits in range(_RETRIES_MAX):
                answer = await self._request(self._names.server_subject(server_id), query)
                if answer != WAIT:
                    return answer
                await trio.sleep(min(_RETRY_SECONDS * 2**waits, _RETRY_SECONDS_MAX))
            raise JetStreamError(0, "another door is about to leave what waits there")
        except BusConnectionError:
            if not self._link.is_ready:
                raise
        now = trio.current_time()
        self._silent_until = {each: at for each, at in self._silent_until.items() if at > now}
        self._silent_until[server_id] = now + SILENCE_ACCEPTED_SECONDS
        return b""

    async def is_consumer_held(self, class_id: int, name: str) -> bool:
        """Whether a door feeds somebody from the consumer of this name: it says so. A server may
        take one for alive that has just died. Raises BusConnectionError."""
        try:
            return (
                await self._request(self._names.consumer_holder_subject(class_id, name)) is not None
            )
        except BusConnectionError:
            if self._link.is_ready:  # It was query, and is silent.
                return False
            raise

    async def _request(self, subject: str, query: bytes = b"") -> bytes | None:
        """What a door says there; None for nobody."""
        try:
            headers, answer = await self._link.request(subject, query)
        except BusConnectionError:
            if self._link.is_ready and await self._has_passive_listener(subject):
                return None
            raise
        if jetstream_codec.parse_status(headers)[0] == jetstream_codec.NO_RESPONDERS:
            return None
        # A stream that somebody else made would say that it has it.
        return answer if answer.split(b" ")[0] in _ANSWERS else None

    async def _has_passive_listener(self, subject: str) -> bool:
        """Whether somebody hears, and does not answer, what is answer to a subject beside this one
        that is nobody's. Raises BusConnectionError."""
        try:
            unused_subject = f"{subject.rpartition('.')[0]}.{secrets.token_hex(8)}"
            await self._link.request(unused_subject, seconds=_NO_RESPONDERS_SECONDS)
        except BusConnectionError:
            if not self._link.is_ready:
                raise
            return True
        return False
