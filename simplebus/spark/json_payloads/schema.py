"""JSON payloads as typed columns: schemas for Spark's `from_json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_FORMATS = {"date-time": "timestamp", "date": "date"}
_SIMPLE_TYPES = {"integer": "bigint", "number": "double", "boolean": "boolean"}


def parse_json(frame: DataFrame, schema: object) -> DataFrame:
    """Return a frame with the column `data`: `value`, parsed as JSON.

    A field that is missing or has another type is null. If the value is not JSON, all fields are
    null.

        class Order(msgspec.Struct):
            book: str
            count: int = 1

        orders = parse_json(frame, Order).select("offset", "data.book", "data.count")

    Args:
        frame: Rows of the source, of a batch or a stream.
        schema: See `spark_schema`.

    Returns:
        The frame with one more column.
    """
    from pyspark.sql import functions as sql

    text = sql.col("value").cast("string")
    return frame.withColumn("data", sql.from_json(text, spark_schema(schema)))


def spark_schema(schema: object) -> str:
    """Return a schema for Spark's `from_json`.

    Args:
        schema: A Spark type; DDL text such as `book string, count bigint`; JSON schema as text or
            a mapping; or a type that msgspec supports, such as a Struct or a dataclass.

    Returns:
        The schema as DDL, or for a Spark type as Spark's JSON text. A JSON value of several types,
        or of any type, is a string with its text. A datetime is a timestamp if its type requires a
        time zone, by `msgspec.Meta(tz=True)`, and else a string.

    Raises:
        ValueError: A JSON schema is recursive or not valid.
        TypeError: msgspec does not support the type.

    >>> spark_schema({"type": "object", "properties": {"count": {"type": "integer"}}})
    'struct<`count`: bigint>'
    """
    if isinstance(schema, str):
        if not schema.lstrip().startswith("{"):
            return schema
        schema = json.loads(schema)
    if isinstance(schema, Mapping):
        return _to_ddl(schema, schema, ())
    if not isinstance(schema, type) and (encode := getattr(schema, "json", None)):
        return str(encode())
    import msgspec  # Importing this package must stay cheap.

    found = msgspec.json.schema(schema)
    return _to_ddl(found, found, ())


def _to_ddl(schema: Mapping[str, Any], root: Mapping[str, Any], parents: tuple[str, ...]) -> str:
    """Return the Spark type of a JSON schema.

    Args:
        schema: Schema of one value.
        root: The whole schema, which holds the definitions.
        parents: References that lead here.
    """
    if reference := schema.get("$ref"):
        if reference in parents:
            raise ValueError(f"{reference} contains itself; Spark has no recursive types")
        return _to_ddl(_definition(reference, root), root, (*parents, reference))
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        kinds = {_to_ddl(each, root, parents) for each in choices if each.get("type") != "null"}
        return kinds.pop() if len(kinds) == 1 else "string"
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = {
            _to_ddl({**schema, "type": each}, root, parents) for each in kind if each != "null"
        }
        return kinds.pop() if len(kinds) == 1 else "string"
    if kind == "object":
        return _object_to_ddl(schema, root, parents)
    if kind == "array":
        items = [*schema.get("prefixItems", ()), *filter(None, [schema.get("items")])]
        kinds = {_to_ddl(each, root, parents) for each in items or [{}]}
        return f"array<{kinds.pop() if len(kinds) == 1 else 'string'}>"
    if kind == "string":
        if schema.get("contentEncoding") == "base64":
            return "binary"
        return _FORMATS.get(schema.get("format", ""), "string")
    if kind is None and (values := schema.get("enum")):
        return "bigint" if all(type(value) is int for value in values) else "string"
    return _SIMPLE_TYPES.get(str(kind), "string")


def _object_to_ddl(
    schema: Mapping[str, Any], root: Mapping[str, Any], parents: tuple[str, ...]
) -> str:
    properties = schema.get("properties")
    if properties:
        fields = [
            f"`{name.replace('`', '``')}`: {_to_ddl(each, root, parents)}"
            for name, each in properties.items()
        ]
        return f"struct<{', '.join(fields)}>"
    values = schema.get("additionalProperties")
    kind = _to_ddl(values, root, parents) if isinstance(values, Mapping) else "string"
    return f"map<string, {kind}>"


def _definition(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise ValueError(f"the JSON schema has no definition {reference}")
    return found
