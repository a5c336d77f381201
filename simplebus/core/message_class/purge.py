"""Messages that nobody is to have any more, though they are stored.

Rule 1: what is purged is done for every position, those to come included, and for what waits. It
goes as soon as nothing in front of it is stored.
Rule 2: purging is idempotent: what is purged again changes nothing, and does not count again.

    ring    floor ─ 3 ─ 4 ─ 5 ─ 6 ─ 7 ─ head
    purged              ■   ■                     3 goes, and they go with it
"""

from __future__ import annotations

from simplebus.core.commit_log import Ledger
from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.limits import PURGED_RANGES_MAX
from simplebus.core.message_class.message_class import MessageClass
from simplebus.core.subscription.subscription import BrokerSubscription


def purge_messages(cls: MessageClass, first: int, last: int, commit_log: Ledger | None) -> int:
    """Have messages first..last-1, as far as they are stored, be nobody's; `release` is to follow.
    Returns how many of them were not purged before.

    Raises RemoteProtocolError (memory_limit) where there would be too many rows of them.
    """
    ring, purged = cls.ring, cls.purged_sequences
    first, last = max(first, cls.first_sequence), min(last, ring.head)
    if first >= last:
        return 0
    purged.remove(0, cls.first_sequence)
    if purged.ranges >= PURGED_RANGES_MAX and first > cls.first_sequence:
        raise RemoteProtocolError(
            Reason.MEMORY_LIMIT,
            f"class {cls.class_id} has {purged.ranges} rows of purged messages behind others that "
            f"are stored, and may have {PURGED_RANGES_MAX}; purge or acknowledge the oldest first",
        )
    before = len(purged)
    purged.add(first, last)
    if cls.has_last_values:
        cls.last_values.discard_range(first, last)
    for position in cls.subscriptions:
        position.purge(first, last)
    _purge_backlog(cls, first, last)
    count = len(purged) - before
    cls.dropped[Reason.PURGED] += count
    if commit_log is not None:
        commit_log.purge(cls.class_id, first, last)
    front = purged.within(cls.first_sequence, cls.first_sequence + 1)
    if front:  # It is not kept either.
        [(_, end)] = purged.within(cls.first_sequence, ring.head)[:1]
        cls.release_below(min(end, cls.floor()))
    return count


def _purge_backlog(cls: MessageClass, first: int, last: int) -> None:
    """The same of what waits for a first subscription. What waits before it counts as sent, since
    nobody may have been sent what lies behind."""
    window = cls.backlog_window
    if not cls.subscriptions:
        window.cursor = max(window.cursor, last)
    first, last = max(first, window.floor), min(last, window.cursor)
    if first < last:
        window.ack_range(first, last)


def apply_purges(cls: MessageClass, position: BrokerSubscription) -> None:
    """A new position does not have what is purged."""
    for first, last in cls.purged_sequences.within(cls.first_sequence, cls.ring.head):
        position.purge(first, last)
