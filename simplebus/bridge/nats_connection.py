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

from simplebus.bridge.reserved_headers import alike, is_barred, is_essential
from simplebus.core.errors import BusConnectionError
from simplebus.nats.client.client import Ready, Replies
from simplebus.nats.client.credentials import Credentials
from simplebus.nats.client.events import Complaint, Messages, Pong
from simplebus.net.nats_connection import CONNECT_SECONDS, Event, Link, Lost, NatsAddress

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
            found,
            self._hear,
            name=name,
            credentials=who,
            tls=tls,
            ping_seconds=heartbeat,
            is_quiet=True,  # Each try is a new one: a lane that tells of all says nothing else.
        )
        self.patience = PATIENCE_HEARTBEATS * heartbeat
        self.core = self.link.core
        self.messages: list[Messages] = []
        self.replies: list[Replies] = []
        self.complaints: list[str] = []
        self.on_messages: Callable[[Messages], object] = self.messages.append
        self.lost = ""
        """Why there is no connection any more; empty while there is one."""
        self.on_lost: Callable[[], object] = lambda: None
        self._changed, self._ponged = trio.Event(), trio.Event()

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
                self._wake_passed()
            case Pong():  # Nothing that is owed: a server goes on to say that it is there.
                self._wake_passed()
                return
            case Ready():
                return
        self._changed.set()
        self._changed = trio.Event()

    def _wake_passed(self) -> None:
        self._ponged.set()
        self._ponged = trio.Event()

    def check(self) -> None:
        """Raise BusConnectionError when the connection is lost."""
        if self.lost:
            raise BusConnectionError(self.lost)

    def check_rights(self, is_needed: Callable[[str], bool] = is_barred) -> None:
        """The same, too, when the server has complained that something that is needed may not be
        done: whoever says nothing else can do without none of it."""
        self.check()
        if barred := next(filter(is_needed, self.complaints), ""):
            raise BusConnectionError(f"NATS at {self.link.server} refuses: {alike(barred)}")

    def explained(self, error: BusConnectionError) -> BusConnectionError:
        """The same error, with what the server has complained of."""
        said = alike(self.complaints[-1]) if self.complaints else ""
        if not said or said in str(error) or type(error) is not BusConnectionError:
            return error
        return BusConnectionError(f"{error}; it had said: {said}")

    async def changed(self) -> None:
        """Return when something has come. Raises BusConnectionError when the connection is lost."""
        self.check()
        await self._changed.wait()
        self.check()

    async def owed(self, what: str) -> None:
        """The same, while something is owed: raises BusConnectionError, too, when nothing comes."""
        self.check()
        await self._waited_for(self._changed, what)

    async def _waited_for(self, event: trio.Event, what: str) -> None:
        with trio.move_on_after(self.patience) as waiting:
            await event.wait()
        if waiting.cancelled_caught:
            raise BusConnectionError(
                f"{what} did not come within {self.patience:g} s from NATS at {self.link.server}"
            )
        self.check()

    async def echoed(self) -> None:
        """Return when the server has dealt with all that is said by now, and what it had sent us by
        then is here: when a message of ours to ourselves has come back."""
        number = self.core.take_numbers(1)
        self.core.publish(self.core.reply_to(number).decode(), b"")
        self.link.flush()
        while not self._take(number):
            await self.owed("our own message")
            self.check_rights(is_essential)

    async def passed(self, mark: int) -> None:
        """Return when the server has dealt with what was said before this mark of the core's.
        Raises BusConnectionError when the connection is lost: a mark is of one connection."""
        self.check()
        while not self.core.has_passed(mark):
            await self._waited_for(self._ponged, "a PONG")

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
                why = f": {alike(wire.link.problem)}" if wire.link.problem else ""
                raise BusConnectionError(
                    f"no NATS server at {named(servers)} let itself be connected to within "
                    f"{CONNECT_SECONDS:g} s{why}"
                )
            with using:
                yield wire
            wire.check()
        except BusConnectionError as error:
            failure = wire.explained(error)
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
