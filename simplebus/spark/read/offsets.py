"""How far a query has come: for each bus and class the sequence of the next message.

Rule 1: nothing of Spark and no I/O here.
Rule 2: offsets are plain JSON, because Spark keeps them in the checkpoint and people read them:

    {"10.0.0.1:8888": {"7": 120, "orders": 4, "": "5b0e…"},
     "query": {"id": "9c41…", "durable": "spark 9c41…", "began": {"10.0.0.1:8888": {…}}}}

A class is named as the query names it. The empty name, which no class has, tells which memory the
sequences are of: a bus that has lost its memory begins again at 0, and what is called 120 then is
another message. `query` is what the query says of itself: a server has a port in its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

LATEST = -1
EARLIEST = -2
SEQUENCE_MAX = (1 << 63) - 1
MILLISECONDS_MAX = 253_402_300_799_999
"""The end of the year 9999."""
_MEMORY = ""
_QUERY = "query"

ByClass = Mapping[str, Mapping[str, int]]
"""Numbers by server and class."""

Wanted = Literal["earliest", "latest"] | ByClass
"""Where somebody wants to begin or to end: a word, or sequences by server and class, LATEST and
EARLIEST among them."""


@dataclass(frozen=True, slots=True)
class Times:
    """The same said by times: with the first message that is accepted at or after each."""

    option: str
    """Where it was said."""
    milliseconds: int | ByClass
    """Since 1970; for all classes, or by server and class."""
    is_strict: bool
    """Whether a time behind the last message is an error; otherwise it stands for the end."""

    def of(self, server: str, name: str) -> int:
        """The time for a class. Raises OffsetError if there is none."""
        if isinstance(self.milliseconds, int):
            return self.milliseconds
        found = self.milliseconds.get(server, {}).get(name)
        if found is None:
            raise _unsaid(self.option, server, name, "milliseconds since 1970")
        return found

    def check(self, servers: Iterable[str], names: Iterable[str]) -> None:
        """Raise OffsetError if something is said of what is not read."""
        if not isinstance(self.milliseconds, int):
            _check_names(self.milliseconds, {one: list(names) for one in servers}, self.option)

    def missed(self, server: str, name: str) -> int:
        """What stands for a time behind the last message. Raises OffsetError if nothing does."""
        if not self.is_strict:
            return LATEST
        milliseconds = self.of(server, name)
        when = datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="milliseconds")
        raise OffsetError(
            f"{self.option} is {milliseconds} ({when}) for class {name} at {server}, which has "
            "accepted nothing since then; to begin with what comes next, set the option "
            "startingOffsetsByTimestampStrategy to latest"
        )


class OffsetError(ValueError):
    """Offsets that cannot be. Says which, what came and what was expected."""


@dataclass(frozen=True, slots=True)
class ClassExtent:
    """What a class holds."""

    floor: int
    """The lowest sequence that is stored."""
    head: int
    """The sequence of the next message."""


@dataclass(frozen=True, slots=True)
class BusExtent:
    """What a bus holds."""

    memory_id: str
    """The identity of its memory."""
    classes: Mapping[str, ClassExtent]


BusExtents = Mapping[str, BusExtent]
"""By server."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far one bus is read."""

    bus: str = ""
    """The identity of the memory that the sequences are of; empty when nobody said."""
    classes: Mapping[str, int] = field(default_factory=dict)


Offsets = Mapping[str, Position]
"""By server."""


@dataclass(frozen=True, slots=True)
class Query:
    """What a query says of itself beside where it stands. Only its checkpoint knows that."""

    id: str
    """Made up when it began. Spark asks where a query begins, and what it is called, also when a
    checkpoint says so: another id is of such an answer."""
    durable: str = ""
    """The name under which the buses keep what it has not processed; empty for none."""
    began: Offsets = field(default_factory=dict)
    """Where it began: Spark does not keep that before the first batch is finished. Empty of who
    has only been asked where to begin."""


def dump(offsets: Offsets, query: Query | None = None) -> dict[str, dict[str, Any]]:
    """As Spark keeps it; the same offsets always look the same."""
    found: dict[str, dict[str, Any]] = {}
    for server in sorted(offsets):
        position = offsets[server]
        found[server] = {name: position.classes[name] for name in sorted(position.classes)}
        if position.bus:
            found[server][_MEMORY] = position.bus
    if query is not None:
        found[_QUERY] = {"id": query.id}
        if query.durable:
            found[_QUERY]["durable"] = query.durable
        if query.began:
            found[_QUERY]["began"] = dump(query.began)
    return found


def load(given: Mapping[str, Any]) -> dict[str, Position]:
    """The offsets of what `dump` made. Raises OffsetError for what it did not."""
    found = {}
    for server, classes in given.items():
        if server == _QUERY:
            continue
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


