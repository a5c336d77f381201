"""What a running server takes over of settings that were read again.

Rule 1: all of it or nothing: what may not be is found out before anything is changed.
Rule 2: connections stay, and are served by what they were told when they came; who may not be
inside any more is disconnected.
Rule 3: nobody waits for a file: it is read and judged beside the event loop, in a bounded time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import trio

from simplebus.core.broker.broker import Broker
from simplebus.core.errors import BusError, RemoteProtocolError
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import Settings
from simplebus.nats.settings import NatsSettings
from simplebus.server.nats_listener import NatsDoor

READ_SECONDS_MAX = 30.0
"""How long what is read again may take."""
_READERS_MAX = 4
"""So many may wait at most for files that do not answer: each has a thread."""

T = TypeVar("T")
_readers: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("readers")


class CannotReloadError(BusError):
    """Settings that a running server cannot take over; says why."""


async def read_aside(read: Callable[[], T]) -> T:
    """Have a thread read something. Raises what that does, and CannotReloadError where it takes too
    long."""
    try:
        limiter = _readers.get()
    except LookupError:
        limiter = trio.CapacityLimiter(_READERS_MAX)
        _readers.set(limiter)
    with trio.move_on_after(READ_SECONDS_MAX):
        return await trio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=limiter)
    raise CannotReloadError(f"a file does not answer: it is not read within {READ_SECONDS_MAX:g} s")


def fitting(broker: Broker, settings: Settings) -> Settings:
    """Settings as this broker can have them: what peers were told, and what beats go by, stays.
    Raises CannotReloadError where they do not fit together then."""
    was = broker.settings
    try:
        fresh = replace(
            settings,
            ack_timeout=was.ack_timeout,
            tick_seconds=was.tick_seconds,
            limits=replace(
                settings.limits,
                frame_bytes=was.limits.frame_bytes,
                credit_bytes=was.limits.credit_bytes,
            ),
        )
    except ValueError as error:
        raise CannotReloadError(f"this needs a restart: {error}") from None
    if fresh.spills and not was.spills:
        raise CannotReloadError("a class is to spill where none did: this needs a restart")
    return fresh


def adopt(
    broker: Broker,
    door: NatsDoor | None,
    settings: Settings,
    nats: NatsSettings,
    classes: Iterable[NamedClass],
    classes_before: Iterable[NamedClass],
) -> None:
    """Have a broker and its NATS door behave like this from now on. Raises CannotReloadError, and
    nothing is changed then."""
    fresh, table = fitting(broker, settings), broker.store.class_registry
    classes, was = list(classes), table.settings
    table.settings = fresh  # There may be more classes then, or fewer.
    try:
        table.check_declaration(classes)
    except RemoteProtocolError as error:
        raise CannotReloadError(error.sentence) from None
    finally:
        table.settings = was
    broker.settings = fresh
    broker.store.apply_settings(fresh)
    table.declare_classes(classes)
    _unbind(broker, classes, classes_before)
    if door is not None:
        door.adopt(nats)


def _unbind(broker: Broker, now: Iterable[NamedClass], before: Iterable[NamedClass]) -> None:
    """Subjects that were bound by the settings, and are no longer in them. Those that somebody has
    bound meanwhile stay."""
    table = broker.store.class_registry
    left = _pairs(broker, before) - _pairs(broker, now)
    for class_id, subject in left:
        if subject in table.subject_bindings.subjects_of(class_id):
            table.subject_bindings.unbind(class_id, subject)


def _pairs(broker: Broker, classes: Iterable[NamedClass]) -> set[tuple[int, str]]:
    names = broker.store.class_registry.class_id_by_name
    found = set()
    for each in classes:
        class_id = each.id if each.id is not None else names.get(each.name or "")
        if class_id is not None:
            found |= {(class_id, subject) for subject in each.subjects}
    return found
