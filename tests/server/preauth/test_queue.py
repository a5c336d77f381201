"""Tests of the pre-authentication queue. Fairness is counted in steps, not in time."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import groupby, pairwise

import pytest
import trio
import trio.testing

from simplebus.core.limits import Limits
from simplebus.core.settings import Settings
from simplebus.core.users.users import Users
from simplebus.nats.limits import NatsLimits
from simplebus.nats.settings import NatsSettings
from simplebus.server import listeners
from simplebus.server.preauth import queue
from simplebus.server.preauth.queue import PreAuthConnection, PreAuthQueue, yield_to_others
from simplebus.server.run import RunningServer
from simplebus.server.tls.certificates import TlsOptions
from tests.support.certificates import CertificateAuthority, CertificatePair
from tests.support.running_server import serving, wait_until

MANY = 100
PATIENT_SECONDS = 600.0
"""Time limit of handshakes. A busy machine needs seconds to connect many clients."""
PATIENT = Settings(limits=Limits(hello_seconds=PATIENT_SECONDS))
PATIENT_NATS = NatsSettings(
    limits=NatsLimits(tls_seconds=PATIENT_SECONDS, auth_seconds=PATIENT_SECONDS)
)


@pytest.fixture
def _patient_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplebus.server.http.server.HEAD_SECONDS_MAX", PATIENT_SECONDS)


@pytest.fixture
def sockets() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Factory of connected sockets: the peer's end and the server's end."""
    with contextlib.ExitStack() as opened_sockets:

        def pair() -> tuple[socket.socket, socket.socket]:
            peer, own_socket = socket.socketpair()
            own_socket.setblocking(False)
            opened_sockets.enter_context(peer)
            opened_sockets.enter_context(own_socket)
            return peer, own_socket

        yield pair


Sockets = Callable[[], tuple[socket.socket, socket.socket]]


@contextlib.asynccontextmanager
async def running_queue() -> AsyncIterator[tuple[PreAuthQueue, trio.Nursery]]:
    async with trio.open_nursery() as nursery:
        queue_ = PreAuthQueue()
        nursery.start_soon(queue_.run)
        yield queue_, nursery
        nursery.cancel_scope.cancel()


async def poll_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition without using the clock."""
    while not condition():
        await trio.lowlevel.checkpoint()


class StepLog:
    """Steps of connections in order, while an authenticated task is always busy."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def run_authenticated(self) -> None:
        while True:
            self.names.append("authenticated")
            await trio.lowlevel.checkpoint()

    async def wait_readable(
        self, connection: PreAuthConnection, name: str, deadline: float = float("inf")
    ) -> None:
        with connection:
            try:
                await connection.wait_readable(deadline)
                self.names.append(name)
            except trio.TooSlowError:
                self.names.append(f"{name} is late")

    async def wait_cancelled(
        self, connection: PreAuthConnection, scope: trio.CancelScope, name: str
    ) -> None:
        with scope, connection:
            await connection.wait_readable()
        self.names.append(name)

    async def wait_turn(self, connection: PreAuthConnection, name: str) -> None:
        with connection:
            await connection.wait_turn()
            self.names.append(name)

    def preauth_names(self) -> list[str]:
        return [name for name in self.names if name != "authenticated"]

    async def wait_steps(self, count: int) -> None:
        """Wait for `count` steps; between any two, the authenticated task must have run."""
        await poll_until(lambda: len(self.preauth_names()) >= count)
        for first_name, second_name in zip(self.names, self.names[1:], strict=False):
            assert "authenticated" in (first_name, second_name), self.names


