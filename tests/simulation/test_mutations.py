"""Each promise is broken on purpose, and the simulation must notice, by its name.

Rule 1: a canary changes the product in one place, as a mistake would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from simplebus.core import restore
from simplebus.core.commit_log import CommitLog, JournalEntry
from simplebus.core.group.group import Group, GroupMember
from simplebus.core.group.partition_queues import PartitionQueues
from simplebus.core.message_class.last_values import LastValues
from simplebus.core.message_class.spill import SpillReader
from simplebus.core.producer_state import ProducerStates
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.envelope_batch import EnvelopeColumns
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import DeliveryPolicy
from simplebus.core.restore import BrokerRestorer
from simplebus.core.settings import FullPolicy
from simplebus.core.store.store import Store
from simplebus.core.subscription.position import Position
from simplebus.core.subscription.subscription import BrokerSubscription
from simplebus.storage.journal import Journal
from simplebus.storage.recovery import Segments
from tests.simulation import run
from tests.simulation.disk import Disk
from tests.simulation.restarts import BrokenError
from tests.simulation.run import live

CONFIRMED = "what is confirmed outlives the process"
SEEDS = 60
"""In so many lives it is noticed at the latest."""
CALM: dict[str, Any] = {"fates": ("-",)}
PLAIN: dict[str, Any] = {"messages_max": 0, "values": False, "purges": False, "keep": 0}
GIVEN_UP = PLAIN | {"deliveries": 3, "level": Durability.DISK}
CUT = PLAIN | {"level": Durability.DISK, "fates": ("kill", "cut", "cut", "-")}
STOPPED = PLAIN | {"level": Durability.DISK, "fates": ("stop", "-", "-")}
KILLED = PLAIN | {"level": Durability.DISK, "fates": ("kill", "-")}
PURGED = KILLED | {"purges": True}
TORN = PLAIN | {"level": Durability.OS, "fates": ("cut", "-")}
SLOW = PLAIN | {"ack_timeout": 6}
KEYS = PLAIN | {"by_key": True}
OLDEST = CALM | {"messages_max": 6, "policy": FullPolicy.DROP_OLDEST, "values": False}
NEWEST = CALM | {"messages_max": 6, "policy": FullPolicy.DROP_NEWEST, "values": False}
VALUES = CALM | {"messages_max": 0, "policy": FullPolicy.BLOCK, "values": True}
SPILLS = CALM | {
    "messages_max": 6,
    "policy": FullPolicy.SPILL,
    "level": Durability.OS,
    "purges": False,
}
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
    def further(position: BrokerSubscription, cursor: int) -> None:
        original(position, min(cursor + 1, position.ring.head))
        position.window.ack_range(cursor, position.window.cursor)

    return seldom(original, further)


def forgets_what_was_nacked(original: Original) -> Original:
    def drop(position: Position, first: int, last: int, *how: Any, **more: Any) -> None:
        position._ack_timer.remove(first, last)

    return drop


def loses_what_a_member_had(original: Original) -> Original:
    def leave(group: Group, member: GroupMember) -> None:
        for span in [*member.pop_unsent(), *(span for _, span in member.pop_in_flight())]:
            group.window.ack_range(span.first, span.last)
        original(group, member)

    return leave


def sends_too_many(original: Original) -> Original:
    return lambda position: original(position) + 2


def counts_twice(original: Original) -> Original:
    def sent(position: BrokerSubscription, piece: memoryview, count: int, tick: int) -> bytes:
        position.delivered_count += 1
        return bytes(original(position, piece, count, tick))

    return seldom(original, sent)


def leaves_out_a_record(original: Original) -> Original:
    def write(journal: Journal, entry: JournalEntry, lot: int) -> None:
        journal._class(entry.class_id)

    return seldom(original, write)


def does_not_sync(original: Original) -> Original:
    def settle(journal: Journal) -> None:
        for file in journal._files():
            file.settle()

    return settle


def looks_at_no_key(original: Original) -> Original:
    def enter(lanes: PartitionQueues, sequences: Iterable[int], of: Iterable[int]) -> list[int]:
        return list(original(lanes, sequences, [0 for _ in of]))

    return enter


def confirms_at_once(original: Original) -> Original:
    return property(lambda commit_log: False)  # type: ignore[return-value]


def as_if_sent_once(original: Original) -> Original:
    return lambda first, last, attempts, **more: original(first, last, [], **more)


def without_its_name(original: Original) -> Original:
    return lambda restoring, class_id, name: original(restoring, class_id, "")


def counts_no_drops(original: Original) -> Original:
    def drop(store: Store, *given: Any) -> None:
        before = [(cls, cls.dropped_counts.copy()) for cls in store.classes.values()]
        original(store, *given)
        for cls, dropped in before:
            cls.dropped_counts = dropped

    return drop


def too_soon(original: Original) -> Original:
    return lambda terms, attempts: 1


def never_early(original: Original) -> Original:
    def rows(store: Store, cls: object, read: EnvelopeColumns, now: float) -> object:
        return original(store, cls, replace(read, not_before=None), now)

    return rows


def never_expires(original: Original) -> Original:
    def rows(store: Store, cls: object, read: EnvelopeColumns, now: float) -> object:
        return original(store, cls, replace(read, expires=None), now)

    return rows


def forgets_the_last_value(original: Original) -> Original:
    return lambda values, *given: original(values, *given)[:-1]


CANARIES: list[tuple[object, str, Canary, str, int, dict[str, Any]]] = [
    (AckWindow, "ack_range", forgets_acks, "what is acknowledged does not come again", 0, {}),
    (BrokerSubscription, "_advance_cursor", skips_a_message, "nothing is left out", 6, PLAIN),
    (
        Position,
        "nack",
        forgets_what_was_nacked,
        "what waits is delivered in the end",
        1,
        PLAIN | CALM,
    ),
    (Group, "remove_member", loses_what_a_member_had, "nothing is passed over", 0, PLAIN),
    (Position, "_in_flight_capacity", sends_too_many, "windows are kept", 0, PLAIN),
    (BrokerSubscription, "mark_sent", counts_twice, "counters add up", 1, PLAIN),
    (Store, "dead_letter", lambda _: nothing, "nothing is passed over", 37, GIVEN_UP),
    (ProducerStates, "set_progress", lambda _: nothing, "a number is stored once", 7, PLAIN),
    (CommitLog, "must_defer_confirms", confirms_at_once, CONFIRMED, 14, CUT),
    (Journal, "_write_entry", leaves_out_a_record, CONFIRMED, 1, CUT),
    (Journal, "_sync_files", does_not_sync, CONFIRMED, 0, CUT),
    (Disk, "_sync_folder", lambda _: nothing, CONFIRMED, 0, CUT),
    (BrokerRestorer, "restore_producer", lambda _: nothing, "a number is stored once", 13, CUT),
    (
        PartitionQueues,
        "enqueue",
        looks_at_no_key,
        "messages of a key come one after the other",
        2,
        KEYS,
    ),
    (BrokerRestorer, "restore_position", lambda _: nothing, "durables outlive the process", 1, CUT),
    (restore, "covering", as_if_sent_once, "deliveries are counted", 0, STOPPED),
    (CommitLog, "append_refusal", lambda _: nothing, "what is said to be lost is", 0, KILLED),
    (CommitLog, "append_purge", lambda _: nothing, "what is purged is nobody's", 8, PURGED),
    (BrokerRestorer, "open_class", without_its_name, "names outlive the process", 0, CUT),
    (Segments, "_say", lambda _: nothing, "what is left out is said", 0, TORN),
    (Store, "_append_evicting_oldest", counts_no_drops, "what is dropped is counted", 0, OLDEST),
    (Store, "_drop_newest", counts_no_drops, "what is dropped is counted", 0, NEWEST),
    (DeliveryPolicy, "pause", too_soon, "nothing is sent again before its pause is over", 0, SLOW),
    (Store, "build_rows", never_expires, "what has expired is not sent", 0, PLAIN),
    (Store, "build_rows", never_early, "nothing is sent before it may be", 0, PLAIN),
    (LastValues, "find_sequences", forgets_the_last_value, "last values are sent", 5, VALUES),
    (
        SpillReader,
        "_append_batch",
        lambda _: nothing,
        "what waits is delivered in the end",
        0,
        SPILLS,
    ),
]
"""What is broken, how, by which promise it is noticed, in which life, and what that is like."""


@pytest.mark.parametrize(
    ("kind", "name", "canary", "promise", "seed", "given"),
    CANARIES,
    ids=[f"{each[1]}: {each[3]}" for each in CANARIES],
)
def test_a_broken_promise_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    kind: object,
    name: str,
    canary: Canary,
    promise: str,
    seed: int,
    given: dict[str, Any],
) -> None:
    """`seed` is one of those in which it is: the others are only looked at when it is not."""
    monkeypatch.setattr(kind, name, canary(getattr(kind, name)))
    monkeypatch.setattr(run, "CALM_SECONDS", 90.0)
    noticed = []
    for each in [seed, *range(SEEDS)]:
        try:
            live(each, **given)
        except BrokenError as error:
            noticed.append(str(error).split(":")[0])
            if noticed[-1] == promise:
                return
        except AssertionError as error:
            noticed.append(repr(error))
    raise AssertionError(f"nobody noticed; but for: {noticed}")
