"""What a Spark job may be told about a bus, read and checked.

Rule 1: nothing of Spark and no I/O here: texts in, values out, ValueError for what cannot be.
Rule 2: names count without regard to case, as everywhere in Spark; an unknown one is an error that
names the nearest real one: an option with a typing error that is passed over is worse than none.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simplebus.client.addresses import Address
from simplebus.core.channel.pattern import check_pattern
from simplebus.core.limits import CLASS_ID_MAX, IDLE_SECONDS_MAX, NAME_CHARACTERS_MAX
from simplebus.spark.read.offsets import (
    MILLISECONDS_MAX,
    ByClass,
    Times,
    Wanted,
    parse,
    parse_times,
)

TIMEOUT_SECONDS = 30.0
# As long as Kafka keeps the offsets of a group that nobody is in. What is kept for a query that was
# given up without a word fills its classes no longer than that.
IDLE_SECONDS = 7 * 86_400.0
# As long as a Kafka source waits.
DELAY_SECONDS = 15 * 60.0
# Small enough that a partition that fails costs little to repeat, and that one class keeps several
# cores busy; large enough that its beginning and end do not show.
PARTITION_MESSAGES = 500_000


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How a bus is read."""

    servers: tuple[str, ...]
    """Buses as `host:port`; or journals, each as the absolute path of a data directory."""
    subscribe: tuple[str, ...]
    """Classes, each an id in digits or a name."""
    channels: tuple[str, ...] = ()
    """Patterns; a message is read if one of them matches its channel. None: every message."""
    starting: Wanted | Times = "earliest"
    ending: Wanted | Times = "latest"
    fail_on_data_loss: bool = True
    max_offsets: int | None = None
    """Messages per trigger."""
    min_offsets: int | None = None
    """So many messages are waited for, but no longer than `max_delay`."""
    max_delay: float = DELAY_SECONDS
    min_partitions: int | None = None
    partition_messages: int = PARTITION_MESSAGES
    include_headers: bool = False
    include_memory: bool = False
    filter_pushdown: bool = False
    durable: str | None = None
    """The name under which the buses keep what the query has not processed; None for one of its
    own, empty for none: then they keep it only while it runs."""
    durable_idle: float = IDLE_SECONDS
    """Seconds for which they keep it while the query lies down."""
    timeout: float = TIMEOUT_SECONDS
    """Seconds for which a bus that does not answer is tried."""

    @property
    def is_of_journals(self) -> bool:
        """Whether files are read, and no bus is asked."""
        return is_path(self.servers[0])

    @property
    def places(self) -> str:
        """Which option says what is read."""
        return "path" if self.is_of_journals else "servers"


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """How a bus is written to."""

    server: str
    class_: str = ""
    """Of rows that do not say: an id in digits or a name."""
    channel: str = ""
    """Of rows that do not say."""
    timeout: float = TIMEOUT_SECONDS


