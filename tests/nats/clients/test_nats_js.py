"""The nats.js client library (@nats-io/transport-node) against a real server."""

from __future__ import annotations

import pytest

from tests.nats.clients.programs import javascript, outcomes
from tests.nats.running_server import IS_REFERENCE, NatsTestServer

pytestmark = pytest.mark.xdist_group("nats clients")


def test_nats_js_publish_subscribe_and_request(shared_server: NatsTestServer) -> None:
    assert outcomes(javascript(), "all", shared_server.url) == {
        "publish": {
            "proto": 1,
            "headers": True,
            "max_payload": 1 << 20,
            "equal": [True] * 5,
            "subject": "js.plain.it",
            "reply": "js.reply",
            "isClosed": True,
            "hasRtt": True,
        },
        "options": [["own", "other"], ["own", "other"], ["other"]],
        "queueGroup": {
            "different": 300,
            "total": 300,
            "haveAllReceived": True,
            "areOrdered": True,
        },
        "requests": {
            "reply": "abab",
            "headers": ["2", "a:b"],
            "withInbox": "cc",
            "noResponders": "RequestError no responders",
            "timeout": "TimeoutError",
        },
        "drain": {"areOrdered": True, "isClosed": True},
        "services": {
            "sum": 6,
            "refused": "nothing to add",
            "name": "adding",
            "haveSameId": True,
            "endpoint": "math.add",
            "requestCount": 2,
        },
    }


@pytest.mark.skipif(IS_REFERENCE, reason="the reference server has no classes")
def test_nats_js_gets_pub_acks(shared_server: NatsTestServer) -> None:
    assert outcomes(javascript(), "pubacks", shared_server.url) == {
        "pubAcks": [
            ["confirmed_js", 0, False],
            ["confirmed_js", 1, False],
            ["confirmed_js", 0, True],
        ],
        "code": 10060,
        "refused": "expected stream does not match",
    }


@pytest.mark.skipif(IS_REFERENCE, reason="the reference server has no classes")
def test_nats_js_ack_methods_work(shared_server: NatsTestServer) -> None:
    received = [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1), (3, 2)]
    assert outcomes(javascript(), "acks", shared_server.url) == {
        "received": [[f"{n}", "js", "reader", attempt, n] for n, attempt in received],
        "confirmedCount": 2,
        "next": "next",
    }
