"""The nats.c client library against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nats.clients.programs import compiled, outcomes
from tests.nats.running_server import IS_REFERENCE, NatsTestServer

pytestmark = pytest.mark.xdist_group("nats clients")


def test_nats_c_publish_subscribe_and_request(
    shared_server: NatsTestServer, tmp_path: Path
) -> None:
    assert outcomes(compiled(tmp_path), "all", shared_server.url) == {
        "publish": {
            "received": 256,
            "invalid": 0,
            "longest": 1 << 20,
            "too_long": "Maximum Payload Exceeded",
        },
        "auto_unsubscribe": "Maximum Messages Delivered",
        "queue_group": {"received": 300, "sum": sum(range(300)), "have_all_received": True},
        "requests": {
            "size": 2,
            "header": "a:b",
            "no_responders": "No responders available for request",
            "timeout": "Timeout",
        },
    }


@pytest.mark.skipif(IS_REFERENCE, reason="the reference server has no classes")
def test_nats_c_gets_pub_acks(shared_server: NatsTestServer, tmp_path: Path) -> None:
    assert outcomes(compiled(tmp_path), "pubacks", shared_server.url) == {
        "pub_acks": [
            ["confirmed_c", 0, False],
            ["confirmed_c", 1, False],
            ["confirmed_c", 0, True],
        ],
        "code": 10060,
    }