async def test_listeners_accept_less_often_in_a_crowd(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd of busy connections delays listeners without stopping them."""
    monkeypatch.setattr(queue, "CROWD_SIZE", 3)
    monkeypatch.setattr(queue, "STEPS_BETWEEN_ACCEPTS", 10)
    step_names: list[str] = []

    async def take_turns(connection: PreAuthConnection, name: str) -> None:
        with connection:
            while True:
                await connection.wait_turn()
                step_names.append(name)

    async with running_queue() as (queue_, nursery):
        for listener_name in ("bus", "health"):
            nursery.start_soon(
                take_turns, queue_.add(sockets()[1], listener_name, is_listener=True), listener_name
            )
        for n in range(5):
            nursery.start_soon(take_turns, queue_.add(sockets()[1], f"place {n % 2}"), "connection")
        await poll_until(lambda: len(step_names) >= 100)
    for listener_name in ("bus", "health"):
        turns = [n for n, name in enumerate(step_names) if name == listener_name]
        steps = [later - earlier for earlier, later in pairwise(turns)]
        assert len(turns) >= 7
        assert all(10 <= step <= 15 for step in steps), steps


async def test_readable_connections_run_one_at_a_time(sockets: Sockets) -> None:
    log = StepLog()
    async with running_queue() as (queue_, nursery):
        for _ in range(MANY):
            peer, own_socket = sockets()
            nursery.start_soon(log.wait_readable, queue_.add(own_socket, "there"), "connection")
            peer.send(b"x")
        nursery.start_soon(log.run_authenticated)
        await log.wait_steps(MANY)
        assert queue_.step_count == MANY
        assert queue_.waiting_count == 0


async def test_timed_out_connections_run_one_at_a_time(
    sockets: Sockets, mock_clock: trio.testing.MockClock
) -> None:
    log = StepLog()
    async with running_queue() as (queue_, nursery):
        for _ in range(MANY):
            nursery.start_soon(
                log.wait_readable, queue_.add(sockets()[1], "there"), "connection", 5.0
            )
        await poll_until(lambda: queue_.waiting_count == MANY)
        mock_clock.jump(4.9)
        await trio.testing.wait_all_tasks_blocked()
        assert log.names == []
        nursery.start_soon(log.run_authenticated)
        mock_clock.jump(0.2)
        await log.wait_steps(MANY)
        assert set(log.preauth_names()) == {"connection is late"}


async def test_cancelled_connections_run_one_at_a_time(sockets: Sockets) -> None:
    log = StepLog()
    async with running_queue() as (queue_, nursery):
        connections = [(queue_.add(sockets()[1], "there"), trio.CancelScope()) for _ in range(MANY)]
        for connection, scope in connections:
            nursery.start_soon(log.wait_cancelled, connection, scope, "connection")
        await poll_until(lambda: queue_.waiting_count == MANY)
        for connection, scope in connections:
            connection.cancel_in_turn(scope)
        nursery.start_soon(log.run_authenticated)
        await log.wait_steps(MANY)
        assert queue_.waiting_count == 0


async def test_connections_that_wait_for_a_turn_run_one_at_a_time(sockets: Sockets) -> None:
    log = StepLog()
    async with running_queue() as (queue_, nursery):
        for _ in range(MANY):
            nursery.start_soon(log.wait_turn, queue_.add(sockets()[1], "there"), "connection")
        nursery.start_soon(log.run_authenticated)
        await log.wait_steps(MANY)


async def test_origins_take_turns(sockets: Sockets) -> None:
    log = StepLog()
    async with running_queue() as (queue_, nursery):
        nursery.start_soon(log.run_authenticated)
        for name in ["crowd"] * MANY + ["one"]:  # All wait in one loop turn, in any order.
            nursery.start_soon(log.wait_turn, queue_.add(sockets()[1], name), name)
        await log.wait_steps(MANY + 1)
        assert log.preauth_names().index("one") <= 2


async def test_connection_can_wait_repeatedly(sockets: Sockets) -> None:
    async with running_queue() as (queue_, _):
        peer, own_socket = sockets()
        with queue_.add(own_socket, "there") as connection:
            for sent in (b"one", b"two", b"three"):
                peer.send(sent)
                await connection.wait_readable()
                assert own_socket.recv(10) == sent
            peer.close()
            await connection.wait_readable()
            assert own_socket.recv(10) == b""


async def test_ready_connection_does_not_time_out(
    sockets: Sockets, mock_clock: trio.testing.MockClock
) -> None:
    log, queue_ = StepLog(), PreAuthQueue()
    async with trio.open_nursery() as nursery:
        peer, own_socket = sockets()
        peer.send(b"x")
        nursery.start_soon(log.wait_readable, queue_.add(own_socket, "there"), "connection", 1.0)
        nursery.start_soon(log.wait_readable, queue_.add(sockets()[1], "there"), "silent", 1.0)
        await poll_until(lambda: queue_.waiting_count == 2)
        mock_clock.jump(2)  # The queue has not run yet.
        nursery.start_soon(queue_.run)
        nursery.start_soon(log.run_authenticated)
        await log.wait_steps(2)
        assert log.preauth_names() == ["connection", "silent is late"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("is_moved", [False, True])
async def test_resumed_connection_ignores_its_deadline(
    sockets: Sockets, mock_clock: trio.testing.MockClock, is_moved: bool
) -> None:
    """The connection is cancelled or resumed in the loop turn of its deadline."""
    cancelled: list[bool] = []
    async with running_queue() as (queue_, nursery):
        connection, scope = queue_.add(sockets()[1], "place"), trio.CancelScope()

        async def wait() -> None:
            with scope, connection:
                await connection.wait_readable(1.0)
            cancelled.append(scope.cancelled_caught)

        nursery.start_soon(wait)
        await poll_until(lambda: queue_.waiting_count == 1)
        mock_clock.jump(2)
        connection.start_step() if is_moved else scope.cancel()
        queue_._collect_ready()
        assert not connection.is_queued
        await poll_until(lambda: cancelled == [not is_moved])


async def test_repeated_deadline_is_scheduled_once(
    sockets: Sockets, mock_clock: trio.testing.MockClock
) -> None:
    async with running_queue() as (queue_, nursery):
        log = StepLog()
        peer, own_socket = sockets()
        with queue_.add(own_socket, "here") as connection:
            for deadline in (8.0, 7.0, 9.0):
                for _ in range(100):
                    peer.send(b"x")
                    await connection.wait_readable(deadline)
                    assert own_socket.recv(1) == b"x"
            assert len(queue_._deadlines) == 2  # An earlier deadline is a second entry.
            nursery.start_soon(log.wait_readable, connection, "connection", 9.0)
            await poll_until(lambda: queue_.waiting_count == 1)
            for now, count in ((8.5, 1), (9.5, 0)):
                mock_clock.jump(now - trio.current_time())
                await poll_until(lambda count=count: len(queue_._deadlines) == count)
            await poll_until(lambda: log.names == ["connection is late"])


async def test_deadlines_of_ready_connections_are_not_rescanned(
    sockets: Sockets,
) -> None:
    async with trio.open_nursery() as nursery:
        queue_, log = PreAuthQueue(), StepLog()
        pairs = [sockets() for _ in range(200)]
        for _, own_socket in pairs:
            nursery.start_soon(
                log.wait_readable, queue_.add(own_socket, "there"), "connection", 1e9
            )
        await poll_until(lambda: queue_.waiting_count == 200)
        for peer, _ in pairs:
            peer.send(b"x")
        for _ in range(10):
            queue_._collect_ready()
        with queue_.add(sockets()[1], "here") as connection:
            connection.deadline = 1e9
            before = queue_._deadlines
            for _ in range(300):
                queue_.watch_readable(connection)
            assert queue_._deadlines is before
        nursery.cancel_scope.cancel()


async def test_outdated_deadlines_do_not_pile_up(sockets: Sockets) -> None:
    async with running_queue() as (queue_, nursery):
        log = StepLog()
        nursery.start_soon(log.wait_readable, queue_.add(sockets()[1], "there"), "silent", 1e9)
        peer, own_socket = sockets()
        with queue_.add(own_socket, "here") as connection:
            for number in range(1000):
                peer.send(b"x")
                await connection.wait_readable(1e9 + number)
                assert own_socket.recv(1) == b"x"
        assert len(queue_._deadlines) <= 2 * 2 + 64
        await poll_until(lambda: queue_.waiting_count == 1)
        assert log.names == []


async def test_cancelled_connections_are_removed(sockets: Sockets) -> None:
    async with running_queue() as (queue_, nursery):
        log, scopes = StepLog(), [trio.CancelScope() for _ in range(3)]
        for scope in scopes:
            peer, own_socket = sockets()
            nursery.start_soon(
                log.wait_cancelled, queue_.add(own_socket, "there"), scope, "connection"
            )
        await poll_until(lambda: queue_.waiting_count == 3)
        for scope in scopes:
            scope.cancel()
        peer.send(b"x")
        await poll_until(lambda: len(log.names) == 3)
        assert queue_.waiting_count == 0
        await trio.testing.wait_all_tasks_blocked()
        assert queue_.step_count == 0


async def test_other_tasks_get_their_share_of_a_busy_loop(
    mock_clock: trio.testing.MockClock,
) -> None:
    turns = 0

    async def be_busy() -> None:
        nonlocal turns
        while True:
            turns += 1
            mock_clock.jump(0.125)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(be_busy)
        await yield_to_others(1.0, loop_share=0.25)
        assert turns >= 3.0 / 0.125
        nursery.cancel_scope.cancel()


async def test_yielding_to_an_idle_loop_returns_at_once(
    mock_clock: trio.testing.MockClock,
) -> None:
    began = trio.current_time()
    await yield_to_others(1000.0)
    assert trio.current_time() == began


# Listeners ------------------------------------------------------------------------------------


async def test_accepts_per_turn_are_bounded() -> None:
    log, accepts_per_turn = StepLog(), listeners._ACCEPTS_PER_TURN
    (listener,) = await listeners.bind("127.0.0.1", 0)
    with contextlib.ExitStack() as opened_sockets:

        def serve(sock: socket.socket, name: str) -> None:
            opened_sockets.enter_context(sock)
            log.names.append("accepted")

        for _ in range(MANY):
            opened_sockets.enter_context(socket.create_connection(listener.getsockname()))
        async with running_queue() as (queue_, nursery):
            nursery.start_soon(log.run_authenticated)
            nursery.start_soon(listeners.accept, listener, serve, queue_)
            await poll_until(lambda: log.names.count("accepted") == MANY)
    together = [len(list(names)) for name, names in groupby(log.names) if name == "accepted"]
    assert max(together) <= accepts_per_turn
    assert len(together) >= MANY / accepts_per_turn


class StepCounter(trio.abc.Instrument):
    """Counts the steps of connections per turn of the event loop."""

    def __init__(self) -> None:
        self.steps_per_turn_max = self.step_count = self._now = 0

    def after_io_wait(self, timeout: float) -> None:
        self._now = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task.name.endswith("Connection.run"):
            self._now += 1
            self.step_count += 1
            self.steps_per_turn_max = max(self.steps_per_turn_max, self._now)


def tls_client_hello() -> bytes:
    """Return the first bytes of a TLS client."""
    outgoing = ssl.MemoryBIO()
    tls_object = ssl.create_default_context().wrap_bio(
        ssl.MemoryBIO(), outgoing, server_hostname="a"
    )
    with contextlib.suppress(ssl.SSLWantReadError):
        tls_object.do_handshake()
    return outgoing.read()


LISTENERS: dict[str, Callable[[RunningServer], tuple[str, ...]]] = {
    "binary": lambda up: up.addresses,
    "nats": lambda up: up.nats_addresses,
    "http": lambda up: up.http_addresses,
}


@pytest.mark.usefixtures("_patient_http")
@pytest.mark.parametrize("listener_name", LISTENERS)
@pytest.mark.parametrize("sent", ["half", "garbage", "whole"])
async def test_many_ready_connections_take_one_step_per_turn(
    server_certificate: CertificatePair,
    authority: CertificateAuthority,
    listener_name: str,
    sent: str,
) -> None:
    tls = TlsOptions(
        server_certificate.cert, server_certificate.key, handshake_seconds=PATIENT_SECONDS
    )
    connection_count = 40
    data_by_kind = {
        "half": tls_client_hello()[:100],
        "garbage": b"\x16\x03\x01\x00\x05nonsense",
        "whole": tls_client_hello(),
    }
    async with serving(
        PATIENT, nats_port=0, nats=PATIENT_NATS, nats_tls=tls, http_port=0, tls=tls
    ) as up:
        host, _, port = LISTENERS[listener_name](up)[0].rpartition(":")
        listening = len(up.addresses + up.nats_addresses + up.http_addresses)
        client_sockets = [
            socket.create_connection((host, int(port))) for _ in range(connection_count)
        ]
        await wait_until(
            lambda: up.server.preauth_queue.waiting_count == listening + connection_count
        )
        steps, before = StepCounter(), up.server.preauth_queue.step_count
        trio.lowlevel.add_instrument(steps)
        for sock in client_sockets:
            sock.sendall(data_by_kind[sent])
        await wait_until(lambda: up.server.preauth_queue.step_count >= before + connection_count)
        for sock in client_sockets:
            sock.close()
        await wait_until(lambda: up.server.preauth_queue.waiting_count == listening)
        trio.lowlevel.remove_instrument(steps)
        assert steps.step_count >= connection_count
        assert steps.steps_per_turn_max == 1


@pytest.mark.parametrize("listener_name", ["binary", "nats"])
async def test_many_silent_connections_close_in_one_step_per_turn(listener_name: str) -> None:
    # Without users nothing authenticates.
    async with serving(PATIENT, nats_port=0, nats=PATIENT_NATS, http_port=0) as up:
        host, _, port = LISTENERS[listener_name](up)[0].rpartition(":")
        listening = len(up.addresses + up.nats_addresses + up.http_addresses)
        client_sockets = [socket.create_connection((host, int(port))) for _ in range(MANY)]
        await wait_until(lambda: up.server.preauth_queue.waiting_count == listening + MANY)
        steps = StepCounter()
        trio.lowlevel.add_instrument(steps)
        for sock in client_sockets:
            sock.close()
        await wait_until(lambda: up.server.preauth_queue.waiting_count == listening)
        trio.lowlevel.remove_instrument(steps)
        assert steps.step_count >= MANY
        assert steps.steps_per_turn_max == 1


@pytest.mark.usefixtures("_patient_http")
async def test_listeners_are_separate_origins() -> None:
    async with serving(PATIENT, nats_port=0, nats=PATIENT_NATS, http_port=0, users=Users([])) as up:
        queue_, client_sockets = up.server.preauth_queue, []
        listening = len(up.addresses + up.nats_addresses + up.http_addresses)
        await wait_until(lambda: queue_.waiting_count == listening)
        listeners_at = {connection.origin for connection in queue_._polled_by_fd.values()}
        for addresses_of in LISTENERS.values():
            host, _, port = addresses_of(up)[0].rpartition(":")
            client_sockets += [socket.create_connection((host, int(port))) for _ in range(3)]
        await wait_until(lambda: queue_.waiting_count == listening + len(client_sockets))
        origins = {connection.origin for connection in queue_._polled_by_fd.values()}
        assert len(origins - listeners_at) == len(LISTENERS)
        for sock in client_sockets:
            sock.close()
        await wait_until(lambda: queue_.waiting_count == listening)
