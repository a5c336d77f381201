"""Health and metrics of a running query over HTTP, for a supervisor and for Prometheus.

/healthz    200 while the query runs and has finished a trigger; else 503
/metrics    counters of this run, and the lag of each class
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from simplebus.spark.jobs.progress import QueryProgress
from simplebus.spark.read.progress import lag

_IDLE_CONNECTION_SECONDS = 10.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class QueryMonitor:
    """Progress of a query, as pages of text."""

    def __init__(self) -> None:
        self._progress = QueryProgress()
        self._report: Mapping[str, Any] = {}

    def update(self, progress: QueryProgress, report: Mapping[str, Any] | None) -> None:
        """Store the progress, and Spark's report of the last trigger if there is one."""
        self._progress = progress
        self._report = report or self._report

    def health(self) -> tuple[int, str]:
        """Return the status and text of /healthz."""
        return (200, "ok\n") if self._report else (503, "no trigger has finished\n")

    def metrics(self) -> str:
        """Return the text of /metrics."""
        progress, report = self._progress, self._report
        values = {
            "messages_total": ("counter", "Messages of finished batches.", progress.rows),
            "batches_total": ("counter", "Finished batches with messages.", progress.batches),
            "messages_per_second": ("gauge", "Rate of the last batch.", progress.rate),
        }
        if report:
            began = datetime.fromisoformat(report["timestamp"]).timestamp()
            values["last_trigger_timestamp_seconds"] = (
                "gauge",
                "Begin of the last trigger, which may have had no messages.",
                began,
            )
        lines = [
            line
            for name, (kind, text, value) in values.items()
            for line in (*_head(name, kind, text), f"simplebus_pipeline_{name} {value:.15g}")
        ]
        lines += _head("lag_messages", "gauge", "Messages that the query has not read.")
        for server, classes in lag({"sources": (), **report}).items():
            for class_, count in classes.items():
                labels = f'server="{_escape(server)}",class="{_escape(class_)}"'
                lines.append(f"simplebus_pipeline_lag_messages{{{labels}}} {count}")
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    name = f"simplebus_pipeline_{name}"
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class _Handler(BaseHTTPRequestHandler):
    timeout = _IDLE_CONNECTION_SECONDS
    monitor: QueryMonitor

    def do_GET(self) -> None:
        pages = {"/healthz": self.monitor.health(), "/metrics": (200, self.monitor.metrics())}
        status, text = pages.get(self.path, (404, "expected /healthz or /metrics\n"))
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", _TEXT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: a supervisor asks every few seconds."""


@contextmanager
def serve_monitor(address: tuple[str, int] | None) -> Iterator[QueryMonitor]:
    """Serve a monitor over HTTP for the duration of a block; on no port if `address` is None.

    Raises OSError if the port cannot be opened.
    """
    monitor = QueryMonitor()
    if address is None:
        yield monitor
        return
    handler = type("Handler", (_Handler,), {"monitor": monitor})
    with ThreadingHTTPServer(address, handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
        try:
            yield monitor
        finally:
            server.shutdown()
