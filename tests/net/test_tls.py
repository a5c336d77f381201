"""TlsSocket: data is unchanged, and work caused by TLS itself is bounded."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import ssl
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import simplebus.net.tls
from simplebus.net.tls import PIECE_BYTES, SLICE_BYTES, WIDE_AFTER_BYTES, TlsSocket
from simplebus.server.tls.certificates import TlsOptions, create_ssl_context
from tests.support.certificates import CertificateAuthority, CertificatePair, client_ssl_context
from tests.support.requirements import skip_or_fail

NOT_REQUESTED, REQUESTED = 0, 1
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return a connected pair of sockets; the first is the server's and non-blocking."""
    server_socket, client_socket = socket.socketpair()
    server_socket.setblocking(False)
    with server_socket, client_socket:
        yield server_socket, client_socket


def read(server: TlsSocket) -> bytes:
    """Return the data of one read; empty if no data has arrived yet."""
    space = bytearray(256 * 1024)
    try:
        return bytes(space[: server.recv_into(memoryview(space))])
    except BlockingIOError:
        return b""


class Client:
    """TLS client whose bytes are passed to the network by hand."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="localhost")

    def shake_hands(self, server: TlsSocket, wire: socket.socket) -> None:
        is_done, is_in = False, False
        while not (is_done and is_in):
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
                is_done = True
            wire.sendall(self.outgoing.read())
            with contextlib.suppress(BlockingIOError):
                server.handshake()
                is_in = True
            if not is_done:
                self.incoming.write(wire.recv(1 << 16))


@pytest.mark.parametrize("version", VERSIONS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(sizes=[40_000] * 8, pieces=[30_000], slice_bytes=11, piece_bytes=30_000, wide_bytes=1)
@given(
    sizes=st.lists(st.sampled_from([1, 13, 300, 16_384, 40_000]), min_size=1, max_size=8),
    pieces=st.lists(st.integers(1, 30_000), max_size=8).map(lambda sizes: [*sizes, 30_000]),
    slice_bytes=st.sampled_from([11, 1000, SLICE_BYTES]),
    piece_bytes=st.sampled_from([30_000, PIECE_BYTES]),
    wide_bytes=st.sampled_from([1, 20_000, WIDE_AFTER_BYTES]),
)
def test_data_is_received_unchanged_in_any_chunks(
    authority: CertificateAuthority,
    server_certificate: CertificatePair,
    version: str,
    sizes: list[int],
    pieces: list[int],
    slice_bytes: int,
    piece_bytes: int,
    wide_bytes: int,
) -> None:
    context = client_ssl_context(authority)
    context.maximum_version = VERSIONS[version]
    server_socket, client_socket = socket.socketpair()
    server_socket.setblocking(False)
    with server_socket, client_socket, pytest.MonkeyPatch.context() as patch:
        server = TlsSocket(
            server_socket,
            create_ssl_context(TlsOptions(server_certificate.cert, server_certificate.key)),
        )
        client = Client(context)
        client.shake_hands(server, client_socket)
        assert read(server) == b""
        patch.setattr(simplebus.net.tls, "SLICE_BYTES", slice_bytes)
        patch.setattr(simplebus.net.tls, "TRUSTED_SLICE_BYTES", 3 * slice_bytes)
        patch.setattr(simplebus.net.tls, "PIECE_BYTES", piece_bytes)
        patch.setattr(simplebus.net.tls, "WIDE_AFTER_BYTES", wide_bytes)
        client_socket.setblocking(False)
        sent, received = b"", b""
        for number, size in enumerate(sizes):
            data = bytes([number + 1]) * size
            assert client.tls.write(data) == size
            sent += data
        wire, offset, chunk_sizes = client.outgoing.read(), 0, cycle(pieces)
        while offset < len(wire) or server.has_unread:
            chunk_size = next(chunk_sizes)
            # The network is full, so it is read more slowly.
            with contextlib.suppress(BlockingIOError):
                offset += client_socket.send(wire[offset : offset + chunk_size])
            received += read(server)
        while len(received) < len(sent):
            received += read(server)
        assert received == sent
        assert read(server) == b""


@pytest.fixture
def through(
    authority: CertificateAuthority,
    server_certificate: CertificatePair,
    ends: tuple[socket.socket, socket.socket],
) -> tuple[TlsSocket, Client, socket.socket]:
    """Return a server, its connected client and the network between them."""
    server = TlsSocket(
        ends[0], create_ssl_context(TlsOptions(server_certificate.cert, server_certificate.key))
    )
    client = Client(client_ssl_context(authority))
    client.shake_hands(server, ends[1])
    assert read(server) == b""
    return server, client, ends[1]


def test_bytes_per_read_are_bounded(
    through: tuple[TlsSocket, Client, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client, wire = through
    monkeypatch.setattr(simplebus.net.tls, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(simplebus.net.tls, "_TURN_BYTES", 60_000)
    client.tls.write(b"x" * 100_000)
    wire.sendall(client.outgoing.read())
    first = len(read(server))
    assert 60_000 - 16_384 <= first <= 80_000  # A part of the last record had arrived.
    assert first + len(read(server)) == 100_000


def test_records_per_read_are_bounded(
    through: tuple[TlsSocket, Client, socket.socket],
) -> None:
    server, client, wire = through
    for _ in range(1000):
        client.tls.write(b"x")
    wire.sendall(client.outgoing.read())
    turns = [len(read(server))]
    while server.has_unread:
        turns.append(len(read(server)))
    assert sum(turns) == 1000
    assert max(turns) == 256


def test_wide_sockets_are_limited(
    authority: CertificateAuthority,
    server_certificate: CertificatePair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenSSL keeps a buffer for the largest piece of each connection."""
    monkeypatch.setattr(simplebus.net.tls, "WIDE_AFTER_BYTES", 100_000)
    monkeypatch.setattr(simplebus.net.tls, "WIDE_MAX", len(simplebus.net.tls._wide_sockets) + 2)
    with contextlib.ExitStack() as stack:
        receive_sizes: list[int] = []
        servers: list[TlsSocket] = []
        for _ in range(4):
            server_socket, client_socket = map(stack.enter_context, socket.socketpair())
            server_socket.setblocking(False)
            server = TlsSocket(
                server_socket,
                create_ssl_context(TlsOptions(server_certificate.cert, server_certificate.key)),
            )
            Client(client_ssl_context(authority)).shake_hands(server, client_socket)
            for _ in range(2):
                assert server.send(bytes(50_000)) == 50_000
                while client_socket.recv(1 << 20) and server.has_unsent:
                    server.flush()
            assert server.send(bytes(5_000_000)) < 5_000_000
            receive_sizes.append(len(server._unsent) + server._outgoing.pending)
            servers.append(server)
            if len(receive_sizes) == 3:
                servers[0].socket.close()
        assert all(
            each > 2 * SLICE_BYTES
            for each in (receive_sizes[0], receive_sizes[1], receive_sizes[3])
        )
        assert receive_sizes[2] < 2 * SLICE_BYTES


