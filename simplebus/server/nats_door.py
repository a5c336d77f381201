"""The NATS front on a trio clock, beside the engine whose loop, buffer and nursery it shares.

Rule 1: whatever changes the front ends with the engine's `settle`, which asks every door.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Awaitable, Callable

import trio

from simplebus.core.errors import RemoteProtocolError
from simplebus.nats.errors import NatsError
from simplebus.nats.front import Front
from simplebus.nats.session import NatsSession
from simplebus.nats.settings import NatsSettings
from simplebus.server.connection import Connection
from simplebus.server.engine import Engine

log = logging.getLogger("simplebus.server")

_BEAT_SECONDS = 0.5


class NatsDoor:
    """Drives one front. Start `run` in a nursery; then `serve` each accepted socket."""

    def __init__(self, engine: Engine, settings: NatsSettings | None = None) -> None:
        self.front = Front(
            settings, server_id=secrets.token_hex(16).upper(), seed=secrets.randbits(64)
        )
        self.engine = engine
        self.buffer = engine.buffer
        self.connections: dict[int, Connection[NatsSession]] = {}
        """By client id."""
        self.accepted = 0
        engine.doors.append(self.settle_own)

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            await trio.sleep(_BEAT_SECONDS)
            self.front.now = trio.current_time()
            try:
                self.front.tick()
                self.settle()
            except Exception:
                log.exception("a beat of the NATS door failed")

    def serve(self, sock: socket.socket, peer: str) -> None:
        """Take over a connected, non-blocking socket, or refuse it."""
        self.accepted += 1
        host, port = sock.getsockname()[:2]
        session = self.front.open(peer, ip=peer.rpartition(":")[0], host=host, port=port)
        connection = Connection(sock, session, self)
        self.connections[session.client_id] = connection
        self.start_soon(connection.run)
        self.settle()

    def receive(self, session: NatsSession, count: int) -> None:
        """`count` fresh bytes of this session are in the buffer. Raises NatsError."""
        self.front.now = trio.current_time()
        try:
            self.front.receive(session, self.buffer, count)
        finally:
            self.settle()

    def settle(self) -> None:
        self.engine.settle()

    def settle_own(self) -> bool:
        """Send what became ready. Returns whether there was any."""
        front, connections = self.front, self.connections
        ready = front.take_ready()
        for session in ready:
            if session.client_id in connections:
                connections[session.client_id].flush()
        for session, error in front.take_cut():
            if session.client_id in connections:
                connections[session.client_id].cut(error)
        return bool(ready)

    @property
    def tick_number(self) -> int:
        return self.engine.tick_number

    def may_rest(self, session: NatsSession) -> bool:
        return False

    def holds_back(self, session: NatsSession) -> bool:
        return False

    def fail(self, session: NatsSession, error: RemoteProtocolError) -> None:
        if isinstance(error, NatsError):
            self.front.fail(session, error)

    def closed(
        self, connection: Connection[NatsSession], reason: str | RemoteProtocolError
    ) -> None:
        """A connection has ended."""
        session = connection.session
        self.engine.say_closed(f"client {session.client_id}", session.peer, reason)
        self.connections.pop(session.client_id, None)
        self.front.close(session)
        self.settle()

    def start_soon(self, task: Callable[[], Awaitable[object]]) -> None:
        self.engine.start_soon(task)

    async def rest(self) -> None:
        await self.engine.rest()
