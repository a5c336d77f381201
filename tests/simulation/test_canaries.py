"""Each promise is broken on purpose, and the simulation must notice, by its name.

Rule 1: a canary changes the product in one place, as a mistake would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simplebus.core.acks import AckWindow
from simplebus.core.group import Group, Member
from simplebus.core.ledger import Entry, Ledger
from simplebus.core.position import Position
from simplebus.core.publishers import Publishers
from simplebus.core.restoring import Restoring
from simplebus.core.store import Store
from simplebus.core.subscription import Subscription
from simplebus.storage.journal import Journal
from simulation.life import live
from simulation.outliving import BrokenError

SEEDS = range(30)
Original = Callable[..., Any]
Canary = Callable[[Original], Original]


def seldom(original: Original, instead: Callable[..., Any], every: int = 9) -> Original:
    """The original, but for each so-many-th time."""
    times = 0

    def sometimes(*given: Any, **more: Any) -> Any:
        nonlocal times
        times += 1
        return (original if times % every else instead)(*given, **more)

    return sometimes


def nothing(*given: Any, **more: Any) -> None:
    """Instead of something."""


def forgets_acks(original: Original) -> Original:
    return seldom(original, nothing)


def skips_a_message(original: Original) -> Original:
    def further(position: Subscription, cursor: int) -> None:
        original(position, min(cursor + 1, position.ring.head))
        position.window.ack_range(cursor, position.window.cursor)

    return seldom(original, further)


def forgets_what_was_nacked(original: Original) -> Original:
    def drop(position: Position, first: int, last: int, delay: object, tick: int) -> None:
        position._wheel.cut(first, last)

    return drop


def loses_what_a_member_had(original: Original) -> Original:
    def leave(group: Group, member: Member) -> None:
        for span in [*member.give_back(), *member.wheel.clear()]:
            group.window.ack_range(span.first, span.last)
        original(group, member)

    return leave


def sends_too_many(original: Original) -> Original:
    return lambda position: original(position) + 2


def counts_twice(original: Original) -> Original:
    def sent(position: Subscription, piece: memoryview, count: int, tick: int) -> bytes:
        position.delivered += 1
        return bytes(original(position, piece, count, tick))

    return seldom(original, sent)


def leaves_out_a_record(original: Original) -> Original:
    def write(journal: Journal, entry: Entry, lot: int) -> None:
        journal._class(entry.class_id)

    return seldom(original, write)


def does_not_sync(original: Original) -> Original:
    def settle(journal: Journal) -> None:
        for file in journal._files():
            file.settle()

    return settle


def confirms_at_once(original: Original) -> Original:
    return property(lambda ledger: False)  # type: ignore[return-value]


CANARIES: list[tuple[type, str, Canary, str]] = [
    (AckWindow, "ack_range", forgets_acks, "what is acknowledged does not come again"),
    (Subscription, "_reach", skips_a_message, "nothing is left out"),
    (Position, "nack", forgets_what_was_nacked, "what waits is delivered in the end"),
    (Group, "leave", loses_what_a_member_had, "what is confirmed is delivered or a dead letter"),
    (Position, "_room", sends_too_many, "windows are kept"),
    (Subscription, "sent", counts_twice, "counters add up"),
    (Store, "bury", lambda _: nothing, "what is confirmed is delivered or a dead letter"),
    (Publishers, "note", lambda _: nothing, "a number is stored once"),
    (Ledger, "is_awaited", confirms_at_once, "what is confirmed outlives the process"),
    (Journal, "_write_entry", leaves_out_a_record, "what is confirmed outlives the process"),
    (Journal, "_sync_files", does_not_sync, "what is confirmed outlives the process"),
    (Restoring, "add_publisher", lambda _: nothing, "a number is stored once"),
    (Restoring, "add_position", lambda _: nothing, "durables outlive the process"),
]


@pytest.mark.parametrize(
    ("kind", "name", "canary", "promise"),
    CANARIES,
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_broken_promise_is_noticed(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, canary: Canary, promise: str
) -> None:
    monkeypatch.setattr(kind, name, canary(getattr(kind, name)))
    noticed = []
    for seed in SEEDS:
        try:
            live(seed)
        except BrokenError as error:
            noticed.append(str(error).split(":")[0])
            if noticed[-1] == promise:
                return
        except AssertionError as error:
            noticed.append(repr(error))
    raise AssertionError(f"nobody noticed; but for: {noticed}")
