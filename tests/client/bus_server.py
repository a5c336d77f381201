"""A real server in a thread of its own, so that a client may run under any event loop, or none."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import trio

from simplebus.core.broker import Settings
from simplebus.core.statistics import ClassStatistics
from simplebus.server.serve import ServeOptions, Serving, serve

T = TypeVar("T")

PATIENCE_SECONDS = 20.0


class BusServer:
    """A server on a free port of 127.0.0.1."""

    def __init__(self, settings: Settings) -> None:
        self.address = ""
        """Where it listens, as a program would be told."""
        self._settings = settings
        self._up = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._run,), daemon=True)
        self._thread.start()
        assert self._up.wait(PATIENCE_SECONDS), "the server did not come up"

    async def _run(self) -> None:
        async with trio.open_nursery() as nursery:
            self._token = trio.lowlevel.current_trio_token()
            self._scope = nursery.cancel_scope
            self._serving: Serving = await nursery.start(
                lambda task_status: serve(
                    self._settings,
                    ServeOptions(hosts=("127.0.0.1",), port=0),
                    announce=lambda line: None,
                    task_status=task_status,
                )
            )
            self.address = f"simplebus://{self._serving.addresses[0]}"
            self._up.set()

    def ask(self, question: Callable[[Serving], T]) -> T:
        """Look at the server, in its own thread, and block for as long."""
        answer: Future[T] = Future()

        def reply() -> None:
            try:
                answer.set_result(question(self._serving))
            except Exception as error:
                answer.set_exception(error)

        self._token.run_sync_soon(reply)
        return answer.result(PATIENCE_SECONDS)

    def statistics(self, class_id: int = 1) -> ClassStatistics:
        classes = self.ask(lambda up: up.engine.broker.statistics().classes)
        return next(cls for cls in classes if cls.class_id == class_id)

    def tick(self, times: int = 1) -> None:
        """Let so many beats of the ack timer pass."""
        for _ in range(times):
            self.ask(lambda up: up.engine.tick())

    def hang_up(self) -> None:
        """Close every connection, as a server that goes does."""
        self.ask(lambda up: [connection.cut() for connection in up.engine.connections.values()])

    def stop(self) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def bus_server(settings: Settings | None = None) -> Iterator[BusServer]:
    server = BusServer(settings or Settings())
    try:
        yield server
    finally:
        server.stop()


def until(condition: Callable[[], bool]) -> None:
    """Wait, blocking, until it holds."""
    for _ in range(int(PATIENCE_SECONDS / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to that")


@contextlib.contextmanager
def deaf_listener(*, answers: bool = True) -> Iterator[tuple[str, list[socket.socket]]]:
    """A listener that answers the first Connect, if at all, and reads nothing more.

    Gives its address and the list of accepted sockets.
    """
    accepted: list[socket.socket] = []

    def accept() -> None:
        peer, _ = listener.accept()
        accepted.append(peer)
        if answers:
            assert peer.recv(15).startswith(b"4")
            peer.sendall(b"4" + bytes(8) + bytes(4) + b"<\r\n>")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", accepted
        finally:
            thread.join(PATIENCE_SECONDS)
            for peer in accepted:
                peer.close()
