"""Dead letters counted by class, reason and subscription.

Spark aggregates; plain functions format the collected rows. Messages that are not dead letters are
ignored.

>>> frame = messages(spark, servers="127.0.0.1:8888", subscribe="orders,7")
>>> dead_letters(frame).show()
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from simplebus.core.dead_letters import (
    ATTEMPTS_HEADER,
    CLASS_HEADER,
    CLASS_PREFIX,
    REASON_HEADER,
    SEQUENCE_HEADER,
    SESSION_HEADER,
    SINCE_HEADER,
    SUBSCRIPTION_HEADER,
    dead_letter_class_name,
    is_dead_letter_class,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_TEXT_BYTES = 80
"""Number of bytes of payload and key in an example."""


def dead_letter_classes(subscribe: str) -> str:
    """Return the dead-letter classes of comma-separated classes."""
    names = [name.strip() for name in subscribe.split(",")]
    return ",".join(
        name if is_dead_letter_class(name) or not name else dead_letter_class_name(name)
        for name in names
    )


def messages(spark: SparkSession, *, servers: str, subscribe: str, **options: object) -> DataFrame:
    """Read the dead letters that are stored on buses now.

    A class without dead letters yields no rows.

    Args:
        spark: The session.
        servers: Buses as host:port, comma-separated.
        subscribe: Classes, comma-separated: names, or ids of classes without a name.
        options: Further options of the source.
    """
    reader = spark.read.format("simplebus").option("servers", servers)
    reader = reader.option("subscribe", dead_letter_classes(subscribe)).option(
        "includeHeaders", "true"
    )
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()


def read_archived(spark: SparkSession, path: str, subscribe: str = "") -> DataFrame:
    """Read the dead letters in an archive.

    Args:
        spark: The session.
        path: Path of the archive.
        subscribe: Classes, comma-separated; empty for all.
    """
    from simplebus.spark.jobs.archive import read

    frame = read(spark, path)
    chosen = frame["class"].startswith(CLASS_PREFIX)
    if subscribe:
        chosen = frame["class"].isin(dead_letter_classes(subscribe).split(","))
    return frame.where(chosen)


def dead_letters(frame: DataFrame) -> DataFrame:
    """Count dead letters by class, reason and subscription, largest counts first.

    Args:
        frame: Messages with the columns of the source with `includeHeaders`, or of an archive.

    Returns:
        A frame with these columns:

            class, reason, subscription: string      from the dead letter's headers
            messages: bigint                         number of dead letters
            first, last: timestamp                   first and last time of dead-lettering
            attempts: int                            maximum number of deliveries
            example: struct                          the last dead letter: server, sequence,
                session,
                                                     channel, and the first bytes of key and payload
    """
    from pyspark.sql import functions as sql

    since = sql.timestamp_seconds(_header_value(SINCE_HEADER).try_cast("decimal(20,6)"))
    letters = frame.select(
        _header_value(CLASS_HEADER).alias("class"),
        _header_value(REASON_HEADER).alias("reason"),
        _header_value(SUBSCRIPTION_HEADER).alias("subscription"),
        _header_value(ATTEMPTS_HEADER).try_cast("int").alias("attempts"),
        sql.coalesce(since, sql.col("timestamp")).alias("since"),
        sql.struct(
            sql.col("server"),
            _header_value(SEQUENCE_HEADER).try_cast("bigint").alias("sequence"),
            _header_value(SESSION_HEADER).alias("session"),
            sql.col("channel"),
            _text_prefix("key"),
            _text_prefix("value").alias("text"),
        ).alias("example"),
    ).where(sql.col("reason").isNotNull())
    return (
        letters.groupBy("class", "reason", "subscription")
        .agg(
            sql.count("*").alias("messages"),
            sql.min("since").alias("first"),
            sql.max("since").alias("last"),
            sql.max("attempts").alias("attempts"),
            sql.max_by("example", "since").alias("example"),
        )
        .orderBy(sql.desc("messages"), "class", "reason", "subscription")
    )


def _header_value(name: str) -> Column:
    """Return a column with the last header of this name; null if absent."""
    from pyspark.sql import functions as sql

    named = sql.filter("headers", lambda header: header["key"] == name)
    return sql.try_element_at(named, sql.lit(-1))["value"].cast("string")


def _text_prefix(column: str) -> Column:
    """Return the first bytes of a column as valid UTF-8."""
    from pyspark.sql import functions as sql

    front = sql.substring(sql.col(column), 1, _TEXT_BYTES)
    return sql.make_valid_utf8(front.cast("string")).alias(column)


# Formatting of rows ------------------------------------------------------------------------------

HEADINGS = ("class", "reason", "subscription", "messages", "since", "last", "attempts", "example")


def to_json_object(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with times in ISO 8601 UTC, for JSON."""
    times = {name: row[name] and _to_utc(row[name]).isoformat() for name in ("first", "last")}
    return {**row, **times}


def to_table_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row as table cells, in the order of HEADINGS."""
    example = row["example"]
    parts = [
        _number_text(example["sequence"]),
        f"on {example['channel']}" if example["channel"] else "",
        f"key {_replace_unprintable(example['key'])}" if example["key"] else "",
        _replace_unprintable(example["text"] or ""),
    ]
    return (
        row["class"],
        row["reason"],
        row["subscription"] or "",
        f"{row['messages']:,}",
        _time_text(row["first"]),
        _time_text(row["last"]),
        _number_text(row["attempts"]),
        " ".join(part for part in parts if part),
    )


def _number_text(number: int | None) -> str:
    return "" if number is None else str(number)


def _time_text(time: datetime | None) -> str:
    return "" if time is None else _to_utc(time).isoformat(sep=" ", timespec="seconds")


def _to_utc(time: datetime) -> datetime:
    """Convert to UTC: Spark returns naive times in this machine's time zone."""
    return time.astimezone(UTC)


def _replace_unprintable(text: str) -> str:
    """Replace characters that could control a terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
