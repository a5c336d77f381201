"""Encoding of Arrow columns as JSON texts, for the option `valueFormat`.

The texts mean the same as those of Spark's `to_json`, which the connector uses: null fields of
structs are left out, binary is base64, timestamps are in UTC with microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

_encoder = msgspec.json.Encoder(decimal_format="number")
_TYPES = (
    *("boolean", "byte", "short", "integer", "long", "float", "double", "decimal"),
    *("string", "varchar", "char", "binary", "date", "timestamp", "timestamp_ntz"),
)


def check_json_type(kind: DataType) -> None:
    """Raise ValueError if values of a Spark type cannot be encoded."""
    from pyspark.sql.types import ArrayType, MapType, StringType, StructType

    if isinstance(kind, StructType):
        for field in kind.fields:
            check_json_type(field.dataType)
    elif isinstance(kind, ArrayType):
        check_json_type(kind.elementType)
    elif isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        check_json_type(kind.valueType)
    elif kind.typeName() not in _TYPES:
        raise ValueError(
            f"the option valueFormat is 'json', which cannot encode {kind.simpleString()}; cast "
            "it to string"
        )


def encode_json(values: pa.Array) -> list[bytes]:
    """Return the JSON text of each value. No value is null, and `check_json_type` has passed."""
    convert = _converter(values.type)
    return [_encoder.encode(convert(value)) for value in values.to_pylist()]


def _converter(kind: pa.DataType) -> Callable[[Any], Any]:
    """Return a function that converts a Python value of an Arrow type for the JSON encoder."""
    if pa.types.is_struct(kind):
        fields = [(field.name, _nullable(_converter(field.type))) for field in kind]
        return lambda row: {
            name: convert(row[name]) for name, convert in fields if row[name] is not None
        }
    if pa.types.is_map(kind):
        item = _nullable(_converter(kind.item_type))
        return lambda pairs: {key: item(value) for key, value in pairs}
    if pa.types.is_list(kind):
        element = _nullable(_converter(kind.value_type))
        return lambda values: [element(value) for value in values]
    if pa.types.is_floating(kind):
        number = np.float32 if kind == pa.float32() else float
        return lambda value: _float(value, str(number(value)))
    if pa.types.is_timestamp(kind):
        return lambda value: value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return lambda value: value  # The encoder converts binary to base64.


def _nullable(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _float(value: float, text: str) -> float | str:
    """Return the number in `text`, which has the digits of its type; NaN and infinity as texts."""
    if math.isfinite(value):
        return float(text)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
