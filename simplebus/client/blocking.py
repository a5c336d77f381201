"""The client without an event loop: every call does its own reading and writing, in its thread.

Rule 1: no thread, no loop, no timer: acknowledgements leave when the program asks for the next
message, and before it waits. A bus belongs to one thread at a time.
Rule 2: when a call that publishes raises ValueError, TypeError or LocalProtocolError, nothing of
it was published.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from selectors import EVENT_WRITE
from time import monotonic

from simplebus.client import dial
from simplebus.client.blocking_subscription import BlockingSubscription
from simplebus.client.blocking_wire import BlockingWire
from simplebus.client.dial import Address
from simplebus.core.client import ClientCore, ClientStatistics
from simplebus.core.errors import BusConnectionError
from simplebus.core.limits import CLOSE_SECONDS, CLOSE_SECONDS_FAILED, Limits


@contextmanager
def connect_blocking(
    address: str, *, timeout: float = 5.0, frame_bytes: int = Limits().frame_bytes
) -> Iterator[BlockingBus]:
    """Connect to a bus: `with simplebus.connect_blocking("simplebus://127.0.0.1:8888") as bus`.

    Arguments, resource handling and errors are those of `simplebus.connect`.
    """
    where = Address.parse(address)
    deadline = monotonic() + timeout
    with _dial(where, timeout) as sock, selectors.DefaultSelector() as selector:
        wire = BlockingWire(ClientCore(frame_bytes_max=frame_bytes), sock, selector, where)
        if not wire.sync(deadline):
            raise dial.unanswered(where, timeout, connected=True)
        try:
            yield BlockingBus(wire)
        except BaseException:
            wire.close(CLOSE_SECONDS_FAILED)
            raise
        wire.close(CLOSE_SECONDS)
        problem = wire.unwritten()
        if problem is not None:
            raise problem


def _dial(where: Address, timeout: float) -> socket.socket:
    """A connected socket. Raises BusConnectionError."""
    deadline = monotonic() + timeout
    problem: OSError | None = None
    try:
        infos = dial.numeric(where) or socket.getaddrinfo(
            where.host, where.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise dial.refused(where, error) from error
    for info in infos:
        try:
            sock = dial.start(info)
        except OSError as error:
            problem = error
            continue
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(sock, EVENT_WRITE)
                if not selector.select(max(0.0, deadline - monotonic())):
                    raise dial.unanswered(where, timeout, connected=False)
            dial.finish(sock)
        except BusConnectionError:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            problem = error
        else:
            return sock
    raise dial.refused(where, problem) from problem


class BlockingBus:
    """A connection to a bus; made by `connect_blocking`."""

    def __init__(self, wire: BlockingWire) -> None:
        self._wire = wire
        self._core = wire.core

    def publish(self, payload: bytes, *, class_id: int) -> None:
        """Hand a message to the socket. Blocks while the bus takes bytes slower than they come.

        Raises what `simplebus.Bus.publish` does.
        """
        self._wire.check()
        self._core.publish(payload, class_id)
        self._wire.write()

    def publish_many(self, payloads: Iterable[bytes], *, class_id: int) -> None:
        """Hand many messages to the socket at once: all, or, when it raises, none."""
        self._wire.check()
        self._core.publish_many(payloads, class_id)
        self._wire.write()

    def flush(self) -> None:
        """Write everything published and acknowledged so far."""
        self._wire.check()
        self._core.settle_processed()
        self._wire.write()

    def drain(self) -> None:
        """Wait until the bus has applied everything sent so far."""
        self.flush()
        self._wire.sync()

    def subscribe(
        self, class_id: int, *, auto_ack: bool = True, idle_seconds: float | None = None
    ) -> BlockingSubscription:
        """Messages of a class: `with bus.subscribe(1) as messages`, then iterate.

        With `idle_seconds` a loop ends when nothing has come for so long. Otherwise as
        `simplebus.Bus.subscribe`.
        """
        return BlockingSubscription(
            self._wire, class_id, auto_ack=auto_ack, idle_seconds=idle_seconds
        )

    def statistics(self) -> ClientStatistics:
        """A snapshot of this connection."""
        return self._core.statistics()
