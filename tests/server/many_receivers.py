"""Server with many NATS subscribers that receive the same messages."""

from __future__ import annotations

import pytest
import trio

from simplebus.nats.nats_server import NatsServer
from simplebus.nats.server.session import NatsSession
from simplebus.server.nats_listener import NatsListener
from simplebus.server.run import RunningServer
from simplebus.server.turns import SlowRequestTurns
from tests.support.nats_peer import NatsPeer, connect_nats_peer

RECEIVERS = 20


async def connect_subscribers(server: RunningServer, subject: bytes) -> list[NatsPeer]:
    """Return clients that have subscribed to the subject, with the id `s`."""
    subscribers = [await connect_nats_peer(server) for _ in range(RECEIVERS)]
    for subscriber in subscribers:
        await subscriber.send(b"SUB %b s\r\n" % subject)
        await subscriber.flush()
    return subscribers


async def read_received(subscriber: NatsPeer) -> list[bytes]:
    """Return all lines that the server has sent to a client so far."""
    await subscriber.send(b"PING\r\n")
    lines = []
    while (line := await subscriber.read_line()) != b"PONG":
        lines.append(line)
    return lines


def break_one_receiver(monkeypatch: pytest.MonkeyPatch, listener: NatsListener) -> None:
    """Make sending to one of the clients raise an error."""
    sessions = list(listener.nats_server.sessions.values())
    send = NatsSession.send

    def send_or_fail(session: NatsSession, piece: bytes) -> None:
        if session is sessions[RECEIVERS // 2]:
            raise AssertionError("a fault of ours")
        send(session, piece)

    monkeypatch.setattr(NatsSession, "send", send_or_fail)


class LaterTurns:
    """Lets all turns but the first one of a delivery wait while they are held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._released = trio.Event()
        self._released.set()
        wait_turn, deliver_waiting = SlowRequestTurns.wait_turn, NatsServer.deliver_waiting

        async def wait_released(turns: SlowRequestTurns) -> None:
            await self._released.wait()
            await wait_turn(turns)

        def deliver_if_released(nats_server: NatsServer) -> None:
            if self._released.is_set():
                deliver_waiting(nats_server)

        monkeypatch.setattr(SlowRequestTurns, "wait_turn", wait_released)
        monkeypatch.setattr(NatsServer, "deliver_waiting", deliver_if_released)

    def hold(self) -> None:
        self._released = trio.Event()

    def release(self) -> None:
        self._released.set()