def source_options(options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Read them. Raises ValueError, with the name, what came and what was expected."""
    given = _Given(options, {**_SOURCE, **(_STREAMING if streaming else _BATCH)})
    servers = _places(given)
    found = SourceOptions(
        servers=servers,
        subscribe=given.required("subscribe", _classes),
        channels=given.get("channels", (), _patterns),
        starting=_beginning(given, "latest" if streaming else "earliest"),
        ending=_end(given),
        fail_on_data_loss=given.get("failOnDataLoss", True, _truth),
        max_offsets=given.get("maxOffsetsPerTrigger", None, _count),
        min_offsets=given.get("minOffsetsPerTrigger", None, _count),
        max_delay=given.get("maxTriggerDelay", DELAY_SECONDS, _span),
        min_partitions=given.get("minPartitions", None, _count),
        partition_messages=given.get("maxRecordsPerPartition", PARTITION_MESSAGES, _count),
        include_headers=given.get("includeHeaders", False, _truth),
        include_memory=given.get("includeMemory", False, _truth),
        filter_pushdown=given.get("filterPushdown", False, _truth),
        durable=given.get("durable", None, _name),
        durable_idle=given.get("durableIdle", IDLE_SECONDS, _idle),
        timeout=given.get("timeout", TIMEOUT_SECONDS, _seconds),
    )
    least, most = found.min_offsets, found.max_offsets
    if least is not None and most is not None and least > most:
        raise ValueError(
            f"minOffsetsPerTrigger is {least} and maxOffsetsPerTrigger {most}: a batch cannot "
            "have both"
        )
    return found


def _places(given: _Given) -> tuple[str, ...]:
    """What is read. A path that is none is a bus: what load() is given."""
    found: tuple[str, ...]
    if not given.has("path"):
        found = given.required("servers", _servers)
        return found
    if given.has("servers"):
        raise ValueError(
            "there are servers and a path; servers are buses that are asked, and path is the data "
            "directory of a bus, whose files are read: give one of them"
        )
    found = given.required("path", _paths_or_servers)
    if is_path(found[0]):
        for name in _OF_BUSES:
            if given.has(name):
                raise ValueError(f"the option {name} is of buses, and {found[0]} is a journal")
    return found


def _beginning(given: _Given, otherwise: Wanted) -> Wanted | Times:
    """The most general of what was said counts, as with a Kafka source."""
    offsets = given.get("startingOffsets", otherwise, _starting)
    by_class = given.get("startingOffsetsByTimestamp", None, _times)
    common = given.get("startingTimestamp", None, _milliseconds)
    is_strict = given.get("startingOffsetsByTimestampStrategy", True, _strategy)
    if common is not None:
        return Times("startingTimestamp", common, is_strict)
    if by_class is not None:
        return Times("startingOffsetsByTimestamp", by_class, is_strict)
    found: Wanted = offsets
    return found


def _end(given: _Given) -> Wanted | Times:
    """The same for the end. A time behind the last message is the end of what there is."""
    offsets = given.get("endingOffsets", "latest", _ending)
    by_class = given.get("endingOffsetsByTimestamp", None, _times)
    common = given.get("endingTimestamp", None, _milliseconds)
    if common is not None:
        return Times("endingTimestamp", common, is_strict=False)
    if by_class is not None:
        return Times("endingOffsetsByTimestamp", by_class, is_strict=False)
    found: Wanted = offsets
    return found


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Read them. Raises ValueError, with the name, what came and what was expected."""
    given = _Given(options, _SINK)
    servers = given.required(
        "path" if given.has("path") and not given.has("servers") else "servers", _servers
    )
    if len(servers) > 1:
        raise ValueError(f"servers of a sink is one bus, got {', '.join(servers)}")
    classes = given.get("class", ("",), _classes)
    if len(classes) > 1:
        raise ValueError(f"class is one class, got {', '.join(classes)}")
    return SinkOptions(
        server=servers[0],
        class_=classes[0],
        channel=given.get("channel", "", str.strip),
        timeout=given.get("timeout", TIMEOUT_SECONDS, _seconds),
    )


# Where several options say the same, the first is the one to use. `path` is what `load` is given;
# Spark itself adds some to every stream.
_SOURCE = {
    "servers": "simplebus host:port, several with commas",
    "path": "the data directory of a bus, several with commas; or, as load() has it, servers",
    "subscribe": "classes by name or id, with commas",
    "channels": "patterns of channels, with commas",
    "startingOffsets": "earliest, latest or JSON",
    "startingTimestamp": "milliseconds since 1970",
    "startingOffsetsByTimestamp": "JSON",
    "startingOffsetsByTimestampStrategy": "error or latest",
    "failOnDataLoss": "true or false",
    "minPartitions": "a number",
    "maxRecordsPerPartition": "a number",
    "includeHeaders": "true or false",
    "includeMemory": "true or false",
    "timeout": "seconds",
}
_BATCH = {
    "endingOffsets": "latest or JSON",
    "endingTimestamp": "milliseconds since 1970",
    "endingOffsetsByTimestamp": "JSON",
    "filterPushdown": "true or false",
}
_STREAMING = {
    "maxOffsetsPerTrigger": "a number",
    "minOffsetsPerTrigger": "a number",
    "maxTriggerDelay": "a span of time such as 15m",
    "durable": "a name, or none",
    "durableIdle": "a span of time such as 7d",
}
# A journal cannot be told what to keep, and there is nobody to wait for.
_OF_BUSES = ("durable", "durableIdle", "timeout")
_SINK = {
    "servers": "simplebus host:port",
    "path": "the same as servers: what save() or start() is given",
    "class": "class by name or id",
    "channel": "a channel",
    "timeout": "seconds",
    "checkpointLocation": "Spark's own",
}


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN = re.compile(rf"(?P<number>\d{{1,9}}(\.\d+)?)\s*(?P<unit>{'|'.join(_UNITS)})", re.ASCII)


class _Given:
    """Options as they were given."""

    def __init__(self, options: Mapping[str, str], known: Mapping[str, str]) -> None:
        self._values = {name.lower(): value for name, value in options.items()}
        self._known = known
        lower = {name.lower(): name for name in known}
        for name in options:
            if name.lower() not in lower:
                raise ValueError(_unknown(name, lower))

    def has(self, name: str) -> bool:
        return name.lower() in self._values

    def required(self, name: str, read: Callable[[str], Any]) -> Any:
        if not self._values.get(name.lower(), "").strip():
            raise ValueError(f"the option {name} is missing; expected {self._known[name]}")
        return self.get(name, None, read)

    def get(self, name: str, default: Any, read: Callable[[str], Any]) -> Any:
        text = self._values.get(name.lower())
        if text is None:
            return default
        try:
            return read(text)
        except ValueError as error:
            raise ValueError(f"the option {name} is {text!r}: {error}") from None


def _unknown(name: str, known: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {known[near[0]]}?" if near else f"there are {', '.join(known.values())}"
    return f"there is no option {name} here; {hint}"


def _listed(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _servers(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(server_name(part) for part in _listed(text)))


def server_name(text: str) -> str:
    """A bus as offsets call it: `host:port`. Raises ValueError."""
    return str(Address.parse(text)).removeprefix("simplebus://")


def is_path(server: str) -> bool:
    """Whether what offsets call it is a journal's path, and no bus."""
    return server.startswith("/")


def _paths_or_servers(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(place_name(part) for part in _listed(text)))
    if len({is_path(one) for one in found}) > 1:
        raise ValueError("expected buses, or data directories of buses; these are both")
    return found


def place_name(text: str) -> str:
    """A bus or a journal as offsets call it. Raises ValueError."""
    path = text.removeprefix("file://") if text.startswith("file:///") else text
    if is_path(path):
        return "/" + posixpath.normpath(path).lstrip("/")
    if "/" in path and not path.startswith("simplebus://"):
        raise ValueError(
            f"expected the absolute path of a data directory, such as /var/lib/simplebus, or a bus "
            f"as host:port; got {text!r}"
        )
    return server_name(path)


def _classes(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(map(class_name, _listed(text))))
    if not found:
        raise ValueError("expected classes by name or id, with commas")
    return found


def class_id(text: str) -> int | None:
    """The id that a class is called by; None for a name, of whatever other digits it is made."""
    return int(text) if text.isdecimal() and text.isascii() else None


def class_name(text: str) -> str:
    """A class as offsets call it: its id in digits, or its name. Raises ValueError."""
    if (number := class_id(text)) is not None:
        if number > CLASS_ID_MAX:
            raise ValueError(f"a class id is from 0 to {CLASS_ID_MAX}, got {text}")
        return str(number)
    if len(text) > NAME_CHARACTERS_MAX:
        raise ValueError(f"a class name has at most {NAME_CHARACTERS_MAX} characters")
    return text


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(check_pattern(part) for part in _listed(text))


def _starting(text: str) -> Wanted:
    return parse(text, known=_offset_names)


def _ending(text: str) -> Wanted:
    return parse(text, known=_offset_names, earliest=False)


def _times(text: str) -> ByClass:
    return parse_times(text, known=_offset_names)


def _milliseconds(text: str) -> int:
    word = text.strip()
    if not (word.isdecimal() and word.isascii() and int(word) <= MILLISECONDS_MAX):
        raise ValueError(
            f"expected milliseconds since 1970, a whole number from 0 to {MILLISECONDS_MAX}"
        )
    return int(word)


def _strategy(text: str) -> bool:
    found = {"error": True, "latest": False}.get(text.strip().lower())
    if found is None:
        raise ValueError("expected error or latest")
    return found


def is_true(text: str) -> bool:
    """Whether an option that is true or false is true."""
    return text.strip().lower() == "true"


def _truth(text: str) -> bool:
    found = {"true": True, "false": False}.get(text.strip().lower())
    if found is None:
        raise ValueError("expected true or false")
    return found


def _count(text: str) -> int:
    if not (text.strip().isdecimal() and text.isascii() and int(text) > 0):
        raise ValueError("expected a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < float("inf"):
        raise ValueError("expected seconds above 0")
    return found


def _span(text: str) -> float:
    """Seconds, of a number and its unit."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None or not float(found["number"]):
        raise ValueError(f"expected a number above 0 and its unit ({', '.join(_UNITS)}), as in 15m")
    return float(found["number"]) * _UNITS[found["unit"]]


def _idle(text: str) -> float:
    seconds = _span(text)
    if seconds > IDLE_SECONDS_MAX:
        raise ValueError(f"expected at most {IDLE_SECONDS_MAX / 86_400:g}d")
    return seconds


def _name(text: str) -> str:
    if not 0 < len(text.strip()) <= NAME_CHARACTERS_MAX:
        raise ValueError(f"expected a name of 1 to {NAME_CHARACTERS_MAX} characters, or none")
    return "" if text.strip().lower() == "none" else text.strip()


def _offset_names(server: str, class_: str) -> tuple[str, str]:
    """A server and a class that a user wrote in JSON, as offsets have them."""
    return place_name(server), class_name(class_)
