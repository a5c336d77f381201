"""Real server in its own thread, for clients under any event loop or none.

The server is that of `simplebus serve`, on a free port. Every call returns when the server has
executed the request.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import trio

from simplebus.core.protocol.durability import Durability
from simplebus.core.settings import Settings
from simplebus.core.statistics import ClassStatistics
from simplebus.core.users.users import Users
from simplebus.jetstream.settings import JetStreamOptions
from simplebus.server.run import RunningServer, ServeOptions, serve
from simplebus.server.tls.certificates import TlsOptions

T = TypeVar("T")

PATIENCE_SECONDS = 60.0


class BusServer:
    """Server on a free port of 127.0.0.1, until `stop`.

    Args:
        settings: Settings of the broker.
        data_dir: Directory that keeps messages and durables. None keeps them in memory only.
        durability: Guarantee of a confirm with `data_dir`.
        cluster: Options of a JetStream cluster that stores the classes instead.
        tls: Certificates for TLS. None accepts plain connections.
        users: Users that may connect. None accepts every client.

    Raises:
        Exception: The error that prevented the start of the server.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        data_dir: Path | None = None,
        durability: Durability = Durability.DISK,
        cluster: JetStreamOptions | None = None,
        tls: TlsOptions | None = None,
        users: Users | None = None,
    ) -> None:
        self._settings = settings or Settings()
        self._options = ServeOptions(
            hosts=("127.0.0.1",),
            port=0,
            data_dir=data_dir,
            durability=durability,
            cluster=cluster,
            tls=tls,
            users=users,
        )
        self._up: Future[RunningServer] = Future()
        self._thread = threading.Thread(target=self._run, name="simplebus server", daemon=True)
        self._thread.start()
        self._serving = self._up.result(PATIENCE_SECONDS)
        scheme = "simplebus" if tls is None else "simplebuss"
        self.address = f"{scheme}://{self._serving.addresses[0]}"
        """Address for `simplebus.connect`."""

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except Exception as error:
            if self._up.done():
                raise
            self._up.set_exception(error)

    async def _serve(self) -> None:
        async with trio.open_nursery() as nursery:
            self._token = trio.lowlevel.current_trio_token()
            self._scope = nursery.cancel_scope
            serving: RunningServer = await nursery.start(
                lambda task_status: serve(
                    self._settings,
                    self._options,
                    announce=lambda line: None,
                    task_status=task_status,
                )
            )
            self._up.set_result(serving)

    def ask(self, question: Callable[[RunningServer], T]) -> T:
        """Call a function with the server in the server's thread, and return its result.

        Args:
            question: Function of the running server.

        Raises:
            Exception: The error that `question` raises.
            TimeoutError: The server did not answer.
        """
        answer: Future[T] = Future()

        def reply() -> None:
            try:
                answer.set_result(question(self._serving))
            except Exception as error:
                answer.set_exception(error)

        self._token.run_sync_soon(reply)
        return answer.result(PATIENCE_SECONDS)

    def statistics(self, class_id: int = 1) -> ClassStatistics:
        """Return a snapshot of the counters of one class. Raises KeyError if the class does not
        exist.
        """
        return self.ask(lambda up: up.server.broker.classes[class_id].statistics())

    def tick(self, times: int = 1) -> None:
        """Run this number of ticks of the ack timer now. Otherwise the clock runs them."""
        for _ in range(times):
            self.ask(lambda up: up.server.tick())

    def hang_up(self) -> None:
        """Close every connection, as a server that restarts does. Clients may connect again."""

        def cut_all(up: RunningServer) -> None:
            for connection in up.server.connections.values():
                connection.disconnect()

        self.ask(cut_all)

    def stop(self) -> None:
        """Stop the server. Messages that are only in memory are lost. Raises TimeoutError if it
        does not stop.
        """
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"the server did not stop within {PATIENCE_SECONDS:g} s")


@contextlib.contextmanager
def bus_server(
    settings: Settings | None = None,
    *,
    data_dir: Path | None = None,
    durability: Durability = Durability.DISK,
    cluster: JetStreamOptions | None = None,
    tls: TlsOptions | None = None,
    users: Users | None = None,
) -> Iterator[BusServer]:
    """Run a server for a block.

        with bus_server() as server:
            ...  # connect(server.address)

    The arguments are those of `BusServer`.

    Yields:
        The running `BusServer`.
    """
    server = BusServer(
        settings, data_dir=data_dir, durability=durability, cluster=cluster, tls=tls, users=users
    )
    try:
        yield server
    finally:
        server.stop()


def until(condition: Callable[[], bool]) -> None:
    """Block until the condition holds. Raises TimeoutError after PATIENCE_SECONDS."""
    for _ in range(int(PATIENCE_SECONDS / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise TimeoutError(f"the condition did not hold within {PATIENCE_SECONDS:g} s")
