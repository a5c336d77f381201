"""Purge: discarding stored messages for all existing and future positions.

Purged messages are freed when no older message is stored. Purging a message again has no effect and
is not counted.

    ring    floor ─ 3 ─ 4 ─ 5 ─ 6 ─ 7 ─ head
    purged              ■   ■                     freed together with 3

From the beginning of a purge, the class counts its messages as purged, and new positions do not
receive them. The existing positions are changed in parts.
"""

from __future__ import annotations

from collections.abc import Generator

from simplebus.core.commit_log import CommitLog
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import PURGED_POSITIONS_PER_TURN, PURGED_RANGES_MAX
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.steps import run_to_end
from simplebus.core.subscription.position import Position


def purge_messages(cls: MessageClass, first: int, last: int, commit_log: CommitLog | None) -> int:
    """Purge messages at once. Like `purge_in_parts` otherwise."""
    return run_to_end(purge_in_parts(cls, first, last, commit_log))


def purge_in_parts(
    cls: MessageClass, first: int, last: int, commit_log: CommitLog | None
) -> Generator[None, None, int]:
    """Purge the stored messages among `first` to `last - 1`, in parts of bounded work.

    All parts must be processed, whatever happens between them. The caller trims the class
    afterwards.

    Returns:
        The number of messages that were not purged before.
    """
    ring, purged = cls.ring, cls.purged_sequences
    requested_first, first, last = first, max(first, cls.first_sequence), min(last, ring.head)
    purged.remove(0, cls.first_sequence)
    if commit_log is not None and requested_first < last:
        # Released messages included: the acks that released them may not be written yet.
        commit_log.append_purge(cls.class_id, requested_first, last)
    if first >= last:
        return 0
    count = mark_purged(cls, first, last)
    cls.dropped_counts[Reason.PURGED] += count
    for number, position in enumerate(list(cls.positions), 1):
        yield from position.unacked.discard_held_in_parts(first, last)
        if position in cls.positions:  # It may have ended between the parts.
            position.purge(first, last)
            if position in cls.groups:
                cls.enqueue_position(position)  # The group has assigned no messages meanwhile.
        if number % PURGED_POSITIONS_PER_TURN == 0:
            yield
    _purge_backlog(cls, first, last)
    is_oldest_purged = bool(purged.ranges_within(cls.first_sequence, cls.first_sequence + 1))
    if is_oldest_purged:  # Purged messages are not subject to retention.
        [(_, end)] = purged.ranges_within(cls.first_sequence, ring.head)[:1]
        cls.release_below(min(end, cls.floor()))
    return count


def check_range_limit(cls: MessageClass, first: int, last: int) -> None:
    """Raise RemoteProtocolError (memory_limit) if a purge of first..last-1 would add a separate
    purged range to too many.
    """
    purged = cls.purged_sequences
    purged.remove(0, cls.first_sequence)
    is_separate = cls.first_sequence < first < min(last, cls.ring.head)
    if is_separate and purged.range_count >= PURGED_RANGES_MAX:
        raise RemoteProtocolError(
            Reason.MEMORY_LIMIT,
            f"class {cls.label} has {purged.range_count} purged ranges between stored messages, "
            f"{PURGED_RANGES_MAX} are allowed; purge or acknowledge the oldest messages first",
        )


def mark_purged(cls: MessageClass, first: int, last: int) -> int:
    """Mark the stored messages first..last-1 as purged: new positions do not receive them.

    The caller must remove the messages from the existing positions.

    Returns:
        The number of messages that were not purged before.
    """
    count_before = len(cls.purged_sequences)
    cls.purged_sequences.add(first, last)
    if cls.has_last_values:
        cls.last_values.discard_range(first, last)
    return len(cls.purged_sequences) - count_before


def _purge_backlog(cls: MessageClass, first: int, last: int) -> None:
    """Acknowledge the purged messages in the backlog.

    The backlog is extended up to `last`, as only messages below its cursor can be acknowledged.
    """
    window = cls.backlog_window
    if not cls.positions:
        window.cursor = max(window.cursor, last)
    first, last = max(first, window.floor), min(last, window.cursor)
    if first < last:
        window.ack_range(first, last)


def apply_purges(cls: MessageClass, position: Position) -> None:
    """Acknowledge all purged messages in a new position."""
    for first, last in cls.purged_sequences.ranges_within(cls.first_sequence, cls.ring.head):
        position.purge(first, last)
