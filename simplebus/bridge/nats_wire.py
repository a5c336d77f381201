"""One connection to a NATS server, for as long as a block lasts.

Rule 1: as `wires`: what is lost is not replaced here. Who uses it begins anew, told at once.
Rule 2: a server that says nothing is lost, too: what is owed is waited for three heartbeats.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import trio

from simplebus.core.errors import BusConnectionError
from simplebus.engine.link import CONNECT_SECONDS, Event, Link, Lost, NatsAddress
from simplebus.nats.client.core import Ready, Replies
from simplebus.nats.client.credentials import Credentials
from simplebus.nats.client.events import Complaint, Messages

PATIENCE_HEARTBEATS = 3


class NatsWire:
    """What comes is here until somebody takes it."""

    def __init__(
        self,
        servers: str,
        name: str,
        credentials: dict[str, str],
        *,
        heartbeat: float = 20.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        found = addresses(servers)
        who = Credentials(**credentials) if credentials else None
        self.link = Link(
            found, self._hear, name=name, credentials=who, tls=tls, ping_seconds=heartbeat
        )
        self._patience = PATIENCE_HEARTBEATS * heartbeat
        self.core = self.link.core
        self.messages: list[Messages] = []
        self.replies: list[Replies] = []
        self.complaints: list[str] = []
        self.on_messages: Callable[[Messages], object] = self.messages.append
        self.lost = ""
        """Why there is no connection any more; empty while there is one."""
        self.on_lost: Callable[[], object] = lambda: None
        self._changed = trio.Event()

    def _hear(self, event: Event) -> None:
        match event:
            case Messages():
                self.on_messages(event)
            case Replies():
                self.replies.append(event)
            case Complaint(says=says):
                self.complaints.append(says)
            case Lost(why=why):
                self.lost = why
                self.on_lost()
            case Ready():
                return
        self._changed.set()
        self._changed = trio.Event()

    def check(self) -> None:
        """Raise BusConnectionError when the connection is lost."""
        if self.lost:
            raise BusConnectionError(f"{self.lost}{self._said()}")

    def _said(self) -> str:
        return f"; it had said: {self.complaints[-1]}" if self.complaints else ""

    async def changed(self) -> None:
        """Return when something has come. Raises BusConnectionError when the connection is lost."""
        self.check()
        await self._changed.wait()
        self.check()

    async def owed(self, what: str) -> None:
        """The same, while something is owed: raises BusConnectionError, too, when nothing comes."""
        with trio.move_on_after(self._patience) as waiting:
            await self.changed()
        if waiting.cancelled_caught:
            raise BusConnectionError(
                f"{what} did not come within {self._patience:g} s from NATS at {self.link.server}"
            )

    def ask_echo(self) -> int:
        """Have a message to ourselves come back behind all that was said before. Returns its
        number; `flush` the link."""
        number = self.core.take_numbers(1)
        self.core.publish(self.core.reply_to(number).decode(), b"")
        return number

    async def echoed(self, number: int | None = None) -> None:
        """Return when this has come back: the server has dealt with what was said before it; by
        default with all that is said by now."""
        if number is None:
            number = self.ask_echo()
            self.link.flush()
        while not self._take(number):
            await self.owed("our own message")

    def _take(self, number: int) -> bool:
        for at, each in enumerate(self.replies):
            mine = each.numbers == number
            if mine.any():
                rest = np.flatnonzero(~mine)
                kept = [Replies(each.numbers[rest], each.messages.pick(rest))] if rest.size else []
                self.replies[at : at + 1] = kept
                return True
        return False


@asynccontextmanager
async def nats_wired(
    servers: str,
    name: str,
    credentials: dict[str, str],
    *,
    heartbeat: float = 20.0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[NatsWire]:
    """A connection. Raises BusConnectionError when there is none within seconds, and as soon as it
    is lost: the block is cancelled then. `heartbeat`: seconds of silence after which the server is
    asked whether it is there; `tls` says who is trusted; None for whom the system trusts."""
    wire = NatsWire(servers, name, credentials, heartbeat=heartbeat, tls=tls)
    using = trio.CancelScope()
    wire.on_lost = using.cancel
    failure: BaseException | None = None
    scope = trio.CancelScope(shield=True)  # A bridge that is told to stop still says how far it is.

    async def run() -> None:
        with scope:
            await wire.link.run()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        try:
            with trio.move_on_after(CONNECT_SECONDS):
                await wire.link.wait_ready()
            if not wire.link.is_ready:
                why = f": {wire.link.problem}" if wire.link.problem else ""
                raise BusConnectionError(
                    f"no NATS server at {named(servers)} let itself be connected to within "
                    f"{CONNECT_SECONDS:g} s{why}"
                )
            with using:
                yield wire
            wire.check()
        except Exception as error:
            failure = error  # Kept out of the nursery, which would wrap it.
        finally:
            scope.cancel()
    if failure is not None:
        raise failure


def named(servers: str) -> str:
    """Without who one is."""
    return ", ".join(map(str, addresses(servers)))


def addresses(servers: str) -> list[NatsAddress]:
    """Of one server, or several with commas between. Raises ValueError for what is none, without
    who one is."""
    return [NatsAddress.of(each.strip()) for each in servers.split(",")]
