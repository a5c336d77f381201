"""Mutation tests of the simulation: each broken promise must be detected, by name.

A mutation changes the product in one place, as a bug would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from simplebus.core import checkpoint, restore
from simplebus.core.checkpoint import Checkpointer
from simplebus.core.commit_log import CommitLog, JournalEntry
from simplebus.core.group.group import Group, GroupMember
from simplebus.core.group.partition_queues import PartitionQueues
from simplebus.core.message_class.last_values import LastValues
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.message_class.spill import SpillReader
from simplebus.core.producer_state import ProducerStates
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.envelope_batch import EnvelopeColumns
from simplebus.core.redelivery.ack_window import AckWindow
from simplebus.core.redelivery.delivery_policy import DeliveryPolicy
from simplebus.core.restore import BrokerRestorer
from simplebus.core.settings import FullPolicy
from simplebus.core.store.drop_oldest import OldestMessageDropper
from simplebus.core.store.store import Store
from simplebus.core.subscription.channel_filter import ChannelTable
from simplebus.core.subscription.position import Position
from simplebus.storage.journal import Journal
from simplebus.storage.segments import SegmentChain
from tests.simulation import run
from tests.simulation.disk import SimulatedDisk
from tests.simulation.restarts import BrokenPromiseError
from tests.simulation.run import run_simulation

CONFIRMED = "confirmed messages survive restarts"
DROPS_COUNTED = "dropped messages are counted"
SEEDS = 60
"""Runs in which a mutation must be detected at the latest."""
CALM: dict[str, Any] = {"fates": ("-",)}
PLAIN: dict[str, Any] = {"messages_max": 0, "values": False, "purges": False, "keep": 0}
GIVEN_UP = PLAIN | {"deliveries": 3, "level": Durability.DISK}
CUT = PLAIN | {"level": Durability.DISK, "fates": ("kill", "cut", "cut", "-")}
STOPPED = PLAIN | {"level": Durability.DISK, "fates": ("stop", "-", "-")}
KILLED = PLAIN | {"level": Durability.DISK, "fates": ("kill", "-")}
PURGED = KILLED | {"purges": True}
DAMAGED = PLAIN | {"level": Durability.DISK, "fates": ("damage", "-")}
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
Mutation = Callable[[Original], Original]


def every_nth_call(original: Original, instead: Callable[..., Any], interval: int = 9) -> Original:
    """Return the original, except that each `every`-th call does `instead`."""
    times = 0

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        nonlocal times
        times += 1
        return (original if times % interval else instead)(*args, **kwargs)

    return sometimes


def do_nothing(*args: Any, **kwargs: Any) -> None: ...


def ignore_acks(original: Original) -> Original:
    return every_nth_call(original, do_nothing)


def skip_messages(original: Original) -> Original:
    def further(position: Position, cursor: int) -> None:
        original(position, min(cursor + 1, position.ring.head))
        position.window.ack_range(cursor, position.window.cursor)

    return every_nth_call(original, further)


def forget_nacked_messages(original: Original) -> Original:
    def drop(position: Position, first: int, last: int, *options: Any, **kwargs: Any) -> None:
        position.unacked.remove_in_flight(first, last, 0)

    return drop


def lose_messages_of_leaving_members(original: Original) -> Original:
    def leave(group: Group, member: GroupMember) -> None:
        unsent = [sequences for _, sequences in member.pop_unsent()]
        in_flight = [sequences for _, _, sequences in member.pop_in_flight()]
        for first, last in chain.from_iterable([*unsent, *in_flight]):
            group.window.ack_range(first, last)
        original(group, member)

    return leave


def exceed_in_flight_limit(original: Original) -> Original:
    return lambda position: original(position) + 2


def count_deliveries_twice(original: Original) -> Original:
    def sent(position: Position, last: int, tick: int) -> None:
        position.delivered_count += 1
        original(position, last, tick)

    return every_nth_call(original, sent)


def skip_records(original: Original) -> Original:
    def write(journal: Journal, entry: JournalEntry, batch_number: int) -> None:
        journal._class(entry.class_id)

    return every_nth_call(original, write)


def skip_sync(original: Original) -> Original:
    def settle(journal: Journal) -> None:
        for file in journal._files():
            file.mark_synced()

    return settle


def ignore_keys(original: Original) -> Original:
    def enter(lanes: PartitionQueues, sequences: Iterable[int], of: Iterable[int]) -> list[int]:
        return list(original(lanes, sequences, [0 for _ in of]))

    return enter


def confirm_at_once(original: Original) -> Original:
    return property(lambda commit_log: False)  # type: ignore[return-value]


def forget_attempts(original: Original) -> Original:
    return lambda first, last, attempts, **kwargs: original(first, last, [], **kwargs)


def record_only_windows(original: Original) -> Original:
    # Not for groups: their cursors pass messages before they are sent.
    return lambda position, recorded: not position.is_shared


def keep_old_heads(original: Original) -> Original:
    return lambda checkpointer, collected: collected


def forget_class_names(original: Original) -> Original:
    return lambda restoring, class_id, name: original(restoring, class_id, "")


def forget_problems(original: Original) -> Original:
    def read(chain: SegmentChain, *args: Any) -> Iterator[object]:
        yield from original(chain, *args)
        chain._found.problems.clear()

    return read


def skip_the_rest(original: Original) -> Original:
    return lambda chain, *args: False


def forget_drop_counts(original: Original) -> Original:
    def drop(*args: Any, **options: Any) -> object:
        cls = next(each for each in args if isinstance(each, MessageClass))
        counts_before = cls.dropped_counts.copy()
        result = original(*args, **options)
        cls.dropped_counts = counts_before
        return result

    return drop


def redeliver_too_soon(original: Original) -> Original:
    return lambda policy, attempts: 1


def ignore_delays(original: Original) -> Original:
    def rows(channels: ChannelTable, columns: EnvelopeColumns, now: float) -> object:
        return original(channels, replace(columns, not_before=None), now)

    return rows


def ignore_expiry(original: Original) -> Original:
    def rows(channels: ChannelTable, columns: EnvelopeColumns, now: float) -> object:
        return original(channels, replace(columns, expires=None), now)

    return rows


def forget_last_value(original: Original) -> Original:
    return lambda values, *args: original(values, *args)[:-1]


MUTATIONS: list[tuple[object, str, Mutation, str, int, dict[str, Any]]] = [
    (AckWindow, "ack_range", ignore_acks, "acked messages are not redelivered", 101, {}),
    (
        Position,
        "_advance_cursor",
        skip_messages,
        "first deliveries skip no message",
        102,
        PLAIN,
    ),
    (
        Position,
        "nack",
        forget_nacked_messages,
        "the backlog is delivered in the end",
        100,
        PLAIN | CALM,
    ),
    (
        Group,
        "remove_member",
        lose_messages_of_leaving_members,
        "positions pass no undelivered message",
        102,
        PLAIN,
    ),
    (
        Position,
        "_in_flight_capacity",
        exceed_in_flight_limit,
        "in-flight limits are kept",
        100,
        PLAIN,
    ),
    (Position, "mark_sent", count_deliveries_twice, "counters add up", 104, PLAIN),
    (
        Store,
        "dead_letter",
        lambda _: do_nothing,
        "positions pass no undelivered message",
        101,
        GIVEN_UP,
    ),
    (
        ProducerStates,
        "set_progress",
        lambda _: do_nothing,
        "a message number is stored once",
        113,
        PLAIN,
    ),
    (CommitLog, "must_defer_confirms", confirm_at_once, CONFIRMED, 101, CUT),
    (Journal, "_write_entry", skip_records, CONFIRMED, 100, CUT),
    (Journal, "_sync_files", skip_sync, CONFIRMED, 100, CUT),
    (SimulatedDisk, "_sync_folder", lambda _: do_nothing, CONFIRMED, 101, CUT),
    (
        BrokerRestorer,
        "restore_producer",
        lambda _: do_nothing,
        "a message number is stored once",
        100,
        CUT,
    ),
    (
        PartitionQueues,
        "enqueue",
        ignore_keys,
        "messages with equal keys are delivered one after the other",
        100,
        KEYS,
    ),
    (
        BrokerRestorer,
        "restore_position",
        lambda _: do_nothing,
        "durables survive restarts",
        100,
        CUT,
    ),
    (restore, "spans_by_attempts", forget_attempts, "deliveries are counted", 100, STOPPED),
    (
        checkpoint,
        "_is_window_sufficient",
        record_only_windows,
        "deliveries are counted",
        101,
        KILLED,
    ),
    (
        CommitLog,
        "append_refusal",
        lambda _: do_nothing,
        "messages reported as lost are lost",
        100,
        KILLED,
    ),
    (
        CommitLog,
        "append_purge",
        lambda _: do_nothing,
        "purged messages are not delivered",
        104,
        PURGED,
    ),
    (BrokerRestorer, "open_class", forget_class_names, "class names survive restarts", 100, CUT),
    (SegmentChain, "headers", forget_problems, "skipped records are logged", 100, TORN),
    (SegmentChain, "headers", forget_problems, "damaged records are reported", 100, DAMAGED),
    (Checkpointer, "_with_present_head", keep_old_heads, CONFIRMED, 83, DAMAGED),
    (SegmentChain, "_can_continue_at", skip_the_rest, CONFIRMED, 100, DAMAGED),
    (OldestMessageDropper, "append", forget_drop_counts, DROPS_COUNTED, 100, OLDEST),
    (Store, "drop_newest", forget_drop_counts, DROPS_COUNTED, 100, NEWEST),
    (
        DeliveryPolicy,
        "redelivery_delay_ticks",
        redeliver_too_soon,
        "redeliveries respect the backoff",
        100,
        SLOW,
    ),
    (ChannelTable, "build_rows", ignore_expiry, "expired messages are not sent", 100, PLAIN),
    (ChannelTable, "build_rows", ignore_delays, "delayed messages are not sent early", 100, PLAIN),
    (LastValues, "find_sequences", forget_last_value, "last values are sent", 5, VALUES),
    (
        SpillReader,
        "_append_batch",
        lambda _: do_nothing,
        "the backlog is delivered in the end",
        0,
        SPILLS,
    ),
]
"""Owner, attribute, mutation, broken promise, seed, and scenario of each mutation."""


@pytest.mark.parametrize(
    ("kind", "name", "mutation", "promise", "seed", "args"),
    MUTATIONS,
    ids=[f"{each[1]}: {each[3]}" for each in MUTATIONS],
)
def test_mutation_breaks_its_promise(
    monkeypatch: pytest.MonkeyPatch,
    kind: object,
    name: str,
    mutation: Mutation,
    promise: str,
    seed: int,
    args: dict[str, Any],
) -> None:
    """`seed` is one in which the mutation is detected; others are tried if it is not."""
    monkeypatch.setattr(kind, name, mutation(getattr(kind, name)))
    monkeypatch.setattr(run, "CALM_SECONDS", 90.0)
    failures = []
    for each in [seed, *range(SEEDS)]:
        try:
            run_simulation(each, **args)
        except BrokenPromiseError as error:
            failures.append(str(error).split(":")[0])
            if failures[-1] == promise:
                return
        except AssertionError as error:
            failures.append(repr(error))
    raise AssertionError(f"no run broke the promise {promise!r}; other failures: {failures}")
