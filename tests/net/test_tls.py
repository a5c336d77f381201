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
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def read(server: TlsSocket) -> bytes:
    """Return the data of one read; empty if there is none yet."""
    space = bytearray(256 * 1024)
    try:
        return bytes(space[: server.recv_into(memoryview(space))])
    except BlockingIOError:
        return b""


class Client:
    """TLS client whose bytes are passed to the network by hand."""

    def __init__(self, made: ssl.SSLContext) -> None:
        self.came, self.goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = made.wrap_bio(self.came, self.goes, server_hostname="localhost")

    def shake_hands(self, server: TlsSocket, wire: socket.socket) -> None:
        is_done, is_in = False, False
        while not (is_done and is_in):
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
                is_done = True
            wire.sendall(self.goes.read())
            with contextlib.suppress(BlockingIOError):
                server.handshake()
                is_in = True
            if not is_done:
                self.came.write(wire.recv(1 << 16))


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
    made = client_ssl_context(authority)
    made.maximum_version = VERSIONS[version]
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs, pytest.MonkeyPatch.context() as patch:
        server = TlsSocket(
            ours, create_ssl_context(TlsOptions(server_certificate.cert, server_certificate.key))
        )
        client = Client(made)
        client.shake_hands(server, theirs)
        assert read(server) == b""
        patch.setattr(simplebus.net.tls, "SLICE_BYTES", slice_bytes)
        patch.setattr(simplebus.net.tls, "TRUSTED_SLICE_BYTES", 3 * slice_bytes)
        patch.setattr(simplebus.net.tls, "PIECE_BYTES", piece_bytes)
        patch.setattr(simplebus.net.tls, "WIDE_AFTER_BYTES", wide_bytes)
        theirs.setblocking(False)
        sent, got = b"", b""
        for number, size in enumerate(sizes):
            data = bytes([number + 1]) * size
            assert client.tls.write(data) == size
            sent += data
        wire, at, turns = client.goes.read(), 0, cycle(pieces)
        while at < len(wire) or server.has_unread:
            piece = next(turns)
            with contextlib.suppress(BlockingIOError):  # The wire is full: it is read slower.
                at += theirs.send(wire[at : at + piece])
            got += read(server)
        while len(got) < len(sent):
            got += read(server)
        assert got == sent
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
    wire.sendall(client.goes.read())
    first = len(read(server))
    assert 60_000 - 16_384 <= first <= 80_000  # Of the last record a part had come.
    assert first + len(read(server)) == 100_000


def test_records_per_read_are_bounded(
    through: tuple[TlsSocket, Client, socket.socket],
) -> None:
    server, client, wire = through
    for _ in range(1000):
        client.tls.write(b"x")
    wire.sendall(client.goes.read())
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
        over: list[int] = []
        servers: list[TlsSocket] = []
        for _ in range(4):
            ours, theirs = map(stack.enter_context, socket.socketpair())
            ours.setblocking(False)
            server = TlsSocket(
                ours,
                create_ssl_context(TlsOptions(server_certificate.cert, server_certificate.key)),
            )
            Client(client_ssl_context(authority)).shake_hands(server, theirs)
            for _ in range(2):
                assert server.send(bytes(50_000)) == 50_000
                while theirs.recv(1 << 20) and server.has_unsent:
                    server.flush()
            assert server.send(bytes(5_000_000)) < 5_000_000
            over.append(len(server._unsent) + server._outgoing.pending)
            servers.append(server)
            if len(over) == 3:
                servers[0].socket.close()
        assert all(each > 2 * SLICE_BYTES for each in (over[0], over[1], over[3]))
        assert over[2] < 2 * SLICE_BYTES


def test_end_after_data_is_reported_by_the_next_read(
    through: tuple[TlsSocket, Client, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client, wire = through
    client.tls.write(b"x" * 5000)
    said = client.goes.read()
    monkeypatch.setattr(
        simplebus.net.tls, "PIECE_BYTES", len(said)
    )  # As much as was asked for came.
    wire.sendall(said)
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
    taken = server.send(data)
    assert server.has_unsent
    assert 10_000 < taken < len(data)
    with pytest.raises(BlockingIOError):
        server.send(data[taken:])
    got = b""
    while len(got) < taken:
        client.came.write(wire.recv(1 << 20))
        with contextlib.suppress(ssl.SSLWantReadError):
            while True:
                got += client.tls.read(1 << 20)
        server.flush()
    assert got == data[:taken]
    assert not server.has_unsent


def library() -> ctypes.CDLL:
    """Return the interpreter's OpenSSL, for functions that Python does not offer."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = next((line.split()[-1] for line in lines if "libssl" in line), None)
    if found is None:
        skip_or_fail("the interpreter's libssl is no library of its own")
    assert found is not None
    made = ctypes.CDLL(found)
    pointer = ctypes.c_void_p
    for name, result, takes in (
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
        function = getattr(made, name)
        function.restype, function.argtypes = result, takes
    return made


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

    def change_keys(self, how: int = REQUESTED) -> None:
        """Update the keys, and optionally request an update from the peer."""
        assert self._library.SSL_key_update(self._tls, how) == 1
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
        got = b""
        while len(got) < len(data):
            got += read(server)
        assert got == data


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
