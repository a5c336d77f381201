"""What fails, why and since when: dead letters, by class, reason and subscription.

Rule 1: messages in, a few rows out, all of it by Spark's own functions. What is no dead letter
among the messages is passed over.
Rule 2: how a row reads is worked out here as well, by pure functions of what was collected.

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
"""So much of a payload, and of a key, is shown."""


def classes(subscribe: str) -> str:
    """The classes in which the dead letters of these lie, both with commas between them."""
    names = [name.strip() for name in subscribe.split(",")]
    return ",".join(name if is_dead_letter_class(name) or not name else dead_letter_class_name(name) for name in names)


def messages(spark: SparkSession, *, servers: str, subscribe: str, **options: object) -> DataFrame:
    """The dead letters of these classes (with commas: names, or ids of those that have no name)
    that lie on buses now.

    A class that has none, or is not there, is one without dead letters. `options` are the source's.
    """
    reader = spark.read.format("simplebus").option("servers", servers)
    reader = reader.option("subscribe", classes(subscribe)).option("includeHeaders", "true")
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()


def archived(spark: SparkSession, path: str, subscribe: str = "") -> DataFrame:
    """The dead letters of these classes, or of all, in an archive."""
    from simplebus.spark.jobs.archive import read

    frame = read(spark, path)
    chosen = frame["class"].startswith(CLASS_PREFIX)
    if subscribe:
        chosen = frame["class"].isin(classes(subscribe).split(","))
    return frame.where(chosen)


def dead_letters(frame: DataFrame) -> DataFrame:
    """What fails: a row for each class, reason and subscription, those with the most first.

    The frame has columns as the source has them with `includeHeaders`, or as an archive has them.

        class, reason, subscription: string      as the dead letters say
        messages: bigint                         dead letters
        first, last: timestamp                   when they were given up
        attempts: int                            the most that one was sent
        example: struct                          the last one: server, sequence, session, channel,
                                                 and the first bytes of key and payload as text
    """
    from pyspark.sql import functions as sql

    since = sql.timestamp_seconds(_header(SINCE_HEADER).try_cast("decimal(20,6)"))
    letters = frame.select(
        _header(CLASS_HEADER).alias("class"),
        _header(REASON_HEADER).alias("reason"),
        _header(SUBSCRIPTION_HEADER).alias("subscription"),
        _header(ATTEMPTS_HEADER).try_cast("int").alias("attempts"),
        sql.coalesce(since, sql.col("timestamp")).alias("since"),
        sql.struct(
            sql.col("server"),
            _header(SEQUENCE_HEADER).try_cast("bigint").alias("sequence"),
            _header(SESSION_HEADER).alias("session"),
            sql.col("channel"),
            _text("key"),
            _text("value").alias("text"),
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


def _header(name: str) -> Column:
    """The value of a message's last header of this name; null if it has none."""
    from pyspark.sql import functions as sql

    named = sql.filter("headers", lambda header: header["key"] == name)
    return sql.try_element_at(named, sql.lit(-1))["value"].cast("string")


def _text(column: str) -> Column:
    """The first bytes of a column as text, whatever they are."""
    from pyspark.sql import functions as sql

    front = sql.substring(sql.col(column), 1, _TEXT_BYTES)
    return sql.make_valid_utf8(front.cast("string")).alias(column)


# How a row reads ---------------------------------------------------------------------------------

HEADINGS = ("class", "reason", "subscription", "messages", "since", "last", "attempts", "example")


def as_object(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as JSON has it: times in ISO 8601, in UTC."""
    times = {name: row[name] and _in_utc(row[name]).isoformat() for name in ("first", "last")}
    return {**row, **times}


def as_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as a person reads it, in the order of HEADINGS."""
    example = row["example"]
    parts = [
        _known(example["sequence"]),
        f"on {example['channel']}" if example["channel"] else "",
        f"key {_printable(example['key'])}" if example["key"] else "",
        _printable(example["text"] or ""),
    ]
    return (
        row["class"],
        row["reason"],
        row["subscription"] or "",
        f"{row['messages']:,}",
        _moment(row["first"]),
        _moment(row["last"]),
        _known(row["attempts"]),
        " ".join(part for part in parts if part),
    )


def _known(number: int | None) -> str:
    return "" if number is None else str(number)


def _moment(at: datetime | None) -> str:
    return "" if at is None else _in_utc(at).isoformat(sep=" ", timespec="seconds")


def _in_utc(at: datetime) -> datetime:
    """Spark hands out times of this machine's time zone, which do not say so."""
    return at.astimezone(UTC)


def _printable(text: str) -> str:
    """Text that does nothing to a terminal."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)
