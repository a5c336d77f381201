"""A real server on loopback, and raw binary clients."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import trio

from simplebus.core.broker.broker import Settings
from simplebus.core.protocol import frames
from simplebus.core.statistics import ClassStatistics
from simplebus.server.run import RunningServer, ServeOptions, serve

PATIENCE_SECONDS = 240.0
PATIENT = Settings(ack_timeout=600)
"""Settings whose ack timeout is so long that a slow machine causes no redelivery."""

_streams: list[trio.SocketStream] = []
"""Streams of the running server's peers, closed with it."""


@contextlib.asynccontextmanager
async def serving(
    settings: Settings | None = None, **options: object
) -> AsyncIterator[RunningServer]:
    """Run a server on a free port of 127.0.0.1 until the end of the block."""
    async with trio.open_nursery() as nursery:
        with trio.fail_after(PATIENCE_SECONDS):
            server = await nursery.start(
                lambda task_status: serve(
                    settings or PATIENT,
                    ServeOptions(**{"hosts": ("127.0.0.1",), "port": 0, **options}),  # type: ignore[arg-type]
                    announce=lambda line: None,
                    task_status=task_status,
                )
            )
        try:
            yield server
        finally:
            nursery.cancel_scope.cancel()
            for stream in _streams:
                stream.socket.close()
            _streams.clear()


class Peer:
    """Raw binary client that sends bytes and reads frames."""

    def __init__(self, stream: trio.SocketStream) -> None:
        _streams.append(stream)
        self.stream = stream
        self.received = bytearray()

    async def send(self, data: bytes) -> None:
        with trio.fail_after(PATIENCE_SECONDS):
            await self.stream.send_all(data)

    async def read_frame(self) -> bytes:
        """Return the next frame with header and delimiter, or b"" at the end of the stream."""
        with trio.fail_after(PATIENCE_SECONDS):
            while (end := self.received.find(frames.DELIMITER, frames.HEADER_BYTES)) < 0:
                data = await self.stream.receive_some(1 << 20)
                if not data:
                    return b""
                self.received += data
        end += len(frames.DELIMITER)
        frame = bytes(self.received[:end])
        del self.received[:end]
        return frame

    async def read_messages(self, count: int) -> list[tuple[int, bytes]]:
        """Return message id and payload of the next `count` messages."""
        messages = []
        for _ in range(count):
            frame = await self.read_frame()
            assert frame, (
                f"the server closed the connection after {len(messages)} of {count} messages"
            )
            frame_type, _, message_id, _ = frames.HEADER.unpack_from(frame)
            assert frame_type == frames.MESSAGE
            messages.append((message_id, frame[frames.HEADER_BYTES : -len(frames.DELIMITER)]))
        return messages

    async def wait_closed(self) -> bool:
        """Wait until the server closes the connection. Returns True; fails after a timeout."""
        with trio.fail_after(PATIENCE_SECONDS):
            try:
                while await self.stream.receive_some(1 << 20):
                    pass
            except trio.BrokenResourceError:
                pass
        return True


async def connect(server: RunningServer, class_ids: list[int] | None = None) -> Peer:
    """Connect to the binary listener; with `class_ids`, send a version 1 Connect and read the
    reply.
    """
    host, _, port = server.addresses[0].rpartition(":")
    peer = Peer(await trio.open_tcp_stream(host, int(port)))
    if class_ids is not None:
        content = str(class_ids).encode()
        await peer.send(frames.encode(frames.CONNECT, content=content))
        reply = await peer.read_frame()
        assert reply[0] == frames.CONNECT
    return peer


def message(payload: bytes, class_id: int = 1) -> bytes:
    return frames.encode(frames.MESSAGE, class_id=class_id, content=payload)


def ack(first: int, last: int, class_id: int = 1) -> bytes:
    return frames.encode_ack(class_id=class_id, timer_index=0, first=first, last=last)


def subscribe(class_id: int = 1) -> bytes:
    return frames.encode(frames.SUBSCRIBE, class_id=class_id)


def class_statistics(server: RunningServer, class_id: int = 1) -> ClassStatistics:
    statistics = server.server.broker.statistics()
    return next(c for c in statistics.classes if c.class_id == class_id)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true; it is checked every few milliseconds."""
    with trio.fail_after(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - an arbitrary condition has no event.
            await trio.sleep(0.005)
