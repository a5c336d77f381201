"""Each promise is broken on purpose, and the simulation must notice, by its name.

Rule 1: a canary changes the product in one place, as a mistake would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from simplebus.core.acks import AckWindow
from simplebus.core.group import Group, Member
from simplebus.core.lanes import Lanes
from simplebus.core.ledger import Entry, Ledger
from simplebus.core.position import Position
from simplebus.core.publishers import Publishers
from simplebus.core.restoring import Restoring
from simplebus.core.store import Store
from simplebus.core.subscription import Subscription
from simplebus.storage.journal import Journal
from simulation import life
from simulation.life import live
from simulation.outliving import BrokenError

CONFIRMED = "what is confirmed outlives the process"
UNACKED = "what a durable has not acknowledged outlives the process"
SEEDS = 60
"""In so many lives it is noticed at the latest."""
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
    def drop(position: Position, first: int, last: int, *how: Any, **more: Any) -> None:
        position._wheel.cut(first, last)

    return drop


def loses_what_a_member_had(original: Original) -> Original:
    def leave(group: Group, member: Member) -> None:
        for span in [*member.give_back(), *(span for _, span in member.give_up())]:
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


def looks_at_no_key(original: Original) -> Original:
    def enter(lanes: Lanes, sequences: Iterable[int], of: Iterable[int]) -> list[int]:
        return list(original(lanes, sequences, [0 for _ in of]))

    return enter


def confirms_at_once(original: Original) -> Original:
    return property(lambda ledger: False)  # type: ignore[return-value]


CANARIES: list[tuple[type, str, Canary, str, int]] = [
    (AckWindow, "ack_range", forgets_acks, "what is acknowledged does not come again", 0),
    (Subscription, "_reach", skips_a_message, "nothing is left out", 0),
    (Position, "nack", forgets_what_was_nacked, "what waits is delivered in the end", 8),
    (Group, "leave", loses_what_a_member_had, UNACKED, 23),
    (Position, "_room", sends_too_many, "windows are kept", 0),
    (Subscription, "sent", counts_twice, "counters add up", 4),
    (Store, "bury", lambda _: nothing, UNACKED, 14),
    (Publishers, "note", lambda _: nothing, "a number is stored once", 2),
    (Ledger, "is_awaited", confirms_at_once, CONFIRMED, 4),
    (Journal, "_write_entry", leaves_out_a_record, CONFIRMED, 1),
    (Journal, "_sync_files", does_not_sync, CONFIRMED, 19),
    (Restoring, "add_publisher", lambda _: nothing, "a number is stored once", 3),
    (Lanes, "enter", looks_at_no_key, "messages of a key come one after the other", 2),
    (Restoring, "add_position", lambda _: nothing, "durables outlive the process", 1),
]


@pytest.mark.parametrize(
    ("kind", "name", "canary", "promise", "seed"), CANARIES, ids=[each[1] for each in CANARIES]
)
def test_a_broken_promise_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    name: str,
    canary: Canary,
    promise: str,
    seed: int,
) -> None:
    """`seed` is one of those in which it is: the others are only looked at when it is not."""
    monkeypatch.setattr(kind, name, canary(getattr(kind, name)))
    monkeypatch.setattr(life, "CALM_SECONDS", 30.0)
    noticed = []
    for each in [seed, *range(SEEDS)]:
        try:
            live(each)
        except BrokenError as error:
            noticed.append(str(error).split(":")[0])
            if noticed[-1] == promise:
                return
        except AssertionError as error:
            noticed.append(repr(error))
    raise AssertionError(f"nobody noticed; but for: {noticed}")
