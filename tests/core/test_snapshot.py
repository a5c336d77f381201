"""What is kept past a process: whatever a peer may ask for has a place in it."""

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
def test_what_is_granted_can_be_written_down(field: str) -> None:
    def asked(value: Any) -> bytes:
        text = f'"{value}"' if isinstance(value, str) else f"{value}"
        return f'{{"{field}":{text}}}'.encode("utf-8", "surrogatepass")

    for value in EXTREMES:
        try:
            wish = requests.decode(SubscribeRequest, asked(value))
        except RemoteProtocolError:
            continue
        msgspec.msgpack.encode(msgspec.structs.astuple(wish))
