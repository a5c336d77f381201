"""Snapshots can encode every value that a Subscribe request may contain."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.protocol import requests
from simplebus.core.protocol.requests import SubscribeRequest

FIELDS = tuple(SubscribeRequest.__struct_fields__)
EXTREMES = (2**63 - 1, 2**64, 10**40, -(10**40), 1e308, -1e308, 5e-324, "\ud800", "\0")


@pytest.mark.parametrize("field", FIELDS)
def test_accepted_request_values_can_be_encoded(field: str) -> None:
    def encode_request(value: Any) -> bytes:
        text = f'"{value}"' if isinstance(value, str) else f"{value}"
        return f'{{"{field}":{text}}}'.encode("utf-8", "surrogatepass")

    for value in EXTREMES:
        try:
            request = requests.decode(SubscribeRequest, encode_request(value))
        except RemoteProtocolError:
            continue
        msgspec.msgpack.encode(msgspec.structs.astuple(request))
