"""Where it is full, who has not said who it is makes room; at every door."""

from __future__ import annotations

import contextlib

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from nats_peer import nats
from served import connect, serving, until

import simplebus
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import Limits
from simplebus.core.passwords import Passwords, quick_hash
from simplebus.core.settings import Settings
from simplebus.core.users import User, Users
from simplebus.nats.auth import NatsAuth
from simplebus.nats.settings import NatsLimits, NatsSettings
from simplebus.server import listeners, memory
from simplebus.server.serve import Serving
from simplebus.server.strangers import Strangers

FULL = RemoteProtocolError(Reason.TOO_MANY_CONNECTIONS, "full")
USERS = Users((User("ada", token=quick_hash("t")),), Passwords(b"by chance"))
DOORS = ("bus", "nats")


def crowded(most: int) -> contextlib.AbstractAsyncContextManager[Serving]:
    """A server that knows a user, and lets in so many at each door."""
    return serving(
        Settings(Limits(connections=most)),
        users=USERS,
        nats_port=0,
        nats=NatsSettings(NatsLimits(connections=most), auth=NatsAuth(shared=USERS)),
    )


async def come(server: Serving, door: str) -> trio.SocketStream:
    """A stranger."""
    address = (server.addresses if door == "bus" else server.nats_addresses)[0]
    host, _, port = address.rpartition(":")
    return await trio.open_tcp_stream(host, int(port))


async def come_in(server: Serving, door: str, stack: contextlib.AsyncExitStack) -> None:
    """One who has a token, and is let in."""
    if door == "bus":
        bus = simplebus.connect(server.addresses[0], token="t")
        await stack.enter_async_context(bus)
    else:
        peer = await nats(server)
        stack.push_async_callback(peer.stream.aclose)
        await peer.send(b'CONNECT {"verbose":false,"auth_token":"t"}\r\nPING\r\n')
        await peer.info()
        assert await peer.line() == b"PONG"


async def is_cut(stream: trio.SocketStream) -> bool:
    with contextlib.suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass
    return True


@pytest.mark.parametrize("door", DOORS)
async def test_who_has_a_token_is_let_in_while_strangers_hold_all_places(door: str) -> None:
    async with crowded(3) as server, contextlib.AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(await come(server, door)) for _ in range(3)]
        for stranger in strangers:  # The one that is there longest goes first.
            await come_in(server, door, stack)
            assert await is_cut(stranger)
        assert server.engine.cut_off == {Reason.TOO_MANY_CONNECTIONS: 3}
        late = await stack.enter_async_context(await come(server, door))
        assert await is_cut(late)  # Those inside stay.
        assert server.nats_door is not None
        assert len(server.engine.connections) + len(server.nats_door.connections) == 3


@pytest.mark.parametrize("door", DOORS)
async def test_so_it_is_where_descriptors_run_out(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crowded(1000) as server, contextlib.AsyncExitStack() as stack:
        strangers = [await stack.enter_async_context(await come(server, "bus")) for _ in range(20)]
        await until(lambda: len(server.engine.strangers) == 20)
        monkeypatch.setattr(memory, "descriptors_for_peers", lambda more=0: 0)
        monkeypatch.setattr(listeners, "_OVER_MAX", 1 << 20)
        await come_in(server, door, stack)
        assert await is_cut(strangers[0])


async def test_who_is_inside_or_gone_is_no_stranger() -> None:
    async with crowded(9) as server, contextlib.AsyncExitStack() as stack:
        for door in DOORS:
            await come_in(server, door, stack)
        async with await come(server, "bus"):
            await until(lambda: len(server.engine.strangers) == 1)
        await until(lambda: not len(server.engine.strangers))
        assert server.nats_door is not None
        assert not len(server.nats_door.strangers)
    async with serving() as open_to_all:
        peer = await connect(open_to_all, [1])
        assert not len(open_to_all.engine.strangers)
        await peer.stream.aclose()


class Stays:
    """One of many; told apart by which it is."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.was_cut = False

    def cut(self, error: RemoteProtocolError) -> None:
        assert error is FULL
        assert not self.was_cut
        self.was_cut = True


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["come", "go", "room"]))))
def test_of_the_fullest_place_who_is_there_longest_makes_room(done: list[tuple[str, str]]) -> None:
    """The same with a list that is looked through."""
    strangers, there = Strangers(), list[Stays]()
    for place, what in done:
        counts = {at: sum(each.place == at for each in there) for at in "abc"}
        if what == "come":
            there.append(Stays(place))
            strangers.come(place, there[-1].cut)
        elif what == "go" and (own := [each for each in there if each.place == place]):
            there.remove(own[-1])
            strangers.go(place, own[-1].cut)
            strangers.go(place, own[-1].cut)
        elif what == "room":
            most = max(counts.values())
            assert strangers.make_room(place, FULL) == bool(there)
            gone = [each for each in there if each.was_cut]
            there = [each for each in there if not each.was_cut]
            assert len(gone) == bool(most)
            for one in gone:
                assert counts[one.place] == most
                assert counts[place] < most or one.place == place
                strangers.go(one.place, one.cut)
        assert len(strangers) == len(there)
    for place in "abc":  # In their order.
        rest = [each for each in there if each.place == place]
        while rest:
            assert strangers.make_room(place, FULL)
            there = [each for each in there if not each.was_cut]
            now = [each for each in rest if not each.was_cut]
            assert now in (rest, rest[1:])
            rest = now
