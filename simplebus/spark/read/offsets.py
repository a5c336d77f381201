"""Offsets of a query: the next sequence to read, by server and class.

Spark stores offsets in the checkpoint as JSON, in this form:

    {"10.0.0.1:8888": {"7": 120, "orders": 4, "": "5b0e…"},
     "query": {"id": "9c41…", "durable": "spark 9c41…", "began": {"10.0.0.1:8888": {…}}}}

A class is named as in the query's options. The empty name holds the memory id: a bus that lost its
data has a new memory id and starts again at sequence 0. `query` is the identity of the query; it
cannot collide with a server, since a server's name contains a port. This module does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

LATEST = -1
EARLIEST = -2
SEQUENCE_MAX = (1 << 63) - 1
MILLISECONDS_MAX = 253_402_300_799_999
"""End of the year 9999."""
_MEMORY = ""
_QUERY = "query"

NumbersByClass = Mapping[str, Mapping[str, int]]
"""Numbers by server and class."""

OffsetSpec = Literal["earliest", "latest"] | NumbersByClass
"""Start or end as a user specifies it: a word, or sequences by server and class.

A sequence may also be LATEST or EARLIEST.
"""


@dataclass(frozen=True, slots=True)
class TimestampSpec:
    """Start or end specified by time: the first message accepted at or after it."""

    option: str
    """Name of the option, for error messages."""
    milliseconds: int | NumbersByClass
    """Milliseconds since 1970: for all classes, or by server and class."""
    is_strict: bool
    """True if a time after the last message is an error; otherwise it means the end of the class.
    """

    def time_for(self, server: str, name: str) -> int:
        """Return the time for a class in milliseconds since 1970. Raises OffsetError if it is
        missing.
        """
        if isinstance(self.milliseconds, int):
            return self.milliseconds
        found = self.milliseconds.get(server, {}).get(name)
        if found is None:
            raise _missing_entry(self.option, server, name, "milliseconds since 1970")
        return found

    def check_names(self, servers: Iterable[str], names: Iterable[str]) -> None:
        """Raise OffsetError if a server or class is named that the query does not read."""
        if not isinstance(self.milliseconds, int):
            _check_names(
                self.milliseconds, {server: list(names) for server in servers}, self.option
            )

    def offset_past_end(self, server: str, name: str) -> int:
        """Return the offset for a time after the last message. Raises OffsetError if strict."""
        if not self.is_strict:
            return LATEST
        milliseconds = self.time_for(server, name)
        time = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=milliseconds)
        shown_time = time.isoformat(timespec="milliseconds")
        raise OffsetError(
            f"{self.option} is {milliseconds} ({shown_time}) for class {name} at {server}, which "
            "stores no message accepted since then; to start with the next message, set the option "
            "startingOffsetsByTimestampStrategy to latest"
        )


class OffsetError(ValueError):
    """Invalid offsets. The message names server, class, the value and the expected value."""


@dataclass(frozen=True, slots=True)
class ClassExtent:
    """Range of sequences that a class stores: `floor <= sequence < head`."""

    floor: int
    """Lowest stored sequence."""
    head: int
    """Sequence of the next message."""


@dataclass(frozen=True, slots=True)
class BusExtent:
    """Stored messages of one bus or journal."""

    memory_id: str
    """Identity of the bus's data; a bus that lost its data has a new one."""
    classes: Mapping[str, ClassExtent]


BusExtents = Mapping[str, BusExtent]
"""Extents by server."""


@dataclass(frozen=True, slots=True)
class ServerOffsets:
    """Offsets of one server."""

    memory_id: str = ""
    """Memory id of the sequences; empty if unknown."""
    classes: Mapping[str, int] = field(default_factory=dict)


Offsets = Mapping[str, ServerOffsets]
"""Offsets by server."""


@dataclass(frozen=True, slots=True)
class QueryIdentity:
    """Identity of a query, stored in its checkpoint beside the offsets."""

    id: str
    """Random id, generated at the query's first start.

    Spark requests an initial offset, which has an id, also if the checkpoint has one. An id that
    differs from the id in the checkpoint belongs to such an unused offset.
    """
    durable: str = ""
    """Name of the durable that retains the query's unprocessed messages; empty for none."""
    start_offsets: Offsets = field(default_factory=dict)
    """Start of the query's first batch; empty until that batch is planned.

    Spark does not store the initial offset before the first batch is committed.
    """


