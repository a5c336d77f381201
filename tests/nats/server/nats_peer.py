"""NATS server without sockets, and its clients.

After each piece of input all pending output is read, as a socket would.
"""

from __future__ import annotations

import functools

from simplebus.core.broker.broker import Broker
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.nats.errors import NatsError
from simplebus.nats.nats_server import NatsServer
from simplebus.nats.server.session import NatsSession
from simplebus.nats.settings import NatsSettings
from tests.nats.differential.compare import ClientOutput, Script, items, normal, pieces


@functools.cache
def buffer() -> ReceiveBuffer:
    """Return the shared receive buffer, which is large."""
    return ReceiveBuffer()


class Client:
    """Client of a NatsServer."""

    def __init__(self, harness: NatsServerHarness) -> None:
        self.harness = harness
        self.session: NatsSession = harness.nats_server.open_session(
            "test", ip="127.0.0.1", host="h", port=1
        )
        if harness.splits_reads:
            self.session.allow_split_reads()
        self.received = bytearray()
        self.closed = False
        self.error: NatsError | None = None

    def send(self, data: bytes, chunks: int = 0) -> None:
        """Send bytes in chunks of this size; 0 for as large as possible. The server processes each
        chunk to its end.
        """
        for data_piece in pieces(data, chunks or len(buffer().writable)):
            if self.closed:
                return
            self.start(data_piece)
            self.finish()

    def start(self, data: bytes) -> None:
        """Send bytes, of which the server processes only what one turn allows."""
        try:
            self.harness.nats_server.receive(self.session, buffer(), buffer().fill(data))
        except NatsError as error:
            self.end(error)
        self.harness.settle()

    def finish(self) -> None:
        """Let the server process everything that was sent."""
        while self.take_turn():
            pass

    def take_turn(self) -> bool:
        """Let the server process more of the sent bytes. Returns False if nothing is left."""
        if self.closed or not (self.session.is_request_pending or self.session.unprocessed):
            return False
        server = self.harness.nats_server
        try:
            if self.session.is_request_pending:
                server.continue_request(self.session)
                buffer().fill(b"reused".ljust(1 << 16))
            else:
                server.receive(self.session, buffer(), self.session.refill(buffer()))
        except NatsError as error:
            self.end(error)
        self.harness.settle()
        return True

    def end(self, error: NatsError) -> None:
        """Close the connection with this error, as the server does."""
        self.error = error
        self.harness.nats_server.send_error(self.session, error)
        self.closed = True
        self.harness.nats_server.close_session(self.session)
        self.drain()

    def drain(self) -> None:
        """Read all pending output."""
        outbox = self.session.outbox
        while data_piece := outbox.peek(0):
            self.received += data_piece
            outbox.mark_sent(len(data_piece), 0)
        assert outbox.is_idle

    def close(self) -> None:
        """Close the connection."""
        self.closed = True
        self.harness.nats_server.close_session(self.session)

    def lines(self) -> bytes:
        """Return the output since the last call."""
        received = bytes(self.received)
        self.received.clear()
        return received


class NatsServerHarness:
    """NatsServer and its clients."""

    def __init__(
        self,
        settings: NatsSettings | None = None,
        *,
        seed: int = 0,
        broker: Broker | None = None,
        splits_reads: bool = False,
    ) -> None:
        """`splits_reads` is True if expensive reads are processed in several turns."""
        self.splits_reads = splits_reads
        self.nats_server = NatsServer(
            settings, server_id="ours", seed=seed, secret=b"secret", broker=broker
        )
        self.clients: list[Client] = []

    def client(self, *greeting: bytes) -> Client:
        """Connect a client and send these bytes."""
        client = Client(self)
        self.clients.append(client)
        client.drain()
        client.received.clear()
        for data in greeting:
            client.send(data)
        return client

    def settle(self) -> None:
        """Deliver all pending output and close clients that the server disconnects."""
        self.nats_server.drain_ready()
        for session, error in self.nats_server.drain_disconnecting():
            next(client for client in self.clients if client.session is session).end(error)
        for client in self.clients:
            if not client.closed:
                client.drain()

    def play(self, script: Script, chunks: int = 0) -> dict[str, ClientOutput]:
        """Play a script, each step in chunks of this size; 0 for whole steps."""
        clients: dict[str, Client] = {}
        greetings: dict[str, bytes] = {}
        for step in script:
            client = clients.get(step.client)
            if client is None:
                client = clients[step.client] = Client(self)
                self.clients.append(client)
                client.drain()
                greetings[step.client] = bytes(client.received.partition(b"\r\n")[0])
            client.send(step.encode(greetings[step.client])[0], chunks)
            if step.settle:
                for sender in [
                    client,
                    *(
                        other_client
                        for other_client in clients.values()
                        if other_client is not client
                    ),
                ]:
                    sender.send(b"PING\r\n")
        return {
            name: ClientOutput(normal(list(items(bytes(client.received)))), client.closed)
            for name, client in clients.items()
        }
