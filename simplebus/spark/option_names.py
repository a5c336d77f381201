"""Names of the options of source and sink, declared once for Python and Java.

The jar of the connector contains this table as JSON, see `encode_table`. The page
protocol/spark.md describes the options.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass
from typing import Literal

OptionUse = Literal["batch", "stream", "sink"]
"""Use of the data source: reading a batch, reading a stream, or writing either."""

_SOURCE: tuple[OptionUse, ...] = ("batch", "stream")
_ALL: tuple[OptionUse, ...] = ("batch", "stream", "sink")


@dataclass(frozen=True, slots=True)
class OptionName:
    """Name of an option."""

    name: str
    expected: str
    """Description of its value, for error messages."""
    uses: tuple[OptionUse, ...]


@dataclass(frozen=True, slots=True)
class KafkaOption:
    """Option of Spark's Kafka source, or of another source, that does not exist here."""

    name: str
    """A final `*` stands for any text."""
    hint: str


OPTIONS = (
    OptionName("servers", "simplebus host:port; the source takes several, with commas", _ALL),
    # Spark passes the argument of load(), save() and start() as `path`.
    OptionName(
        "path",
        "data directories of buses, with commas; or servers, as the argument of load() or save()",
        _ALL,
    ),
    OptionName("subscribe", "classes by name or id, with commas", _SOURCE),
    OptionName("subscribePattern", "a regular expression", _SOURCE),
    OptionName("channels", "patterns of channels, with commas", _SOURCE),
    OptionName("startingOffsets", "earliest, latest or JSON", _SOURCE),
    OptionName("startingTimestamp", "milliseconds since 1970", _SOURCE),
    OptionName("startingOffsetsByTimestamp", "JSON", _SOURCE),
    OptionName("startingOffsetsByTimestampStrategy", "error or latest", _SOURCE),
    OptionName("failOnDataLoss", "true or false", _SOURCE),
    OptionName("minPartitions", "a number", _SOURCE),
    OptionName("maxRecordsPerPartition", "a number", _SOURCE),
    OptionName("includeHeaders", "true or false", _SOURCE),
    OptionName("includeMemory", "true or false", _SOURCE),
    OptionName("timeout", "seconds", _ALL),
    OptionName("endingOffsets", "latest or JSON", ("batch",)),
    OptionName("endingTimestamp", "milliseconds since 1970", ("batch",)),
    OptionName("endingOffsetsByTimestamp", "JSON", ("batch",)),
    OptionName("filterPushdown", "true or false", ("batch",)),
    OptionName("maxOffsetsPerTrigger", "a number", ("stream",)),
    OptionName("minOffsetsPerTrigger", "a number", ("stream",)),
    OptionName("maxTriggerDelay", "a span of time such as 15m", ("stream",)),
    OptionName("durable", "a name, or the word none", ("stream",)),
    OptionName("durableIdle", "a span of time such as 7d", ("stream",)),
    OptionName("class", "class by name or id", ("sink",)),
    OptionName("channel", "a channel", ("sink",)),
    OptionName("valueFormat", "bytes or json", ("sink",)),
    OptionName("publisher", "a name", ("sink",)),
    OptionName("checkpointLocation", "Spark's own", ("sink",)),
)

_CREDENTIALS_HINT = (
    "credentials and certificates are taken from environment variables such as SIMPLEBUS_USER and "
    "SIMPLEBUS_TLS_CA"
)
KAFKA_OPTIONS = (
    KafkaOption("kafka.bootstrap.servers", "use servers, with host:port of each bus"),
    KafkaOption("assign", "use subscribe, since a class has no partitions"),
    KafkaOption("schema", "parse the values by simplebus.spark.parse_json, or by from_json"),
    KafkaOption("topic", "use subscribe in the source, and class in the sink"),
    KafkaOption("kafka.group.id", "use durable in a stream; a batch needs none"),
    KafkaOption("groupIdPrefix", "use durable in a stream; a batch needs none"),
    KafkaOption("kafka.security.*", _CREDENTIALS_HINT),
    KafkaOption("kafka.sasl.*", _CREDENTIALS_HINT),
    KafkaOption("kafka.ssl.*", _CREDENTIALS_HINT),
    KafkaOption("kafkaConsumer.*", "use timeout, in seconds"),
    KafkaOption("fetchOffset.*", "use timeout, in seconds"),
    KafkaOption("kafka.*", "settings of a Kafka client do not apply to simplebus"),
)
"""The first entry that matches a name applies."""


def expected_values(use: OptionUse) -> dict[str, str]:
    """Return the descriptions of the values, by the names of the options of this use."""
    return {option.name: option.expected for option in OPTIONS if use in option.uses}


def unknown_option_message(name: str, use: OptionUse) -> str:
    """Return the error message for an option that this use does not have."""
    expected_names = {option.lower(): option for option in expected_values(use)}
    return f"there is no option {_spelling(name)} here; " + (
        _other_use_hint(name.lower())
        or _kafka_hint(name.lower())
        or _similar_hint(name.lower(), expected_names)
        or f"expected {', '.join(expected_names.values())}"
    )


def _spelling(name: str) -> str:
    """Return the documented spelling of a known name. Spark passes some names in lower case."""
    names = (option.name for option in (*OPTIONS, *KAFKA_OPTIONS))
    return next((spelling for spelling in names if spelling.lower() == name.lower()), name)


def _other_use_hint(name: str) -> str | None:
    for option in OPTIONS:
        if option.name.lower() == name:
            owner = "the source" if option.uses == _SOURCE else f"a {option.uses[0]}"
            return f"it is an option of {owner}"
    return None


def _kafka_hint(name: str) -> str | None:
    for option in KAFKA_OPTIONS:
        pattern = option.name.lower()
        if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
            return option.hint
    return None


def _similar_hint(name: str, expected_names: dict[str, str]) -> str | None:
    similar = difflib.get_close_matches(name, expected_names, n=1, cutoff=0.5)
    return f"did you mean {expected_names[similar[0]]}?" if similar else None


def encode_table() -> str:
    """Return the table as JSON text, for the connector in Java."""
    table = {
        "options": [asdict(option) for option in OPTIONS],
        "kafka": [asdict(option) for option in KAFKA_OPTIONS],
    }
    return json.dumps(table, indent=1) + "\n"
