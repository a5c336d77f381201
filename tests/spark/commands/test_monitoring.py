"""Health and metrics of a query over HTTP."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest

from simplebus.spark.commands.monitoring import serve_monitor
from simplebus.spark.jobs.progress import QueryProgress

REPORT = {
    "timestamp": "2026-11-28T20:00:00.000Z",
    "sources": [
        {
            "description": "SimplebusMicroBatchStream[1 at h:1]",
            "endOffset": {"h:1": {"a": 7, "b": 3, "": "memory"}},
            "latestOffset": '{"h:1": {"a": 10, "b": 3, "": "memory"}}',
        }
    ],
}


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_pages_follow_the_query() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serve_monitor(("127.0.0.1", port)) as monitor:
        assert get(port, "/healthz") == (503, "no trigger has finished\n")
        assert "simplebus_pipeline_messages_total 0\n" in get(port, "/metrics")[1]
        monitor.update(QueryProgress(batches=2, rows=70, rate=3.5), REPORT)
        monitor.update(QueryProgress(batches=2, rows=70, rate=3.5), None)
        assert get(port, "/healthz") == (200, "ok\n")
        status, text = get(port, "/metrics")
        assert status == 200
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert lines == [
            "simplebus_pipeline_messages_total 70",
            "simplebus_pipeline_batches_total 2",
            "simplebus_pipeline_messages_per_second 3.5",
            "simplebus_pipeline_last_trigger_timestamp_seconds 1795896000",
            'simplebus_pipeline_lag_messages{server="h:1",class="a"} 3',
            'simplebus_pipeline_lag_messages{server="h:1",class="b"} 0',
        ]
        assert get(port, "/")[0] == 404


def test_port_in_use_is_an_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as used,
        pytest.raises(OSError, match="in use"),
        serve_monitor(used.getsockname()),
    ):
        pass
