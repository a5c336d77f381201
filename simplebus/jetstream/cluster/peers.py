"""Queries to the other stateless servers of a cluster.

A server is gone if NATS reports that its subject has no subscriber. A server that is connected but
does not answer, for example because it is stopped, counts as alive and is not asked again for a
while. Otherwise two servers could own the same consumer.

If a third party subscribes to the query subjects, NATS cannot report that. Then silence counts as
gone.
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
"""Time for which a silent server counts as alive without being asked again."""
_NO_RESPONDERS_SECONDS = 1.0
"""Time within which NATS reports a subject without subscribers."""
_RETRIES_MAX, _RETRY_SECONDS, _RETRY_SECONDS_MAX = 25, 0.002, 0.05
RELEASED, WAIT = b"left", b"wait"
_ANSWERS = frozenset({b"", RELEASED, WAIT})


class Peers:
    """Other servers of the cluster, as seen by one server."""

    def __init__(self, link: NatsConnection, names: JetStreamNames) -> None:
        self._link = link
        self._names = names
        self._silent_until: dict[str, float] = {}
        """Silent servers, and the time until which they count as alive."""

    async def find_alive(
        self, server_ids: Collection[str], class_id: int | None = None
    ) -> tuple[set[str], set[str]]:
        """Return the servers that are alive, and the consumers of a class that they are about to
        release.

        Consumers are returned only if `class_id` is given.

        Raises:
            BusConnectionError: A query failed.
            JetStreamError: A server is releasing a consumer right now.
        """
        alive, released, errors = set[str](), set[str](), list[BusError]()

        async def query_server(server_id: str) -> None:
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
                nursery.start_soon(query_server, server_id)
        if errors:
            raise errors[0]
        return alive, released

    async def is_alive(self, server_id: str) -> bool:
        """Return True if a server is alive. Raises BusConnectionError."""
        return await self._query_server(server_id) is not None

    async def _query_server(self, server_id: str, query: bytes = b"") -> bytes | None:
        """Return the answer of a server; empty if it is silent, None if it is gone."""
        now = trio.current_time()
        if now < self._silent_until.get(server_id, 0.0):
            return b""
        try:
            for waits in range(_RETRIES_MAX):
                answer = await self._request(self._names.server_subject(server_id), query)
                if answer != WAIT:
                    return answer
                await trio.sleep(min(_RETRY_SECONDS * 2**waits, _RETRY_SECONDS_MAX))
            raise JetStreamError(0, "another server is releasing a consumer of the class")
        except BusConnectionError:
            if not self._link.is_ready:
                raise
        now = trio.current_time()
        self._silent_until = {each: at for each, at in self._silent_until.items() if at > now}
        self._silent_until[server_id] = now + SILENCE_ACCEPTED_SECONDS
        return b""

    async def is_consumer_held(self, class_id: int, name: str) -> bool:
        """Return True if a server answers that it fetches from a consumer. Raises
        BusConnectionError.

        A NATS server may still route the query to a server that has just died.
        """
        try:
            return (
                await self._request(self._names.consumer_holder_subject(class_id, name)) is not None
            )
        except BusConnectionError:
            if self._link.is_ready:  # The query was sent, but not answered.
                return False
            raise

    async def _request(self, subject: str, query: bytes = b"") -> bytes | None:
        """Return the answer at `subject`; None if no server answers."""
        try:
            headers, answer = await self._link.request(subject, query)
        except BusConnectionError:
            if self._link.is_ready and await self._has_passive_listener(subject):
                return None
            raise
        if jetstream_codec.parse_status(headers)[0] == jetstream_codec.NO_RESPONDERS:
            return None
        # A foreign stream on this subject would answer with a PubAck.
        return answer if answer.split(b" ")[0] in _ANSWERS else None

    async def _has_passive_listener(self, subject: str) -> bool:
        """Return True if a third party receives such queries without answering. Raises
        BusConnectionError.
        """
        try:
            unused_subject = f"{subject.rpartition('.')[0]}.{secrets.token_hex(8)}"
            await self._link.request(unused_subject, seconds=_NO_RESPONDERS_SECONDS)
        except BusConnectionError:
            if not self._link.is_ready:
                raise
            return True
        return False
