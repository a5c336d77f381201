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
from tests.support.running_server import Peer, connect, serving, wait_until

HEARTBEAT = build_frame(frames.HEARTBEAT)
HELLO = build_frame(frames.CONNECT, content=b'{"auth":{"user":"ada","password":"secret"}}')
OTHER_FRAME = build_frame(frames.MESSAGE, class_id=7, content=b"hi")


def fail_on_disconnect(error: RemoteProtocolError) -> None:
    raise AssertionError(error)


class SearchCountingBytes(bytearray):
    """Buffer that counts the bytes searched by `find`."""

    searched_count = 0

    def find(self, pattern: bytes, first: int = 0) -> int:  # type: ignore[override]
        self.searched_count += max(0, len(self) - first)
        return super().find(pattern, first)


def parse_pieces(*pieces: bytes) -> tuple[Greeting, list[tuple[bool, object]]]:
    greeting = Greeting(fail_on_disconnect)
    greeting.data = SearchCountingBytes()
    results = []
    for piece in pieces:
        greeting.data += piece
        results.append(parse_greeting(greeting))
    return greeting, results


@given(
    st.integers(0, 5),
    st.sampled_from([HELLO, OTHER_FRAME, build_frame(frames.CONNECT, content=b"[1]")]),
    st.lists(st.integers(1, 40), max_size=20),
)
def test_greeting_is_parsed_in_any_fragmentation(
    heartbeats: int, frame: bytes, sizes: list[int]
) -> None:
    data, pieces = HEARTBEAT * heartbeats + frame, []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    greeting, results = parse_pieces(*[piece for piece in (*pieces, data) if piece])
    first = [is_whole for is_whole, _ in results].index(True)
    assert results[first][1] == (None if frame is not HELLO else results[-1][1])
    assert bytes(greeting.data).startswith(frame[: len(greeting.data)])
    if first == len(results) - 1:
        assert bytes(greeting.data) == frame
        assert (results[-1][1] is not None) is (frame is HELLO)


def test_greeting_sent_byte_by_byte_is_searched_in_linear_time() -> None:
    long = build_frame(frames.CONNECT, content=b'{"client":"' + b"x" * 4000 + b'"}')
    greeting, results = parse_pieces(*struct.unpack(f"{len(long)}c", long))
    assert [is_whole for is_whole, _ in results] == [False] * (len(long) - 1) + [True]
    assert isinstance(greeting.data, SearchCountingBytes)
    assert greeting.data.searched_count < 5 * len(long)


def test_heartbeats_before_the_greeting_are_discarded_and_limited() -> None:
    greeting, results = parse_pieces(*[HEARTBEAT] * HANDSHAKE_HEARTBEATS_MAX, HELLO[:20])
    assert not any(is_whole for is_whole, _ in results)
    assert bytes(greeting.data) == HELLO[:20]
    with pytest.raises(RemoteProtocolError, match=r"65 heartbeats .* 64 are allowed") as caught:
        parse_pieces(HEARTBEAT * (HANDSHAKE_HEARTBEATS_MAX + 1))
    assert caught.value.reason is Reason.UNAUTHORIZED


def test_length_of_a_greeting_is_limited() -> None:
    whole = b"4" * HANDSHAKE_FRAME_BYTES_MAX
    assert parse_pieces(whole)[1] == [(False, None)]
    with pytest.raises(RemoteProtocolError, match="frame_too_long"):
        parse_pieces(whole, b"4")


# All greetings ------------------------------------------------------------------------------------


def test_largest_greeting_is_disconnected_first() -> None:
    greetings, errors = GreetingBuffers(1000), []
    all_greetings = [greetings.open(errors.append) for _ in range(4)]
    for greeting, size in zip(all_greetings, (100, 500, 300, 100), strict=True):
        greeting.data += bytes(size)
        greetings.enforce_limit(greeting)
    assert greetings.held_bytes == 1000
    late_greeting = greetings.open(fail_on_disconnect)
    late_greeting.data += bytes(50)
    greetings.enforce_limit(late_greeting)
    assert [error.reason for error in errors] == [Reason.PENDING_LIMIT]
    assert "500 bytes" in str(errors[0])
    assert greetings.held_bytes == 550
    all_greetings[1].data += b"x"
    with pytest.raises(RemoteProtocolError, match="pending_limit"):
        greetings.enforce_limit(all_greetings[1])
    greetings.close(all_greetings[1])
    for greeting in (*all_greetings, late_greeting):
        greetings.close(greeting)
    assert greetings.held_bytes == 0


def test_greeting_over_its_share_is_refused() -> None:
    greetings = GreetingBuffers(1000)
    all_greetings = [greetings.open(fail_on_disconnect) for _ in range(10)]
    for greeting in all_greetings:
        greeting.data += bytes(100)
        greetings.enforce_limit(greeting)
    all_greetings[3].data += b"x"
    with pytest.raises(RemoteProtocolError, match="pending_limit"):
        greetings.enforce_limit(all_greetings[3])
    greetings.close(all_greetings[3])
    assert greetings.held_bytes == 900


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.sampled_from(["say", "say", "say", "end"]), st.integers(1, 90)
        )
    )
)
def test_total_of_greetings_is_bounded(script: list[tuple[int, str, int]]) -> None:
    greetings, open_greetings = GreetingBuffers(200), dict[int, Greeting]()
    for number, action, size in script:
        if number not in open_greetings:
            open_greetings[number] = greetings.open(lambda error: None)
        if action == "end":
            greetings.close(open_greetings.pop(number))
            continue
        open_greetings[number].data += bytes(size)
        try:
            greetings.enforce_limit(open_greetings[number])
        except RemoteProtocolError:
            greetings.close(open_greetings.pop(number))
        counted_bytes = sum(
            len(greeting.data)
            for greeting in open_greetings.values()
            if greeting in greetings._counted_bytes
        )
        assert counted_bytes == greetings.held_bytes <= 200


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


class DualStackListener(socket.socket):
    """Listener that reports IPv4 peers as IPv4-mapped addresses, as a dual-stack socket does."""

    def accept(self) -> tuple[socket.socket, tuple[object, ...]]:
        sock, (host, port) = super().accept()
        return sock, (f"::ffff:{host}", port, 0, 0)


def dual_stack_listeners() -> Iterator[socket.socket]:
    """Yield a simulated dual-stack listener, and a real one if the machine has IPv6."""
    mapped_listener = DualStackListener()
    mapped_listener.bind(("127.0.0.1", 0))
    mapped_listener.listen()
    yield mapped_listener
    with contextlib.suppress(OSError, ValueError):
        yield socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)


async def test_ipv4_mapped_addresses_are_shown_as_ipv4() -> None:
    users = Users([User("till", addresses=("127.0.0.0/8",))])
    for listener in dual_stack_listeners():
        listener.setblocking(False)
        async with serving(users=users, inherited={"tcp": [listener]}) as server:
            peer = Peer(await trio.open_tcp_stream("127.0.0.1", listener.getsockname()[1]))
            await peer.send(build_frame(frames.CONNECT, content=b"[1]"))
            assert (await peer.read_frame())[0] == frames.CONNECT
            assert [session.user for session in server.server.broker.sessions.values()] == ["till"]
