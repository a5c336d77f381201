"""Our front in this process, without a socket: clients that say bytes and hear bytes.

Rule 1: after each piece of bytes everything that waits for anybody is taken, as a socket would.
"""

from __future__ import annotations

import functools

from simplebus.core.broker.broker import Broker
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.nats.errors import NatsError
from simplebus.nats.nats_server import NatsServer
from simplebus.nats.server.session import NatsSession
from simplebus.nats.settings import NatsSettings
from tests.nats.differential.compare import Heard, Script, items, normal, pieces


@functools.cache
def buffer() -> ReceiveBuffer:
    """One for all: it is large."""
    return ReceiveBuffer()


class Client:
    """One client of a front."""

    def __init__(self, house: Inside) -> None:
        self.house = house
        self.session: NatsSession = house.front.open_session(
            "test", ip="127.0.0.1", host="h", port=1
        )
        self.heard = bytearray()
        self.closed = False
        self.error: NatsError | None = None

    def say(self, data: bytes, chunks: int = 0) -> None:
        """In pieces of so many bytes; 0: whole."""
        for piece in pieces(data, chunks or len(buffer().writable)):
            if self.closed:
                return
            try:
                self.house.front.receive(self.session, buffer(), buffer().fill(piece))
            except NatsError as error:
                self.end(error)
            self.house.settle()

    def end(self, error: NatsError) -> None:
        """The server ends the conversation."""
        self.error = error
        self.house.front.send_error(self.session, error)
        self.closed = True
        self.house.front.close_session(self.session)
        self.take()

    def take(self) -> None:
        """Take all that waits."""
        outbox = self.session.outbox
        while piece := outbox.peek(0):
            self.heard += piece
            outbox.mark_sent(len(piece), 0)
        assert outbox.is_idle

    def leave(self) -> None:
        """Hang up."""
        self.house.front.close_session(self.session)

    def lines(self) -> bytes:
        """What was heard since this was asked last."""
        heard = bytes(self.heard)
        self.heard.clear()
        return heard


class Inside:
    """A front and its clients."""

    def __init__(
        self,
        settings: NatsSettings | None = None,
        *,
        seed: int = 0,
        broker: Broker | None = None,
    ) -> None:
        self.front = NatsServer(
            settings, server_id="ours", seed=seed, secret=b"secret", broker=broker
        )
        self.clients: list[Client] = []

    def client(self, *said: bytes) -> Client:
        """One more, who says this."""
        client = Client(self)
        self.clients.append(client)
        client.take()
        client.heard.clear()
        for data in said:
            client.say(data)
        return client

    def settle(self) -> None:
        """Have everybody take what waits, and cut off whoever is to be."""
        self.front.drain_ready()
        for session, error in self.front.drain_disconnecting():
            next(client for client in self.clients if client.session is session).end(error)
        for client in self.clients:
            if not client.closed:
                client.take()

    def play(self, script: Script, chunks: int = 0) -> dict[str, Heard]:
        """Say all of it, each step in pieces of so many bytes (0: whole)."""
        clients: dict[str, Client] = {}
        greetings: dict[str, bytes] = {}
        for say in script:
            client = clients.get(say.client)
            if client is None:
                client = clients[say.client] = Client(self)
                self.clients.append(client)
                client.take()
                greetings[say.client] = bytes(client.heard.partition(b"\r\n")[0])
            client.say(say.words(greetings[say.client])[0], chunks)
            if say.settle:
                for one in [client, *(other for other in clients.values() if other is not client)]:
                    one.say(b"PING\r\n")
        return {
            name: Heard(normal(list(items(bytes(client.heard)))), client.closed)
            for name, client in clients.items()
        }
