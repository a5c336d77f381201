"""Encoding of snapshots."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.protocol import requests
from simplebus.core.protocol.requests import SubscribeRequest
from simplebus.core.snapshot import (
    EncodedProducers,
    ProducerSnapshot,
    StateChanges,
    decode_changes,
)

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


@pytest.mark.parametrize("count", [0, 1, 20, 70_000])
def test_publishers_encoded_one_by_one_are_a_list(count: int) -> None:
    producers = [ProducerSnapshot(f"publisher {n}", n) for n in range(count)]
    encoded = EncodedProducers()
    for producer in producers:
        encoded.append(producer)
    state = StateChanges(purged_ranges=[(1, 2, 3)], boot_id="boot")
    expected = msgspec.structs.replace(state, producers=producers)
    assert decode_changes(state.encode(encoded)) == expected
