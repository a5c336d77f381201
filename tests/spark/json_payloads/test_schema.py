"""Schemas for Spark's `from_json`, built from Python types, JSON schemas and DDL."""

from __future__ import annotations

import json
from datetime import date, datetime
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import pytest

from simplebus.spark import spark_schema


class Color(Enum):
    RED = 1


class Item(msgspec.Struct):
    name: str
    price: float


class Order(msgspec.Struct):
    id: int
    items: list[Item]
    paid: bool = False
    at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    day: date | None = None
    notes: dict[str, list[int]] = {}
    color: Color = Color.RED
    size: Literal["s", "m"] = "s"
    data: bytes = b""
    either: int | str = 0
    anything: Any = None
    pair: tuple[int, int] = (0, 0)
    mixed: tuple[int, str] = (0, "")


class Tree(msgspec.Struct):
    children: list[Tree]


def test_types_of_msgspec() -> None:
    assert spark_schema(Order) == (
        "struct<`id`: bigint, `items`: array<struct<`name`: string, `price`: double>>, "
        "`paid`: boolean, `at`: timestamp, `day`: date, `notes`: map<string, array<bigint>>, "
        "`color`: bigint, `size`: string, `data`: binary, `either`: string, `anything`: string, "
        "`pair`: array<bigint>, `mixed`: array<string>>"
    )
    assert spark_schema(list[int]) == "array<bigint>"


def test_json_schemas() -> None:
    schema = {
        "type": "object",
        "properties": {"a`b": {"type": ["integer", "null"]}, "c": {"$ref": "#/$defs/c"}},
        "$defs": {"c": {"type": "object", "additionalProperties": {"type": "number"}}},
    }
    expected = "struct<`a``b`: bigint, `c`: map<string, double>>"
    assert spark_schema(schema) == spark_schema(json.dumps(schema)) == expected


def test_ddl_and_types_of_spark() -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql.types import LongType, StructType

    assert spark_schema("a int, b string") == "a int, b string"
    kind = StructType().add("a", LongType())
    assert StructType.fromJson(json.loads(spark_schema(kind))) == kind


def test_recursive_and_incomplete_schemas_are_refused() -> None:
    with pytest.raises(ValueError, match="Tree contains itself; Spark has no recursive types"):
        spark_schema(Tree)
    with pytest.raises(ValueError, match="the JSON schema has no definition #/a"):
        spark_schema({"$ref": "#/a"})
