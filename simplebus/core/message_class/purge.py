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
from simplebus.core.subscription.subscription import Subscription


def purge(cls: MessageClass, first: int, last: int, ledger: Ledger | None) -> int:
    """Have messages first..last-1, as far as they are stored, be nobody's; `release` is to follow.
    Returns how many of them were not purged before.

    Raises RemoteProtocolError (memory_limit) where there would be too many rows of them.
    """
    ring, purged = cls.ring, cls.purged
    first, last = max(first, cls.first), min(last, ring.head)
    if first >= last:
        return 0
    purged.remove(0, cls.first)
    if purged.ranges >= PURGED_RANGES_MAX and first > cls.first:
        raise RemoteProtocolError(
            Reason.MEMORY_LIMIT,
            f"class {cls.class_id} has {purged.ranges} rows of purged messages behind others that "
            f"are stored, and may have {PURGED_RANGES_MAX}; purge or acknowledge the oldest first",
        )
    before = len(purged)
    purged.add(first, last)
    if cls.holds_values:
        cls.values.forget(first, last)
    for position in cls.subscriptions:
        position.purge(first, last)
    _purge_waiting(cls, first, last)
    count = len(purged) - before
    cls.dropped[Reason.PURGED] += count
    if ledger is not None:
        ledger.purge(cls.class_id, first, last)
    front = purged.within(cls.first, cls.first + 1)
    if front:  # It is not kept either.
        [(_, end)] = purged.within(cls.first, ring.head)[:1]
        cls.let_go(min(end, cls.floor()))
    return count


def _purge_waiting(cls: MessageClass, first: int, last: int) -> None:
    """The same of what waits for a first subscription. What waits before it counts as sent, since
    nobody may have been sent what lies behind."""
    window = cls.waiting
    if not cls.subscriptions:
        window.cursor = max(window.cursor, last)
    first, last = max(first, window.floor), min(last, window.cursor)
    if first < last:
        window.ack_range(first, last)


def purge_again(cls: MessageClass, position: Subscription) -> None:
    """A new position does not have what is purged."""
    for first, last in cls.purged.within(cls.first, cls.ring.head):
        position.purge(first, last)