def dump_offsets(offsets: Offsets, query: QueryIdentity | None = None) -> dict[str, dict[str, Any]]:
    """Return offsets as JSON for Spark's checkpoint. Equal offsets give equal JSON text."""
    found: dict[str, dict[str, Any]] = {}
    for server in sorted(offsets):
        position = offsets[server]
        found[server] = {name: position.classes[name] for name in sorted(position.classes)}
        if position.memory_id:
            found[server][_MEMORY] = position.memory_id
    if query is not None:
        found[_QUERY] = {"id": query.id}
        if query.durable:
            found[_QUERY]["durable"] = query.durable
        if query.start_offsets:
            found[_QUERY]["began"] = dump_offsets(query.start_offsets)
    return found


def load_offsets(offsets_json: Mapping[str, Any]) -> dict[str, ServerOffsets]:
    """Parse the JSON of `dump_offsets`. Raises OffsetError."""
    found = {}
    for server, classes in offsets_json.items():
        if server == _QUERY:
            continue
        if not isinstance(classes, Mapping):
            raise OffsetError(
                f"the checkpoint has {classes!r} for {server}, expected sequences by class"
            )
        bus = classes.get(_MEMORY, "")
        sequences = {
            name: _sequence(value, server, name) for name, value in classes.items() if name
        }
        found[server] = ServerOffsets(bus if isinstance(bus, str) else "", sequences)
    return found


def load_query(offsets_json: Mapping[str, Any]) -> QueryIdentity | None:
    """Return the query's identity from the JSON of `dump_offsets`; None if absent. Raises
    OffsetError.
    """
    query_json = offsets_json.get(_QUERY)
    if query_json is None:
        return None
    if isinstance(query_json, dict):
        query_id, durable, start_offsets = (
            query_json.get("id"),
            query_json.get("durable", ""),
            query_json.get("began", {}),
        )
        if (
            isinstance(query_id, str)
            and isinstance(durable, str)
            and isinstance(start_offsets, dict)
        ):
            return QueryIdentity(query_id, durable, load_offsets(start_offsets))
    raise OffsetError(
        f"the checkpoint has the query {query_json!r}, expected an id, a durable and start offsets"
    )


def parse_offsets(
    text: str,
    *,
    normalize: Callable[[str, str], tuple[str, str]],
    earliest: bool = True,
    latest: bool = True,
) -> OffsetSpec:
    """Parse a user's `earliest`, `latest` or JSON by server and class.

    Args:
        text: The option's value. In JSON, -1 is latest and -2 is earliest.
        normalize: Returns the normalized names of a server and a class.
        earliest: False if `earliest` is not allowed, as for an end.
        latest: False if `latest` is not allowed, as for the start of a batch.

    Raises:
        OffsetError: The text is invalid.
    """
    word = text.strip()
    if word.lower() == "latest":
        if latest:
            return "latest"
        raise OffsetError(
            'expected "earliest" or JSON; "latest" is not a possible start of a batch'
        )
    if word.lower() == "earliest":
        if earliest:
            return "earliest"
        raise OffsetError('expected "latest" or JSON; "earliest" is not a possible end')
    lowest = EARLIEST if earliest else LATEST
    return _by_class(
        word,
        normalize,
        lambda value, server, name: _sequence(value, server, name, lowest=lowest),
        expected='expected earliest, latest or JSON such as {"127.0.0.1:8888": {"7": 120}}',
    )


def parse_times(text: str, *, normalize: Callable[[str, str], tuple[str, str]]) -> NumbersByClass:
    """Parse a user's JSON of milliseconds since 1970, by server and class.

    Raises OffsetError.
    """
    example = 'expected JSON such as {"127.0.0.1:8888": {"7": 1763740800000}}'
    return _by_class(text, normalize, _milliseconds, expected=example)