def load_query(given: Mapping[str, Any]) -> Query | None:
    """What `dump` was told of the query; None for nothing. Raises OffsetError."""
    said = given.get(_QUERY)
    if said is None:
        return None
    if isinstance(said, dict):
        query_id, durable, began = said.get("id"), said.get("durable", ""), said.get("began", {})
        if isinstance(query_id, str) and isinstance(durable, str) and isinstance(began, dict):
            return Query(query_id, durable, load(began))
    raise OffsetError(
        f"the checkpoint says {said!r} of its query, expected an id, a durable and where it began"
    )


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
    lowest = EARLIEST if earliest else LATEST
    return _by_class(
        word,
        known,
        lambda value, server, name: _sequence(value, server, name, lowest=lowest),
        expected='expected earliest, latest or JSON such as {"127.0.0.1:8888": {"7": 120}}',
    )


def parse_times(text: str, *, known: Callable[[str, str], tuple[str, str]]) -> ByClass:
    """What a user wrote: JSON by server and class, in milliseconds since 1970.

    Raises OffsetError.
    """
    example = 'expected JSON such as {"127.0.0.1:8888": {"7": 1763740800000}}'
    return _by_class(text, known, _milliseconds, expected=example)


def _by_class(
    text: str,
    known: Callable[[str, str], tuple[str, str]],
    number: Callable[[Any, str, str], int],
    *,
    expected: str,
) -> dict[str, dict[str, int]]:
    """Numbers by server and class."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise OffsetError(f"it is no JSON ({error}); {expected}") from None
    if not isinstance(given, dict) or not given:
        raise OffsetError(f"it holds no server; {expected}")
    found: dict[str, dict[str, int]] = {}
    for server, classes in given.items():
        if not isinstance(classes, dict):
            raise OffsetError(f"of {server} it says {classes!r}; {expected}")
        for name, value in classes.items():
            if name:
                where, class_ = known(server, name)
                found.setdefault(where, {})[class_] = number(value, server, name)
    return found


def _milliseconds(value: Any, server: str, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MILLISECONDS_MAX:
        raise OffsetError(
            f"class {name} at {server} is to have the time {value!r}, expected milliseconds since "
            f"1970, a whole number from 0 to {MILLISECONDS_MAX}"
        )
    return value


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


def resolve(wanted: Wanted, memories: BusExtents, *, option: str) -> dict[str, Position]:
    """What somebody wants, as sequences of what the buses hold now. Sequences below a floor stay:
    whether that is a loss is the planner's business.

    Raises OffsetError for what is beyond the end, of another server or class, or not said at all.
    """
    if not isinstance(wanted, str):
        _check_names(
            wanted, {server: list(memory.classes) for server, memory in memories.items()}, option
        )
    found = {}
    for server, memory in memories.items():
        sequences = {}
        for name, held in memory.classes.items():
            at = wanted if isinstance(wanted, str) else wanted.get(server, {}).get(name)
            if at is None:
                raise _unsaid(option, server, name, "a sequence, -1 for latest or -2 for earliest")
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
        found[server] = Position(memory.memory_id, sequences)
    return found


def _unsaid(option: str, server: str, name: str, expected: str) -> OffsetError:
    return OffsetError(f"{option} says nothing of class {name} at {server}; expected {expected}")


def _check_names(wanted: ByClass, read: Mapping[str, list[str]], option: str) -> None:
    """Raise OffsetError if something is said of a server or a class that is not read."""
    for server, classes in wanted.items():
        if server not in read:
            raise OffsetError(
                f"{option} speaks of {server}, which is not read; servers are {', '.join(read)}"
            )
        for name in classes:
            if name not in read[server]:
                raise OffsetError(
                    f"{option} speaks of class {name} at {server}, which is not subscribed to; "
                    f"subscribe is {', '.join(read[server])}"
                )


def check_apart(meant: Mapping[str, object], what: str, option: str) -> None:
    """Raise OffsetError if two names mean the same: all that it holds would be read twice."""
    names: dict[object, str] = {}
    for name, one in meant.items():
        if (other := names.setdefault(one, name)) != name:
            raise OffsetError(f"{option} has {other} and {name}, which are one {what}; drop one")


def merge(offsets: Offsets, memories: BusExtents) -> dict[str, Position]:
    """Offsets for what is read now: a bus or a class that was added begins at the earliest message
    that it holds, one that is read no more is left out."""
    found = {}
    for server, memory in memories.items():
        before = offsets.get(server)
        if before is None:
            sequences = {name: held.floor for name, held in memory.classes.items()}
            found[server] = Position(memory.memory_id, sequences)
            continue
        sequences = {}
        for name, held in memory.classes.items():
            sequences[name] = before.classes.get(name, held.floor)
        found[server] = Position(before.bus, sequences)
    return found
