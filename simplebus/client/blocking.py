"""The client without an event loop: every call does its own reading and writing, in its thread.

Rule 1: no decisions here. What bytes mean and what is written next is the core's business.
Rule 2: whoever waits to write reads meanwhile, so that neither side waits for the other.
Rule 3: no thread, no loop, no timer: acknowledgements leave when the program asks for the next
message, and before it waits. A bus belongs to one thread at a time.
"""

from __future__ import annotations

import math
import selectors
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from selectors import EVENT_READ, EVENT_WRITE
from time import monotonic
from types import TracebackType
from typing import Self

from simplebus.client import dial
from simplebus.client.dial import Address
from simplebus.core.client import ACK_SECONDS, ClientCore, ClientStatistics
from simplebus.core.errors import BusConnectionError, LocalProtocolError, RemoteProtocolError
from simplebus.core.inbox import Inbox
from simplebus.core.limits import Limits
from simplebus.core.messages import Batch, Message
from simplebus.core.receive import ReceiveBuffer

_READ_BYTES = 256 * 1024
_MESSAGES_PER_TURN = 1024
_CLOSE_SECONDS = 5.0
_CLOSE_SECONDS_FAILED = 1.0


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
        bus = BlockingBus(ClientCore(frame_bytes_max=frame_bytes), sock, selector, where)
        if not bus._sync(deadline):
            raise dial.unanswered(where, timeout, connected=True)
        try:
            yield bus
        except BaseException:
            bus._close(_CLOSE_SECONDS_FAILED)
            raise
        bus._close(_CLOSE_SECONDS)
        left = bus.statistics().queued_bytes
        if left:
            raise dial.unwritten(left, bus._loss)


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

    def __init__(
        self,
        core: ClientCore,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        address: Address,
    ) -> None:
        self._core = core
        self._socket = sock
        self._selector = selector
        self._address = address
        self._buffer = ReceiveBuffer(_READ_BYTES)
        self._awaited = EVENT_READ
        self._loss = ""
        """What became of the connection; empty while it is there."""
        self._cause: Exception | None = None
        selector.register(sock, EVENT_READ)

    def publish(self, payload: bytes, *, class_id: int) -> None:
        """Hand a message to the socket. Blocks while the bus takes bytes slower than they come.

        Raises what `simplebus.Bus.publish` does.
        """
        self._check()
        self._core.publish(payload, class_id)
        self._write()

    def publish_many(self, payloads: Iterable[bytes], *, class_id: int) -> None:
        """Hand many messages to the socket at once: all, or, when it raises, none."""
        self._check()
        self._core.publish_many(payloads, class_id)
        self._write()

    def flush(self) -> None:
        """Write everything published and acknowledged so far."""
        self._check()
        self._core.settle_processed()
        self._write()

    def drain(self) -> None:
        """Wait until the bus has applied everything sent so far."""
        self.flush()
        self._sync()

    def subscribe(
        self, class_id: int, *, auto_ack: bool = True, idle_seconds: float | None = None
    ) -> BlockingSubscription:
        """Messages of a class: `with bus.subscribe(1) as messages`, then iterate.

        With `idle_seconds` a loop ends when nothing has come for so long. Otherwise as
        `simplebus.Bus.subscribe`.
        """
        return BlockingSubscription(self, class_id, auto_ack=auto_ack, idle_seconds=idle_seconds)

    def statistics(self) -> ClientStatistics:
        """A snapshot of this connection."""
        return self._core.statistics()

    # Moving bytes --------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._loss:
            raise BusConnectionError(self._loss) from self._cause

    def _write(self, deadline: float = math.inf) -> None:
        """Write all that is queued, reading meanwhile. Past the deadline, give up."""
        outgoing = self._core.outgoing
        while data := outgoing.peek():
            try:
                outgoing.sent(self._socket.send(data))
            except BlockingIOError:
                wanted = EVENT_WRITE if self._core.is_full else EVENT_READ | EVENT_WRITE
                ready = self._wait(wanted, deadline)
                if not ready:
                    return
                if ready & EVENT_READ:
                    self._read()
            except OSError as error:
                self._lose(error)
                self._check()

    def _read(self) -> None:
        """Take what is there, without waiting."""
        try:
            count = self._socket.recv_into(self._buffer.space)
            if count == 0:
                self._lose(None)
            else:
                self._core.receive(self._buffer, count)
        except BlockingIOError:
            return
        except (OSError, RemoteProtocolError) as error:
            self._lose(error)
        self._check()

    def _read_until(self, condition: Callable[[], bool], deadline: float = math.inf) -> bool:
        """Write and read until the condition holds, or, then False, until the deadline."""
        self._check()
        self._write(deadline)
        while not condition():
            if self._core.is_full:  # Nobody will make room while we wait.
                self._core.find_still(self._core.progress())
            if not self._wait(EVENT_READ, deadline):
                return False
            self._read()
        return True

    def _sync(self, deadline: float = math.inf) -> bool:
        asked = self._core.connect()
        return self._read_until(lambda: self._core.answers >= asked, deadline)

    def _wait(self, wanted: int, deadline: float) -> int:
        """Which of the wanted events are there; 0 at the deadline."""
        if wanted != self._awaited:
            self._selector.modify(self._socket, wanted)
            self._awaited = wanted
        patience = None if deadline == math.inf else max(0.0, deadline - monotonic())
        ready = self._selector.select(patience)
        return ready[0][1] if ready else 0

    def _lose(self, error: Exception | None) -> None:
        self._loss = dial.lost(self._address, error, left=False)
        self._cause = error

    def _close(self, seconds: float) -> None:
        """Write what is queued, say goodbye, and wait until the bus has heard it."""
        deadline = monotonic() + seconds
        with suppress(BusConnectionError, OSError):
            self._check()
            self._core.settle_processed()
            self._write(deadline)
            self._socket.shutdown(socket.SHUT_WR)
            while self._wait(EVENT_READ, deadline) and self._socket.recv_into(self._buffer.space):
                pass  # What comes now was not acknowledged, and will come again.
        self._loss = self._loss or dial.lost(self._address, None, left=True)


