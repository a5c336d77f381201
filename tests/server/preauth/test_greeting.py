"""Tests of the limits on the first messages of unauthenticated connections."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import HANDSHAKE_FRAME_BYTES_MAX, HANDSHAKE_HEARTBEATS_MAX
from simplebus.core.protocol import frames
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.users import User, Users
from simplebus.server.listeners import format_address, host_from_address
from simplebus.server.preauth.greeting import Greeting, GreetingBuffers, parse_greeting
from tests.support.oracles import build_frame
from tests.support.running_server import (
    Peer,
    connect,
    serving,
    wait_until,
)

HEARTBEAT = build_frame(frames.HEARTBEAT)
HELLO = build_frame(frames.CONNECT, content=b'{"auth":{"user":"ada","password":"secret"}}')
STRANGE = build_frame(frames.MESSAGE, class_id=7, content=b"hi")


def nobody(error: RemoteProtocolError) -> None:
    raise AssertionError(error)


class Looked(bytearray):
    """Counts the bytes that are looked through."""

    total = 0

    def find(self, what: bytes, first: int = 0) -> int:  # type: ignore[override]
        self.total += max(0, len(self) - first)
        return super().find(what, first)


def hears(*pieces: bytes) -> tuple[Greeting, list[tuple[bool, object]]]:
    heard = Greeting(nobody)
    heard.data = Looked()
    said = []
    for piece in pieces:
        heard.data += piece
        said.append(parse_greeting(heard))
    return heard, said


@given(
    st.integers(0, 5),
    st.sampled_from([HELLO, STRANGE, build_frame(frames.CONNECT, content=b"[1]")]),
    st.lists(st.integers(1, 40), max_size=20),
)
def test_greeting_is_parsed_in_any_fragmentation(
    heartbeats: int, frame: bytes, sizes: list[int]
) -> None:
    data, pieces = HEARTBEAT * heartbeats + frame, []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    heard, said = hears(*[piece for piece in (*pieces, data) if piece])
    first = [is_whole for is_whole, _ in said].index(True)
    assert said[first][1] == (None if frame is not HELLO else said[-1][1])
    assert bytes(heard.data).startswith(frame[: len(heard.data)])
    if first == len(said) - 1:
        assert bytes(heard.data) == frame
        assert (said[-1][1] is not None) is (frame is HELLO)


def test_greeting_sent_byte_by_byte_is_searched_in_linear_time() -> None:
    long = build_frame(frames.CONNECT, content=b'{"client":"' + b"x" * 4000 + b'"}')
    heard, said = hears(*struct.unpack(f"{len(long)}c", long))
    assert [is_whole for is_whole, _ in said] == [False] * (len(long) - 1) + [True]
    assert isinstance(heard.data, Looked)
    assert heard.data.total < 5 * len(long)


def test_heartbeats_before_the_greeting_are_discarded_and_limited() -> None:
    heard, said = hears(*[HEARTBEAT] * HANDSHAKE_HEARTBEATS_MAX, HELLO[:20])
    assert not any(is_whole for is_whole, _ in said)
    assert bytes(heard.data) == HELLO[:20]
    with pytest.raises(RemoteProtocolError, match=r"65 heartbeats .* 64 are allowed") as caught:
        hears(HEARTBEAT * (HANDSHAKE_HEARTBEATS_MAX + 1))
    assert caught.value.reason is Reason.UNAUTHORIZED


def test_length_of_a_greeting_is_limited() -> None:
    whole = b"4" * HANDSHAKE_FRAME_BYTES_MAX
    assert hears(whole)[1] == [(False, None)]
    with pytest.raises(RemoteProtocolError, match="frame_too_long"):
        hears(whole, b"4")


# All together ------------------------------------------------------------------------------------


def test_largest_greeting_is_disconnected_first() -> None:
    greetings, cut = GreetingBuffers(1000), []
    many = [greetings.open(cut.append) for _ in range(4)]
    for heard, size in zip(many, (100, 500, 300, 100), strict=True):
        heard.data += bytes(size)
        greetings.enforce_limit(heard)
    assert greetings.held_bytes == 1000
    late = greetings.open(nobody)
    late.data += bytes(50)
    greetings.enforce_limit(late)
    assert [error.reason for error in cut] == [Reason.PENDING_LIMIT]
    assert "500 bytes" in str(cut[0])
    assert greetings.held_bytes == 550
    many[1].data += b"x"
    with pytest.raises(RemoteProtocolError, match="pending_limit"):
        greetings.enforce_limit(many[1])
    greetings.close(many[1])
    for heard in (*many, late):
        greetings.close(heard)
    assert greetings.held_bytes == 0


def test_greeting_over_its_share_is_refused() -> None:
    greetings = GreetingBuffers(1000)
    many = [greetings.open(nobody) for _ in range(10)]
    for heard in many:
        heard.data += bytes(100)
        greetings.enforce_limit(heard)
    many[3].data += b"x"
    with pytest.raises(RemoteProtocolError, match="pending_limit"):
        greetings.enforce_limit(many[3])
    greetings.close(many[3])
    assert greetings.held_bytes == 900


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.sampled_from(["say", "say", "say", "end"]), st.integers(1, 90)
        )
    )
)
def test_total_of_greetings_is_bounded(script: list[tuple[int, str, int]]) -> None:
    greetings, there = GreetingBuffers(200), dict[int, Greeting]()
    for who, what, size in script:
        if who not in there:
            there[who] = greetings.open(lambda error: None)
        if what == "end":
            greetings.close(there.pop(who))
            continue
        there[who].data += bytes(size)
        try:
            greetings.enforce_limit(there[who])
        except RemoteProtocolError:
            greetings.close(there.pop(who))
        kept = sum(len(heard.data) for heard in there.values() if heard in greetings._counted_bytes)
        assert kept == greetings.held_bytes <= 200


async def test_server_disconnects_the_largest_greeting_and_admits_others() -> None:
    users = Users([User("ada", token=hash_token("ada's token"))])
    async with serving(users=users) as server:
        auth_worker = server.server.auth_worker
        assert auth_worker is not None
        auth_worker.greeting_buffers._bytes_max = 9_910
        first = await connect(server)
        await first.send(b"4" * 9_900)
        await wait_until(lambda: auth_worker.greeting_buffers.held_bytes == 9_900)
        second = await connect(server)
        hello = build_frame(frames.CONNECT, content=b'{"auth":{"token":"ada\'s token"}}')
        await second.send(HEARTBEAT + hello[:20])
        await wait_until(lambda: 0 < auth_worker.greeting_buffers.held_bytes < 100)
        assert await first.wait_closed()
        await second.send(hello[20:])
        assert (await second.read_frame())[0] == frames.CONNECT
        assert auth_worker.greeting_buffers.held_bytes == 0


# Addresses ---------------------------------------------------------------------------------------


def test_ipv4_mapped_addresses_are_formatted_as_ipv4() -> None:
    for address, shown, host in (
        (("::ffff:192.0.2.7", 80, 0, 0), "192.0.2.7:80", "192.0.2.7"),
        (("192.0.2.7", 80), "192.0.2.7:80", "192.0.2.7"),
        (("2001:db8::1", 80, 0, 0), "[2001:db8::1]:80", "2001:db8::1"),
        (("::ffff:1", 80, 0, 0), "[::ffff:1]:80", "::ffff:1"),
    ):
        assert format_address(address) == shown
        assert host_from_address(format_address(address)) == host


@pytest.mark.parametrize("written", ["192.0.2.0/24", "::ffff:192.0.2.0/120"])
@pytest.mark.parametrize("shown", ["192.0.2.7", "::ffff:192.0.2.7"])
def test_address_rules_match_ipv4_and_mapped_notation(written: str, shown: str) -> None:
    users = Users([User("till", addresses=(written,)), User("all", addresses=("::/0",))])
    assert users.authenticate(None, address=shown, version=1).name == "till"
    assert users.authenticate(None, address="2001:db8::1", version=1).name == "all"
    with pytest.raises(RemoteProtocolError, match="unauthorized"):
        users.authenticate(None, address="::ffff:198.51.100.1", version=1)


class OfBothVersions(socket.socket):
    """A listener that names peers of version 4 as one for both versions does."""

    def accept(self) -> tuple[socket.socket, tuple[object, ...]]:
        sock, (host, port) = super().accept()
        return sock, (f"::ffff:{host}", port, 0, 0)


def listeners_of_both_versions() -> Iterator[socket.socket]:
    """One that is like them, and a real one where the machine speaks version 6."""
    like_it = OfBothVersions()
    like_it.bind(("127.0.0.1", 0))
    like_it.listen()
    yield like_it
    with contextlib.suppress(OSError, ValueError):
        yield socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)


async def test_ipv4_mapped_addresses_are_shown_as_ipv4() -> None:
    users = Users([User("till", addresses=("127.0.0.0/8",))])
    for listener in listeners_of_both_versions():
        listener.setblocking(False)
        async with serving(users=users, inherited={"tcp": [listener]}) as server:
            peer = Peer(await trio.open_tcp_stream("127.0.0.1", listener.getsockname()[1]))
            await peer.send(build_frame(frames.CONNECT, content=b"[1]"))
            assert (await peer.read_frame())[0] == frames.CONNECT
            assert [each.user for each in server.server.broker.sessions.values()] == ["till"]
