"""How far a query has come: for each bus and class the sequence of the next message.

Rule 1: nothing of Spark and no I/O here.
Rule 2: offsets are plain JSON, because Spark keeps them in the checkpoint and people read them:

    {"10.0.0.1:8888": {"7": 120, "orders": 4, "": "5b0e…"}}

A class is named as the query names it. The empty name, which no class has, tells which memory the
sequences are of: a bus that has lost its memory begins again at 0, and what is called 120 then is
another message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LATEST = -1
EARLIEST = -2
SEQUENCE_MAX = (1 << 63) - 1
_MEMORY = ""

Wanted = Literal["earliest", "latest"] | Mapping[str, Mapping[str, int]]
"""Where somebody wants to begin or to end: a word, or sequences by server and class, LATEST and
EARLIEST among them."""


class OffsetError(ValueError):
    """Offsets that cannot be. Says which, what came and what was expected."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a class holds."""

    floor: int
    """The lowest sequence that is stored."""
    head: int
    """The sequence of the next message."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a bus holds."""

    bus: str
    """The identity of its memory."""
    classes: Mapping[str, Held]


Memories = Mapping[str, Memory]
"""By server."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far one bus is read."""

    bus: str = ""
    """The identity of the memory that the sequences are of; empty when nobody said."""
    classes: Mapping[str, int] = field(default_factory=dict)


Offsets = Mapping[str, Position]
"""By server."""


def dump(offsets: Offsets) -> dict[str, dict[str, int | str]]:
    """As Spark keeps it; the same offsets always look the same."""
    found: dict[str, dict[str, int | str]] = {}
    for server in sorted(offsets):
        position = offsets[server]
        found[server] = {name: position.classes[name] for name in sorted(position.classes)}
        if position.bus:
            found[server][_MEMORY] = position.bus
    return found


def load(given: Mapping[str, Any]) -> dict[str, Position]:
    """What `dump` made. Raises OffsetError for what it did not."""
    found = {}
    for server, classes in given.items():
        if not isinstance(classes, Mapping):
            raise OffsetError(
                f"the checkpoint says {classes!r} of {server}, expected sequences by class"
            )
        bus = classes.get(_MEMORY, "")
        sequences = {
            name: _sequence(value, server, name) for name, value in classes.items() if name
        }
        found[server] = Position(bus if isinstance(bus, str) else "", sequences)
    return found


def parse(
    text: str, *, known: Callable[[str, str], tuple[str, str]], earliest: bool = True
) -> Wanted:
    """What a user wrote: `earliest`, `latest`, or JSON by server and class with -1 for latest and
    -2 for earliest. `known` says how offsets write a server and a class.

    Raises OffsetError.
    """
    word = text.strip()
    if word.lower() == "latest":
        return "latest"
    if word.lower() == "earliest":
        if earliest:
            return "earliest"
        raise OffsetError('expected "latest" or JSON: reading ends behind something')
    try:
        given = json.loads(word)
    except ValueError as error:
        raise OffsetError(f"it is no JSON ({error}); {_EXPECTED}") from None
    if not isinstance(given, dict) or not given:
        raise OffsetError(f"it holds no server; {_EXPECTED}")
    found: dict[str, dict[str, int]] = {}
    for server, classes in given.items():
        if not isinstance(classes, dict):
            raise OffsetError(f"of {server} it says {classes!r}; {_EXPECTED}")
        for name, value in classes.items():
            if not name:
                continue
            where, class_ = known(server, name)
            lowest = EARLIEST if earliest else LATEST
            found.setdefault(where, {})[class_] = _sequence(value, server, name, lowest=lowest)
    return found


_EXPECTED = 'expected earliest, latest or JSON such as {"127.0.0.1:8888": {"7": 120}}'


def _sequence(value: Any, server: str, name: str, *, lowest: int = 0) -> int:
    if type(value) is not int or not lowest <= value <= SEQUENCE_MAX:
        special = {
            0: "",
            LATEST: ", or -1 for latest",
            EARLIEST: ", -1 for latest or -2 for earliest",
        }
        raise OffsetError(
            f"class {name} at {server} is to have the offset {value!r}, expected a sequence from "
            f"0 on{special[lowest]}"
        )
    return value


def resolve(wanted: Wanted, memories: Memories, *, option: str) -> dict[str, Position]:
    """What somebody wants, as sequences of what the buses hold now. Sequences below a floor stay:
    whether that is a loss is the planner's business.

    Raises OffsetError for what is beyond the end, of another server or class, or not said at all.
    """
    if not isinstance(wanted, str):
        _check_names(wanted, memories, option)
    found = {}
    for server, memory in memories.items():
        sequences = {}
        for name, held in memory.classes.items():
            at = wanted if isinstance(wanted, str) else wanted.get(server, {}).get(name)
            if at is None:
                raise OffsetError(
                    f"{option} says nothing of class {name} at {server}; expected a sequence, -1 "
                    "for latest or -2 for earliest"
                )
            if at in ("latest", LATEST):
                at = held.head
            elif at in ("earliest", EARLIEST):
                at = held.floor
            assert isinstance(at, int)
            if at > held.head:
                raise OffsetError(
                    f"{option} is {at} for class {name} at {server}, beyond its end: the next "
                    f"message there will be {held.head}"
                )
            sequences[name] = at
        found[server] = Position(memory.bus, sequences)
    return found


def _check_names(wanted: Mapping[str, Mapping[str, int]], memories: Memories, option: str) -> None:
    for server, classes in wanted.items():
        if server not in memories:
            raise OffsetError(
                f"{option} speaks of {server}, which is not read; servers are {', '.join(memories)}"
            )
        for name in classes:
            if name not in memories[server].classes:
                raise OffsetError(
                    f"{option} speaks of class {name} at {server}, which is not subscribed to; "
                    f"subscribe is {', '.join(memories[server].classes)}"
                )


def merge(offsets: Offsets, memories: Memories) -> dict[str, Position]:
    """Offsets for what is read now: a bus or a class that was added begins at the earliest message
    that it holds, one that is read no more is left out."""
    found = {}
    for server, memory in memories.items():
        before = offsets.get(server)
        if before is None:
            sequences = {name: held.floor for name, held in memory.classes.items()}
            found[server] = Position(memory.bus, sequences)
            continue
        sequences = {}
        for name, held in memory.classes.items():
            sequences[name] = before.classes.get(name, held.floor)
        found[server] = Position(before.bus, sequences)
    return found