class BlockingSubscription:
    """The messages of one class. Enter it, then iterate; made by `BlockingBus.subscribe`.

    Asking for the next message says that the one before is processed; so does leaving the block
    without an exception. The last message of a loop that was left early counts as failed when
    another loop begins.
    """

    def __init__(
        self, bus: BlockingBus, class_id: int, *, auto_ack: bool, idle_seconds: float | None
    ) -> None:
        self.class_id = class_id
        self._bus = bus
        self._auto_ack = auto_ack
        self._idle_seconds = math.inf if idle_seconds is None else idle_seconds
        self._entered: Inbox | None = None
        self._ack_at = 0.0

    def __enter__(self) -> Self:
        if self._entered is not None:
            raise LocalProtocolError("a subscription can be entered once; subscribe again")
        self._bus._check()
        self._entered = self._bus._core.subscribe(self.class_id, auto_ack=self._auto_ack)
        try:
            self._bus._sync()
        except BaseException:
            self._bus._core.unsubscribe(self._entered)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._inbox.settle(current=True)
        else:
            self._inbox.give_up()
        self._bus._core.unsubscribe(self._inbox)
        if not self._bus._loss:
            with suppress(BusConnectionError):
                self._bus._write()

    def __iter__(self) -> Iterator[Message]:
        inbox = self._inbox
        inbox.give_up()
        while self._refill():
            inbox.prepare(_MESSAGES_PER_TURN)
            for message in inbox.ready:
                yield message
                if monotonic() >= self._ack_at:
                    inbox.settle(current=True)
                    self._push()

    def batches(self) -> Iterator[Batch]:
        """Iterate over batches: many messages at the price of one."""
        inbox = self._inbox
        inbox.give_up()
        while self._refill():
            batch = inbox.take_batch()
            assert batch is not None, "refill returned, and there was nothing"
            yield batch

    def ack(self, message: Message) -> None:
        """Acknowledge a message by hand, in any order."""
        self._acked(message.ack(self._inbox), message)

    def ack_batch(self, batch: Batch) -> None:
        """Acknowledge a batch by hand."""
        self._acked(batch.ack(self._inbox), batch)

    def _acked(self, is_ours: bool, what: object) -> None:
        if not is_ours:
            raise LocalProtocolError(f"{what!r} came from another subscription; ack it there")
        if self._bus._core.acks_are_due or monotonic() >= self._ack_at:
            self._push()

    @property
    def _inbox(self) -> Inbox:
        if self._entered is None:
            raise LocalProtocolError(
                "a subscription begins with its block: with bus.subscribe(…) as messages"
            )
        return self._entered

    def _refill(self) -> bool:
        """Wait until there is something to hand out. What was handed out before is processed."""
        inbox, bus = self._inbox, self._bus
        inbox.settle(current=True)
        if not inbox.is_empty:
            bus._check()
            if bus._core.acks_are_due:
                self._push()
            return True
        deadline = monotonic() + self._idle_seconds
        inbox.is_awaited = True
        try:
            return bus._read_until(lambda: not inbox.is_empty, deadline)
        finally:
            inbox.is_awaited = False

    def _push(self) -> None:
        self._ack_at = monotonic() + ACK_SECONDS
        self._bus._write()
