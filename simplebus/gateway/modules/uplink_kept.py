"""What lies in an uplink's directory when it begins, and what the other end knows it by.

Rule 1: what is kept is sent. A class goes on under the name under which it was begun, whatever the
module is called now: the other end remembers by that how far it is. What was heard for another
class is sent to that one.
Rule 2: what nobody will send is told, with what sends it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from simplebus.bridge.settings import lane_name
from simplebus.core import dead_letters
from simplebus.core.statistics import BrokerStatistics, ClassStatistics

_DURABLE = re.compile(r"bridge (\S+) there ")


@dataclass(frozen=True, slots=True)
class Kept:
    """A class of the bus in this process."""

    class_: int | str
    name: str
    """What the uplink is called at the other end, for this class."""
    waiting: int
    """Messages that are still to be sent."""
    others: dict[str, int]
    """Other names, under which nobody sends; and how many messages wait for each."""


def kept(found: BrokerStatistics, class_: int | str, name: str) -> list[Kept]:
    """What there is to send: of this class, which comes first, and of others for which something
    waits. `name` is for what has none yet."""
    mine, rest = Kept(class_, name, 0, {}), []
    for each in found.classes:
        if each.class_id == class_ or (each.name and each.name == class_):
            mine = _of(each, class_, name)
        elif not dead_letters.are_kept_in(each.name):
            before = _of(each, each.name or each.class_id, name)
            if before.waiting or before.others:
                rest.append(before)
    return [mine, *rest]


def _of(found: ClassStatistics, class_: int | str, name: str) -> Kept:
    waiting = dict(_names(found, class_))
    if not waiting:
        return Kept(class_, name, found.ring.messages + found.spilled, {})
    mine = name if name in waiting else next(iter(waiting))
    count = waiting.pop(mine)
    return Kept(class_, mine, count, {each: left for each, left in waiting.items() if left})


def _names(found: ClassStatistics, class_: int | str) -> Iterator[tuple[str, int]]:
    """Under which it was sent, and how many messages wait for each."""
    for each in found.subscriptions:
        match = _DURABLE.match(each.durable)
        if match and each.durable == lane_name(match[1], class_, back=False):
            yield match[1], each.in_flight + each.waiting