def _by_class(
    text: str,
    normalize: Callable[[str, str], tuple[str, str]],
    number: Callable[[Any, str, str], int],
    *,
    expected: str,
) -> dict[str, dict[str, int]]:
    """Parse JSON of numbers by server and class."""
    try:
        offsets_json = json.loads(text)
    except ValueError as error:
        raise OffsetError(f"not valid JSON ({error}); {expected}") from None
    if not isinstance(offsets_json, dict) or not offsets_json:
        raise OffsetError(f"the JSON has no server; {expected}")
    found: dict[str, dict[str, int]] = {}
    for server, classes in offsets_json.items():
        if not isinstance(classes, dict):
            raise OffsetError(f"the JSON has {classes!r} for {server}; {expected}")
        for name, value in classes.items():
            if name:
                server_name, class_ = normalize(server, name)
                found.setdefault(server_name, {})[class_] = number(value, server, name)
    return found


def _milliseconds(value: Any, server: str, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MILLISECONDS_MAX:
        raise OffsetError(
            f"class {name} at {server} has the time {value!r}, expected milliseconds since 1970, "
            f"a whole number from 0 to {MILLISECONDS_MAX}"
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
            f"class {name} at {server} has the offset {value!r}, expected a sequence >= 0"
            f"{special[lowest]}"
        )
    return value


def resolve_offsets(
    spec: OffsetSpec, extents: BusExtents, *, option: str
) -> dict[str, ServerOffsets]:
    """Resolve an OffsetSpec to sequences. Sequences below a floor stay; the planner reports the
    loss.

    Args:
        wanted: The user's offsets.
        extents: The classes that the query reads, with their stored messages.
        option: Name of the option, for error messages.

    Raises:
        OffsetError: An offset is beyond the head, missing, or for a server or class that is not
            read.
    """
    if not isinstance(spec, str):
        _check_names(
            spec, {server: list(extent.classes) for server, extent in extents.items()}, option
        )
    found = {}
    for server, extent in extents.items():
        sequences = {}
        for name, class_extent in extent.classes.items():
            sequence = spec if isinstance(spec, str) else spec.get(server, {}).get(name)
            if sequence is None:
                raise _missing_entry(
                    option, server, name, "a sequence, -1 for latest or -2 for earliest"
                )
            if sequence in ("latest", LATEST):
                sequence = class_extent.head
            elif sequence in ("earliest", EARLIEST):
                sequence = class_extent.floor
            assert isinstance(sequence, int)
            if sequence > class_extent.head:
                raise OffsetError(
                    f"{option} is {sequence} for class {name} at {server}, beyond its end: the "
                    f"next message there will be {class_extent.head}"
                )
            sequences[name] = sequence
        found[server] = ServerOffsets(extent.memory_id, sequences)
    return found


def _missing_entry(option: str, server: str, name: str, expected: str) -> OffsetError:
    return OffsetError(f"{option} has no entry for class {name} at {server}; expected {expected}")


def _check_names(spec: NumbersByClass, read: Mapping[str, list[str]], option: str) -> None:
    """Raise OffsetError for a server or class that is not read."""
    for server, classes in spec.items():
        if server not in read:
            place = next(iter(read))
            example = json.dumps({place: {read[place][0]: next(iter(classes.values()))}})
            raise OffsetError(
                f"{option} names the server {server}, which is not read; expected one of "
                f"{', '.join(read)} and its classes, as in {example}"
            )
        for name in classes:
            if name not in read[server]:
                raise OffsetError(
                    f"{option} names class {name} at {server}, which is not subscribed to; "
                    f"subscribe is {', '.join(read[server])}"
                )


def check_distinct(targets: Mapping[str, object], kind: str, option: str) -> None:
    """Raise OffsetError if two names have the same target: its messages would be read twice."""
    names: dict[object, str] = {}
    for name, target in targets.items():
        if (first_name := names.setdefault(target, name)) != name:
            raise OffsetError(
                f"{option} has {first_name} and {name}, which are the same {kind}; drop one of them"
            )


def merge_offsets(offsets: Offsets, extents: BusExtents) -> dict[str, ServerOffsets]:
    """Adapt offsets to the servers and classes that are read now.

    Added ones start at their earliest stored message; those not read any more are dropped.
    """
    found = {}
    for server, extent in extents.items():
        before = offsets.get(server)
        if before is None:
            sequences = {name: class_extent.floor for name, class_extent in extent.classes.items()}
            found[server] = ServerOffsets(extent.memory_id, sequences)
            continue
        sequences = {}
        for name, class_extent in extent.classes.items():
            sequences[name] = before.classes.get(name, class_extent.floor)
        found[server] = ServerOffsets(before.memory_id, sequences)
    return found
