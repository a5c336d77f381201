"""Tests of socket activation."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from simplebus.server import systemd
from simplebus.server.systemd import SocketActivationError, assign_sockets, take_inherited_sockets
from tests.support.running_server import connect, message, serving, subscribe


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listening_socket(stack: ExitStack) -> tuple[socket.socket, int]:
    """Return a listening socket on loopback, and its port."""
    sock = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    return sock, sock.getsockname()[1]


def set_activation_environment(
    monkeypatch: pytest.MonkeyPatch, *fds: int, names: str = ""
) -> dict[str, str]:
    """Return the environment of a process that inherits these consecutive descriptors."""
    monkeypatch.setattr(systemd, "FIRST_FD", fds[0])
    assert list(fds) == list(range(fds[0], fds[0] + len(fds)))
    inherited = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(fds)), "OTHER": "x"}
    return inherited | ({"LISTEN_FDNAMES": names} if names else {})


def duplicate_descriptors(count: int, *socks: socket.socket) -> list[int]:
    """Return consecutive descriptors, the first ones for these sockets."""
    first = 200
    for at, sock in enumerate(socks):
        os.dup2(sock.fileno(), first + at)
    return list(range(first, first + count))


def test_inherited_sockets_are_taken_once(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = listening_socket(stack), listening_socket(stack)
    environment = set_activation_environment(
        monkeypatch, *duplicate_descriptors(2, first[0], second[0]), names="nats:x"
    )
    inherited = take_inherited_sockets(environment)
    assert [(name, sock.getsockname()[1]) for name, sock in inherited] == [
        ("nats", first[1]),
        ("x", second[1]),
    ]
    for _, sock in inherited:
        assert not sock.getblocking()
        assert not sock.get_inheritable()
        sock.close()
    assert environment == {"OTHER": "x"}
    assert take_inherited_sockets(environment) == []


def test_sockets_of_another_process_are_ignored() -> None:
    assert take_inherited_sockets({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == []
    assert take_inherited_sockets({"LISTEN_FDS": "1"}) == []
    assert take_inherited_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"}) == []


def test_inherited_socket_that_does_not_listen_is_reported(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    sock = stack.enter_context(socket.socket())
    environment = set_activation_environment(
        monkeypatch, *duplicate_descriptors(1, sock), names="tcp"
    )
    with pytest.raises(
        SocketActivationError,
        match=r"descriptor 200 .'tcp'. of LISTEN_FDS is not a listening TCP socket",
    ):
        take_inherited_sockets(environment)


def test_assigns_sockets_by_name_or_port(stack: ExitStack) -> None:
    by_name, by_port, unassigned = (
        listening_socket(stack),
        listening_socket(stack),
        listening_socket(stack),
    )
    ports = {"tcp": by_port[1], "nats": 1, "http": None}
    inherited = assign_sockets([("nats", by_name[0]), ("simplebus.socket", by_port[0])], ports)
    assert inherited == {"nats": [by_name[0]], "tcp": [by_port[0]]}
    with pytest.raises(SocketActivationError, match=r"socket 'x' on 127.* belongs to no listener"):
        assign_sockets([("x", unassigned[0])], ports)
    with pytest.raises(SocketActivationError, match="is for the http listener, which is disabled"):
        assign_sockets([("http", unassigned[0])], ports)


async def test_early_clients_wait_in_the_backlog(stack: ExitStack) -> None:
    sock, port = listening_socket(stack)
    early = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    early.sendall(b"<")  # Waits in the queue.
    sock.setblocking(False)
    copy = sock.dup()
    async with serving(inherited={"tcp": [copy]}) as server:
        assert server.addresses == (f"127.0.0.1:{port}",)
        peer = await connect(server, [1])
        await peer.send(subscribe() + message(b"x"))
        assert await peer.read_messages(1) == [(0, b"x")]
    assert copy.fileno() == -1
    with socket.create_connection(("127.0.0.1", port)):  # The socket still listens.
        pass


@pytest.mark.parametrize(
    ("host", "is_warned"), [("0.0.0.0", True), ("127.0.0.1", False)], ids=["network", "loopback"]
)
async def test_warns_about_inherited_public_sockets(
    host: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sockets = {listener: [socket.create_server((host, 0))] for listener in ("tcp", "http")}
    for (sock,) in sockets.values():
        sock.setblocking(False)
    async with serving(inherited=sockets, http_port=0):
        pass
    for warning in (f"{host} can publish, subscribe", f"{host} can read metrics"):
        assert (warning in caplog.text) == is_warned
