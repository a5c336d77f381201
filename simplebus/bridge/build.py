"""The ends of a lane between a bus and a NATS server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from simplebus.bridge.bus_connection import near_wired, who_is_at, wired
from simplebus.bridge.copier import Begin, Ends, Way
from simplebus.bridge.dead_letters import letters_at
from simplebus.bridge.interfaces import FatalConfigurationError
from simplebus.bridge.nats_connection import NatsWire, named, nats_wired
from simplebus.bridge.settings import CopiedClass
from simplebus.bridge.source.bus import NearBus, near_alone
from simplebus.bridge.source.core_nats import NearCore, check_lane, identity_of
from simplebus.bridge.source.identity import Looked, life_of
from simplebus.bridge.source.stream import NearStream
from simplebus.bridge.target.batched_stream import FarChains
from simplebus.bridge.target.bus import FarBus, FarDoor, FarTerms, far_bus, far_door
from simplebus.bridge.target.nats import Config, FarNats
from simplebus.bridge.target.ordered_stream import UNDER_WAY_MESSAGES, FarFew
from simplebus.client.aio.connection import ClientConnection
from simplebus.client.aio.transport import Endpoint
from simplebus.client.credentials import Access
from simplebus.core.protocol.requests import Auth
from simplebus.nats.client.credentials import Credentials
from simplebus.nats.client.jetstream_codec import NOT_FOUND, JetStreamError


def between(
    near: Place,
    far: Place,
    terms: FarTerms,
    *,
    class_: int | str,
    start: str = "waiting",
    auth: Auth | None = None,
) -> Way:
    """What opens both ends: `class_` of the bus at `near`, where the lane is who `auth` says, and
    the far end of these terms."""
    looked = Looked()
    beat = terms.heartbeat

    def near_bus(wire: Wire) -> NearBus:
        return NearBus(
            wire,
            class_=class_,
            durable=terms.name,
            channels=terms.channels,
            start=start,
            place=near,
        )

    @asynccontextmanager
    async def open(begin: Begin) -> AsyncIterator[Ends]:
        to, is_door = await who_is_at(far, heartbeat=beat, auth=terms.auth)
        async with near_wired(near, terms.name, to=to, heartbeat=beat, auth=auth) as wire:
            here = near_bus(wire)
            if is_door:
                begin(here, kept := await here.open())
                doubts = await looked.again(here, terms.name)
                whose = terms.of(life_of(wire.core) + looked.era)
                async with far_door(far, whose, here, kept, looked) as door:
                    check_apart(here, door)
                    yield Ends(here, door, kept, [], doubts)
                return
            async with far_bus(far, terms.of(wire.core.bus_id)) as (there, record):
                begin(here, kept := await here.open())
                check_apart(here, there)
                refusals = await there.resume(here, record, kept=kept)
                at = kept if there.at is None else max(kept, there.at)
                yield Ends(here, there, at, refusals, there.doubts)

    def check_apart(here: NearBus, there: FarBus | FarDoor) -> None:
        if (here.identity, here.class_id) == (there.identity, there.class_id):
            raise FatalConfigurationError(
                f"{near} and {far} are the same bus, {here.identity}: "
                f"class {class_!r} is not copied onto itself; have it lead to another bus, or into "
                "another class"
            )

    return Way(open, near_alone(near, near_bus, heartbeat=beat, auth=auth))


log = logging.getLogger("simplebus.bridge")

_ONE_BY_ONE = (
    "%s: messages go into stream %r one by one, which keeps their order whoever leads it and when "
    "it is full; 'allow_batched' there (nats-server 2.14) keeps it at full rate, and 'under_way' "
    "in the lane's table trades some of it for more"
)

_SERVERS_MAX = 256
"""Of so many that were met at some addresses it is known that they are one place."""
_met: dict[tuple[str, str], dict[str, None]] = {}
"""What servers went by that lanes of this process met, by addresses and stream."""


def _one_place(servers: str, stream: str, identity: str) -> Collection[str]:
    """What else a server goes by: servers of one cluster are one place, though each is called
    otherwise, and a lane that reads there may be connected to another than one that writes."""
    known = _met.setdefault((named(servers), stream), {})
    known.pop(identity, None)
    known[identity] = None
    if len(known) > _SERVERS_MAX:
        del known[next(iter(known))]
    return known.keys()


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """Who a lane is at a NATS server, and whom it trusts there."""

    credentials: dict[str, str] = field(repr=False)
    access: Access

    def wired(
        self, servers: str, name: str, *, heartbeat: float
    ) -> AbstractAsyncContextManager[NatsWire]:
        """A connection. Raises OSError for a certificate that is no good."""
        access = self.access
        has_own = access.context or access.ca or access.cert
        tls = access.tls() if has_own else None
        return nats_wired(servers, name, self._said(), heartbeat=heartbeat, tls=tls)

    def check(self) -> None:
        """Raise ValueError for what contradicts itself, and for a seed that is none."""
        Credentials(**self._said())

    def _said(self) -> dict[str, str]:
        access = self.access
        said = {"user": access.user, "password": access.password, "token": access.token}
        return {name: value for name, value in said.items() if value} | self.credentials


def to_nats(
    near: Place,
    servers: str,
    terms: FarTerms,
    copied: CopiedClass,
    *,
    shown: NatsAccess,
    auth: Auth | None = None,
) -> Way:
    """From a class of the bus at `near`, where the lane is who `auth` says, to subjects of a NATS
    server."""
    looked = Looked()
    beat = terms.heartbeat

    def near_bus(wire: Wire) -> NearBus:
        return NearBus(
            wire,
            class_=copied.class_,
            durable=terms.name,
            channels=terms.channels,
            start=copied.start,
            place=near,
        )

    @asynccontextmanager
    async def open(begin: Begin) -> AsyncIterator[Ends]:
        to = named(servers)
        async with near_wired(near, terms.name, to=to, heartbeat=beat, auth=auth) as wire:
            here = near_bus(wire)
            begin(here, at := await here.open())
            async with shown.wired(servers, terms.name, heartbeat=beat) as nats:
                doubts = 0
                kind, more, config = FarNats, dict[str, Any](), None
                if copied.stream:
                    check_lane(nats)
                    doubts = await looked.again(here, terms.name)
                    config = await _config_of(nats, copied.stream)
                    kind, more = end_for(config, copied)
                    if kind is FarFew and not copied.under_way:
                        log.info(_ONE_BY_ONE, terms.name, copied.stream)
                there = kind(
                    nats,
                    terms,
                    near=here,
                    class_id=here.class_id,
                    life=life_of(wire.core),
                    looked=looked,
                    stream=copied.stream,
                    there=_one_place(servers, copied.stream, identity_of(nats, copied.stream)),
                    config=config,
                    fits=lambda config: end_for(config, copied) == (kind, more),
                    **more,
                )
                _tell(terms.name, nats)
                yield Ends(here, there, at, [], doubts)

    return Way(open, near_alone(near, near_bus, heartbeat=beat, auth=auth))


def from_nats(
    servers: str, far: Place, terms: FarTerms, copied: CopiedClass, *, shown: NatsAccess
) -> Way:
    """From subjects of a NATS server, or a stream, to a class of the bus at `far`."""
    terms = replace(terms, channels=())  # The server sends no others.
    beat = terms.heartbeat
    letters = letters_at(far, terms.class_, terms.name, heartbeat=beat, auth=terms.auth)

    def near_stream(nats: NatsWire, to: str) -> NearStream:
        check_lane(nats)
        return NearStream(
            nats,
            copied.stream,
            durable=terms.name,
            to=to,
            subjects=copied.channels,
            start=copied.start,
            heartbeat=beat,
            letters=letters,
        )

    @asynccontextmanager
    async def alone() -> AsyncIterator[tuple[NearStream, int]]:
        async with shown.wired(servers, terms.name, heartbeat=beat) as nats:
            here = near_stream(nats, "")
            yield here, await here.open()

    @asynccontextmanager
    async def open(begin: Begin) -> AsyncIterator[Ends]:
        to, is_door = await who_is_at(far, heartbeat=beat, auth=terms.auth)
        async with shown.wired(servers, terms.name, heartbeat=beat) as nats:
            here: NearCore | NearStream
            if copied.stream:
                here = near_stream(nats, to)
            else:
                here = NearCore(nats, copied.channels, letters=letters)
            _one_place(servers, copied.stream, here.identity)
            kept = first = await here.open()
            begin(here, first)
            source = here.memory if copied.stream else servers
            if is_door:
                async with AsyncExitStack() as stack:
                    if not copied.stream:  # Its numbers are of this life: a name is for all of it.
                        await stack.enter_async_context(wired(far, terms.of(source).core()))
                    numbered = terms.of(here.memory)
                    door = await stack.enter_async_context(
                        far_door(far, numbered, here, first, Looked())
                    )
                    _tell(terms.name, nats)
                    yield Ends(here, door, first, [])
                return
            async with far_bus(far, terms.of(source)) as (there, record):
                if isinstance(here, NearStream):
                    await here.look_over()  # One that was displaced only now has copied on.
                    if here.is_new:
                        kept = 0  # Its consumer is gone: only the far bus knows where it was.
                refusals = await there.resume(here, record, kept=kept)
                at = first if there.at is None else max(kept, there.at)
                _tell(terms.name, nats)
                yield Ends(here, there, at, refusals, there.doubts)

    return Way(open, alone if copied.stream else None)


async def _config_of(nats: NatsWire, stream: str) -> Config | None:
    """None for one that is not there: that is waited for by who sends."""
    try:
        config: Config = (await nats.link.ask(f"STREAM.INFO.{stream}"))["config"]
    except JetStreamError as error:
        if error.code not in NOT_FOUND:
            raise
        return None
    return config


def end_for(config: Config | None, copied: CopiedClass) -> tuple[type[FarNats], dict[str, Any]]:
    """How messages go to a stream that is kept so, and what more that wants to know. How many
    servers will keep one that is not there, nobody knows."""
    if config is not None and config.get("allow_batched") is True:
        return FarChains, {}
    if config is None or copied.under_way or _may_put_behind(config):
        return FarFew, {"under_way": copied.under_way or UNDER_WAY_MESSAGES}
    return FarNats, {}


def _may_put_behind(config: Config) -> bool:
    """Whether of what is under way some may be stored behind later ones: it may be lost with a
    leader, or refused by a stream that is full, and has room again for what comes next."""
    bounds = (config.get(bound) or 0 for bound in ("max_msgs", "max_bytes"))
    refuses = config.get("discard") == "new" and any(bound > 0 for bound in bounds)
    return refuses or (config.get("num_replicas") or 1) > 1


def _tell(lane: str, nats: NatsWire) -> None:
    log.info("%s: connected to NATS at %s", lane, nats.link.server)
