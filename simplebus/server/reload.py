"""Applying changed settings to a running server.

Settings are applied completely or not at all: they are checked before anything changes. Open
connections keep the limits of their handshake. Files are read and checked in a thread with a
time limit, because a network file system may not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import trio

from simplebus.core.broker.broker import Broker
from simplebus.core.errors import BusError, RemoteProtocolError
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.settings import Settings
from simplebus.nats.settings import NatsSettings
from simplebus.server.nats_listener import NatsListener

READ_SECONDS_MAX = 30.0
"""Time limit for reading the settings."""
_READERS_MAX = 4
"""Threads that may wait for files that do not answer."""

T = TypeVar("T")
_readers: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("readers")


class CannotReloadError(BusError):
    """The running server cannot apply the new settings; the message says why."""


async def read_in_thread(read: Callable[[], T]) -> T:
    """Run `read` in a thread. Raises its errors, and CannotReloadError if it takes too long."""
    try:
        limiter = _readers.get()
    except LookupError:
        limiter = trio.CapacityLimiter(_READERS_MAX)
        _readers.set(limiter)
    with trio.move_on_after(READ_SECONDS_MAX):
        return await trio.to_thread.run_sync(read, abandon_on_cancel=True, limiter=limiter)
    raise CannotReloadError(f"reading the files took longer than {READ_SECONDS_MAX:g} s")


def reloadable_settings(broker: Broker, settings: Settings) -> Settings:
    """Return the settings that this broker can apply: handshake limits and tick length stay.

    Raises CannotReloadError if the combination is invalid.
    """
    previous = broker.settings
    try:
        new_settings = replace(
            settings,
            ack_timeout=previous.ack_timeout,
            tick_seconds=previous.tick_seconds,
            limits=replace(
                settings.limits,
                frame_bytes=previous.limits.frame_bytes,
                credit_bytes=previous.limits.credit_bytes,
            ),
        )
    except ValueError as error:
        raise CannotReloadError(f"restart the server to apply this: {error}") from None
    if new_settings.has_spilling_class and not previous.has_spilling_class:
        raise CannotReloadError("restart the server to enable spilling to disk")
    return new_settings


def apply_settings(
    broker: Broker,
    nats_listener: NatsListener | None,
    settings: Settings,
    nats: NatsSettings,
    classes: Iterable[NamedClass],
    classes_before: Iterable[NamedClass],
) -> Iterator[None]:
    """Apply settings and class declarations to a broker and its NATS listener: the settings of
    existing classes and NATS clients while the result is iterated.

    Raises CannotReloadError, in which case nothing is changed.
    """
    new_settings, table = reloadable_settings(broker, settings), broker.store.class_registry
    if table.class_count > new_settings.limits.classes:
        raise CannotReloadError(
            f"max-classes is {new_settings.limits.classes}, but {table.class_count} classes exist"
        )
    classes, previous = list(classes), table.settings
    table.settings = new_settings  # The limit for classes may change.
    try:
        table.check_declaration(classes)
    except RemoteProtocolError as error:
        raise CannotReloadError(error.sentence) from None
    finally:
        table.settings = previous
    broker.settings = new_settings
    parts = broker.store.apply_settings(new_settings)
    table.declare_operator_classes(classes)
    _undo_declarations(broker, classes, classes_before)
    if nats_listener is not None:
        parts = chain(nats_listener.apply_settings_in_parts(nats), parts)
    return parts


def _undo_declarations(
    broker: Broker, now: Iterable[NamedClass], before: Iterable[NamedClass]
) -> None:
    """Unbind subjects, and forget last values, that were removed from the settings.

    Subjects bound by clients stay.
    """
    table = broker.store.class_registry
    (subjects, last_values), (old_subjects, old_last_values) = (
        _declared(broker, classes) for classes in (now, before)
    )
    for class_id, subject in old_subjects - subjects:
        if subject in table.subject_bindings.subjects_of(class_id):
            table.subject_bindings.unbind(class_id, subject)
    for class_id in (old_last_values - last_values) & table.classes.keys():
        table.disable_last_values(class_id)


def _declared(
    broker: Broker, classes: Iterable[NamedClass]
) -> tuple[set[tuple[int, str]], set[int]]:
    """Return the class and subject of each binding, and the classes that keep last values."""
    names = broker.store.class_registry.class_id_by_name
    subjects, last_values = set(), set()
    for cls in classes:
        class_id = cls.id if cls.id is not None else names.get(cls.name or "")
        if class_id is not None:
            subjects |= {(class_id, subject) for subject in cls.subjects}
            last_values |= {class_id} if cls.last_values else set()
    return subjects, last_values