def test_end_after_data_is_reported_by_the_next_read(
    through: tuple[TlsSocket, Client, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client, wire = through
    client.tls.write(b"x" * 5000)
    wire_data = client.outgoing.read()
    # The requested number of bytes arrived.
    monkeypatch.setattr(simplebus.net.tls, "PIECE_BYTES", len(wire_data))
    wire.sendall(wire_data)
    wire.close()
    assert read(server) == b"x" * 5000
    space = memoryview(bytearray(10))
    assert server.recv_into(space) == 0


def test_send_accepts_as_much_as_the_network(
    through: tuple[TlsSocket, Client, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client, wire = through
    monkeypatch.setattr(simplebus.net.tls, "SLICE_BYTES", 10_000)
    data = bytes(range(256)) * 8000
    accepted_bytes = server.send(data)
    assert server.has_unsent
    assert 10_000 < accepted_bytes < len(data)
    with pytest.raises(BlockingIOError):
        server.send(data[accepted_bytes:])
    received = b""
    while len(received) < accepted_bytes:
        client.incoming.write(wire.recv(1 << 20))
        with contextlib.suppress(ssl.SSLWantReadError):
            while True:
                received += client.tls.read(1 << 20)
        server.flush()
    assert received == data[:accepted_bytes]
    assert not server.has_unsent


def library() -> ctypes.CDLL:
    """Return the interpreter's OpenSSL, for functions that Python does not offer."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = next((line.split()[-1] for line in lines if "libssl" in line), None)
    if found is None:
        skip_or_fail("the interpreter's libssl is no library of its own")
    assert found is not None
    context = ctypes.CDLL(found)
    pointer = ctypes.c_void_p
    for name, result, argument_types in (
        ("TLS_client_method", pointer, []),
        ("SSL_CTX_new", pointer, [pointer]),
        ("SSL_CTX_free", None, [pointer]),
        ("SSL_new", pointer, [pointer]),
        ("SSL_free", None, [pointer]),
        ("SSL_set_fd", ctypes.c_int, [pointer, ctypes.c_int]),
        ("SSL_connect", ctypes.c_int, [pointer]),
        ("SSL_key_update", ctypes.c_int, [pointer, ctypes.c_int]),
        ("SSL_do_handshake", ctypes.c_int, [pointer]),
        ("SSL_write", ctypes.c_int, [pointer, ctypes.c_char_p, ctypes.c_int]),
    ):
        function = getattr(context, name)
        function.restype, function.argtypes = result, argument_types
    return context


class Changing:
    """Client that updates its TLS keys on request and reads only the handshake."""

    def __init__(self, server: TlsSocket, wire: socket.socket) -> None:
        wire.setblocking(False)
        self._library = library()
        self._context = self._library.SSL_CTX_new(self._library.TLS_client_method())
        self._tls = self._library.SSL_new(self._context)
        self._library.SSL_set_fd(self._tls, wire.fileno())
        is_in = False
        while not is_in or self._library.SSL_connect(self._tls) != 1:
            self._library.SSL_connect(self._tls)
            with contextlib.suppress(BlockingIOError):
                server.handshake()
                is_in = True

    def close(self) -> None:
        self._library.SSL_free(self._tls)
        self._library.SSL_CTX_free(self._context)

    def change_keys(self, request_type: int = REQUESTED) -> None:
        """Update the keys, and optionally request an update from the peer."""
        assert self._library.SSL_key_update(self._tls, request_type) == 1
        assert self._library.SSL_do_handshake(self._tls) == 1

    def write(self, data: bytes) -> None:
        assert self._library.SSL_write(self._tls, data, len(data)) == len(data)


@pytest.fixture
def pair(
    server_certificate: CertificatePair, ends: tuple[socket.socket, socket.socket]
) -> Iterator[tuple[TlsSocket, Changing]]:
    server = TlsSocket(
        ends[0], create_ssl_context(TlsOptions(server_certificate.cert, server_certificate.key))
    )
    client = Changing(server, ends[1])
    assert read(server) == b""
    yield server, client
    client.close()


def test_occasional_key_updates_are_accepted(pair: tuple[TlsSocket, Changing]) -> None:
    server, client = pair
    for number in range(500):
        client.change_keys()
        data = bytes([number % 256]) * 100
        client.write(data)
        received = b""
        while len(received) < len(data):
            received += read(server)
        assert received == data


def test_only_key_updates_abort_the_connection(pair: tuple[TlsSocket, Changing]) -> None:
    server, client = pair

    def change_keys() -> None:
        for _ in range(2000):
            client.change_keys(NOT_REQUESTED)
            assert read(server) == b""

    with pytest.raises(ConnectionAbortedError, match="contained almost no data"):
        change_keys()


def test_unread_tls_replies_are_bounded(pair: tuple[TlsSocket, Changing]) -> None:
    server, client = pair
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

    def change_keys() -> None:
        for _ in range(5000):
            client.change_keys()
            client.write(b"x" * 100)
            read(server)

    with pytest.raises(ConnectionAbortedError, match="requested TLS key updates without reading"):
        change_keys()


def test_key_updates_are_decrypted_one_slice_per_read(
    pair: tuple[TlsSocket, Changing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simplebus.net.tls, "SLICE_BYTES", 1000)
    server, client = pair
    for _ in range(150):
        client.change_keys()
    turns = 0
    while not turns or server.has_unread:
        assert read(server) == b""
        turns += 1
    assert turns >= 4
